r"""Evaluates a trained YOLOv4 with pycocotools: the 12 COCO numbers and a table per class.

    python yolov4/eval.py --weights=runs/demo-yolov4 \
        --eval_images=runs/demo-data/eval/images --eval_annotations=runs/demo-data/eval/instances.json

--weights also accepts a file of export.py: a saved_model directory, an .onnx, .tflite or .plan file. The
command writes metrics.json, detections.json (COCO results, boxes in pixels of the original images) and
pr_curves.png. With --errors, it also prints a table of error types, and writes errors.json,
confusion_matrix.png and errors.png, a picture of the worst images.
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
from common.args import EvalArgs
from common.progress import import_tensorflow

define_flags = functools.partial(shared_flags.define, args_class=EvalArgs)


def evaluate_weights(**given: Any) -> dict:
    """Evaluates weights and returns `metrics` of coco_metrics.Evaluation.

    Args:
        given: values for fields of EvalArgs.
    """
    from common.data.check import datasets
    from common.evaluation import commands, error_analysis
    from common.evaluation.detectors import open_detector
    from yolov4.loaders import make_loader
    from yolov4.predict import APP

    return commands.evaluate_weights(
        EvalArgs(**given),
        functools.partial(open_detector, APP),
        make_loader,
        datasets.open_evaluation,
        datasets.explain,
        report_errors=error_analysis.report,
    )


def main() -> None:
    import_tensorflow()
    evaluate_weights(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
