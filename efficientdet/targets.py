"""Task-aligned assignment (arXiv 2108.07755): assigns each box to the anchors that already predict it best.

It depends on the predictions, so the loss calls it. The loader assigns boxes by IoU (common/box_encoder.py).

The alignment of an anchor with a box is score**alpha * IoU**beta: the anchor's score for the class of the
box, and the IoU of the anchor's predicted box with the box.

ALPHA, BETA and ANCHORS_PER_BOX come from YOLOv8 (ultralytics/utils/tal.py). One difference: YOLOv8's
alignment uses CIoU instead of IoU.
"""

import functools
from typing import NamedTuple

import tensorflow as tf

from common import boxes as box_ops
from common.layers import is_cpu_only

ALPHA, BETA = 0.5, 6.0  # exponents of score and IoU
ANCHORS_PER_BOX = 10
# In the assignment, sides of boxes are at least this long, in pixels, so that boxes contain anchor centres.
MIN_SIDE = 8.0
# On a CPU, arrays of boxes are shortened to one of these lengths, so that XLA compiles only a few shapes.
FEW_BOXES = (16, 48)


class AlignedTargets(NamedTuple):
    """The box and class targets of each anchor of a batch.

    Attributes:
        boxes: float32 (B, A, 4), ltrb normalised; undefined where `quality` is 0.
        quality: float32 (B, A, C), the class targets, 0 to 1; above 0 for at most one class of an anchor.
    """

    boxes: tf.Tensor
    quality: tf.Tensor


def assign_targets(
    predicted: tf.Tensor,
    scores: tf.Tensor,
    centers: tf.Tensor,
    boxes: tf.Tensor,
    classes: tf.Tensor,
    image_size: tuple[int, int],
) -> AlignedTargets:
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
    if not is_cpu_only():  # on a GPU, the host would wait for the number that chooses the branch
        return _assign(predicted, scores, centers, boxes, classes, image_size)
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
) -> AlignedTargets:
    middles, half_sides = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]) / 2
    reach = tf.maximum(half_sides, MIN_SIDE / 2 / tf.constant(image_size[::-1], tf.float32))
    inside = tf.reduce_all(tf.abs(centers - middles[:, :, tf.newaxis]) < reach[:, :, tf.newaxis], axis=-1)
    inside &= classes[..., tf.newaxis] >= 0  # (B, N, A)
    iou = box_ops.iou(boxes[:, :, tf.newaxis], predicted[:, tf.newaxis])
    iou = tf.where(inside, iou, 0.0)
    labels = tf.one_hot(classes, scores.shape[-1])  # (B, N, C), zeros for padding
    alignment = tf.matmul(labels, scores, transpose_b=True) ** ALPHA * iou**BETA

    threshold = tf.math.top_k(alignment, min(ANCHORS_PER_BOX, centers.shape[0])).values[..., -1:]
    is_candidate = (alignment >= threshold) & (alignment > 0)
    owner = tf.argmax(tf.where(is_candidate, iou, 0.0), axis=1)  # (B, A)
    is_assigned = tf.where(is_candidate, tf.one_hot(owner, classes.shape[1], axis=1), 0.0)  # (B, N, A)
    alignment, iou = alignment * is_assigned, iou * is_assigned
    largest = tf.reduce_max(alignment, axis=-1, keepdims=True)
    quality = tf.math.divide_no_nan(alignment, largest) * tf.reduce_max(iou, axis=-1, keepdims=True)
    return AlignedTargets(
        boxes=tf.gather(boxes, owner, batch_dims=1),
        quality=tf.reduce_sum(quality, axis=1)[..., tf.newaxis] * tf.gather(labels, owner, batch_dims=1),
    )
