"""From a network that detects to COCO's numbers: what training, eval.py and infer.py share."""

import pathlib
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from common import coco_metrics, damaged_images, drawing, errors, progress
from common.labels import LabelMap
from common.loading import Loader, placement
from common.sources import Source


class Detect(Protocol):
    """A compiled function from a batch of an evaluation loader to detections: each app's make_detect."""

    def __call__(self, images: tf.Tensor, letterbox: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Detects in one batch.

        Args:
            images: (B, H, W, 3) as the loader gives them.
            letterbox: (B, 4), place of each image in the network input.

        Returns:
            boxes (B, D, 4) ltrb, normalised to the original image and clipped to it; scores (B, D); classes
            (B, D), 0-based, -1 in the padding; whether all outputs of the network were finite (B,).
        """
        ...


def predict(
    detect: Detect, loader: Loader, source: Source, label_map: LabelMap, *, title: str
) -> list[dict[str, Any]]:
    """Runs `detect` over the loader's images, each exactly once.

    Args:
        detect: what the app's make_detect returned.
        loader: an evaluation loader.
        source: what it reads.
        label_map: of the trained classes.
        title: what the progress bar says.

    Returns:
        Detections in COCO results format.

    Raises:
        UserError: an image cannot be decoded; or the network gives NaN or infinity: such an image would count
            as one without detections (and pycocotools would give NaN boxes an AP of 1).
    """
    results: list[dict] = []
    seen: set[int] = set()  # the last batch of a shard is filled up with repeats
    bar = progress.Bar(title, loader.steps_per_epoch)
    with placement(loader):
        batches = iter(loader.dataset())
    for _ in range(loader.steps_per_epoch):
        try:
            images, extra = next(batches)
        except tf.errors.OpError as error:
            raise damaged_images.explain(error, source, loader.pipeline_type) from error
        boxes, scores, classes, finite = (np.asarray(t) for t in detect(images, extra["letterbox"]))
        image_ids = np.asarray(extra["image_ids"])
        if not finite.all():
            raise errors.UserError(
                f"the network's output for image {image_ids[~finite][0]} is not finite: the weights are "
                "damaged, or training diverged"
            )
        image_sizes = np.asarray(extra["image_sizes"])
        results += coco_metrics.to_results(boxes, scores, classes, image_ids, image_sizes, label_map, seen)
        bar.step()
    if len(seen) != source.size:
        raise RuntimeError(f"{len(seen)} of {source.size} images came out of the loader")
    return results


def evaluate(
    detect: Detect, loader: Loader, source: Source, label_map: LabelMap
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Detects in the loader's images, each exactly once, and scores the detections.

    Args:
        detect: what the app's make_detect returned.
        loader: an evaluation loader.
        source: what it reads, with annotations.
        label_map: of the trained classes.

    Returns:
        (metrics, results): see coco_metrics.evaluate, and the detections in COCO results format.
    """
    results = predict(detect, loader, source, label_map, title="evaluating")
    return coco_metrics.evaluate(source.annotations.ground_truth(), results), results


def write_evaluation(directory: pathlib.Path, metrics: dict, results: list[dict], ground_truth: dict) -> None:
    """metrics.json, detections.json and pr_curves.png; the same evaluation gives the same bytes."""
    coco_metrics.write_metrics(metrics, directory / "metrics.json")
    coco_metrics.write_detections(results, directory / "detections.json")
    drawing.pr_curves(coco_metrics.precision_recall(ground_truth, results), directory / "pr_curves.png")
