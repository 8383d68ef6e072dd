r"""Evaluates a trained YOLOv4 with pycocotools: the 12 COCO numbers and a table per class.

    python yolov4/eval.py --weights=runs/demo-yolov4 \
        --eval_images=runs/demo-data/eval/images --eval_annotations=runs/demo-data/eval/instances.json

--weights also accepts a file of export.py: a saved_model directory, an .onnx, .tflite or .plan file. The
command writes metrics.json, detections.json (COCO results, boxes in pixels of the original images),
pr_curves.png and detections.png, which shows detections in six images. With --errors, it also prints a table
of error types, and writes errors.json, confusion_matrix.png and errors.png, a picture of the worst images.
"""

import functools
import pathlib
import sys
import time

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from common.args import EvalArgs
from common.progress import counted, import_tensorflow

define_flags = functools.partial(args.define, args_class=EvalArgs)

if __name__ == "__main__":  # check the flags first, because the imports below take seconds
    args.install(define_flags)
    errors.parse_flags()
    import_tensorflow(pyplot=False)

from common.data.loader import evaluation_options
from common.data.open import open_evaluation
from common.distributed.start import optimize_graphs_once, share_gpu_memory
from common.errors import UserError
from common.evaluation import coco_metrics, error_analysis
from common.evaluation.detectors import open_detector
from common.evaluation.evaluate import evaluate, write_evaluation
from common.files import make_output_directory, user_errors
from yolov4.loaders import make_loader
from yolov4.predict import APP


def evaluate_weights(a: EvalArgs) -> dict:
    """Evaluates weights on the evaluation data. Prints and writes the results.

    Returns:
        `metrics` of coco_metrics.Evaluation.

    Raises:
        UserError: the weights, flags or data cannot be used, or the output cannot be written.
    """
    if a.errors_min_score is not None and not a.errors:
        raise UserError(f"--errors_min_score={a.errors_min_score} has no effect without --errors: add it")
    share_gpu_memory()
    optimize_graphs_once()
    coco_metrics.check_backend(a.coco_backend)
    detect, config, label_map, file = open_detector(APP, a.weights, a.image_size, a.hparams)
    neighbour = file.parent if file.suffix == ".h5" else file.with_name(f"{file.name}.eval")
    directory = make_output_directory(a.output_dir or neighbour)
    source = open_evaluation(a, label_map)
    loader = make_loader(a.pipeline_type, source=source, config=config, **evaluation_options(a))
    start = time.monotonic()
    evaluation = evaluate(detect, loader, label_map, coco_backend=a.coco_backend)
    print(coco_metrics.format_table(evaluation.metrics))
    print(f"{counted(source.size, 'image')} in {time.monotonic() - start:.1f} s, compiling included")
    with user_errors(f"--output_dir={directory}"):
        files = write_evaluation(directory, evaluation, source)
        if a.errors:
            table, more = error_analysis.report(source, evaluation.results, directory, a.errors_min_score)
            print(table)
            files += more
    print(f"wrote to {directory}: {', '.join(files)}")
    return evaluation.metrics


def main() -> None:
    evaluate_weights(EvalArgs(**args.values(flags.FLAGS, define_flags)))


if __name__ == "__main__":
    errors.run(main)
