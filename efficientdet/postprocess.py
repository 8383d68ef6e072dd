"""Turns the heads' outputs into detections: best candidates, their boxes, non-maximum suppression per class.

Follows google/automl efficientdet/tf2/postprocess.py (postprocess_per_class). Two differences: an anchor can
be a candidate for several classes, and only the best `nms_candidates` enter NMS.
"""

import tensorflow as tf

from common import box_encoder, nms
from efficientdet.config import EfficientDetConfig

# Class logits (B, h, w, k * C) and box deltas (B, h, w, k * 4). Each list has one tensor per level.
Outputs = tuple[list[tf.Tensor], list[tf.Tensor]]


def detect(outputs: Outputs, config: EfficientDetConfig) -> nms.Detections:
    """Turns the outputs of the model into detections.

    A prediction with a logit or coordinate that is not finite never becomes a detection.
    """
    boxes, scores, classes = candidates(outputs, config)
    return nms.suppress(
        boxes,
        scores,
        classes,
        num_classes=outputs[0][0].shape[-1] // config.anchors_per_location,
        method=config.nms_method,
        max_detections=config.max_detections,
        score_threshold=config.score_threshold,
        class_agnostic=config.nms_class_agnostic,
        iou_threshold=config.nms_iou,
        sigma=config.nms_sigma,
    )


def candidates(outputs: Outputs, config: EfficientDetConfig) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the best K predictions of each image before NMS, best first.

    Returns:
        boxes: float32 (B, K, 4), ltrb, normalised to the network input, not clipped.
        scores: float32 (B, K).
        classes: int32 (B, K).
    """
    class_logits, box_deltas = outputs
    num_classes = class_logits[0].shape[-1] // config.anchors_per_location
    logits, rows, classes = nms.top_candidates(  # (B, K)
        box_encoder.split_anchors(class_logits, num_classes), config.nms_candidates
    )
    deltas = tf.concat(box_encoder.split_anchors(box_deltas, 4), axis=1)
    deltas = tf.gather(deltas, rows, batch_dims=1)  # (B, K, 4)
    boxes = box_encoder.decode_deltas(deltas, tf.gather(config.anchors.boxes_normalized, rows))
    return boxes, tf.sigmoid(logits), classes


def decode_all(outputs: Outputs, config: EfficientDetConfig) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes the box and the scores of every anchor, without NMS.

    Returns:
        boxes: float32 (B, A, 4), ltrb, normalised to the network input, not clipped.
        scores: float32 (B, A, C).
    """
    class_logits, box_deltas = outputs
    num_classes = class_logits[0].shape[-1] // config.anchors_per_location
    logits = tf.concat(box_encoder.split_anchors(class_logits, num_classes), axis=1)
    return box_encoder.decode_boxes(box_deltas, config.anchors), tf.sigmoid(tf.cast(logits, tf.float32))
