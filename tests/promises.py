"""Lists what docs/versions.md promises: the flags of all commands, and Python names with their parameters.

python -m tests.promises >tests/promises.txt
"""

import importlib
import inspect

from absl import flags

from tests.reference import APP_PROGRAMS, APPS, OTHER_PROGRAMS

PROGRAMS = (
    *(program.format(app=app) for app in APPS for program in APP_PROGRAMS),
    *(program for program in OTHER_PROGRAMS if not program.startswith("benchmarks/")),
    "tools/describe_weights.py",
)
NAMES = (
    "common.anchors.Anchors",
    "common.box_encoder.EncodedBoxes",
    "common.box_encoder.encode_boxes",
    "common.box_encoder.decode_boxes",
    "common.data.loader.BaseLoader",
    "common.evaluation.image_detector.ImageDetector",
    "common.evaluation.image_detector.ImageDetector.__call__",
    "common.readers.coco_reader",
    "common.readers.tfrecord_reader",
    "common.readers.webdataset_reader",
    "efficientdet.automl_weights.load_automl",
    "efficientdet.detector.load",
    "efficientdet.model.build_model",
    "efficientdet.pipeline.EfficientDetPipeline",
    "efficientdet.pipeline.EfficientDetPipeline.dataset",
    "yolov4.darknet_weights.load_darknet",
    "yolov4.darknet_weights.save_darknet",
    "yolov4.detector.load",
    "yolov4.model.build_model",
    "yolov4.pipeline.YOLOv4Pipeline",
    "yolov4.pipeline.YOLOv4Pipeline.dataset",
    "yolov4.postprocess.decode_heads",
)


def promises() -> list[str]:
    """Returns lines such as "efficientdet/train.py --seed" and "common.anchors.Anchors min_level"."""
    lines = [f"{program} --{flag}" for program in PROGRAMS for flag in flags_of(program)]
    return lines + [f"{name} {parameter}" for name in NAMES for parameter in parameters_of(name)]


def flags_of(program: str) -> list[str]:
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    values = flags.FlagValues()
    module.define_flags(values)
    return sorted(values)


def parameters_of(name: str) -> list[str]:
    """Returns the parameters of a function or class in their order."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:  # a method
        module, _, class_name = path.rpartition(".")
        owner = getattr(importlib.import_module(module), class_name)
    return list(inspect.signature(getattr(owner, attribute)).parameters)


if __name__ == "__main__":
    print(*promises(), sep="\n")
