"""Assigns the boxes of a whole batch to anchors without comparing all pairs of boxes and anchors.

DALI's fn.box_encoder (common/box_encoder.py) gives the same matches. A template is an anchor shape of one
level. The anchors of a template form a regular grid. This has two consequences:

- For a given box, the best anchor of a template is the one with the nearest centre.
- If the IoU of a box and an anchor is above t, their intersection is above t / (1 + t) times the sum of their
  areas. So their centres are close, and only a small rectangle of cells can match.
"""

import numpy as np
import tensorflow as tf

from common import boxes as box_ops
from common.anchors import MATCH_IOU, Anchors
from common.box_encoder import EncodedBoxes, level_slices
from efficientdet.anchor_templates import templates


def match(
    boxes: tf.Tensor, images: tf.Tensor, anchors: Anchors, match_iou: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the positive anchors and the box that each of them is assigned to.

    Args:
        boxes: float32 (R, 4) ltrb normalised, all with an area; R may be 0.
        images: int32 (R,), the index of each box's image in the batch.
        anchors: the A anchors of each image.
        match_iou: an anchor is assigned to its best box if their IoU is above match_iou. In addition, the
            best anchor of each box is assigned to this box, even if their IoU is lower. If IoUs are equal,
            the last anchor or box wins.

    Returns:
        owned: int32 (P,), the positive anchors. Anchor a of image i has the number i * A + a.
        owners: int32 (P,), the index of the box of each positive anchor.
    """
    owner, anchor = _candidates(boxes, anchors, match_iou)  # (C,)
    # `iou` computes DALI's exact bits.
    overlap = box_ops.iou(tf.gather(boxes, owner), tf.gather(anchors.boxes_normalized, anchor))

    # Find each box's best anchor, the last one if IoUs are equal.
    num_boxes = tf.shape(boxes)[0]
    best = tf.math.unsorted_segment_max(overlap, owner, num_boxes)
    is_best = (overlap == tf.gather(best, owner)) & (overlap > 0)
    best_anchor = tf.math.unsorted_segment_max(tf.where(is_best, anchor, -1), owner, num_boxes)
    best_anchor = tf.where(best_anchor < 0, anchors.num_anchors - 1, best_anchor)

    # Find each anchor's best box, the last one if IoUs are equal. Each box and its best anchor get an IoU
    # of 2, so that this pair wins against all pairs with a real IoU.
    above = tf.where(overlap > match_iou)[:, 0]
    overlap = tf.concat([tf.gather(overlap, above), tf.fill([num_boxes], 2.0)], axis=0)
    owner = tf.concat([tf.gather(owner, above), tf.range(num_boxes)], axis=0)
    anchor = tf.concat([tf.gather(anchor, above), best_anchor], axis=0)
    place = tf.gather(images, owner) * anchors.num_anchors + anchor
    owned, group = tf.unique(place)
    num_owned = tf.shape(owned)[0]
    most = tf.math.unsorted_segment_max(overlap, group, num_owned)
    is_most = overlap == tf.gather(most, group)
    return owned, tf.math.unsorted_segment_max(tf.where(is_most, owner, -1), group, num_owned)


def _candidates(boxes: tf.Tensor, anchors: Anchors, match_iou: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the box and the anchor of each pair that may match, as two tensors of indices, int32 (C,)."""
    kinds = templates(anchors)
    kind_sizes = tf.constant(kinds.sizes, tf.float32)  # (T, 2)
    strides = tf.constant(1.0 / kinds.cells, tf.float32)
    last_cells = tf.constant(kinds.cells - 1, tf.float32)
    sizes = boxes[:, tf.newaxis, 2:] - boxes[:, tf.newaxis, :2]  # (R, 1, 2)
    centers = (boxes[:, tf.newaxis, :2] + boxes[:, tf.newaxis, 2:]) * 0.5

    middle = centers / strides - 0.5  # (R, T, 2) in cells
    nearest = tf.clip_by_value(tf.round(middle), 0.0, last_cells)
    distance = tf.abs((nearest + 0.5) * strides - centers)
    smaller, half_sum = tf.minimum(sizes, kind_sizes), (sizes + kind_sizes) * 0.5
    overlap = tf.clip_by_value(half_sum - distance, 0.0, smaller)
    intersection = overlap[..., 0] * overlap[..., 1]  # (R, T)
    areas = sizes[..., 0] * sizes[..., 1] + kind_sizes[:, 0] * kind_sizes[:, 1]
    iou = intersection / (areas - intersection)
    # The IoU of a tiny box is inexact in float32, so lower the threshold.
    slack = tf.minimum(1e-4 + 2e-6 * tf.reduce_sum(1.0 / sizes, axis=-1), 0.9)  # (R, 1)
    wanted = tf.minimum(match_iou, tf.reduce_max(iou, axis=1, keepdims=True)) * (1.0 - slack)

    # Along each axis, find the cells whose anchors can reach the wanted IoU.
    enough = areas * wanted / (1.0 + wanted)  # the least intersection for the wanted IoU
    reach = half_sum - enough[..., tf.newaxis] / tf.maximum(overlap[..., ::-1], 1e-12)
    reach = reach / strides + 1e-3
    low = tf.clip_by_value(tf.math.ceil(middle - reach), 0.0, last_cells)
    high = tf.clip_by_value(tf.floor(middle + reach), 0.0, last_cells)

    pairs = tf.where((iou >= wanted) & (iou > 0))  # (S, 2) box, template
    low = tf.cast(tf.gather_nd(low, pairs), tf.int32)  # (S, 2) column, row
    spans = tf.cast(tf.gather_nd(high, pairs), tf.int32) - low + 1
    counts = spans[:, 0] * spans[:, 1]
    index = tf.repeat(tf.range(tf.shape(counts)[0]), counts)  # (C,) index of the candidate's row in `pairs`
    within = tf.range(tf.shape(index)[0]) - tf.gather(tf.cumsum(counts, exclusive=True), index)
    columns = tf.gather(spans[:, 0], index)
    cell = tf.gather(low, index) + tf.stack([within % columns, within // columns], axis=1)  # (C, 2)
    owner, kind = tf.unstack(tf.gather(tf.cast(pairs, tf.int32), index), axis=1)
    k = anchors.anchors_per_location
    steps = np.stack([np.full(len(kinds.first), k), k * kinds.cells[:, 0]], axis=1)  # to the next column, row
    first, steps = tf.constant(kinds.first, tf.int32), tf.constant(steps, tf.int32)
    return owner, tf.gather(first, kind) + tf.reduce_sum(cell * tf.gather(steps, kind), axis=1)


def encode_batch_tf(boxes: tf.Tensor, classes: tf.Tensor, anchors: Anchors) -> EncodedBoxes:
    """Encodes the targets of a batch from its padded boxes. The deltas differ from DALI's by 1e-6 or less.

    Args:
        boxes: float32 (B, max_instances, 4), ltrb normalised. B is static. The boxes lie within the image
            and have an area.
        classes: int32 (B, max_instances), 0-based, -1 for padding.

    Returns:
        The targets of the batch: each tensor of EncodedBoxes has the batch as its first axis.
    """
    batch_size, num_anchors = boxes.shape[0], anchors.num_anchors
    rows = tf.where(classes >= 0)  # (R, 2) image, row
    images, flat_boxes = tf.cast(rows[:, 0], tf.int32), tf.gather_nd(boxes, rows)  # (R,), (R, 4)
    owned, owners = match(flat_boxes, images, anchors, MATCH_IOU)  # (P,)

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
    for start, size, (height, width) in level_slices(anchors):
        level_deltas = deltas[:, 4 * start : 4 * (start + size)]
        class_targets.append(tf.reshape(targets[:, start : start + size], [batch_size, height, width, k]))
        box_targets.append(tf.reshape(level_deltas, [batch_size, height, width, k * 4]))
    num_positives = tf.math.bincount(owned // num_anchors, minlength=batch_size, dtype=tf.float32)
    num_positives = tf.ensure_shape(num_positives, [batch_size])
    # Tuples, because tf.data would stack lists into one tensor.
    return EncodedBoxes(num_positives, boxes, classes, tuple(class_targets), tuple(box_targets))
