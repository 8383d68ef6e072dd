"""EfficientDet's crops in NumPy, from random numbers that the caller passes.

All functions return a window (top, left, height, width) in pixels, and the size (height, width) to which it
is resized.
"""

import math

import numpy as np

from tests.oracle import numpy_images
from tests.oracle.numpy_images import nearest

Crop = tuple[tuple[int, ...], tuple[int, int]]


def letterbox_crop(size, image_size) -> Crop:
    return (0, 0, *size), numpy_images.letterbox(size, image_size, centered=False)[2:]


def jittered_crop(size, image_size, jitter, shares) -> Crop:
    """Computes the crop of google/automl's dataloader.py."""
    scale = jitter * min(image_size[0] / size[0], image_size[1] / size[1])
    starts, lengths, out_size = [], [], []
    for side, limit, share in zip(size, image_size, shares, strict=True):
        scaled = max(nearest(side * scale), 1)
        out_size.append(min(scaled, limit))
        lengths.append(min(max(nearest(side * out_size[-1] / scaled), 1), side))
        places = side - lengths[-1] + 1
        starts.append(min(int(share * places), places - 1))
    return (*starts, *lengths), tuple(out_size)


def resize_range_crop(size, image_size, drawn) -> Crop:
    """Resizes the shorter side to `drawn`, rounded down. An image that would not fit is made to fit."""
    window, largest = letterbox_crop(size, image_size)
    # The graph computes in float32, too.
    scale = np.float32(math.floor(drawn)) / np.float32(min(size))
    scaled = [nearest(np.float32(side) * scale) for side in size]
    height, width = map(min, scaled, largest)
    return window, (height, width)


def min_iou_crop(size, image_size, anchor, shape) -> Crop:
    """`anchor` and `shape` are (x, y), shares of the image."""
    starts, lengths = [], []
    for side, start, length in zip(size, anchor[::-1], shape[::-1], strict=True):
        first = min(math.ceil(start * side - 1e-3), side - 1)
        last = max(math.floor((start + length) * side + 1e-3), first + 1)
        starts.append(first)
        lengths.append(min(last, side) - first)
    return (*starts, *lengths), numpy_images.letterbox(lengths, image_size, centered=False)[2:]
