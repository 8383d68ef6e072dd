"""Encodes ground-truth boxes as anchor targets, and decodes the heads' outputs to boxes.

Anchors are assigned as in SSD (arXiv 1512.02325, section 2.2): to the box that they overlap most, if the IoU
exceeds 0.5. In addition, each box gets the anchor with the largest IoU, unless another box takes that anchor.
Of anchors with equal IoU, the last is taken. Deltas are those of Faster R-CNN (arXiv 1506.01497, section
3.1.2), in TensorFlow's order (dy, dx, dh, dw).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from common import boxes as box_ops
from common.anchors import MATCH_IOU, MAX_INSTANCES, Anchors
from common.dali_ops import pad_boxes, select_boxes

# The matrix (row by row) with which fn.coord_transform converts (dx, dy, dw, dh) to (dy, dx, dh, dw).
_SWAP_XY = [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]


class EncodedBoxes(NamedTuple):
    """The targets of one image, as DALI nodes or as tensors.

    Attributes:
        num_positives: float32 (), the number of anchors that are assigned to a box.
        boxes: float32 (max_instances, 4), ltrb normalised, padded with -1.
        classes: int32 (max_instances,), 0-based, padded with -1.
        class_targets: for each level int32 (h, w, anchors_per_location), 0-based, -1 for background.
        box_targets: for each level float32 (h, w, anchors_per_location * 4). The last axis lists the four
            numbers dy, dx, dh, dw of each anchor. They are 0 for background.
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
    """Assigns the boxes of one image to anchors and computes the targets, in a DALI graph.

    Drops boxes without area. Then keeps the `max_instances` largest boxes.

    Args:
        boxes: float32 (N, 4), ltrb normalised; N may be 0. Boxes on a GPU are first copied to the CPU.
        labels: int32 (N,), 1-based.
        anchors: the anchors of the network input that the boxes are normalised to.
        max_instances: number of rows of the padded boxes and classes.
        device: "cpu" or "gpu", the device that computes and holds the targets. Default: that of `boxes`.
    """
    selected = select_boxes(boxes.cpu(), labels.cpu(), max_instances=max_instances)
    return encode_selected(
        selected.boxes, selected.labels, anchors, max_instances, device=device or boxes.device
    )


def encode_selected(
    boxes: DataNode, labels: DataNode, anchors: Anchors, max_instances: int, *, device: str
) -> EncodedBoxes:
    """Works like `encode_boxes`, but expects at most `max_instances` boxes of `select_boxes` on the CPU."""
    padded_boxes, padded_classes = pad_boxes(boxes, labels, max_instances)
    if device == "gpu":
        boxes, labels = boxes.gpu(), labels.gpu()
        padded_boxes, padded_classes = padded_boxes.gpu(), padded_classes.gpu()

    deltas, targets = fn.box_encoder(
        boxes, labels, anchors=anchors.boxes_normalized.ravel().tolist(), criteria=MATCH_IOU, offset=True
    )  # deltas (A, 4) dx dy dw dh; targets (A,) 1-based classes, 0 for background
    num_positives = fn.reductions.sum(fn.cast(targets != 0, dtype=types.FLOAT))
    targets -= 1
    deltas = fn.coord_transform(deltas, M=_SWAP_XY)

    class_targets, box_targets = [], []
    for start, size, (height, width) in level_slices(anchors):
        k = anchors.anchors_per_location
        # Uses keyword arguments, because DALI copies positional ones to the GPU and waits for the copies.
        part: dict[str, Any] = {"start": [start], "shape": [size], "axes": [0]}
        level_targets, level_deltas = fn.slice(targets, **part), fn.slice(deltas, **part)
        class_targets.append(fn.reshape(level_targets, shape=[height, width, k]))
        box_targets.append(fn.reshape(level_deltas, shape=[height, width, k * 4]))
    return EncodedBoxes(num_positives, padded_boxes, padded_classes, tuple(class_targets), tuple(box_targets))


# --- the same in TensorFlow, for loaders without DALI ---


def encode_boxes_tf(boxes: tf.Tensor, classes: tf.Tensor, anchors: Anchors) -> EncodedBoxes:
    """Computes the targets of one image by comparing every box with every anchor.

    The deltas differ from those of `encode_boxes` by 1e-6 or less. Everything else is equal.

    Args:
        boxes: float32 (max_instances, 4), ltrb normalised, each with an area. Padding is at the end.
        classes: int32 (max_instances,), 0-based, -1 for padding.
    """
    num_boxes = tf.math.count_nonzero(classes >= 0, dtype=tf.int32)  # N
    background = num_boxes  # follows the indices of the boxes
    prior = tf.constant(anchors.boxes_normalized)  # (A, 4)
    overlaps = box_ops.iou(boxes[:num_boxes, tf.newaxis], prior)  # (N, A), the same bits as DALI's
    # Each box gets its best anchor, unless a later box has the same best anchor: 2 is above every IoU.
    is_best = tf.one_hot(_last_argmax(overlaps, axis=1), anchors.num_anchors, True, False, dtype=tf.bool)
    overlaps = tf.where(is_best, 2.0, overlaps)
    # Background gets the anchors that no box overlaps by more than MATCH_IOU.
    overlaps = tf.concat([overlaps, tf.fill([1, anchors.num_anchors], MATCH_IOU)], axis=0)
    owners = _last_argmax(overlaps, axis=0)  # (A,)

    targets = tf.gather(tf.concat([classes[:num_boxes], [-1]], axis=0), owners)  # (A,)
    matched = tf.gather(tf.concat([boxes[:num_boxes], [[0.0, 0.0, 1.0, 1.0]]], axis=0), owners)
    matched, prior = box_ops.ltrb_to_cxcywh(matched), box_ops.ltrb_to_cxcywh(prior)
    shifts = (matched[:, :2] - prior[:, :2]) / prior[:, 2:]
    scales = tf.math.log(matched[:, 2:] / prior[:, 2:])
    deltas = tf.concat([shifts[:, ::-1], scales[:, ::-1]], axis=1)  # (A, 4) dy dx dh dw
    deltas = tf.where(owners[:, tf.newaxis] < background, deltas, 0.0)

    class_targets, box_targets = [], []
    for start, size, (height, width) in level_slices(anchors):
        k = anchors.anchors_per_location
        class_targets.append(tf.reshape(targets[start : start + size], [height, width, k]))
        box_targets.append(tf.reshape(deltas[start : start + size], [height, width, k * 4]))
    num_positives = tf.math.count_nonzero(owners < background, dtype=tf.float32)
    return EncodedBoxes(num_positives, boxes, classes, tuple(class_targets), tuple(box_targets))


def _last_argmax(values: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the index of the largest value along an axis; the last index if values are equal."""
    indices = tf.range(tf.shape(values)[axis])
    indices = indices[:, tf.newaxis] if axis == 0 else indices
    is_largest = values == tf.reduce_max(values, axis, keepdims=True)
    return tf.reduce_max(tf.where(is_largest, indices, -1), axis)


# --- levels ---


def level_slices(anchors: Anchors) -> list[tuple[int, int, tuple[int, int]]]:
    """Returns (first anchor, number of anchors, (feature height, feature width)) for each level."""
    slices, start = [], 0
    for height, width in anchors.feature_sizes:
        size = height * width * anchors.anchors_per_location
        slices.append((start, size, (height, width)))
        start += size
    return slices


# --- back from head outputs ---


def decode_boxes(deltas: Any, anchors: Anchors) -> Any:
    """Converts the deltas of the box heads to boxes: the inverse of `encode_boxes`.

    Args:
        deltas: (dy, dx, dh, dw) of all anchors, (..., A, 4). Or a list with one array for each level,
            (B, h, w, anchors_per_location * 4).
        anchors: the anchors that the deltas are relative to.

    Returns:
        float32 (..., A, 4) ltrb, normalised, not clipped to the image.
    """
    if isinstance(deltas, list | tuple):
        deltas = ops.concatenate(split_anchors(deltas, 4), axis=1)
    return decode_deltas(deltas, anchors.boxes_normalized)


def decode_deltas(deltas: Any, prior: Any) -> Any:
    """Decodes deltas (..., 4) relative to the anchors `prior` (..., 4), ltrb normalised."""
    dy, dx, dh, dw = ops.unstack(ops.cast(deltas, "float32"), 4, axis=-1)
    left, top, right, bottom = ops.unstack(prior, 4, axis=-1)
    width, height = right - left, bottom - top
    x, y = dx * width + (left + right) / 2, dy * height + (top + bottom) / 2
    half_width, half_height = ops.exp(dw) * (width / 2), ops.exp(dh) * (height / 2)
    return ops.stack([x - half_width, y - half_height, x + half_width, y + half_height], axis=-1)


def split_anchors(per_level: Sequence[Any], num_values: int) -> list[Any]:
    """Reshapes each level from (B, h, w, k * num_values) to (B, h * w * k, num_values)."""
    return [
        ops.reshape(level, (-1, math.prod(level.shape[1:]) // num_values, num_values)) for level in per_level
    ]
