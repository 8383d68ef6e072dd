"""Crops of YOLOv4's images in DALI: which window of an image is used, and its place in the network input.

The jitter follows AlexeyAB/darknet src/data.c, load_data_detection. Sizes are int32 nodes (height, width).
For N images at once, sizes are (2, N), crops are (4, N), and the size of the network input is (2, 1).
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
    """A window of the stored image, and its place in the network input. Both are int32 nodes.

    Everything outside `place` is padding.
    """

    window: DataNode  # (4,): top, left, height, width in pixels of the stored image
    place: DataNode  # (4,): top, left, height, width in pixels of the network input


def source_sizes(jpegs: list[DataNode]) -> DataNode:
    """Reads int32 (2, N): the sizes of several images as columns."""
    shapes = [fn.peek_image_shape(file, adjust_orientation=False) for file in jpegs]
    return int32(fn.stack(*shapes, axis=1)[0:2])


def input_size(config: "YOLOv4Config", training: bool, seed: int) -> DataNode:
    """Returns int32 (2,), (height, width) of the network input. It is random in training if multi_scale > 1.

    The shorter side is then a random multiple of 32, from image_size / multi_scale to image_size *
    multi_scale. All ranks use the same `seed`, so they get the same size.
    """
    if not training or config.multi_scale == 1:
        return types.Constant(np.array(config.image_size, np.int32), device="cpu")
    low, high = config.size_range
    sizes = np.array([config.bucket(units) for units in range(low, high + 1)], np.int32)
    drawn = fn.random.uniform(range=(0.0, float(len(sizes))), seed=seed)
    drawn = dali_math.min(int32(dali_math.floor(drawn)), len(sizes) - 1)  # floor, because a cast rounds
    # All samples of the batch use the number drawn for the first sample.
    drawn = fn.permute_batch(drawn, indices=types.Constant(0, device="cpu"))
    return types.Constant(sizes, device="cpu")[drawn]


def whole_image(size: DataNode, image_size: DataNode, keep_aspect: bool) -> CropResize:
    """Takes the whole image. With keep_aspect, letterboxes and centres it; otherwise stretches it."""
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
    """Takes a random crop, which may reach outside the image, and stretches it over the network input.

    Each edge moves by up to `jitter` times the image's side. With keep_aspect, the crop also grows to the
    aspect ratio of the network input. `count` is the number of images; None for a single image.
    """
    longer: DataNode | float = 0.0
    if keep_aspect:
        longer = dali_math.max(_swap(size) * image_size / _swap(image_size) - size, 0.0)
    start = round_half_up(_jitter(jitter, count) * size - longer / 2)
    end = size - round_half_up(_jitter(jitter, count) * size - longer / 2)
    length = dali_math.max(end - start, 1)
    first, last = dali_math.max(start, 0), dali_math.min(start + length, size)  # the part in the image
    # Round to the nearest pixel of the network input. Halves are rounded up.
    ends = (2 * image_size * (fn.stack(first, last) - start) + length) // (2 * length)
    place = dali_math.min(ends[0], image_size - 1)
    place_size = dali_math.max(ends[1] - place, 1)
    return CropResize(fn.cat(first, last - first), fn.cat(place, place_size))


def training_crop(
    config: "YOLOv4Config", size: DataNode, image_size: DataNode, count: int | None = None
) -> CropResize:
    """Returns the crop of a training image: jittered, or the whole image if config.jitter is 0."""
    if config.jitter:
        return jittered_crop(size, image_size, config.jitter, config.letterbox, count)
    return whole_image(size, image_size, config.letterbox)


def _jitter(limit: float, count: int | None) -> DataNode:
    return fn.random.uniform(range=(-limit, limit), shape=[2] if count is None else [2, count])


def _swap(size: DataNode) -> DataNode:
    return fn.stack(size[1], size[0])


def round_half_up(values: DataNode) -> DataNode:
    return int32(dali_math.floor(values + 0.5))
