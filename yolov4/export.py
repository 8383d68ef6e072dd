r"""Writes a trained YOLOv4 as a file that runs without this project, and checks it against the weights.

    python yolov4/export.py --weights=runs/demo-yolov4 --format=onnx --output=detector.onnx
    python yolov4/export.py --weights=runs/demo-yolov4 --format=onnx --quantize=int8 \
        --calibration_images=runs/demo-data/train/images --output=small.onnx

Formats: saved_model (images of any size), onnx, litert and tensorrt (images at their places in the network
input, as the loaders make them, and the sizes of the originals). Out come boxes (ltrb, in pixels of the
original), scores, classes (0-based, named in the metadata) and how many there are. Inside is hard suppression
per class, whatever was trained: no format has the one by DIoU, and --verify_annotations says what that
costs. A file of float32 that finds something else than the weights, by more than 1e-4, is an error.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses

from absl import flags

from common import args as shared_flags
from common import devices, errors
from common.loading import Loader
from common.sources import Source
from common.training import weights as weight_files
from tools.exporting import job, options
from yolov4.export_parts import make_exportable
from yolov4.loaders import make_loader
from yolov4.model_metadata import make_metadata
from yolov4.predict import load_trained, make_detect, to_pixels

EXPORTED_NMS = "greedy"


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_trained_flags(fv)
    options.define_export_flags(fv)


def export(
    *,
    weights: str | None,
    format: str | None,
    output: str | None,
    quantize: str = "none",
    calibration_images: str | None = None,
    calibration_table: str | None = None,
    nms: str | None = None,
    opset: int = options.OPSET,
    verify_images: str | None = None,
    verify_annotations: str | None = None,
    image_size: str | None = None,
    hparams: str | None = None,
) -> pathlib.Path:
    """Exports weights; see the flags of the same names. Returns what was written."""
    wanted = options.check(
        format=format,
        output=output,
        quantize=quantize,
        nms=nms,
        opset=opset,
        calibration_images=calibration_images,
        calibration_table=calibration_table,
        verify_images=verify_images,
        verify_annotations=verify_annotations,
    )
    devices.share_gpu_memory()
    model, trained_config, label_map, file = load_trained(weights, image_size, hparams)
    config = dataclasses.replace(trained_config, nms_method=EXPORTED_NMS)

    def make_evaluation_loader(source: Source, pipeline_type: str, batch_size: int) -> Loader:
        return make_loader(
            pipeline_type,
            source=source,
            config=config,
            batch_size=batch_size,
            training=False,
            with_targets=False,
        )

    metadata = weight_files.read_metadata(file)
    trained = job.Trained(
        parts=make_exportable(model, config),
        detect=make_detect(model, config),
        trained_detect=None if config == trained_config else make_detect(model, trained_config),
        make_loader=make_evaluation_loader,
        to_pixels=to_pixels,
        label_map=label_map,
        metadata=metadata | make_metadata(config, label_map, metadata["num_classes"]),
    )
    return job.export(trained, wanted, verify_images, verify_annotations)


def main() -> None:
    export(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
