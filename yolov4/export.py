r"""Writes a trained YOLOv4 as a file that runs without this project, and checks it against the weights.

    python yolov4/export.py --weights=runs/demo-yolov4 --format=onnx --output=detector.onnx
    python yolov4/export.py --weights=runs/demo-yolov4 --format=onnx --quantize=int8 \
        --calibration_images=runs/demo-data/train/images --output=small.onnx

saved_model takes images of any size. The other formats have two inputs: images that already have the
size of the network input, and the sizes of the original images. The outputs are boxes (ltrb, in pixels of the
original), scores, classes (0-based, named in the metadata) and the number of boxes.
Exported NMS is always greedy NMS per class.
--verify_annotations compares the AP of the file with the AP of the weights.
The command fails if the outputs of a float32 file differ by more than 1e-4 from the outputs of the weights.
"""

import pathlib
import sys
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors
from common.export.options import Options
from common.progress import import_tensorflow


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, Options)


def export(**given: Any) -> pathlib.Path:
    """Exports weights and returns the path of the exported file.

    Args:
        given: values for fields of Options.
    """
    from common.export import exporter
    from yolov4.export_parts import make_exportable
    from yolov4.loaders import make_loader
    from yolov4.predict import APP

    return exporter.export(APP, Options(**given), make_exportable, make_loader, nms_method="greedy")


def main() -> None:
    given = shared_flags.values(flags.FLAGS, define_flags)
    Options(**given).check()  # `export` checks the options too, but only after imports that take seconds
    import_tensorflow()
    export(**given)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
