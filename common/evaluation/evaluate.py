"""From a network that detects to COCO's numbers: what training, eval.py and infer.py share.

    loader = make_loader(..., training=False, shard_id=ranks.rank, num_shards=ranks.world_size)
    metrics, results, curves = evaluate(detect, loader, source, label_map, ranks=ranks)

Each rank detects in its own part of the images, the parts are put together on every rank, and what comes out
is the same for any number of ranks and any batch size.
"""

import collections
import itertools
import operator
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from common import errors, progress
from common.distributed.ranks import Ranks
from common.evaluation import coco_backends, coco_metrics, drawing
from common.labels import LabelMap
from common.loader import BaseLoader, placement

if TYPE_CHECKING:
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


class Detector(NamedTuple):
    """A trained detector.

    Attributes:
        detect: from a batch of the evaluation loader to detections.
        config: the app's, with the image size and the NMS that `detect` has: what make_loader takes.
        label_map: of the trained classes.
        file: what was read: a weights file, a file of an exported format, or a saved_model directory.
    """

    detect: Detect
    config: Any
    label_map: LabelMap
    file: pathlib.Path


OnBatch = Callable[[int, int], None]  # (batches done, batches in all)
# (what a loader raised, what it read, --pipeline_type) -> the error that names the images
Explain = Callable[[Exception, "Source", str], errors.UserError]


class Evaluation(NamedTuple):
    """What `evaluate` found.

    Attributes:
        metrics: COCO's numbers: see coco_metrics.Score.
        results: the detections: see `predict`.
        curves: precision at recalls by class name: see coco_metrics.Score.
    """

    metrics: dict[str, Any]
    results: list[dict[str, Any]]
    curves: dict[str, list[float]]


def predict(
    detect: Detect,
    loader: BaseLoader,
    source: "Source",
    label_map: LabelMap,
    *,
    title: str,
    ranks: Ranks | None = None,
    on_batch: OnBatch | None = None,
    explain: Explain | None = None,
) -> list[dict[str, Any]]:
    """Runs `detect` over the source's images, each exactly once. All ranks call it together.

    Args:
        detect: what the app's make_detect returned.
        loader: an evaluation loader of this rank's shard: shard_id is the rank, num_shards the world size.
        source: what all the loaders read.
        label_map: of the trained classes.
        title: of the progress bar.
        ranks: all that detect together; None for this process alone.
        on_batch: called after every batch, on every rank for the same batches, also for those that a rank
            leaves out because of a problem: it may do what needs all ranks. What it raises passes through, so
            under several ranks it must raise on all of them at the same batch.
        explain: turns an error of the loader into one that names the images: open_data.explain; None
            repeats the loader's own words.

    Returns:
        Detections of all images in COCO results format, the same list on every rank: by rising image id, and
        those of one image as `detect` gave them.

    Raises:
        UserError: an image cannot be decoded; or the network gives NaN or infinity: such an image would count
            as one without detections (and pycocotools would give NaN boxes an AP of 1). On all ranks, once
            they are through with their shards.
    """
    ranks = ranks or Ranks()
    batches = _detect_batches(detect, loader, source, explain)
    results, seen, problem = _collect(batches, loader.steps_per_epoch, label_map, title, on_batch)
    with ranks.raise_on_any_rank():
        if problem:
            raise problem
    parts = ranks.gather((results, sorted(seen)))
    _check_complete([image_id for _, seen in parts for image_id in seen], source)
    results = itertools.chain.from_iterable(results for results, _ in parts)
    return sorted(results, key=operator.itemgetter("image_id"))


def _collect(
    batches: Iterator[tuple[np.ndarray, ...]],
    count: int,
    label_map: LabelMap,
    title: str,
    on_batch: OnBatch | None,
) -> tuple[list[dict[str, Any]], set[int], errors.UserError | None]:
    """(detections, image ids, error that ended them early) of `count` batches."""
    found: list[tuple[np.ndarray, ...]] = []
    problem: errors.UserError | None = None
    bar = progress.Bar(title, count)
    for done in range(1, count + 1):
        if problem is None:
            try:
                found.append(next(batches))
            except errors.UserError as error:
                problem = error  # on_batch must still be called as often as on the other ranks
            bar.step()
        if on_batch:
            on_batch(done, count)
    if problem:
        return [], set(), problem
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    seen: set[int] = set()  # the last batch of a shard is filled up with repeats
    with coco_backends.without_garbage_collection():
        return coco_metrics.to_results(*columns, label_map, seen), seen, None


def _detect_batches(
    detect: Detect, loader: BaseLoader, source: "Source", explain: Explain | None
) -> Iterator[tuple[np.ndarray, ...]]:
    """(boxes, scores, classes, image ids, image sizes) of each batch; what can be wrong is a UserError."""
    with placement(loader):
        batches = iter(loader.dataset())
    while True:
        try:
            images, extra = next(batches)
        except tf.errors.OpError as error:
            if explain:
                raise explain(error, source, loader.pipeline_type) from error
            reason = str(error).splitlines()[0]
            raise errors.UserError(f"the loader ({loader.pipeline_type}) stopped: {reason}") from error
        *columns, finite = map(np.asarray, detect(images, extra["letterbox"]))
        image_ids, image_sizes = np.asarray(extra["image_ids"]), np.asarray(extra["image_sizes"])
        if not finite.all():
            raise errors.UserError(
                f"the network's output for image {image_ids[~finite][0]} is not finite: the weights are "
                "damaged, or training diverged"
            )
        yield *columns, image_ids, image_sizes


def _check_complete(seen: list[int], source: "Source") -> None:
    """RuntimeError unless every image of the source was seen, on one rank only."""
    annotations = source.annotations
    expected = range(source.size) if annotations is None else annotations.image_ids.tolist()
    missing = sorted(set(expected).difference(seen))
    surplus = sorted((collections.Counter(seen) - collections.Counter(expected)).elements())
    if missing or surplus:
        raise RuntimeError(
            f"of {source.size} images {len(missing)} were left out {missing[:5]} and {len(surplus)} came "
            f"from another rank again {surplus[:5]}: is each rank's loader that of its own shard?"
        )


def evaluate(
    detect: Detect,
    loader: BaseLoader,
    source: "Source",
    label_map: LabelMap,
    *,
    ranks: Ranks | None = None,
    on_batch: OnBatch | None = None,
    explain: Explain | None = None,
    coco_backend: str = "pycocotools",
) -> Evaluation:
    """Detects in the source's images and scores the detections. All ranks call it together.

    Args:
        detect: what the app's make_detect returned.
        loader: an evaluation loader of this rank's shard.
        source: what all the loaders read, with annotations.
        label_map: of the trained classes.
        ranks: all that detect together; None for this process alone.
        on_batch, explain: see `predict`.
        coco_backend: see coco_backends.

    Returns:
        The same on every rank. Rank 0 scores; meanwhile the others wait.

    Raises:
        UserError: see `predict`; or the data hold no box, or rank 0 lacks the backend. On all ranks.
    """
    ranks = ranks or Ranks()
    results = predict(
        detect,
        loader,
        source,
        label_map,
        title="evaluating",
        ranks=ranks,
        on_batch=on_batch,
        explain=explain,
    )
    score = None
    with ranks.raise_on_any_rank():
        if ranks.rank == 0:
            score = coco_metrics.score(source.annotations.ground_truth(), results, coco_backend)
    metrics, curves = ranks.broadcast_object(score)
    return Evaluation(metrics, results, curves)


def write_evaluation(directory: pathlib.Path, metrics: dict, results: list[dict], curves: dict) -> None:
    """metrics.json, detections.json and pr_curves.png; the same evaluation gives the same bytes."""
    coco_metrics.write_metrics(metrics, directory / "metrics.json")
    coco_metrics.write_detections(results, directory / "detections.json")
    drawing.pr_curves(curves, directory / "pr_curves.png")
