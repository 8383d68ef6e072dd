"""YOLOv4's pipeline against NumPy on two hundred fuzzed images: every stage, given what it drew."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest

from tests.oracle import numpy_boxes, numpy_images
from tests.oracle.fuzzed import NUM_IMAGES, Annotated
from tests.oracle.watched import Batch, Draws, Watched
from tests.yolov4.test_crops import darknet_axis
from tests.yolov4.test_mosaic import darknet_mosaic
from yolov4.config import YOLOv4Config, get_config
from yolov4.pipeline import YOLOv4Pipeline

INPUT = (128, 192)  # height, width: not square, so that a swapped axis shows
BATCH = 25
FILL = 127  # Darknet's 0.5
PLAIN = dataclasses.replace(
    get_config("yolov4"),
    image_size=INPUT,
    multi_scale=1.0,
    jitter=0.0,
    flip_prob=0.0,
    hue=0.0,
    saturation=1.0,
    exposure=1.0,
    mosaic_prob=0.0,
)

COLOR = {"hue": 36.0, "saturation": 1.5, "exposure": 1.5}
TRAININGS = {
    "stretch": {},
    "letterbox": {"letterbox": True},
    "not antialiased": {"antialias": False, "jitter": 0.3},
    "jitter": {"jitter": 0.3},
    "letterbox and jitter": {"letterbox": True, "jitter": 0.4},
    "flip": {"flip_prob": 0.5, "letterbox": True},
    "colour": COLOR,
    "multi-scale": {"multi_scale": 1.7},
    "mosaic": {"mosaic_prob": 0.7, "letterbox": True},
    "fresh mosaic": {"mosaic_prob": 0.7, "mosaic_tiles": "fresh", "letterbox": True},
    "MixUp": {"mixup_prob": 0.7},
    "CutMix": {"cutmix_prob": 0.7},
    "all": COLOR
    | {"letterbox": True, "jitter": 0.3, "flip_prob": 0.5, "multi_scale": 1.4, "min_box_size": 3.0}
    | {"mosaic_prob": 0.4, "mixup_prob": 0.4, "cutmix_prob": 0.6},
}
TRAININGS["all, fresh mosaic"] = TRAININGS["all"] | {"mosaic_tiles": "fresh", "antialias": False}


class Canvas(NamedTuple):
    """A finished network input; in the order that `darknet_mosaic` unpacks."""

    pixels: np.ndarray  # uint8 (H, W, 3)
    boxes_px: np.ndarray  # float64 (N, 4)
    classes: np.ndarray  # int (N,)
    place: tuple[int, int, int, int]  # of the image: top, left, height, width
    source: str  # for messages


# --- what the definitions say ---


def nearest(value: float) -> int:
    """The nearest whole number, halves up."""
    return math.floor(value + 0.5)


def batch_size(config: YOLOv4Config, draws: Draws) -> tuple[int, int]:
    """The network input of a batch: the shorter side any multiple of 32 in the range, and the same shape."""
    if config.multi_scale == 1:
        return INPUT
    units = min(INPUT) / 32
    low, high = max(nearest(units / config.multi_scale), 1), nearest(units * config.multi_scale)
    drawn = draws.uniform(0.0, float(high - low + 1))[0]  # the first image draws for all
    shorter = low + math.floor(drawn)
    return tuple(32 * nearest(shorter * side / min(INPUT)) for side in INPUT)


def whole_image(size, image_size, keep_aspect) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(window, place) of all of the image: letterboxed in the middle, or stretched."""
    if keep_aspect:
        return (0, 0, *size), numpy_images.letterbox(size, image_size, centered=True)
    return (0, 0, *size), (0, 0, *image_size)


def jittered_crop(size, image_size, first, last, keep_aspect) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Darknet's crop, moved by the drawn shares (y, x) at its first and at its last edges."""
    axes = [
        darknet_axis(
            size[axis],
            size[1 - axis],
            image_size[axis],
            image_size[1 - axis],
            float(first[axis]),
            float(last[axis]),
            keep_aspect,
        )
        for axis in (0, 1)
    ]
    (top, height, to_top, to_height), (left, width, to_left, to_width) = axes
    return (top, left, height, width), (to_top, to_left, to_height, to_width)


def factor(limit: float, draws: Draws, count: int) -> np.ndarray:
    """src/utils.c, rand_scale: uniform in 1 .. limit, or one over that."""
    inverted = draws.take("coin_flip", probability=0.5, shape=[count])
    drawn = draws.uniform(1.0, limit, shape=[count])
    return np.where(inverted, 1 / drawn, drawn)


def draw_colors(config: YOLOv4Config, draws: Draws, count: int) -> np.ndarray | None:
    """(B, count, 3): what is drawn to change the colours of so many images of each sample."""
    if not config.hue:
        return None
    hue = draws.uniform(-config.hue, config.hue, shape=[count])
    factors = [factor(limit, draws, count) for limit in (config.saturation, config.exposure)]
    return np.stack([hue, *factors], 2)


def batch_canvases(
    config: YOLOv4Config, images: list[Annotated], image_size: tuple[int, int], draws: Draws
) -> list[Canvas]:
    """View, colour, padding and flip of every image of a training batch."""
    if config.jitter:
        edges = [draws.uniform(-config.jitter, config.jitter, shape=[2]) for _ in range(2)]
        crops = [
            jittered_crop(image.size, image_size, *drawn, config.letterbox)
            for image, *drawn in zip(images, *edges, strict=True)
        ]
    else:
        crops = [whole_image(image.size, image_size, config.letterbox) for image in images]
    flips = draws.coin(config.flip_prob) if config.flip_prob else np.zeros(len(images))
    colors = draw_colors(config, draws, 1)
    return [
        canvas_of(image, *crop, config, image_size, None if colors is None else colors[row, 0], flips[row])
        for row, (image, crop) in enumerate(zip(images, crops, strict=True))
    ]


def fresh_canvases(
    config: YOLOv4Config, images: list[list[Annotated]], image_size: tuple[int, int], draws: Draws
) -> tuple[list[Canvas], np.ndarray]:
    """Mosaics of the images of all readers, or canvases of the first's; 1 for the mosaics.

    Args:
        images: of each reader.
    """
    mosaics = draws.coin(config.mosaic_prob)
    cuts = draws.uniform(0.2, 0.8, shape=[2])
    sizes = [[image.size for image in of_reader] for of_reader in images]  # (4, B) pairs
    if config.jitter:
        edges = [draws.uniform(-config.jitter, config.jitter, shape=[2, 4]) for _ in range(2)]  # (B, 2, 4)
        crops = [
            [
                jittered_crop(size, image_size, *(edge[row, :, tile] for edge in edges), config.letterbox)
                for row, size in enumerate(sizes[tile])
            ]
            for tile in range(4)
        ]
    else:
        crops = [[whole_image(size, image_size, config.letterbox) for size in ones] for ones in sizes]
    flips = np.zeros((len(mosaics), 4))
    if config.flip_prob:
        flips = draws.take("coin_flip", probability=config.flip_prob, shape=[4])
    colors = draw_colors(config, draws, 4)

    canvases = []
    for row, is_mosaic in enumerate(mosaics):
        shown = [
            canvas_of(
                images[tile][row],
                *crops[tile][row],
                config,
                image_size,
                None if colors is None else colors[row, tile],
                flips[row, tile],
            )
            for tile in range(4 if is_mosaic else 1)
        ]
        if is_mosaic:
            cut = [nearest(share * side) for share, side in zip(cuts[row], image_size, strict=True)]
            source = f"mosaic cut at {cut} of " + " | ".join(canvas.source for canvas in shown)
            shown = [Canvas(*darknet_mosaic(shown, range(4), *cut), (), source)]
        canvases.append(shown[0])
    return canvases, mosaics


def canvas_of(image: Annotated, window, place, config, image_size, color=None, flip=0) -> Canvas:
    """One image as a network input."""
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


def mix(
    config: YOLOv4Config,
    canvases: list[Canvas],
    image_size: tuple[int, int],
    draws: Draws,
    taken: np.ndarray | None = None,
) -> list[Canvas]:
    """Mosaic, or else MixUp, or else CutMix of each canvas with others, by the drawn permutations.

    A canvas that is `taken` stays.
    """
    if not (config.mosaic_prob or config.mixup_prob or config.cutmix_prob):
        return canvases
    count = 4 if config.mosaic_prob else 2
    own = draws.take("batch_permutation")
    partners = [draws.take("batch_permutation", no_fixed_points=True) for _ in range(count - 1)]
    sources = np.stack([own, *(own[partner] for partner in partners)], 1)  # (B, 2 or 4)
    never = np.zeros(len(canvases))
    mosaics = draws.coin(config.mosaic_prob) if config.mosaic_prob else never
    cuts = draws.uniform(0.2, 0.8, shape=[2]) if config.mosaic_prob else None
    mixups = draws.coin(config.mixup_prob) if config.mixup_prob else never
    cutmixes = draws.coin(config.cutmix_prob) if config.cutmix_prob else never
    if config.cutmix_prob:
        shares, centers = draws.uniform(0.0, 1.0), draws.uniform(0.0, 1.0, shape=[2])
    mixed = []
    for row, numbers in enumerate(sources.tolist()):
        if taken is not None and taken[numbers[0]]:
            mixed.append(canvases[numbers[0]])
        elif mosaics[row]:
            cut = [nearest(share * side) for share, side in zip(cuts[row], image_size, strict=True)]
            pixels, boxes_px, classes = darknet_mosaic(canvases, numbers, *cut)
            source = " | ".join(canvases[number].source for number in numbers)
            mixed.append(Canvas(pixels, boxes_px, classes, (), f"mosaic cut at {cut} of {source}"))
        elif mixups[row]:
            mixed.append(mixup(canvases[numbers[0]], canvases[numbers[1]]))
        elif cutmixes[row]:
            mixed.append(cutmix(canvases[numbers[0]], canvases[numbers[1]], shares[row], centers[row]))
        else:
            mixed.append(canvases[numbers[0]])
    return mixed


def mixup(own: Canvas, other: Canvas) -> Canvas:
    """Half of each (arXiv 1710.09412 with Darknet's constant share), the boxes of both."""
    pixels = (own.pixels.astype(np.float64) + other.pixels) / 2
    boxes_px = np.concatenate([own.boxes_px, other.boxes_px])
    classes = np.concatenate([own.classes, other.classes])
    return Canvas(pixels, boxes_px, classes, (), f"MixUp of {own.source} | {other.source}")


def cutmix(own: Canvas, other: Canvas, share: float, center: np.ndarray) -> Canvas:
    """A rectangle of another canvas over the own one (arXiv 1905.04899).

    It has that share of the area and the canvas' shape, less what is outside. Own boxes of which it covers
    more than half are gone, and the other's boxes are clipped to it.
    """
    size = np.array(own.pixels.shape[:2])
    half = np.sqrt(share) / 2
    top, left = (nearest((middle - half) * side) for middle, side in zip(center, size, strict=True))
    bottom, right = (nearest((middle + half) * side) for middle, side in zip(center, size, strict=True))
    top, left, bottom, right = max(top, 0), max(left, 0), min(bottom, size[0]), min(right, size[1])
    pixels = own.pixels.copy()
    pixels[top:bottom, left:right] = other.pixels[top:bottom, left:right]
    if top >= bottom or left >= right:
        return own._replace(source=f"CutMix without area of {own.source}")
    low, high = np.array([left, top, left, top]), np.array([right, bottom, right, bottom])
    covered = np.clip(own.boxes_px, low, high)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (covered, own.boxes_px)]
    stays = areas[0] <= 0.5 * areas[1]
    boxes_px = np.concatenate([own.boxes_px * stays[:, np.newaxis], np.clip(other.boxes_px, low, high)])
    source = f"CutMix at {(top, left, bottom, right)} of {own.source} | {other.source}"
    return Canvas(pixels, boxes_px, np.concatenate([own.classes, other.classes]), (), source)


# --- comparing ---


def check(batch: Batch, row: int, canvas: Canvas, config: YOLOv4Config) -> None:
    """Pixels, boxes, classes and counts of one network input."""
    outputs, where = batch.outputs, canvas.source
    got = outputs["images"][row]
    assert got.shape == canvas.pixels.shape, where
    difference = np.abs(got.astype(np.float64) * 255 - canvas.pixels)
    highest, mean = (4.001, 0.5) if config.hue else (1.001, 0.1)
    if config.mixup_prob:  # halves of odd levels
        highest, mean = highest + 0.5, 0.6
    assert difference.max() <= highest and difference.mean() <= mean, (
        f"{where}: {difference.max():.3f}, {difference.mean():.3f}"
    )
    count = outputs["num_boxes"].reshape(-1)[row]
    boxes, classes = outputs["boxes"][row], outputs["classes"][row]
    assert (boxes[count:] == -1).all() and (classes[count:] == -1).all(), where
    rule = {"min_size": config.min_box_size, "max_instances": config.max_instances, "where": where}
    got_px = boxes[:count].astype(np.float64) * numpy_boxes.swapped(got.shape[:2])
    numpy_boxes.assert_kept(got_px, classes[:count], canvas.boxes_px, canvas.classes, **rule)
    numpy_boxes.assert_lost(outputs["lost"][row], canvas.boxes_px, **rule)


@pytest.mark.parametrize("name", TRAININGS)
def test_training(fuzzed, name):
    config = dataclasses.replace(PLAIN, **TRAININGS[name])
    loader = YOLOv4Pipeline(
        source=fuzzed.source, config=config, batch_size=BATCH, training=True, count_lost=True, seed=7
    )
    watched, seen, sizes = Watched(loader), [], set()
    for _ in range(NUM_IMAGES // BATCH):
        batch = watched.run()
        readers = [batch.image_ids, *batch.other_image_ids]
        images = [[fuzzed.images[image_id] for image_id in ids] for ids in readers]
        image_size = batch_size(config, batch.draws)
        if config.mosaic_tiles == "fresh":
            canvases, taken = fresh_canvases(config, images, image_size, batch.draws)
            without = dataclasses.replace(config, mosaic_prob=0.0)
            mixed = mix(without, canvases, image_size, batch.draws, taken)
        else:
            canvases = batch_canvases(config, images[0], image_size, batch.draws)
            mixed = mix(config, canvases, image_size, batch.draws)
        batch.draws.finish()
        for row, canvas in enumerate(mixed):
            check(batch, row, canvas, config)
        seen += batch.image_ids
        sizes.add(image_size)
    assert sorted(seen) == sorted(fuzzed.images)  # each once in an epoch
    assert (len(sizes) > 1) == (config.multi_scale > 1)


@pytest.mark.parametrize("keep_aspect", [False, True])
def test_evaluation(fuzzed, keep_aspect):
    augmented = dataclasses.replace(PLAIN, **TRAININGS["all"] | {"letterbox": keep_aspect})
    plain = dataclasses.replace(PLAIN, min_box_size=augmented.min_box_size)
    loader = YOLOv4Pipeline(
        source=fuzzed.source, config=augmented, batch_size=BATCH, training=False, count_lost=True
    )
    watched, seen = Watched(loader), []
    for _ in range(loader.steps_per_epoch):
        batch = watched.run()
        batch.draws.finish()
        for row, image_id in enumerate(batch.image_ids):
            image = fuzzed.images[image_id]
            window, place = whole_image(image.size, INPUT, keep_aspect)
            assert batch.outputs["image_ids"].reshape(-1)[row] == image_id
            assert tuple(batch.outputs["image_sizes"][row]) == image.size
            assert tuple(batch.outputs["letterbox"][row]) == place
            check(batch, row, canvas_of(image, window, place, plain, INPUT), plain)
        seen += batch.image_ids
    assert seen == list(fuzzed.images)
