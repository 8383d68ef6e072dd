"""Crops of YOLOv4's images, in DALI: which window of an image is used, and where in the network input.

The jitter follows AlexeyAB/darknet src/data.c, load_data_detection. Windows and places are whole pixels: only
these are decoded, and boxes are mapped exactly as the pixels are. Sizes are int32 nodes (height, width). That
of the network input is a node too, because it may change from batch to batch.

The crops of several images at once are columns: (2, N) sizes, (2, 1) for the network input, (4, N) crops.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import letterbox
from common.dali_ops import int32

if TYPE_CHECKING:
    from yolov4.config import YOLOv4Config


class CropResize(NamedTuple):
    """The window of the stored image that is used, and its place in the network input. int32 nodes.

    Everything outside `place` is padding. Boxes are clipped to the window and go through the map that takes
    the window to the place.
    """

    window: DataNode  # (4,): top, left, height, width in pixels of the stored image
    place: DataNode  # (4,): top, left, height, width in pixels of the network input


def source_size(jpegs: DataNode) -> DataNode:
    """int32 (2,): (height, width) of the stored image, from its header; EXIF does not turn it."""
    return int32(fn.peek_image_shape(jpegs, adjust_orientation=False)[0:2])


def source_sizes(jpegs: list[DataNode]) -> DataNode:
    """int32 (2, N): the sizes of several images as columns."""
    shapes = [fn.peek_image_shape(file, adjust_orientation=False) for file in jpegs]
    return int32(fn.stack(*shapes, axis=1)[0:2])


def input_size(config: "YOLOv4Config", training: bool, seed: int) -> DataNode:
    """int32 (2,): (height, width) of the network input, drawn for every training batch at multi_scale > 1.

    `seed` decides, so that all ranks draw alike: they wait for each other, and a large image takes longer.

    The shorter side is then any multiple of 32 between image_size / multi_scale and image_size * multi_scale,
    each as often as the others, and the shape stays. Darknet (src/detector.c, train_detector, random=1) draws
    for ten batches at once, rounds up by one step more, and draws small sizes more often.
    """
    if not training or config.multi_scale == 1:
        return types.Constant(np.array(config.image_size, np.int32), device="cpu")
    low, high = config.size_range
    sizes = np.array([config.bucket(units) for units in range(low, high + 1)], np.int32)
    drawn = fn.random.uniform(range=(0.0, float(len(sizes))), seed=seed)
    drawn = dali_math.min(int32(dali_math.floor(drawn)), len(sizes) - 1)  # a cast alone would round
    # Every sample has drawn: all take what the first one drew.
    drawn = fn.permute_batch(drawn, indices=types.Constant(0, device="cpu"))
    return types.Constant(sizes, device="cpu")[drawn]


def whole_image(size: DataNode, image_size: DataNode, keep_aspect: bool) -> CropResize:
    """The whole image: as large as fits and in the middle, or stretched over the network input."""
    zero = 0 * size
    window = fn.cat(zero, size)
    if not keep_aspect:
        return CropResize(window, fn.cat(zero, zero + image_size))
    limits = image_size[0], image_size[1]
    fitted = fn.stack(*letterbox.fit(size[0], size[1], limits, dali_math.min, dali_math.max))
    return CropResize(window, fn.cat((image_size - fitted) // 2, fitted))


def jittered_crop(
    size: DataNode, image_size: DataNode, jitter: float, keep_aspect: bool, count: int | None = None
) -> CropResize:
    """A random crop of the image, inwards or outwards, stretched over the network input.

    Each edge moves by up to `jitter` times the image's side, each on its own; what the crop has outside the
    image is padding. To keep the aspect ratio, but for the jitter's own changes, the crop first grows along
    the side that is too short for the shape of the network input, half of it at each end.

    `count` is the number of columns; None where there are none.
    """
    longer: DataNode | float = 0.0
    if keep_aspect:
        longer = dali_math.max(_swap(size) * image_size / _swap(image_size) - size, 0.0)
    start = round_half_up(_jitter(jitter, count) * size - longer / 2)
    end = size - round_half_up(_jitter(jitter, count) * size - longer / 2)
    length = dali_math.max(end - start, 1)
    first, last = dali_math.max(start, 0), dali_math.min(start + length, size)  # of the crop, in the image
    # To the nearest pixel of the network input, halves up, in whole numbers.
    ends = (2 * image_size * (fn.stack(first, last) - start) + length) // (2 * length)
    place = dali_math.min(ends[0], image_size - 1)
    place_size = dali_math.max(ends[1] - place, 1)
    return CropResize(fn.cat(first, last - first), fn.cat(place, place_size))


def training_crop(
    config: "YOLOv4Config", size: DataNode, image_size: DataNode, count: int | None = None
) -> CropResize:
    """The crop of a training image: jittered, unless config.jitter is 0."""
    if config.jitter:
        return jittered_crop(size, image_size, config.jitter, config.letterbox, count)
    return whole_image(size, image_size, config.letterbox)


def _jitter(limit: float, count: int | None) -> DataNode:
    return fn.random.uniform(range=(-limit, limit), shape=[2] if count is None else [2, count])


def _swap(size: DataNode) -> DataNode:
    return fn.stack(size[1], size[0])


def round_half_up(values: DataNode) -> DataNode:
    return int32(dali_math.floor(values + 0.5))
