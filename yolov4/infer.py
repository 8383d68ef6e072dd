"""Detects objects in images or in a video with a trained YOLOv4, and draws them.

    python yolov4/infer.py --weights=runs/demo-yolov4 --images='photos/*.jpg' --output_dir=found
    python yolov4/infer.py --weights=runs/demo-yolov4 --images=clip.mp4 --output_dir=found

The command writes one picture per image, or the video with boxes, and detections.json with boxes in pixels of
the original images. With --annotations, each picture shows the ground truth on the left.

For COCO's test server, read the image ids from its list and keep all detections:

    python yolov4/infer.py --weights=WEIGHTS --images=coco/test2017 --output_dir=found --nodraw \
        --image_info=coco/annotations/image_info_test-dev2017.json --score_threshold=0 --hparams=nms_iou=0.6

Then rename detections.json as https://cocodataset.org/#upload says, and zip it.

NMS has an IoU threshold of 0.45 here, but of 0.6 in eval.py. To change it:
--hparams=nms_iou=0.6
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

PICTURE_NMS_IOU = 0.45  # AlexeyAB/darknet src/detector.c, test_detector


define_flags = functools.partial(shared_flags.define, args_class=InferArgs)


def infer(**given: Any) -> list[dict]:
    """Writes all output files and returns the detections as COCO results.

    Args:
        given: values for fields of InferArgs.
    """
    from common.data.check import datasets
    from common.evaluation import commands
    from common.evaluation.detectors import open_detector
    from yolov4.loaders import make_loader
    from yolov4.predict import APP

    a = InferArgs(**given)
    opener = functools.partial(open_detector, APP, nms_iou=PICTURE_NMS_IOU)
    return commands.infer(a, opener, make_loader, datasets.open_images, datasets.explain)


def main() -> None:
    import_tensorflow()
    infer(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
