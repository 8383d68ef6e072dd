"""Mosaics of four freshly read images in DALI, as Darknet makes them: --hparams=mosaic_tiles=fresh.

For each tile, DALI decodes, resizes and colours only the pixels that the tile shows, and a margin that the
resize filter needs. A sample that is not a mosaic has one tile: the whole canvas of the first reader's image.

The first reader reads the data in its usual order. The other three read the same shards in other orders.
Each image is read four times per epoch. For TFRecords and WebDataset, use --shuffle=global.

Arrays have one column per tile. In int32 (2, 4), the first row has the four y, the second the four x.
"""

from typing import Any, NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.dali_ops import Decoder, int32
from yolov4.augmentations import augment_pixels
from yolov4.config import FILL, YOLOv4Config
from yolov4.crops import CropResize, source_sizes, training_crop
from yolov4.mosaic import IS_FIRST, TILES, Objects, hide_slivers, random_cut, tile_starts

_STRIPS = 8  # divides the height of every network input, which is a multiple of 32

# A PNM file of one pixel replaces the file of an image that is not shown.
_NOTHING = np.frombuffer(b"P6\n1 1\n255\n\0\0\0", np.uint8)


class Example(NamedTuple):
    jpegs: DataNode  # uint8 (bytes,)
    boxes: DataNode  # float32 (N, 4), ltrb normalised
    labels: DataNode  # int32 (N,)


class Tiles(NamedTuple):
    """For each tile: the part of an image to show, the place in the mosaic, and how to convert boxes.

    Boxes are normalised by their image. They are clipped to the crop, and flipped if the image is flipped.
    Then box * scale + shift converts them to pixels of the mosaic, where they are clipped to the tile.
    """

    window: DataNode  # int32 (4, 4): top, left, height, width in pixels of the stored image
    roi_start: DataNode  # float32 (2, 4): start of the part to resize, in pixels of the window
    roi_end: DataNode  # float32 (2, 4): end of this part, left of its start if the image is flipped
    size: DataNode  # float32 (2, 4): height, width in the mosaic, at least 1
    target: DataNode  # int32 (2, 4): top, left in the mosaic
    # float32 (6, 4, 4): the crop's start and end, scale, shift, the tile's start and end. Each of these six
    # has a column (x, y, x, y) for each tile.
    boxes: DataNode


def reader_seeds(seed: int) -> list[int]:
    """Returns one seed for each reader. The first is `seed`, and none is above args.MAX_SEED."""
    others = [np.random.SeedSequence([seed, number]).generate_state(1)[0] for number in range(1, TILES)]
    return [seed, *(int(other) % 2**31 for other in others)]


def make(
    examples: list[Example],
    config: YOLOv4Config,
    image_size: DataNode,
    decoder: Decoder,
) -> tuple[DataNode, Objects, DataNode]:
    """Returns a mosaic with probability `mosaic_prob`, else the canvas of the first reader's image.

    Args:
        examples: the outputs of the four readers.
        image_size: int32 (2,), (H, W) of the network input.

    Returns:
        image: float32 (H, W, 3).
        objects: the objects of the image. Some boxes may have no area.
        chosen: int32 (), 1 for a mosaic, else 0.
    """
    chosen = fn.random.coin_flip(probability=config.mosaic_prob)
    cut = random_cut(image_size)
    jpegs = [example.jpegs for example in examples]
    if config.mosaic_prob < 1:
        jpegs[1:] = _only_where(chosen, jpegs[1:])

    sizes = source_sizes(jpegs)  # (2, 4)
    image_sizes = fn.expand_dims(image_size, axes=[1])  # (2, 1)
    crop = training_crop(config, sizes, image_sizes, count=TILES)
    coins: Any = [0] * TILES
    flips: DataNode | int = 0
    if config.flip_prob:
        coins = fn.random.coin_flip(probability=config.flip_prob, shape=[TILES])
        flips = fn.stack(0 * coins, coins)  # (2, 4)
    tiles = tiles_of(sizes, crop, flips, fn.expand_dims(cut, axes=[1]), image_sizes, chosen)

    windows = [decoder.crop(image, tiles.window[:, i]) for i, image in enumerate(jpegs)]
    images = [_resize(window, tiles, i, config.antialias) for i, window in enumerate(windows)]
    images = augment_pixels(config, images)
    boxes_px = []
    for number, example in enumerate(examples):
        crop_low, crop_high, scale, shift, tile_low, tile_high = (tiles.boxes[i, :, number] for i in range(6))
        boxes = dali_math.clamp(example.boxes, crop_low, crop_high)
        moved_px = fn.bb_flip(boxes, horizontal=coins[number], ltrb=True) * scale + shift
        clipped_px = dali_math.clamp(moved_px, tile_low, tile_high)
        boxes_px.append(hide_slivers(moved_px, clipped_px, config.min_visible))
    objects = Objects(fn.cat(*boxes_px), fn.cat(*(example.labels for example in examples)))
    padded = bool(config.jitter or config.letterbox)
    return _paste(images, tiles, image_size, FILL / 255 if padded else None), objects, chosen


def tiles_of(
    sizes: DataNode,
    crop: CropResize,
    flips: DataNode | int,
    cut: DataNode,
    image_size: DataNode,
    chosen: DataNode,
) -> Tiles:
    """Returns the tiles of a mosaic. If `chosen` is 0, only the first tile is present: the whole canvas.

    Args:
        sizes: int32 (2, 4), the sizes of the stored images.
        crop: window (4, 4) and place (4, 4) of each image, before flipping.
        flips: int32 (2, 4). Row 0 is 0. Row 1 is 1 for each flipped image.
        cut: int32 (2, 1), from `random_cut`.
        image_size: int32 (2, 1), the size of the network input.
        chosen: int32 (), 1 for a mosaic, else 0.
    """
    first = types.Constant(IS_FIRST.T.copy(), device="cpu")
    cut = cut * chosen + image_size * (1 - chosen)
    rest = image_size - cut
    window_start, window_size, place_size = crop.window[0:2], crop.window[2:4], crop.place[2:4]
    before = crop.place[0:2]
    before = before + flips * (image_size - place_size - 2 * before)
    after = image_size - before - place_size

    # Find the visible part of each image, in pixels of its canvas.
    start = tile_starts(first, cut, rest, before, after)
    shift = (1 - first) * cut - start  # from the canvas to the mosaic
    shown = dali_math.max(start, before)
    end = start + dali_math.max(first * cut + (1 - first) * rest, 1)
    size = dali_math.min(end, before + place_size) - shown
    target = shown + shift
    # Without a mosaic, shrink tiles 1 to 3 to one pixel, which tile 0 covers.
    there = dali_math.max(types.Constant(np.array([1, 0, 0, 0], np.int32), device="cpu"), chosen)
    size = size * there + (1 - there)
    target = target * there + target[:, 0:1] * (1 - there)

    # Convert the visible part to pixels of the crop; add the filter's margin.
    part = shown - before
    part = part + flips * (place_size - size - 2 * part)
    scale = window_size / place_size
    roi_start, roi_end = part * scale, (part + size) * scale
    reach = dali_math.max(scale, 1.0) + 1.0
    decoded = dali_math.max(int32(dali_math.floor(roi_start - reach)), 0)
    decoded_end = dali_math.min(int32(dali_math.ceil(roi_end + reach)), window_size)
    roi_start, roi_end = roi_start - decoded, roi_end - decoded

    turn = flips * (roi_end - roi_start)
    roi_start, roi_end = roi_start + turn, roi_end - turn
    window_in_flipped = window_start + flips * (sizes - window_size - 2 * window_start)
    boxes = fn.stack(
        window_start / sizes,
        (window_start + window_size) / sizes,
        sizes / scale,
        before + shift - window_in_flipped / scale,
        fn.cast(target, dtype=types.FLOAT),
        fn.cast(target + size * there, dtype=types.FLOAT),
    )  # (6, 2, 4)
    y, x = boxes[:, 0], boxes[:, 1]
    return Tiles(
        fn.cat(window_start + decoded, decoded_end - decoded),
        roi_start,
        roi_end,
        fn.cast(size, dtype=types.FLOAT),
        target,
        fn.stack(x, y, x, y, axis=1),
    )


def _only_where(chosen: DataNode, jpegs: list[DataNode]) -> list[DataNode]:
    """Returns the files if `chosen` is 1, else files of one pixel."""
    instead = types.Constant(_NOTHING, device="cpu")[: len(_NOTHING) * (1 - chosen)]
    return [fn.cat(file[: file.shape(dtype=types.INT32)[0] * chosen], instead) for file in jpegs]


def _resize(window: DataNode, tiles: Tiles, number: int, antialias: bool) -> DataNode:
    """Resizes a window to one tile, uint8 (h, w, 3), and flips it."""
    resized: Any = fn.resize(  # DALI's type hints allow two outputs
        window,
        size=tiles.size[:, number],
        roi_start=tiles.roi_start[:, number],
        roi_end=tiles.roi_end[:, number],
        interp_type=types.INTERP_LINEAR,
        antialias=antialias,
    )
    return resized


def _paste(images: list[DataNode], tiles: Tiles, image_size: DataNode, fill: float | None) -> DataNode:
    """Pastes the tiles into float32 (H, W, 3), the first tile last. Pixels outside all tiles are `fill`."""
    if images[0].device == "gpu":
        # DALI 2.4's GPU kernel reads all inputs with the width of the first (multipaste.cu, SetupTyped).
        images = [fn.pad(image, axes=[1], shape=image_size[1:2]) for image in images]
    first, *others = images
    anchors, sizes = (int32(fn.transpose(rows, perm=[1, 0])) for rows in (tiles.target, tiles.size))  # (4, 2)
    targets, shapes = [anchors[1:], anchors[0:1]], [sizes[1:], sizes[0:1]]
    if fill is not None:
        # To save time, DALI fills only a strip, which is pasted several times.
        rows = image_size[0] // _STRIPS
        strip_size = fn.stack(rows, image_size[1])
        strip = fn.reshape(fn.full(fill, shape=fn.cat(strip_size, [3])), layout="HWC")
        others = [strip.gpu() if first.device == "gpu" else strip] * _STRIPS + others
        numbers = np.stack([np.arange(_STRIPS), np.zeros(_STRIPS)], 1).astype(np.int32)
        targets = [types.Constant(numbers, device="cpu") * rows, *targets]
        shapes = [fn.stack(*[strip_size] * _STRIPS), *shapes]
    place = fn.cat(*targets)
    return fn.multi_paste(*others, first, out_anchors=place, shapes=fn.cat(*shapes), output_size=image_size)
