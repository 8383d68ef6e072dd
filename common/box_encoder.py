"""Boxes to anchor targets, and the heads' outputs back to boxes.

`encode_boxes` works inside a DALI graph, around `fn.box_encoder`; `encode_batch_tf` gives the same tensors by
TensorFlow, after a graph that ends with the padded boxes, and for the loader without DALI. Matching is that
of SSD (arXiv 1512.02325, section 2.2): an anchor takes the box that it overlaps most if their IoU exceeds
0.5, and every box gets its best anchor whatever the IoU. Deltas are those of Faster R-CNN (arXiv 1506.01497,
section 3.1.2) in TensorFlow's order, (dy, dx, dh, dw).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import grid_matching
from common.anchors import Anchors

MATCH_IOU = 0.5  # google/automl efficientdet/tf2/anchors.py AnchorLabeler: match_threshold
MAX_INSTANCES = 100  # google/automl efficientdet/hparams_config.py: max_instances_per_image

# (dx, dy, dw, dh) -> (dy, dx, dh, dw), row by row
_SWAP_XY = [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_ROWS = 2**14  # more boxes than this in one image are an error: choosing among N takes N x N numbers


class EncodedBoxes(NamedTuple):
    """The targets of one image: DALI nodes from `encode_boxes`, TensorFlow tensors from `encode_boxes_tf`.

    Attributes:
        num_positives: float32 (), the number of anchors that own a box.
        boxes: float32 (max_instances, 4), ltrb normalised, padded with -1.
        classes: int32 (max_instances,), 0-based, padded with -1.
        class_targets: one per level, int32 (h, w, anchors_per_location), 0-based, -1 for background.
        box_targets: one per level, float32 (h, w, anchors_per_location * 4), the (dy, dx, dh, dw) of each
            anchor in turn, zeros for background.
    """

    num_positives: Any
    boxes: Any
    classes: Any
    class_targets: tuple[Any, ...]
    box_targets: tuple[Any, ...]


# --- inside a DALI graph ---


def encode_boxes(
    boxes: DataNode,
    labels: DataNode,
    anchors: Anchors,
    max_instances: int = MAX_INSTANCES,
    device: str | None = None,
) -> EncodedBoxes:
    """Encodes the boxes of one image against the anchors; runs in a DALI graph.

    Boxes without area are dropped first (fn.box_encoder would give them infinite deltas), and of more than
    `max_instances` the largest are kept, so that the padded boxes and the targets are of the same boxes.
    Of equally good anchors a box gets the last; of equally good boxes an anchor takes the last. A box can
    end up without an anchor, where others take its best one.

    Args:
        boxes: float32 (N, 4), ltrb normalised; N may be 0.
        labels: int32 (N,), 1-based.
        anchors: those of the network input that the boxes are normalised to.
        max_instances: rows of the padded boxes and classes.
        device: "cpu" or "gpu", where to encode and where the results are; by default where `boxes` are. The
            choice of boxes is always made on the CPU, so boxes read there need no copy before.
    """
    device = device or boxes.device
    boxes, labels = keep_largest(*drop_small_boxes(boxes.cpu(), labels.cpu()), max_instances)
    padded_boxes, padded_classes = pad_boxes(boxes, labels, max_instances)
    if device == "gpu":
        boxes, labels = boxes.gpu(), labels.gpu()
        padded_boxes, padded_classes = padded_boxes.gpu(), padded_classes.gpu()

    deltas, targets = fn.box_encoder(
        boxes,
        labels,
        anchors=anchors.boxes_normalized.ravel().tolist(),
        criteria=MATCH_IOU,
        offset=True,
    )  # (A, 4) dx dy dw dh, (A,) 1-based with 0 for background
    num_positives = fn.reductions.sum(fn.cast(targets != 0, dtype=types.FLOAT))
    targets -= 1
    deltas = fn.coord_transform(deltas, M=_SWAP_XY)

    class_targets, box_targets = [], []
    for start, size, (height, width) in _level_slices(anchors):
        k = anchors.anchors_per_location
        level_targets = fn.slice(targets, start, size, axes=[0])
        level_deltas = fn.slice(deltas, start, size, axes=[0])
        class_targets.append(fn.reshape(level_targets, shape=[height, width, k]))
        box_targets.append(fn.reshape(level_deltas, shape=[height, width, k * 4]))
    return EncodedBoxes(num_positives, padded_boxes, padded_classes, tuple(class_targets), tuple(box_targets))


def pad_boxes(boxes: DataNode, labels: DataNode, max_instances: int) -> tuple[DataNode, DataNode]:
    """Fills up with -1; runs in a DALI graph.

    Args:
        boxes: float32 (N, 4), N at most max_instances: fn.pad does not truncate.
        labels: int32 (N,), 1-based.
        max_instances: rows of the results.

    Returns:
        float32 (max_instances, 4) and int32 (max_instances,), 0-based classes.
    """
    padded_boxes = fn.pad(boxes, axes=[0], shape=[max_instances], fill_value=-1)
    return padded_boxes, fn.pad(labels - 1, axes=[0], shape=[max_instances], fill_value=-1)


def drop_small_boxes(
    boxes: DataNode, labels: DataNode, min_size: tuple[float, float] = (0.0, 0.0)
) -> tuple[DataNode, DataNode]:
    """Drops boxes smaller than `min_size`; runs in a DALI graph, on the CPU.

    Boxes without area, inverted boxes and boxes with NaN or infinite coordinates are always dropped.

    Args:
        boxes: float32 (N, 4), ltrb normalised.
        labels: int (N,).
        min_size: (height, width), normalised like the boxes.

    Returns:
        The boxes that stay, float32 (M, 4), in their order, and their labels, int32 (M,).
    """
    min_height, min_width = min_size
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    # A coordinate that is not finite makes its side NaN or infinite, and a comparison with NaN is false.
    keep_width = (width > 0) & (width >= float(min_width)) & (width <= _FLOAT32_MAX)
    keep_height = (height > 0) & (height >= float(min_height)) & (height <= _FLOAT32_MAX)
    return _select(boxes, labels, keep_width & keep_height)


def keep_largest(boxes: DataNode, labels: DataNode, max_instances: int) -> tuple[DataNode, DataNode]:
    """Keeps the boxes with the largest areas; runs in a DALI graph, on the CPU.

    Args:
        boxes: float32 (N, 4), ltrb normalised, finite.
        labels: int (N,).
        max_instances: how many to keep at most; of equal boxes the first stay.

    Returns:
        The boxes that stay, float32 (M, 4), in their order, and their labels, int32 (M,).
    """
    width = dali_math.max(boxes[:, 2] - boxes[:, 0], 0.0)
    height = dali_math.max(boxes[:, 3] - boxes[:, 1], 0.0)
    # Positive floats are ordered like their bits: one integer compares the area, then the position.
    area_bits = fn.cast(fn.reinterpret(width * height, dtype=types.INT32), dtype=types.INT64)
    key = area_bits * _MAX_ROWS - _arange(boxes.shape()[0])
    is_larger = fn.expand_dims(key, axes=[0]) > fn.expand_dims(key, axes=[1])  # (N, N)
    rank = fn.reductions.sum(fn.cast(is_larger, dtype=types.INT32), axes=[1])
    return _select(boxes, labels, rank < max_instances)


def _select(boxes: DataNode, labels: DataNode, keep: DataNode) -> tuple[DataNode, DataNode]:
    """boxes[keep], labels[keep] for a boolean (N,) `keep`: DALI's graph has no such indexing.

    Instead the rows are multiplied by a matrix with a single 1 in each line. The factors are integers, the
    bits of the coordinates: the products are exact, and 0 times a NaN that is to be dropped is 0.
    """
    kept = fn.cast(keep, dtype=types.INT32)
    index = _arange(boxes.shape()[0])
    is_before = fn.expand_dims(index, axes=[0]) < fn.expand_dims(index, axes=[1])  # (N, N)
    target = fn.reductions.sum(is_before * fn.expand_dims(kept, axes=[0]), axes=[1])  # row of each kept box
    target = (target + 1) * kept - 1  # -1 for the others

    wanted = fn.expand_dims(_arange(fn.reductions.sum(kept)), axes=[1])  # (M, 1)
    is_source = fn.expand_dims(target, axes=[0]) == wanted  # (M, N)
    labels = fn.expand_dims(fn.cast(labels, dtype=types.INT32), axes=[0])
    bits = fn.expand_dims(fn.reinterpret(boxes, dtype=types.INT32), axes=[0])
    labels = is_source * labels  # (M, N)
    bits = fn.expand_dims(is_source, axes=[2]) * bits  # (M, N, 4)
    labels = fn.reductions.sum(labels, axes=[1], dtype=types.INT32)  # (M,)
    bits = fn.reductions.sum(bits, axes=[1], dtype=types.INT32)  # (M, 4)
    return fn.reinterpret(bits, dtype=types.FLOAT), labels


def _arange(count: DataNode) -> DataNode:
    """int32 (count,): 0, 1, 2, ..."""
    return types.Constant(np.arange(_MAX_ROWS, dtype=np.int32), device="cpu")[:count]


# --- the same in TensorFlow ---


def encode_boxes_tf(
    boxes: tf.Tensor, labels: tf.Tensor, anchors: Anchors, max_instances: int = MAX_INSTANCES
) -> EncodedBoxes:
    """`encode_boxes` for one image by TensorFlow operations: the same owners, deltas equal to 1e-6."""
    boxes, labels = keep_largest_tf(*drop_small_boxes_tf(boxes, labels), max_instances)
    boxes, classes = pad_boxes_tf(boxes, labels, max_instances)
    batch = encode_batch_tf(boxes[tf.newaxis], classes[tf.newaxis], anchors)
    return tf.nest.map_structure(lambda tensor: tensor[0], batch)


def encode_batch_tf(boxes: tf.Tensor, classes: tf.Tensor, anchors: Anchors) -> EncodedBoxes:
    """The targets of a batch from its padded boxes, by TensorFlow operations: for `tf.data.Dataset.map`.

    They are those of `encode_boxes`, every owner the same, deltas equal to 1e-6, at a fraction of the cost.

    Args:
        boxes: float32 (B, max_instances, 4), B static, ltrb normalised, within the image, each with an area.
        classes: int32 (B, max_instances), 0-based, -1 for padding.
        anchors: those of the network input that the boxes are normalised to.

    Returns:
        As of one image, with the batch first.
    """
    batch_size, num_anchors = boxes.shape[0], anchors.num_anchors
    rows = tf.where(classes >= 0)  # (R, 2) image, row
    images, flat_boxes = tf.cast(rows[:, 0], tf.int32), tf.gather_nd(boxes, rows)  # (R,), (R, 4)
    owned, owners = grid_matching.match(flat_boxes, images, batch_size, anchors, MATCH_IOU)  # (P,)

    matched, prior = tf.gather(flat_boxes, owners), tf.gather(anchors.boxes_normalized, owned % num_anchors)
    centers, sizes = (prior[:, :2] + prior[:, 2:]) * 0.5, prior[:, 2:] - prior[:, :2]
    box_centers, box_sizes = (matched[:, :2] + matched[:, 2:]) * 0.5, matched[:, 2:] - matched[:, :2]
    shifts, scales = (box_centers - centers) / sizes, tf.math.log(box_sizes / sizes)
    deltas = tf.concat([shifts[:, ::-1], scales[:, ::-1]], axis=1)  # dy dx dh dw

    places = owned[:, tf.newaxis]
    labels = tf.gather(tf.gather_nd(classes, rows), owners) + 1
    deltas = tf.scatter_nd(places, deltas, [batch_size * num_anchors, 4])
    targets = tf.scatter_nd(places, labels, [batch_size * num_anchors]) - 1
    deltas = tf.reshape(deltas, [batch_size, num_anchors * 4])
    targets = tf.reshape(targets, [batch_size, num_anchors])

    k = anchors.anchors_per_location
    class_targets, box_targets = [], []
    for start, size, (height, width) in _level_slices(anchors):
        level_deltas = deltas[:, 4 * start : 4 * (start + size)]
        class_targets.append(tf.reshape(targets[:, start : start + size], [batch_size, height, width, k]))
        box_targets.append(tf.reshape(level_deltas, [batch_size, height, width, k * 4]))
    num_positives = tf.math.bincount(owned // num_anchors, minlength=batch_size, dtype=tf.float32)
    num_positives = tf.ensure_shape(num_positives, [batch_size])
    # Tuples, because tf.data would stack a list.
    return EncodedBoxes(num_positives, boxes, classes, tuple(class_targets), tuple(box_targets))


def drop_small_boxes_tf(
    boxes: tf.Tensor, labels: tf.Tensor, min_size: tuple[float, float] = (0.0, 0.0)
) -> tuple[tf.Tensor, tf.Tensor]:
    """`drop_small_boxes` by TensorFlow operations."""
    sizes = boxes[:, 2:] - boxes[:, :2]  # (N, 2) width, height
    keep = (sizes > 0) & (sizes >= tf.constant(min_size[::-1], tf.float32)) & (sizes <= _FLOAT32_MAX)
    keep = tf.reduce_all(keep, axis=1)
    return tf.boolean_mask(boxes, keep), tf.boolean_mask(tf.cast(labels, tf.int32), keep)


def keep_largest_tf(boxes: tf.Tensor, labels: tf.Tensor, max_instances: int) -> tuple[tf.Tensor, tf.Tensor]:
    """`keep_largest` by TensorFlow operations."""
    sizes = tf.maximum(boxes[:, 2:] - boxes[:, :2], 0.0)
    areas = sizes[:, 0] * sizes[:, 1]
    # top_k puts the lower index first among equal values
    largest = tf.math.top_k(areas, k=tf.minimum(tf.shape(areas)[0], max_instances)).indices
    kept = tf.sort(largest)
    return tf.gather(boxes, kept), tf.gather(tf.cast(labels, tf.int32), kept)


def pad_boxes_tf(boxes: tf.Tensor, labels: tf.Tensor, max_instances: int) -> tuple[tf.Tensor, tf.Tensor]:
    """`pad_boxes` by TensorFlow operations."""
    padding = [[0, max_instances - tf.shape(boxes)[0]]]
    boxes = tf.pad(boxes, padding + [[0, 0]], constant_values=-1.0)
    classes = tf.pad(labels - 1, padding, constant_values=-1)
    return tf.ensure_shape(boxes, [max_instances, 4]), tf.ensure_shape(classes, [max_instances])


def _level_slices(anchors: Anchors) -> list[tuple[int, int, tuple[int, int]]]:
    """(first anchor, number of anchors, (feature height, feature width)) of each level."""
    slices, start = [], 0
    for height, width in anchors.feature_sizes:
        size = height * width * anchors.anchors_per_location
        slices.append((start, size, (height, width)))
        start += size
    return slices


# --- back from head outputs ---


def decode_boxes(deltas: Any, anchors: Anchors) -> Any:
    """The inverse of the encoding: the boxes that the heads' deltas stand for.

    Args:
        deltas: (..., A, 4), (dy, dx, dh, dw), or a list, (B, h, w, anchors_per_location * 4) per level.
        anchors: the anchors that the deltas are relative to.

    Returns:
        float32 (..., A, 4) ltrb, normalised, not clipped to the image.
    """
    if isinstance(deltas, list | tuple):
        deltas = ops.concatenate(split_anchors(deltas, 4), axis=1)
    return decode_deltas(deltas, anchors.boxes_normalized)


def decode_deltas(deltas: Any, prior: Any) -> Any:
    """`decode_boxes` of single anchors: deltas (..., 4) and the anchors, ltrb normalised, (..., 4)."""
    dy, dx, dh, dw = ops.unstack(ops.cast(deltas, "float32"), 4, axis=-1)
    left, top, right, bottom = ops.unstack(prior, 4, axis=-1)
    width, height = right - left, bottom - top
    x, y = dx * width + (left + right) / 2, dy * height + (top + bottom) / 2
    half_width, half_height = ops.exp(dw) * (width / 2), ops.exp(dh) * (height / 2)
    return ops.stack([x - half_width, y - half_height, x + half_width, y + half_height], axis=-1)


def split_anchors(per_level: Sequence[Any], num_values: int) -> list[Any]:
    """Each level's (B, h, w, k * num_values) as (B, h * w * k, num_values), in the order of the anchors."""
    flat = []
    for level in per_level:
        _, height, width, depth = level.shape
        flat.append(ops.reshape(level, (-1, height * width * depth // num_values, num_values)))
    return flat
