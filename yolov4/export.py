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

import functools
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from common.export.options import ExportArgs
from common.progress import import_tensorflow

define_flags = functools.partial(args.define, args_class=ExportArgs)

if __name__ == "__main__":  # check the flags first, because the imports below take seconds
    args.install(define_flags)
    errors.parse_flags()
    import_tensorflow()

from common.export import exporter
from yolov4.export_parts import make_exportable, placement
from yolov4.loaders import make_loader
from yolov4.predict import APP


def export(a: ExportArgs) -> pathlib.Path:
    """Exports weights and returns the path of the exported file.

    Raises:
        UserError: see `exporter.export`.
    """
    return exporter.export(APP, a, make_exportable, make_loader, placement, nms_method="greedy")


def main() -> None:
    export(ExportArgs(**args.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    errors.run(main)
