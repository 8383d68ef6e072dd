"""Task-aligned learning (arXiv 2108.07755): assigns each box to the anchors that already predict it best.

The alignment of an anchor with a box is score**alpha * IoU**beta: the anchor's score for the class of the
box, and the IoU of the anchor's predicted box with the box.

ALPHA, BETA, ANCHORS_PER_BOX and the plain cross-entropy come from YOLOv8 (ultralytics/utils/tal.py,
loss.py). The box loss uses CIoU (arXiv 1911.08287). Two differences from YOLOv8: the alignment uses IoU
instead of CIoU, and the loss is divided by the number of positive anchors, not by the sum of qualities.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from common import box_encoder
from common import boxes as box_ops
from efficientdet import losses
from efficientdet.config import EfficientDetConfig

ALPHA, BETA = 0.5, 6.0  # exponents of score and IoU
ANCHORS_PER_BOX = 10
# In the assignment, sides of boxes are at least this long, in pixels, so that boxes contain anchor centres.
MIN_SIDE = 8.0
# Arrays of boxes are shortened to one of these lengths, so that XLA compiles only a few shapes.
FEW_BOXES = (16, 48)
# Largest values of (dy, dx, dh, dw). Sides grow with exp(dh) and exp(dw), which could overflow.
LARGEST_DELTAS = (math.inf, math.inf, 4.0, 4.0)


class Assignment(NamedTuple):
    """The box and class targets of each anchor of a batch.

    Attributes:
        boxes: float32 (B, A, 4), ltrb normalised; undefined where `quality` is 0.
        quality: float32 (B, A, C), the class targets, 0 to 1; above 0 for at most one class of an anchor.
    """

    boxes: tf.Tensor
    quality: tf.Tensor


def detection_loss(
    class_logits: Sequence[tf.Tensor],
    box_deltas: Sequence[tf.Tensor],
    targets: dict[str, tf.Tensor],
    config: EfficientDetConfig,
    num_positives: tf.Tensor | None = None,
) -> dict[str, tf.Tensor]:
    """Returns the loss that `config.assignment` names. Arguments and results: see losses.detection_loss.

    For task_aligned, the class loss is the cross-entropy of all classes of all anchors. The box loss is
    1 - CIoU of the assigned anchors, weighted by quality.
    """
    if config.assignment == "max_iou":
        return losses.detection_loss(class_logits, box_deltas, targets, config, num_positives)
    if num_positives is None:
        num_positives = losses.num_positives_share(targets)
    num_classes = class_logits[0].shape[-1] // config.anchors_per_location
    logits = tf.cast(tf.concat(box_encoder.split_anchors(class_logits, num_classes), axis=1), tf.float32)
    anchors = tf.constant(config.anchors.boxes_normalized)
    deltas = tf.concat(box_encoder.split_anchors(box_deltas, 4), axis=1)
    boxes = box_encoder.decode_deltas(tf.minimum(deltas, LARGEST_DELTAS), anchors)
    assigned = assign(
        tf.stop_gradient(boxes),
        tf.stop_gradient(tf.sigmoid(logits)),
        (anchors[:, :2] + anchors[:, 2:]) / 2,
        targets["boxes"],
        targets["classes"],
        config.image_size,
    )
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=assigned.quality, logits=logits)
    class_term = tf.reduce_sum(cross_entropy) / num_positives
    weights = tf.reduce_sum(assigned.quality, axis=-1)
    box_term = tf.reduce_sum(weights * (1.0 - box_ops.ciou(boxes, assigned.boxes))) / num_positives
    return {
        "class_loss": class_term,
        "box_loss": box_term,
        "detection_loss": class_term + config.box_loss_weight * box_term,
    }


def assign(
    predicted: tf.Tensor,
    scores: tf.Tensor,
    centers: tf.Tensor,
    boxes: tf.Tensor,
    classes: tf.Tensor,
    image_size: tuple[int, int],
) -> Assignment:
    """Assigns each box to the best-aligned anchors among those whose centre is inside the box.

    If several boxes choose the same anchor, the box with the largest IoU gets it. The class target of an
    anchor is alignment / (largest alignment) * (largest IoU). Both maxima are over the anchors of the box.

    Args:
        predicted: float32 (B, A, 4), ltrb normalised, the boxes that the anchors predict now.
        scores: float32 (B, A, C), the scores that the anchors predict now.
        centers: float32 (A, 2), x and y of the anchors' centres, normalised.
        boxes: float32 (B, N, 4), ltrb normalised, padded with -1.
        classes: int32 (B, N), 0-based, -1 for padding.
        image_size: (height, width) of the network input in pixels.
    """
    # Shorten the arrays if their last boxes are padding in all images of the batch.
    num_boxes = tf.reduce_max(tf.math.count_nonzero(classes >= 0, axis=1, dtype=tf.int32))
    lengths = [length for length in FEW_BOXES if length < classes.shape[1]]
    index = tf.math.count_nonzero(num_boxes > tf.constant(lengths, tf.int32), dtype=tf.int32)
    branches = [
        functools.partial(
            _assign, predicted, scores, centers, boxes[:, :length], classes[:, :length], image_size
        )
        for length in (*lengths, classes.shape[1])
    ]
    return tf.switch_case(index, branches)


def _assign(
    predicted: tf.Tensor,
    scores: tf.Tensor,
    centers: tf.Tensor,
    boxes: tf.Tensor,
    classes: tf.Tensor,
    image_size: tuple[int, int],
) -> Assignment:
    middles, half_sides = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]) / 2
    reach = tf.maximum(half_sides, MIN_SIDE / 2 / tf.constant(image_size[::-1], tf.float32))
    inside = tf.reduce_all(tf.abs(centers - middles[:, :, tf.newaxis]) < reach[:, :, tf.newaxis], axis=-1)
    inside &= classes[..., tf.newaxis] >= 0  # (B, N, A)
    iou = box_ops.iou(boxes[:, :, tf.newaxis], predicted[:, tf.newaxis])
    iou = tf.where(inside, iou, 0.0)
    labels = tf.one_hot(classes, scores.shape[-1])  # (B, N, C), zeros for padding
    alignment = tf.matmul(labels, scores, transpose_b=True) ** ALPHA * iou**BETA

    least = tf.math.top_k(alignment, min(ANCHORS_PER_BOX, centers.shape[0])).values[..., -1:]
    wanted = (alignment >= least) & (alignment > 0)
    owner = tf.argmax(tf.where(wanted, iou, 0.0), axis=1)  # (B, A)
    owned = tf.where(wanted, tf.one_hot(owner, classes.shape[1], axis=1), 0.0)  # (B, N, A)
    alignment, iou = alignment * owned, iou * owned
    largest = tf.reduce_max(alignment, axis=-1, keepdims=True)
    quality = tf.math.divide_no_nan(alignment, largest) * tf.reduce_max(iou, axis=-1, keepdims=True)
    return Assignment(
        boxes=tf.gather(boxes, owner, batch_dims=1),
        quality=tf.reduce_sum(quality, axis=1)[..., tf.newaxis] * tf.gather(labels, owner, batch_dims=1),
    )
