r"""Evaluates a trained EfficientDet with pycocotools: the 12 COCO numbers and a table per class.

    python efficientdet/eval.py --weights=runs/demo-efficientdet \
        --eval_images=runs/demo-data/eval/images --eval_annotations=runs/demo-data/eval/instances.json

--weights takes what export.py writes, too: a saved_model directory, an .onnx or a .tflite file. Writes
metrics.json, detections.json (COCO results: original pixels, original category ids) and pr_curves.png.
"""

import os
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import devices, errors
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import check_labels, log_source, open_source
from common.evaluation import coco_backends, coco_metrics
from common.evaluation.evaluate import evaluate, write_evaluation
from common.evaluation.throughput import Throughput
from common.loading import refuse_synthetic
from common.training.run_directory import make_output_directory, writing
from efficientdet.loaders import make_loader
from efficientdet.predict import open_detector


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define_trained_flags(fv)
    shared_flags.define_data_flags(fv, ("eval",))
    shared_flags.define_evaluation_flags(fv)
    flags.DEFINE_string(
        "output_dir",
        None,
        "Where metrics.json and detections.json go. Default: the run directory; beside an exported file.",
        flag_values=fv,
    )


def evaluate_weights(
    *,
    weights: str | None,
    output_dir: str | None = None,
    image_size: str | None = None,
    hparams: str | None = None,
    input_type: str | None = None,
    eval_images: str | None = None,
    eval_annotations: str | None = None,
    eval_file_pattern: str | None = None,
    label_map: str | None = None,
    pipeline_type: str = "auto",
    batch_size: int = 8,
    num_threads: int = 2,
    prefetch: int = 2,
    on_bad_image: str = "stop",
    max_megapixels: float = shared_flags.MAX_MEGAPIXELS,
    coco_backend: str = "pycocotools",
) -> dict:
    """Evaluates weights on the given data, prints and writes the result; see the flags of the same names."""
    devices.share_gpu_memory()
    refuse_synthetic(pipeline_type)
    coco_backends.check(coco_backend)
    detector = open_detector(weights, image_size, hparams)
    directory = make_output_directory(output_dir or detector.results_directory)
    source = open_source(
        images=eval_images,
        annotations=eval_annotations,
        file_pattern=eval_file_pattern,
        input_type=input_type,
        label_map=label_map,
        policy=ImagePolicy(on_bad_image, max_megapixels),
        split="eval",
    )
    check_labels(detector.label_map, source)
    log_source("evaluation", source)
    loader = make_loader(
        pipeline_type,
        source=source,
        config=detector.config,
        batch_size=batch_size,
        training=False,
        num_threads=num_threads,
        prefetch=prefetch,
        with_targets=False,
    )
    throughput = Throughput(source.size, batch_size, prefetch)
    metrics, results, curves = evaluate(
        detector.detect,
        loader,
        source,
        detector.label_map,
        coco_backend=coco_backend,
        on_batch=throughput,
    )
    print(coco_metrics.format_table(metrics))
    print(throughput.describe())
    with writing(directory):
        write_evaluation(directory, metrics, results, curves)
    print(f"wrote {directory / 'metrics.json'} and {directory / 'detections.json'}")
    return metrics


def main() -> None:
    evaluate_weights(**shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
