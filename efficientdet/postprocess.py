"""Turns the heads' outputs into detections: best candidates, their boxes, non-maximum suppression per class.

Follows google/automl efficientdet/tf2/postprocess.py (postprocess_per_class), with two differences: an anchor
can be a candidate for several classes, as in training, and only the best `nms_candidates` enter NMS.
"""

import tensorflow as tf

from common import box_encoder, nms
from common.anchors import Anchors
from efficientdet.config import EfficientDetConfig


def detect(
    class_logits: list[tf.Tensor],
    box_deltas: list[tf.Tensor],
    config: EfficientDetConfig,
    anchors: Anchors,
) -> nms.Detections:
    """Turns the outputs of the model into detections, by TensorFlow operations.

    A prediction with a logit or coordinate that is not finite never becomes a detection.

    Args:
        class_logits: one (B, h, w, anchors_per_location * C) per level, of any float type.
        box_deltas: one (B, h, w, anchors_per_location * 4) per level.
        config: nms_method, nms_iou, nms_sigma, score_threshold, nms_candidates and max_detections are used.
        anchors: the anchors for the size of the images that the model received.
    """
    num_classes = class_logits[0].shape[-1] // anchors.anchors_per_location
    boxes, scores, classes = candidates(class_logits, box_deltas, config, anchors)
    return nms.suppress(
        boxes,
        scores,
        classes,
        num_classes=num_classes,
        method=config.nms_method,
        max_detections=config.max_detections,
        score_threshold=config.score_threshold,
        iou_threshold=config.nms_iou,
        sigma=config.nms_sigma,
    )


def candidates(
    class_logits: list[tf.Tensor],
    box_deltas: list[tf.Tensor],
    config: EfficientDetConfig,
    anchors: Anchors,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the best K predictions of each image before NMS, in descending order; arguments as in `detect`.

    Returns:
        boxes float32 (B, K, 4), ltrb, normalised to the network input, not clipped; scores float32 (B, K);
        classes int32 (B, K).
    """
    num_classes = class_logits[0].shape[-1] // anchors.anchors_per_location
    logits, rows, classes = nms.top_candidates(  # (B, K)
        box_encoder.split_anchors(class_logits, num_classes), config.nms_candidates
    )
    deltas = tf.concat(box_encoder.split_anchors(box_deltas, 4), axis=1)
    deltas = tf.gather(deltas, rows, batch_dims=1)  # (B, K, 4)
    boxes = box_encoder.decode_deltas(deltas, tf.gather(anchors.boxes_normalized, rows))
    return boxes, tf.sigmoid(logits), classes


def decode_all(
    class_logits: list[tf.Tensor], box_deltas: list[tf.Tensor], anchors: Anchors
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes the box and the scores of every anchor, without NMS.

    Returns:
        boxes float32 (B, A, 4), ltrb, normalised to the network input, not clipped; scores float32 (B, A, C).
        Anchors are ordered as in Anchors.boxes.
    """
    num_classes = class_logits[0].shape[-1] // anchors.anchors_per_location
    logits = tf.concat(box_encoder.split_anchors(class_logits, num_classes), axis=1)
    return box_encoder.decode_boxes(box_deltas, anchors), tf.sigmoid(tf.cast(logits, tf.float32))
