"""Box formats by name, and how much two boxes overlap. The last axis always holds the four numbers.

Plain `boxes` are ltrb (left, top, right, bottom), normalised to [0, 1] by the image they belong to; the
conversions between formats work on pixels just as well. All functions take NumPy arrays, TensorFlow tensors
or symbolic Keras tensors of any leading shape, compute in float32 (float64 stays float64), and return
tensors of the Keras backend.
"""

import math
from typing import Any

import keras
from keras import ops

# Areas, squared diagonals and sides smaller than this count as this: far below one pixel, well inside
# float32's range.
TINY = 1e-12


def ltrb_to_tlbr(boxes: Any) -> Any:
    """(..., 4) left, top, right, bottom -> top, left, bottom, right."""
    left, top, right, bottom = _split(boxes)
    return ops.stack([top, left, bottom, right], axis=-1)


def ltwh_to_ltrb(boxes_ltwh: Any) -> Any:
    """(..., 4) left, top, width, height (the COCO json's format) -> left, top, right, bottom."""
    left, top, width, height = _split(boxes_ltwh)
    return ops.stack([left, top, left + width, top + height], axis=-1)


def ltrb_to_cxcywh(boxes: Any) -> Any:
    """(..., 4) left, top, right, bottom -> centre x, centre y, width, height (the YOLO heads' format)."""
    left, top, right, bottom = _split(boxes)
    return ops.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], axis=-1)


def cxcywh_to_ltrb(boxes_cxcywh: Any) -> Any:
    """(..., 4) centre x, centre y, width, height -> left, top, right, bottom."""
    x, y, width, height = _split(boxes_cxcywh)
    return ops.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=-1)


def clip(boxes: Any) -> Any:
    """Cuts normalised boxes (..., 4) to the image. A box wholly outside keeps no area; NaN stays NaN."""
    return ops.clip(_floating(boxes), 0.0, 1.0)


def area(boxes: Any) -> Any:
    """(..., 4) ltrb -> (...) areas; inverted boxes (right < left or bottom < top) have none."""
    width, height = _sides(_split(boxes))
    return width * height


def iou(a: Any, b: Any) -> Any:
    """Intersection over union of boxes a and b, ltrb (..., 4) each, element by element with broadcasting.

    Of every pair of a (N, 4) and b (M, 4): iou(a[:, None], b[None]), (N, M).
    0 for boxes without area, even for two equal ones. Values and gradients are finite for every finite
    input, here and in the two below.
    """
    return _iou(_split(a), _split(b))


def diou(a: Any, b: Any, beta: float = 1.0) -> Any:
    """Distance IoU (arXiv 1911.08287), in [-1, 1]; arguments as for `iou`, and the exponent of Darknet's."""
    a, b = _split(a), _split(b)
    return _iou(a, b) - ops.power(_center_distance(a, b), beta)


def ciou(a: Any, b: Any) -> Any:
    """Complete IoU (arXiv 1911.08287): `diou` less a term for differing aspect ratios.

    Arguments as for `iou`. The weight of that term, alpha, is a constant for the gradient, as in the paper.
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
    """The operations of DALI's core/geom/box.h in their order: a float32 is the same to the last bit."""
    common = [*map(ops.maximum, a[:2], b[:2]), *map(ops.minimum, a[2:], b[2:])]
    intersection, area_a, area_b = [width * height for width, height in map(_sides, (common, a, b))]
    return intersection / ops.maximum(area_a + area_b - intersection, TINY)


def _center_distance(a: list[Any], b: list[Any]) -> Any:
    """Squared distance of the centres over the squared diagonal of the enclosing box."""
    distance = ops.square(a[0] + a[2] - b[0] - b[2]) / 4 + ops.square(a[1] + a[3] - b[1] - b[3]) / 4
    width, height = _sides([*map(ops.minimum, a[:2], b[:2]), *map(ops.maximum, a[2:], b[2:])])
    return distance / ops.maximum(ops.square(width) + ops.square(height), TINY)


def _diagonal_angle(box: list[Any]) -> Any:
    """arctan(width / height), defined for boxes without height too."""
    width, height = _sides(box)
    return ops.arctan2(ops.maximum(width, TINY), ops.maximum(height, TINY))
