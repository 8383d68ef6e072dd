"""From the heads' outputs to detections: the best candidates, their boxes, non-maximum suppression per class.

Follows google/automl efficientdet/tf2/postprocess.py (postprocess_per_class), with two differences: an anchor
may be several classes at once, as in training, and suppression is among the best `nms_candidates` only.
"""

import math
from typing import NamedTuple

import tensorflow as tf

from common import box_encoder, boxes
from common.anchors import Anchors
from efficientdet.config import EfficientDetConfig

# Boxes are cut to this range while suppressing. Anchors reach from -1 to 2 (d0); a box that reaches
# much further would cost all others their precision.
_NEIGHBOURHOOD = (-8.0, 8.0)


class Detections(NamedTuple):
    """D = max_detections per image, the best first, padded.

    Attributes:
        boxes: float32 (B, D, 4), ltrb, normalised to the network input and clipped to it; 0 in the padding.
        scores: float32 (B, D), probabilities, which Gaussian suppression lowers; 0 in the padding.
        classes: int32 (B, D), 0-based; -1 in the padding.
        count: int32 (B,), how many are not padding.
    """

    boxes: tf.Tensor
    scores: tf.Tensor
    classes: tf.Tensor
    count: tf.Tensor


def detect(
    class_logits: list[tf.Tensor],
    box_offsets: list[tf.Tensor],
    config: EfficientDetConfig,
    anchors: Anchors,
) -> Detections:
    """Turns the outputs of the model into detections, by TensorFlow operations.

    What is not finite, be it a logit or a coordinate, never becomes a detection.

    Args:
        class_logits: per level (B, h, w, anchors_per_location * C), any float type.
        box_offsets: per level (B, h, w, anchors_per_location * 4).
        config: nms_method, nms_iou, nms_sigma, score_threshold, nms_candidates and max_detections are used.
        anchors: those of the images that went into the model.
    """
    num_classes = class_logits[0].shape[-1] // anchors.anchors_per_location
    logits = tf.cast(box_encoder.flatten_levels(class_logits, num_classes), tf.float32)  # (B, A, C)
    logits, anchor_index, classes = _top_candidates(logits, config.nms_candidates)  # (B, K)
    all_boxes = box_encoder.decode_boxes(box_offsets, anchors)  # (B, A, 4)
    candidates = tf.gather(all_boxes, anchor_index, batch_dims=1)  # (B, K, 4)

    is_finite = tf.reduce_all(tf.math.is_finite(candidates), axis=-1)
    candidates = tf.where(is_finite[..., tf.newaxis], candidates, 0.0)
    scores = tf.where(is_finite, tf.sigmoid(logits), 0.0)
    selected, scores, count = _suppress(candidates, scores, classes, num_classes, config)  # (B, D)

    is_detection = tf.sequence_mask(count, config.max_detections)
    detected_boxes = boxes.clip(tf.gather(candidates, selected, batch_dims=1))
    return Detections(
        boxes=tf.where(is_detection[..., tf.newaxis], detected_boxes, 0.0),
        scores=tf.where(is_detection, scores, 0.0),
        classes=tf.where(is_detection, tf.gather(classes, selected, batch_dims=1), -1),
        count=count,
    )


def _top_candidates(logits: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The K = min(count, A * C) largest of (B, A, C) logits, exactly as one top-k over all, ties included.

    The largest `count` logits belong to the `count` anchors with the largest maxima, so that the costly
    sorting sees A numbers instead of A * C.

    Returns:
        (B, K) logits in descending order, -inf for those that are not finite; int32 anchors; int32 classes.
    """
    num_classes = logits.shape[2]
    num_anchors = min(count, logits.shape[1])
    _, top_anchors = tf.math.top_k(_without_nonfinite(tf.reduce_max(logits, axis=2)), num_anchors)
    top_anchors = tf.sort(top_anchors, axis=1)  # back in order of position, for the ties
    top_logits = _without_nonfinite(tf.gather(logits, top_anchors, batch_dims=1))  # (B, num_anchors, C)
    top_logits = tf.reshape(top_logits, (-1, num_anchors * num_classes))
    top_logits, index = tf.math.top_k(top_logits, min(count, num_anchors * num_classes))
    return top_logits, tf.gather(top_anchors, index // num_classes, batch_dims=1), index % num_classes


def _without_nonfinite(logits: tf.Tensor) -> tf.Tensor:
    """-inf in place of NaN, which sorts anywhere, and of +inf."""
    return tf.where(logits <= logits.dtype.max, logits, -math.inf)


def _suppress(
    candidates: tf.Tensor,
    scores: tf.Tensor,
    classes: tf.Tensor,
    num_classes: int,
    config: EfficientDetConfig,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Non-maximum suppression within each class: hard, or Gaussian (Soft-NMS, arXiv 1704.04503).

    One call does all classes of an image: each class' boxes are moved to a place of their own, where they
    overlap no other class. The places form a square grid, which keeps the coordinates small and so precise:
    with 90 classes and boxes within the image, float32 resolves 1/1000 of a pixel of 512.

    Returns:
        (B, D) indices into the K candidates and (B, D) scores, padded with 0; (B,) how many are not padding.
    """
    columns = math.ceil(math.sqrt(num_classes))
    place = tf.cast(tf.stack([classes % columns, classes // columns] * 2, axis=-1), tf.float32)  # (B, K, 4)
    nearby = tf.clip_by_value(candidates, *_NEIGHBOURHOOD)
    spacing = tf.reduce_max(nearby, axis=[1, 2], keepdims=True) - tf.reduce_min(
        nearby, axis=[1, 2], keepdims=True
    )
    moved_boxes_tlbr = boxes.ltrb_to_tlbr(nearby + place * spacing)
    is_soft = config.nms_method == "gaussian"

    def suppress_one(image):
        boxes_tlbr, scores = image
        suppressed = tf.raw_ops.NonMaxSuppressionV5(
            boxes=boxes_tlbr,
            scores=scores,
            max_output_size=config.max_detections,
            iou_threshold=1.0 if is_soft else config.nms_iou,
            score_threshold=config.score_threshold,
            # exp(-IoU**2 / sigma) in the paper, exp(-IoU**2 / (2 sigma)) in TensorFlow
            soft_nms_sigma=config.nms_sigma / 2 if is_soft else 0.0,
            pad_to_max_output_size=True,
        )
        return tuple(suppressed)  # map_fn insists on the very type of its signature

    selected, scores, count = tf.map_fn(
        suppress_one,
        (moved_boxes_tlbr, scores),
        fn_output_signature=(
            tf.TensorSpec([config.max_detections], tf.int32),
            tf.TensorSpec([config.max_detections], tf.float32),
            tf.TensorSpec([], tf.int32),
        ),
    )
    return selected, scores, count
