"""Detects in all images of a loader and computes COCO metrics, for training, eval.py and infer.py.

    loader = make_loader(..., training=False, shard_id=ranks.rank, num_shards=ranks.world_size)
    metrics, results, curves = evaluate(detect, loader, label_map, ranks=ranks)

The result is the same for any number of ranks and any batch size.
"""

import itertools
import operator
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from common import progress
from common.data.check import loader_errors
from common.data.labels import LabelMap
from common.data.loader import BaseLoader
from common.data.sources import Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.evaluation import coco_metrics, drawing, sheets
from common.evaluation.coco_metrics import Evaluation
from common.weights.trained import Detect

OnBatch = Callable[[int, int], None]  # arguments: number of batches done, number of all batches
ALONE = Ranks()
PR_CURVES, DETECTIONS = "pr_curves.png", "detections.png"  # pictures of an evaluation


def predict(
    detect: Detect,
    loader: BaseLoader,
    label_map: LabelMap,
    *,
    title: str,
    ranks: Ranks = ALONE,
    on_batch: OnBatch = lambda *_: None,
    min_score: float = 0.0,
) -> list[dict[str, Any]]:
    """Detects objects in each of the loader's images exactly once. All ranks call `predict` together.

    Args:
        loader: an evaluation loader of this rank's shard: shard_id is the rank, num_shards the world size.
        ranks: the ranks that detect together; by default only this process.
        on_batch: called after every batch, equally often on all ranks. If `on_batch` raises an exception,
            all ranks must raise after the same batch.
        min_score: lowest score of the detections that are returned.

    Returns:
        Detections of all images in COCO results format, sorted by image id, the same list on every rank.

    Raises:
        UserError: an image cannot be decoded, or the network's output for it has NaN or infinity, or the data
            have changed. All ranks raise the error after they have finished their shards.
    """
    seen: set[int] = set()
    with ranks.raise_on_any_rank():
        batches = loader.iterator()
    results: list[dict[str, Any]] = []
    problem: UserError | None = None
    bar = progress.Bar(title, loader.steps_per_epoch)
    for done in range(1, loader.steps_per_epoch + 1):
        if problem is None:
            try:
                new = coco_metrics.to_results(*_next(detect, batches, loader), label_map, seen)
                results += [result for result in new if result["score"] >= min_score]
            except UserError as error:
                problem = error
            bar.step()
        on_batch(done, loader.steps_per_epoch)
    with ranks.raise_on_any_rank():
        if problem:
            raise problem
        if loader.source:
            loader.source.check_unchanged()
    parts, seen_by_rank = zip(*ranks.gather((results, sorted(seen))), strict=True)
    image_ids = list(itertools.chain.from_iterable(seen_by_rank))
    count, different = len(image_ids), len(set(image_ids))
    if not count == different == loader.size:
        raise RuntimeError(f"{count} images were evaluated, {different} of them different, not {loader.size}")
    return sorted(itertools.chain.from_iterable(parts), key=operator.itemgetter("image_id"))


def _next(
    detect: Detect, batches: Iterator, loader: BaseLoader
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns boxes, scores, classes, image ids and image sizes of the next batch."""
    try:
        images, extra = next(batches)
    except tf.errors.OpError as error:
        raise loader_errors.explain(error, loader.source, loader.pipeline_type) from error
    boxes, scores, classes, finite = map(np.asarray, detect(images, extra["letterbox"]))
    image_ids, image_sizes = np.asarray(extra["image_ids"]), np.asarray(extra["image_sizes"])
    if not finite.all():
        image_id = image_ids[~finite][0]
        raise UserError(f"the output for image {image_id} is not finite: the weights are damaged or diverged")
    return boxes, scores, classes, image_ids, image_sizes


def evaluate(
    detect: Detect,
    loader: BaseLoader,
    label_map: LabelMap,
    *,
    ranks: Ranks = ALONE,
    coco_backend: str = "pycocotools",
    **options: Any,
) -> Evaluation:
    """Detects objects in the loader's images and computes metrics. All ranks call `evaluate` together.

    Args:
        loader: an evaluation loader of this rank's shard, whose source has annotations.
        ranks: the ranks that detect together; by default only this process.
        options: the argument `on_batch` of `predict`.

    Returns:
        The evaluation, the same on every rank.

    Raises:
        UserError: see `predict`; or the data hold no box; or the backend is not installed on rank 0.
    """
    results = predict(detect, loader, label_map, title="evaluating", ranks=ranks, **options)
    scores: tuple[Any, ...] = ()
    with ranks.raise_on_any_rank():
        if ranks.rank == 0:
            ground_truth = loader.opened_source.annotations.ground_truth()
            scores = coco_metrics.score(ground_truth, results, coco_backend)._replace(results=[])
    return Evaluation(*ranks.broadcast_object(scores))._replace(results=results)


def write_evaluation(
    directory: pathlib.Path, evaluation: Evaluation, source: Source | None = None
) -> list[str]:
    """Writes metrics.json, detections.json, pr_curves.png and, with a source, detections.png.

    Args:
        source: the evaluated data, in which detections.png shows detections.

    Returns:
        The names of the written files; a picture that cannot be drawn only gives a warning.
    """
    coco_metrics.write_metrics(evaluation.metrics, directory / "metrics.json")
    coco_metrics.write_detections(evaluation.results, directory / "detections.json")
    files = ["metrics.json", "detections.json"]
    with drawing.warn_if_undrawable(directory / PR_CURVES):
        from common.evaluation import curves  # late, because it imports Matplotlib

        curves.pr_curves(evaluation.curves, directory / PR_CURVES)
        files.append(PR_CURVES)
    if source:
        with drawing.warn_if_undrawable(directory / DETECTIONS):
            drawing.save_png(sheets.detection_sheet(source, evaluation.results), directory / DETECTIONS)
            files.append(DETECTIONS)
    return files
