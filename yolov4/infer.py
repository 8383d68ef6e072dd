"""Draws what a trained YOLOv4 finds in images, or in a video.

    python yolov4/infer.py --weights=runs/demo-yolov4 --images='photos/*.jpg' --output_dir=found
    python yolov4/infer.py --weights=runs/demo-yolov4 --images=clip.mp4 --output_dir=found

Writes one picture per image, or the video with boxes, and detections.json (original pixels, original category
ids; images in sorted order). With --annotations the ground truth is drawn beside the detections. --submission
writes a results file for the COCO server (common/evaluation/submission.py).

Boxes of one class are suppressed at an IoU of 0.45 (in eval.py and for --submission: 0.6);
--hparams=nms_iou=0.6 changes that.
"""

import functools
import pathlib
import sys
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors
from common.args import InferArgs
from common.progress import import_tensorflow

# For pictures, where two boxes on one object disturb more than a lost one: darknet src/detector.c,
# test_detector. eval.py keeps the 0.6 of COCO results.
PICTURE_NMS_IOU = 0.45


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, InferArgs)


def infer(**given: Any) -> list[dict]:
    """Detects, draws and writes; `given`: fields of InferArgs. Returns the detections (COCO results)."""
    from common.datacheck import datasets
    from common.evaluation import commands
    from common.training.detectors import open_detector
    from yolov4.loaders import make_loader
    from yolov4.predict import APP

    a = InferArgs(**given)
    defaults: dict[str, Any] = {} if a.submission else {"nms_iou": PICTURE_NMS_IOU}
    opener = functools.partial(open_detector, APP, **defaults)
    return commands.infer(a, opener, make_loader, datasets.open_images, datasets.explain)


def main() -> None:
    import_tensorflow()
    infer(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
