"""From a network that detects to COCO's numbers: what training, eval.py and infer.py share.

    loader = make_loader(..., training=False, shard_id=ranks.rank, num_shards=ranks.world_size)
    metrics, results, curves = evaluate(detect, loader, label_map, explain=explain, ranks=ranks)

Each rank detects in its own part of the images, the parts are put together on every rank, and what comes out
is the same for any number of ranks and any batch size.
"""

import itertools
import operator
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from common import progress
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.evaluation import coco_metrics, drawing
from common.evaluation.coco_metrics import Evaluation
from common.labels import LabelMap
from common.loader import BaseLoader

if TYPE_CHECKING:
    from common.datasets import Source

# Each app's make_detect returns one. It takes the first two tensors of an evaluation loader's batch, images
# (B, H, W, 3) and letterbox (B, 4), the place of each image in the network input. It returns boxes (B, D, 4)
# ltrb, normalised to the original image and clipped to it; scores (B, D); classes (B, D), 0-based, -1 in the
# padding; whether all outputs of the network were finite (B,).
Detect = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]
OnBatch = Callable[[int, int], None]  # (batches done, batches in all)
# (what a loader raised, what it read, --pipeline_type) -> the error that names the images
Explain = Callable[[Exception, "Source | None", str], UserError]
ALONE = Ranks()


def predict(
    detect: Detect,
    loader: BaseLoader,
    label_map: LabelMap,
    *,
    title: str,
    explain: Explain,
    ranks: Ranks = ALONE,
    on_batch: OnBatch | None = None,
) -> list[dict[str, Any]]:
    """Runs `detect` over the loader's images, each exactly once. All ranks call it together.

    Args:
        detect: what the app's make_detect returned.
        loader: an evaluation loader of this rank's shard: shard_id is the rank, num_shards the world size.
        label_map: of the trained classes.
        title: of the progress bar.
        ranks: all that detect together; by default this process alone.
        on_batch: called after every batch, on all ranks alike, also after a problem: it may do what needs
            all ranks. What it raises passes through, so it must raise on all ranks at the same batch.
        explain: makes the UserError of what the loader raised; the data check's names the images.

    Returns:
        Detections of all images in COCO results format, the same list on every rank: by rising image id, and
        those of one image as `detect` gave them.

    Raises:
        UserError: an image cannot be decoded, or the network gives NaN or infinity for it, which would count
            as no detection. On all ranks, once they are through with their shards.
    """
    seen: set[int] = set()  # the last batch of a shard is filled up with repeats
    batches = _detect_batches(detect, loader, explain)
    results: list[dict[str, Any]] = []
    problem = None
    bar = progress.Bar(title, loader.steps_per_epoch)
    for done in range(1, loader.steps_per_epoch + 1):
        if problem is None:
            try:
                results += coco_metrics.to_results(*next(batches), label_map, seen)
            except UserError as error:
                problem = error  # on_batch must still be called as often as on the other ranks
            bar.step()
        if on_batch:
            on_batch(done, loader.steps_per_epoch)
    with ranks.raise_on_any_rank():
        if problem:
            raise problem
    parts, seen_by_rank = zip(*ranks.gather((results, sorted(seen))), strict=True)
    found = list(itertools.chain.from_iterable(seen_by_rank))
    if not len(found) == len(set(found)) == loader.size:
        raise RuntimeError(
            f"{len(found)} images were evaluated, {len(set(found))} different ones, and the data have "
            f"{loader.size}: does each rank read only its shard?"
        )
    return sorted(itertools.chain.from_iterable(parts), key=operator.itemgetter("image_id"))


def _detect_batches(
    detect: Detect, loader: BaseLoader, explain: Explain
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(boxes, scores, classes, image ids, image sizes) of each batch; what can be wrong is a UserError."""
    batches = loader.iterator()
    while True:
        try:
            images, extra = next(batches)
        except tf.errors.OpError as error:
            raise explain(error, loader.source, loader.pipeline_type) from error
        boxes, scores, classes, finite = map(np.asarray, detect(images, extra["letterbox"]))
        image_ids, image_sizes = np.asarray(extra["image_ids"]), np.asarray(extra["image_sizes"])
        if not finite.all():
            raise UserError(
                f"the network's output for image {image_ids[~finite][0]} is not finite: the weights are "
                "damaged, or training diverged"
            )
        yield boxes, scores, classes, image_ids, image_sizes


def evaluate(
    detect: Detect,
    loader: BaseLoader,
    label_map: LabelMap,
    *,
    ranks: Ranks = ALONE,
    coco_backend: str = "pycocotools",
    **options: Any,
) -> Evaluation:
    """Detects in the loader's images and scores the detections. All ranks call it together.

    Args:
        detect: what the app's make_detect returned.
        loader: an evaluation loader of this rank's shard, whose source has annotations.
        label_map: of the trained classes.
        ranks: all that detect together; by default this process alone.
        coco_backend: see coco_metrics.score.
        options: explain and on_batch of `predict`.

    Returns:
        The same on every rank. Rank 0 scores; meanwhile the others wait.

    Raises:
        UserError: see `predict`; or the data hold no box, or rank 0 lacks the backend. On all ranks.
    """
    results = predict(detect, loader, label_map, title="evaluating", ranks=ranks, **options)
    scores: tuple[Any, ...] = ()
    with ranks.raise_on_any_rank():
        if ranks.rank == 0:
            ground_truth = loader.opened_source.annotations.ground_truth()
            scores = coco_metrics.score(ground_truth, results, coco_backend)._replace(results=[])
    return Evaluation(*ranks.broadcast_object(scores))._replace(results=results)  # which all ranks have


def write_evaluation(directory: pathlib.Path, metrics: dict, results: list[dict], curves: dict) -> None:
    """metrics.json, detections.json and pr_curves.png; the same evaluation gives the same bytes."""
    coco_metrics.write_metrics(metrics, directory / "metrics.json")
    coco_metrics.write_detections(results, directory / "detections.json")
    drawing.pr_curves(curves, directory / "pr_curves.png")
