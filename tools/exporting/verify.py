"""Does the exported file find what the weights find? The same images through both, and AP beside AP."""

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from common.evaluation.evaluate import Detect
from common.evaluation.exported import Run
from common.loader import BaseLoader, placement

FLOAT_LIMIT = 1e-4  # for boxes as shares of the image, and for scores
AP_LIMITS = {"none": 1e-3, "int8": 0.01}

Detections = tuple[np.ndarray, np.ndarray, np.ndarray]  # boxes (D, 4), scores (D,), classes (D,) of one image


def largest_difference(
    detect: Detect, exported: Detect, loader: BaseLoader, max_detections: int
) -> tuple[float, int]:
    """The largest difference over the loader's images, and how many detections were compared."""
    largest, count = 0.0, 0
    for images, extra in batches(loader):
        pair = (_by_image(each(images, extra["letterbox"])) for each in (detect, exported))
        for one, other in zip(*pair, strict=True):
            largest = max(
                largest, difference(one, other, max_detections), difference(other, one, max_detections)
            )
            count += len(one[1])
    return largest, count


def difference(wanted: Detections, found: Detections, max_detections: int) -> float:
    """The largest distance of a wanted detection from the nearest found one of its class.

    The order does not matter: equal scores may change places. A missing detection counts with its score,
    unless a full list has no room for a score like it.

    Returns:
        The larger of the differences of box sides, as shares of the image, and of scores.
    """
    boxes, scores, classes = found
    lowest = scores.min() if len(scores) == max_detections else 0.0
    largest = 0.0
    for box, score, class_ in zip(*wanted, strict=True):
        same = classes == class_
        apart = np.maximum(np.abs(boxes[same] - box).max(axis=1, initial=0.0), np.abs(scores[same] - score))
        nearest = min(apart.min(initial=np.inf), score)
        if nearest > FLOAT_LIMIT and score <= lowest + FLOAT_LIMIT:
            continue
        largest = max(largest, float(nearest))
    return largest


def largest_raw_difference(
    reference: Run, exported: Run, to_pixels: Callable[[tf.Tensor], tf.Tensor], loader: BaseLoader
) -> tuple[float, int]:
    """The same without suppression, where the order is fixed: row by row."""
    largest, count = 0.0, 0
    for images, extra in batches(loader):
        sizes = np.asarray(extra["letterbox"])[:, 2:].astype(np.int32)
        pixels = to_pixels(images).numpy()
        wanted, found = reference(pixels, sizes), exported(pixels, sizes)
        sides = sizes[:, np.newaxis, [1, 0, 1, 0]]
        apart = np.abs(wanted["boxes"] - found["boxes"]) / sides
        scores = np.abs(wanted["scores"] - found["scores"])
        largest = np.max([largest, apart.max(), scores.max()])  # np.max keeps NaN
        count += apart.shape[0] * apart.shape[1]
    return float(largest), count


def batches(loader: BaseLoader) -> Iterator[tuple[tf.Tensor, dict[str, tf.Tensor]]]:
    """One epoch of the loader."""
    with placement(loader):
        yield from loader.dataset().take(loader.steps_per_epoch)


def _by_image(found: tuple[tf.Tensor, ...]) -> Iterator[Detections]:
    for boxes, scores, classes in zip(*map(np.asarray, found[:3]), strict=True):
        real = classes >= 0
        yield boxes[real], scores[real], classes[real]
