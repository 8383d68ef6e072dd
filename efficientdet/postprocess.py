"""From the heads' outputs to detections: the best candidates, their boxes, non-maximum suppression per class.

Follows google/automl efficientdet/tf2/postprocess.py (postprocess_per_class), with two differences: an anchor
may be several classes at once, as in training, and suppression is among the best `nms_candidates` only.
"""

import tensorflow as tf

from common import box_encoder, nms
from common.anchors import Anchors
from efficientdet.config import EfficientDetConfig


def detect(
    class_logits: list[tf.Tensor],
    box_offsets: list[tf.Tensor],
    config: EfficientDetConfig,
    anchors: Anchors,
) -> nms.Detections:
    """Turns the outputs of the model into detections, by TensorFlow operations.

    What is not finite, be it a logit or a coordinate, never becomes a detection.

    Args:
        class_logits: per level (B, h, w, anchors_per_location * C), any float type.
        box_offsets: per level (B, h, w, anchors_per_location * 4).
        config: nms_method, nms_iou, nms_sigma, score_threshold, nms_candidates and max_detections are used.
        anchors: those of the images that went into the model.
    """
    num_classes = class_logits[0].shape[-1] // anchors.anchors_per_location
    logits, rows, classes = nms.top_candidates(  # (B, K)
        box_encoder.split_anchors(class_logits, num_classes), config.nms_candidates
    )
    offsets = nms.take_rows(box_encoder.split_anchors(box_offsets, 4), rows)  # (B, K, 4)
    return nms.suppress(
        box_encoder.decode_offsets(offsets, tf.gather(anchors.boxes_normalized, rows)),
        tf.sigmoid(logits),
        classes,
        num_classes=num_classes,
        method=config.nms_method,
        max_detections=config.max_detections,
        score_threshold=config.score_threshold,
        iou_threshold=config.nms_iou,
        sigma=config.nms_sigma,
    )
