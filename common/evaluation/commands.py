"""What eval.py and infer.py of both apps do; each app gives its `open_detector` and `make_loader`."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common import devices
from common.evaluation import coco_backends, coco_metrics
from common.evaluation.args import EvalArgs, InferArgs
from common.evaluation.evaluate import Detect, Detector, Explain, evaluate, predict, write_evaluation
from common.evaluation.inference import LoadAnnotations, OpenImages, open_job
from common.files import make_output_directory, writing
from common.labels import LabelMap
from common.loader import BaseLoader, refuse_synthetic
from common.sources import Source

OpenDetector = Callable[[str | None, str | None, str | None], Detector]  # --weights, --image_size, --hparams
MakeLoader = Callable[..., BaseLoader]


def evaluate_weights(
    a: EvalArgs,
    open_detector: OpenDetector,
    make_loader: MakeLoader,
    open_source: Callable[[EvalArgs, LabelMap], Source],
    explain: Explain,
) -> dict[str, Any]:
    """Evaluates weights on the given data, prints and writes the result.

    Args:
        a: the flags.
        open_detector, make_loader: the app's.
        open_source: opens and checks the evaluation data, for a network that was trained on these classes.
        explain: see `evaluate.predict`.

    Returns:
        COCO's numbers: see coco_metrics.Score.
    """
    devices.share_gpu_memory()
    refuse_synthetic(a.pipeline_type)
    coco_backends.check(a.coco_backend)
    detector = open_detector(a.weights, a.image_size, a.hparams)
    directory = make_output_directory(a.output_dir or _results_directory(detector.file))
    source = open_source(a, detector.label_map)
    loader = make_loader(a.pipeline_type, source=source, **_loader_options(a, detector))
    throughput = Throughput(source.size, a.batch_size, a.prefetch)
    options = {"on_batch": throughput, "explain": explain, "coco_backend": a.coco_backend}
    found = evaluate(detector.detect, loader, source, detector.label_map, **options)
    print(coco_metrics.format_table(found.metrics))
    print(throughput.describe())
    with writing(directory):
        write_evaluation(directory, *found)
    print(f"wrote {directory / 'metrics.json'} and {directory / 'detections.json'}")
    return found.metrics


def _results_directory(file: pathlib.Path) -> pathlib.Path:
    """Where evaluation writes by default: the run directory; beside an exported file."""
    return file.parent if file.suffix == ".h5" else file.with_name(f"{file.name}.eval")


def infer(
    a: InferArgs,
    open_detector: OpenDetector,
    make_loader: MakeLoader,
    open_images: OpenImages,
    load_annotations: LoadAnnotations,
    explain: Explain,
) -> list[dict[str, Any]]:
    """Detects, draws and writes.

    Args:
        a: the flags.
        open_detector, make_loader: the app's.
        open_images: opens and checks the images that --images names.
        load_annotations: reads a COCO json without its images.
        explain: see `evaluate.predict`.

    Returns:
        The detections in COCO results format, as in detections.json.
    """
    devices.share_gpu_memory()
    job = open_job(a, open_images, load_annotations)
    detector = open_detector(a.weights, a.image_size, a.hparams)
    job.check_labels(detector.label_map)
    loader = make_loader(job.pipeline_type, source=job.source, **_loader_options(a, detector))
    throughput = Throughput(job.source.size, a.batch_size, a.prefetch)
    detect = _only_above(detector.detect, job.least_score)
    options = {"title": "detecting", "on_batch": throughput, "explain": explain}
    found = predict(detect, loader, job.source, detector.label_map, **options)
    results = job.write(found, detector.label_map)
    print(throughput.describe())
    return results


def _loader_options(a: EvalArgs | InferArgs, detector: Detector) -> dict[str, Any]:
    """Arguments of make_loader beside the pipeline type and the source."""
    return {
        "config": detector.config,
        "batch_size": a.batch_size,
        "training": False,
        "num_threads": a.num_threads,
        "prefetch": a.prefetch,
        "with_targets": False,
    }


def _only_above(detect: Detect, least_score: float) -> Detect:
    """`detect` with its lower scores turned to padding, which evaluation.predict drops early.

    NMS does not change: only a box of a higher score suppresses another.
    """

    def wanted(images, letterbox):
        boxes, scores, classes, finite = (np.asarray(part) for part in detect(images, letterbox))
        return boxes, scores, np.where(scores >= np.float32(least_score), classes, -1), finite

    return wanted


class Throughput:
    """Measures images per second, loading and post-processing included: `on_batch` of evaluate.predict.

    Args:
        num_images: of all batches together.
        batch_size: images of a batch.
        prefetch: batches that are loaded while the first one compiles; like that one they are left out.
    """

    def __init__(self, num_images: int, batch_size: int, prefetch: int) -> None:
        self._num_images = num_images
        self._skipped = 1 + prefetch
        self._counted = max(num_images - self._skipped * batch_size, 0)
        self._start = self._warm = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self._last = time.monotonic()
        if done == self._skipped:
            self._warm = self._last

    def describe(self) -> str:
        """One line: images per second; or, of few batches, their seconds."""
        if not self._counted:
            return f"{self._num_images} images in {self._last - self._start:.1f} s, compiling included"
        rate = self._counted / max(self._last - self._warm, 1e-9)
        return (
            f"{rate:.1f} images/s from file to boxes: loading, network and post-processing; without the "
            f"first {self._skipped} batches, which compile or were loaded meanwhile"
        )
