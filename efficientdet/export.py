r"""Writes a trained EfficientDet as a file that runs without this project, and checks it against the weights.

    python efficientdet/export.py --weights=runs/demo-efficientdet --format=onnx --output=detector.onnx
    python efficientdet/export.py --weights=runs/demo-efficientdet --format=onnx --quantize=int8 \
        --calibration_images=runs/demo-data/train/images --output=small.onnx

saved_model takes images of any size. The other formats have two inputs: images that already have the
size of the network input, and the sizes of the original images. The outputs are boxes (ltrb, in pixels of the
original), scores, classes (0-based, named in the metadata) and the number of boxes.
Exported NMS is always hard NMS per class, because the formats lack Soft-NMS.
--verify_annotations prints how much AP this costs.
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
    from efficientdet.export_parts import make_exportable
    from efficientdet.loaders import make_loader
    from efficientdet.predict import APP

    return exporter.export(APP, Options(**given), make_exportable, make_loader, nms_method="hard")


def main() -> None:
    given = shared_flags.values(flags.FLAGS, define_flags)
    Options(**given).check()  # `export` checks the options too, but only after imports that take seconds
    import_tensorflow()
    export(**given)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
