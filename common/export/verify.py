"""Compares detections of an exported file with detections of the weights."""

import itertools
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw

from common.data.check.loader_errors import explain
from common.data.loader import BaseLoader
from common.evaluation.exported import Run, make_detect
from common.export.export_graph import Exportable, detect_raw
from common.weights.trained import Detect

FLOAT_LIMIT = 1e-4  # largest difference of scores, and of box coordinates as shares of the image size
AP_LIMITS = {"none": 1e-3, "int8": 0.01}

Detections = tuple[np.ndarray, np.ndarray, np.ndarray]  # boxes (D, 4), scores (D,), classes (D,) of one image
ToPixels = Callable[[tf.Tensor], tf.Tensor]  # images of a loader -> uint8


def draw_images(folder: pathlib.Path, count: int = 8) -> None:
    """Writes images of coloured ellipses and rectangles, the same ones in each call."""
    random = np.random.default_rng(0)
    for number in range(count):
        height, width = random.integers(192, 321, 2)
        coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)
        canvas = ImageDraw.Draw(image)
        for draw in (canvas.ellipse, canvas.rectangle) * 3:
            left, top = random.uniform(0.0, 0.7, 2) * (width, height)
            w, h = random.uniform(0.1, 0.4, 2) * min(width, height)
            red, green, blue = random.integers(0, 256, 3).tolist()
            draw((left, top, left + w, top + h), fill=(red, green, blue))
        image.save(folder / f"{number}.png")


def largest_difference(
    parts: Exportable, detect: Detect, run: Run, to_pixels: ToPixels, loader: BaseLoader
) -> float:
    """Returns the largest difference between the detections of an exported file and of the weights.

    This is a difference of scores, or of box coordinates as fractions of the image size.

    Args:
        detect: detects with the weights.
        run: runs the exported file.
        to_pixels: converts images of the loader to uint8.
    """
    largest = 0.0
    for images, extra in batches(loader):
        pair = (_by_image(each(images, extra["letterbox"])) for each in (detect, make_detect(run, to_pixels)))
        for one, other in zip(*pair, strict=True):
            for reference, tested in ((one, other), (other, one)):
                largest = max(largest, difference(reference, tested, parts.max_detections))
    return largest


def difference(reference: Detections, tested: Detections, max_detections: int) -> float:
    """Returns the largest distance from a reference detection to the nearest tested one of its class.

    A distance is at most the score of the reference detection. If `tested` has `max_detections` entries,
    NMS may have dropped detections with low scores. Such reference detections are ignored.
    """
    boxes, scores, classes = tested
    lowest = scores.min() if len(scores) == max_detections else 0.0
    largest = 0.0
    for box, score, class_ in zip(*reference, strict=True):
        same = classes == class_
        apart = np.maximum(np.abs(boxes[same] - box).max(axis=1, initial=0.0), np.abs(scores[same] - score))
        nearest = min(apart.min(initial=np.inf), score)
        if nearest > FLOAT_LIMIT and score <= lowest + FLOAT_LIMIT:
            continue
        largest = max(largest, float(nearest))
    return largest


def largest_raw_difference(parts: Exportable, run: Run, to_pixels: ToPixels, loader: BaseLoader) -> float:
    """Returns the largest difference without NMS, row by row."""
    reference = tf.function(lambda *arguments: detect_raw(parts, *arguments), reduce_retracing=True)
    largest = 0.0
    for images, extra in batches(loader):
        pixels, sizes = to_pixels(images), tf.cast(extra["letterbox"][:, 2:], tf.int32)
        expected, actual = reference(pixels, sizes), run(pixels.numpy(), sizes.numpy())
        sides = sizes.numpy()[:, np.newaxis, [1, 0, 1, 0]]
        boxes_apart = np.abs(expected["boxes"] - actual["boxes"]) / sides
        scores_apart = np.abs(expected["scores"] - actual["scores"])
        largest = np.max([largest, boxes_apart.max(), scores_apart.max()])  # np.max keeps NaN
    return float(largest)


def batches(loader: BaseLoader) -> Iterator[tuple[tf.Tensor, dict[str, tf.Tensor]]]:
    try:
        # tf.data's `take` lacks a GPU kernel.
        yield from itertools.islice(loader.iterator(), loader.steps_per_epoch)
    except tf.errors.OpError as error:
        raise explain(error, loader.source, loader.pipeline_type) from error


def _by_image(detections: tuple[tf.Tensor, ...]) -> Iterator[Detections]:
    for boxes, scores, classes in zip(*map(np.asarray, detections[:3]), strict=True):
        real = classes >= 0
        yield boxes[real], scores[real], classes[real]
