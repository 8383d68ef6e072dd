"""Compares pipeline.py, crops.py, augmentations.py and mosaic.py of yolov4 with computations in NumPy."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from tests.oracle import numpy_boxes, numpy_images
from tests.oracle.fuzzed import Annotated
from tests.oracle.numpy_images import nearest
from tests.oracle.watched import BATCH, Batch, Draws, run_epoch
from tests.yolov4.darknet_rules import clip_visible, darknet_axis, darknet_mosaic
from tests.yolov4.rectangles import AUGMENTATIONS, INPUT, PLAIN
from yolov4.config import YOLOv4Config
from yolov4.pipeline import YOLOv4Pipeline

FILL = 127  # padding; Darknet uses 0.5 of 255
TRAININGS = {
    "not antialiased": {"antialias": False, "jitter": 0.3},
    "letterbox, jitter and flip": {"letterbox": True, "jitter": 0.4, "flip_prob": 0.5},
    "mosaic": {"mosaic_prob": 0.7, "letterbox": True},
    "fresh mosaic": {"mosaic_prob": 0.7, "mosaic_tiles": "fresh", "letterbox": True},
    "MixUp": {"mixup_prob": 0.7},
    "CutMix": {"cutmix_prob": 0.7},
    "mostly hidden boxes": {"mosaic_prob": 0.5, "cutmix_prob": 0.8, "min_visible": 0.4321},
    "mostly hidden boxes, fresh mosaic": {"mosaic_prob": 0.7, "mosaic_tiles": "fresh", "min_visible": 0.4321},
    "all": AUGMENTATIONS
    | {"letterbox": True, "multi_scale": 1.4, "min_box_size": 3.0}
    | {"mosaic_prob": 0.4, "mixup_prob": 0.4, "cutmix_prob": 0.6},
}
TRAININGS["all, fresh mosaic"] = TRAININGS["all"] | {"mosaic_tiles": "fresh", "antialias": False}


class Canvas(NamedTuple):
    """`darknet_mosaic` unpacks the fields in this order."""

    pixels: np.ndarray
    boxes_px: np.ndarray
    classes: np.ndarray
    place: tuple[int, int, int, int]
    source: str


# --- the definitions ---


def batch_size(config: YOLOv4Config, draws: Draws) -> tuple[int, int]:
    """The shorter side is a random multiple of 32; the shape stays."""
    if config.multi_scale == 1:
        return INPUT
    units = min(INPUT) / 32
    low, high = max(nearest(units / config.multi_scale), 1), nearest(units * config.multi_scale)
    drawn = draws.uniform(0.0, float(high - low + 1))[0]  # the whole batch uses the first image's number
    shorter = low + math.floor(drawn)
    height, width = (32 * nearest(shorter * side / min(INPUT)) for side in INPUT)
    return height, width


def whole_image(size, image_size, keep_aspect) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (window, place): centred with padding, or stretched."""
    if keep_aspect:
        return (0, 0, *size), numpy_images.letterbox(size, image_size, centered=True)
    return (0, 0, *size), (0, 0, *image_size)


def jittered_crop(size, image_size, first, last, keep_aspect) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns Darknet's crop. `first` (y, x) moves its top and left, `last` its bottom and right."""
    sides = zip(size, size[::-1], image_size, image_size[::-1], first.tolist(), last.tolist(), strict=True)
    axes = [darknet_axis(*of_axis, keep_aspect=keep_aspect) for of_axis in sides]
    (top, height, to_top, to_height), (left, width, to_left, to_width) = axes
    return (top, left, height, width), (to_top, to_left, to_height, to_width)


def draw_colors(config: YOLOv4Config, draws: Draws, count: int) -> np.ndarray | None:
    """Returns (B, count, 3): hue, and the factors of saturation and exposure.

    As in Darknet's rand_scale, a factor is uniform in 1 .. limit, or the inverse of such a number.
    """
    if not config.hue:
        return None
    drawn = [draws.uniform(-config.hue, config.hue, shape=[count])]
    for limit in (config.saturation, config.exposure):
        inverted = draws.take("coin_flip", probability=0.5, shape=[count])
        factors = draws.uniform(1.0, limit, shape=[count])
        drawn.append(np.where(inverted, 1 / factors, factors))
    return np.stack(drawn, 2)


def draw_views(config, readers, image_size, draws: Draws) -> Callable[[int, int], Canvas]:
    """Returns a function (reader, row) -> canvas."""
    count, shape = len(readers), (len(readers[0]), len(readers))
    if config.jitter:
        of_axis = [2] if count == 1 else [2, count]
        edges = [draws.uniform(-config.jitter, config.jitter, shape=of_axis) for _ in range(2)]
        edges = [edge.reshape(shape[0], 2, count) for edge in edges]
    flips = draws.coin(config.flip_prob).reshape(shape) if config.flip_prob else np.zeros(shape)
    colors = draw_colors(config, draws, count)

    def view(reader: int, row: int) -> Canvas:
        image = readers[reader][row]
        if config.jitter:
            drawn = [edge[row, :, reader] for edge in edges]
            crop = jittered_crop(image.size, image_size, *drawn, keep_aspect=config.letterbox)
        else:
            crop = whole_image(image.size, image_size, config.letterbox)
        color = None if colors is None else colors[row, reader]
        return canvas_of(image, *crop, config, image_size, color, flips[row, reader])

    return view


def canvas_of(image: Annotated, window, place, config, image_size, color=None, flip=0) -> Canvas:
    pixels = numpy_images.resize(numpy_images.crop(image.pixels, window), place[2:], config.antialias)
    if color is not None:
        hue, saturation, exposure = color
        pixels = numpy_images.twist_color(pixels, hue=hue, saturation=saturation, brightness=exposure)
    pixels = numpy_images.put(pixels, place[:2], image_size, FILL)
    boxes_px = numpy_boxes.move(image.boxes_px, window, place)
    source = f"image {image.image_id} {image.size}, {window} to {place}, colour {color}, flip {flip}"
    if flip:
        pixels, boxes_px = pixels[:, ::-1], numpy_boxes.flip(boxes_px, image_size[1])
        place = place[0], image_size[1] - place[1] - place[3], *place[2:]
    return Canvas(pixels, boxes_px, image.classes, place, source)


def mosaic(config, canvases: list[Canvas], numbers, cut_shares, image_size: tuple[int, int]) -> Canvas:
    """Cuts are rounded to whole pixels."""
    cut = [nearest(share * side) for share, side in zip(cut_shares, image_size, strict=True)]
    source = f"mosaic cut at {cut} of " + " | ".join(canvases[number].source for number in numbers)
    return Canvas(
        *darknet_mosaic(canvases, numbers, *cut, min_visible=config.min_visible), place=(), source=source
    )


def mix(config, canvases, image_size, draws: Draws, is_mosaic: np.ndarray) -> list[Canvas]:
    """Applies at most one of mosaic, MixUp and CutMix to each canvas that `is_mosaic` does not mark."""
    if not (config.mosaic_prob or config.mixup_prob or config.cutmix_prob):
        return canvases
    count = 4 if config.mosaic_prob else 2
    order = draws.take("batch_permutation")
    partners = [draws.take("batch_permutation", no_fixed_points=True) for _ in range(count - 1)]
    sources = np.stack([order, *(order[partner] for partner in partners)], 1)
    never = np.zeros(len(canvases))
    mosaics = draws.coin(config.mosaic_prob) if config.mosaic_prob else never
    cuts = draws.uniform(0.2, 0.8, shape=[2]) if config.mosaic_prob else None
    mixups = draws.coin(config.mixup_prob) if config.mixup_prob else never
    cutmixes = draws.coin(config.cutmix_prob) if config.cutmix_prob else never
    if config.cutmix_prob:
        shares, centers = draws.uniform(0.0, 1.0), draws.uniform(0.0, 1.0, shape=[2])
    mixed = []
    for row, numbers in enumerate(sources.tolist()):
        first, second = (canvases[number] for number in numbers[:2])
        if is_mosaic[numbers[0]]:
            mixed.append(first)
        elif mosaics[row]:
            mixed.append(mosaic(config, canvases, numbers, cuts[row], image_size))
        elif mixups[row]:
            mixed.append(mixup(first, second))
        elif cutmixes[row]:
            mixed.append(cutmix(config, first, second, shares[row], centers[row]))
        else:
            mixed.append(first)
    return mixed


def mixup(first: Canvas, second: Canvas) -> Canvas:
    """Both weights are equal, as in Darknet; the boxes of both stay."""
    pixels = (first.pixels.astype(np.float64) + second.pixels) / 2
    boxes_px = np.concatenate([first.boxes_px, second.boxes_px])
    classes = np.concatenate([first.classes, second.classes])
    return Canvas(pixels, boxes_px, classes, (), f"MixUp of {first.source} | {second.source}")


def cutmix(config, first: Canvas, second: Canvas, share: float, center: np.ndarray) -> Canvas:
    """CutMix (arXiv 1905.04899): a rectangle of `second`, with `share` of the area, over `first`.

    Boxes of `first` of which more than half is covered are dropped. Boxes of `second` are clipped.
    """
    size = np.array(first.pixels.shape[:2])
    half = np.sqrt(share) / 2
    y0, x0 = (max(nearest((middle - half) * side), 0) for middle, side in zip(center, size, strict=True))
    y1, x1 = (min(nearest((middle + half) * side), side) for middle, side in zip(center, size, strict=True))
    if y0 >= y1 or x0 >= x1:
        return first._replace(source=f"CutMix without area of {first.source}")
    pixels = first.pixels.copy()
    pixels[y0:y1, x0:x1] = second.pixels[y0:y1, x0:x1]
    low, high = np.array([x0, y0, x0, y0]), np.array([x1, y1, x1, y1])
    covered = np.clip(first.boxes_px, low, high)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (covered, first.boxes_px)]
    stays = areas[0] <= 0.5 * areas[1]
    pasted_px = clip_visible(second.boxes_px, low, high, config.min_visible)
    boxes_px = np.concatenate([first.boxes_px * stays[:, np.newaxis], pasted_px])
    source = f"CutMix at {(y0, x0, y1, x1)} of {first.source} | {second.source}"
    return Canvas(pixels, boxes_px, np.concatenate([first.classes, second.classes]), (), source)


# --- comparing ---


def check(batch: Batch, row: int, canvas: Canvas, config: YOLOv4Config) -> None:
    outputs, where = batch.outputs, canvas.source
    pixels = outputs["images"][row]
    assert pixels.shape == canvas.pixels.shape, where
    difference = np.abs(pixels.astype(np.float64) * 255 - canvas.pixels)
    numpy_images.assert_small(difference, config, where, has_halves=config.mixup_prob > 0)
    assert outputs["num_boxes"].reshape(-1)[row] == (outputs["classes"][row] >= 0).sum(), where
    numpy_boxes.assert_boxes(outputs, row, canvas.boxes_px, canvas.classes, config, where)


@pytest.mark.parametrize("name", TRAININGS)
def test_yolov4_training_batches_equal_numpy(fuzzed, name):
    config = dataclasses.replace(PLAIN, **TRAININGS[name])
    sizes = set()
    for batch, images in run_epoch(YOLOv4Pipeline, fuzzed, config=config, training=True):
        image_size = batch_size(config, batch.draws)
        is_mosaic, mixing = np.zeros(BATCH), config
        if config.mosaic_tiles == "fresh":
            is_mosaic = batch.draws.coin(config.mosaic_prob)
            cuts = batch.draws.uniform(0.2, 0.8, shape=[2])
            mixing = dataclasses.replace(config, mosaic_prob=0.0)
        tiles = [[fuzzed.images[image_id] for image_id in ids] for ids in batch.other_image_ids]
        view = draw_views(config, [images, *tiles], image_size, batch.draws)
        canvases = [
            mosaic(config, [view(tile, row) for tile in range(4)], range(4), cuts[row], image_size)
            if is_mosaic[row]
            else view(0, row)
            for row in range(BATCH)
        ]
        mixed = mix(mixing, canvases, image_size, batch.draws, is_mosaic)
        batch.draws.finish()
        for row, canvas in enumerate(mixed):
            check(batch, row, canvas, config)
        sizes.add(image_size)
    assert (len(sizes) > 1) == (config.multi_scale > 1)


@pytest.mark.parametrize("keep_aspect", [False, True], ids=["stretched", "letterboxed"])
def test_yolov4_evaluation_batches_are_unaugmented_and_equal_numpy(fuzzed, keep_aspect):
    augmented = dataclasses.replace(PLAIN, **TRAININGS["all"] | {"letterbox": keep_aspect})
    plain = dataclasses.replace(PLAIN, min_box_size=augmented.min_box_size)
    for batch, images in run_epoch(YOLOv4Pipeline, fuzzed, config=augmented, training=False):
        for row, image in enumerate(images):
            window, place = whole_image(image.size, INPUT, keep_aspect)
            assert tuple(batch.outputs["letterbox"][row]) == place
            check(batch, row, canvas_of(image, window, place, plain, INPUT), plain)
