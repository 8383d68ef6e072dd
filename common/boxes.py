"""Converts box formats and computes how much boxes overlap. The last axis holds a box's four numbers.

A name without a format, such as `boxes`, means ltrb (left, top, right, bottom), normalised to [0, 1]. All
functions take NumPy arrays, TensorFlow tensors or symbolic Keras tensors. They compute in float32, or in
float64 for float64 boxes, and return tensors of the Keras backend.
"""

import math
from typing import Any

import keras
from keras import ops

TINY = 1e-12  # avoids divisions by 0; far below one pixel


def ltrb_to_tlbr(boxes: Any) -> Any:
    """Converts (..., 4) left, top, right, bottom to top, left, bottom, right."""
    left, top, right, bottom = _split(boxes)
    return ops.stack([top, left, bottom, right], axis=-1)


def ltrb_to_cxcywh(boxes: Any) -> Any:
    """Converts (..., 4) left, top, right, bottom to centre x, centre y, width, height."""
    left, top, right, bottom = _split(boxes)
    return ops.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], axis=-1)


def cxcywh_to_ltrb(boxes_cxcywh: Any) -> Any:
    """Converts (..., 4) centre x, centre y, width, height to left, top, right, bottom."""
    x, y, width, height = _split(boxes_cxcywh)
    return ops.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=-1)


def clip(boxes: Any) -> Any:
    """Clips normalised boxes (..., 4) to the image. NaN stays NaN."""
    return ops.clip(_floating(boxes), 0.0, 1.0)


def area(boxes: Any) -> Any:
    """Returns the areas (...) of ltrb boxes (..., 4). The area is 0 if right < left or bottom < top."""
    width, height = _sides(_split(boxes))
    return width * height


def iou(a: Any, b: Any) -> Any:
    """Returns the intersection over union of ltrb boxes a and b, (..., 4) each, with broadcasting.

    For all pairs of a (N, 4) and b (M, 4), use iou(a[:, None], b[None]). A box without area has an IoU of 0.
    Values and gradients of `iou`, `diou` and `ciou` are finite for every finite input.
    """
    return _iou(_split(a), _split(b))


def diou(a: Any, b: Any, beta: float = 1.0) -> Any:
    """Distance IoU (arXiv 1911.08287), in [-1, 1]. `beta` is Darknet's exponent of the distance."""
    a, b = _split(a), _split(b)
    return _iou(a, b) - ops.power(_center_distance(a, b), beta)


def ciou(a: Any, b: Any) -> Any:
    """Complete IoU (arXiv 1911.08287): `diou` minus a penalty for different aspect ratios.

    The weight of the penalty, alpha, gets no gradient, as in the paper.
    """
    a, b = _split(a), _split(b)
    overlap = _iou(a, b)
    difference = _diagonal_angle(a) - _diagonal_angle(b)
    v = (2 / math.pi) ** 2 * ops.square(difference)
    alpha = ops.stop_gradient(v / ops.maximum(1 - overlap + v, TINY))
    return overlap - _center_distance(a, b) - alpha * v


def _floating(x: Any) -> Any:
    x = ops.convert_to_tensor(x)
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")


def _split(boxes: Any) -> list[Any]:
    return ops.unstack(_floating(boxes), 4, axis=-1)


def _sides(box: list[Any]) -> tuple[Any, Any]:
    left, top, right, bottom = box
    return ops.maximum(right - left, 0.0), ops.maximum(bottom - top, 0.0)


def _iou(a: list[Any], b: list[Any]) -> Any:
    """Computes the IoU as DALI's core/geom/box.h does. float32 results are bit-identical."""
    common = [*map(ops.maximum, a[:2], b[:2]), *map(ops.minimum, a[2:], b[2:])]
    intersection, area_a, area_b = [width * height for width, height in map(_sides, (common, a, b))]
    return intersection / ops.maximum(area_a + area_b - intersection, TINY)


def _center_distance(a: list[Any], b: list[Any]) -> Any:
    """Returns the squared distance of the centres, divided by the squared diagonal of the enclosing box."""
    distance = ops.square(a[0] + a[2] - b[0] - b[2]) / 4 + ops.square(a[1] + a[3] - b[1] - b[3]) / 4
    width, height = _sides([*map(ops.minimum, a[:2], b[:2]), *map(ops.maximum, a[2:], b[2:])])
    return distance / ops.maximum(ops.square(width) + ops.square(height), TINY)


def _diagonal_angle(box: list[Any]) -> Any:
    """arctan(width / height)"""
    width, height = _sides(box)
    return ops.arctan2(ops.maximum(width, TINY), ops.maximum(height, TINY))
