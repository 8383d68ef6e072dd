"""Turns the heads' outputs into detections: best candidates, their boxes, non-maximum suppression per class.

Follows AlexeyAB/darknet src/yolo_layer.c, get_yolo_detections, but only the best `nms_candidates` enter NMS.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from common import nms
from yolov4.config import STRIDE, YOLOv4Config, get_config
from yolov4.decoding import decode_boxes, decode_offsets

# nms_method -> its name in common/nms.py. diou is Darknet's greedynms.
_METHODS = {"greedy": "hard", "diou": "diou"}


def decode_heads(
    raw: list[tf.Tensor], model_name: str, image_size: tuple[int, int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes all boxes and scores of a model in its default configuration, without NMS.

    Args:
        raw: one (B, h, w, K, 5 + C) per head, finest stride first, of any float type.
        image_size: (height, width) of the network input that gave `raw`.

    Returns:
        Boxes float32 (B, N, 4), ltrb, normalised to the network input, not clipped, and scores
        float32 (B, N, C), objectness times class probability. The N predictions are ordered by head (finest
        stride first), row, column and anchor.

    Raises:
        ValueError: the shapes of `raw` do not fit this model and size.
    """
    config = get_config(model_name)
    heads = [tf.convert_to_tensor(head) for head in raw]
    _check_shapes(heads, config, tuple(image_size))
    return decode_all(heads, config)


def decode_all(heads: list[tf.Tensor], config: YOLOv4Config) -> tuple[tf.Tensor, tf.Tensor]:
    """Does what `decode_heads` does, for the heads of any config."""
    boxes, scores = [], []
    for number, head in enumerate(heads):
        batch_size = tf.shape(head)[0]
        flat = tf.cast(tf.reshape(head, [batch_size, -1, head.shape[-1]]), tf.float32)
        boxes.append(tf.reshape(decode_boxes(head, config, number), [batch_size, -1, 4]))
        scores.append(tf.sigmoid(flat[..., 4:5]) * tf.sigmoid(flat[..., 5:]))
    return tf.concat(boxes, axis=1), tf.concat(scores, axis=1)


def detect(heads: list[tf.Tensor], config: YOLOv4Config) -> nms.Detections:
    """Turns the outputs of the model into detections.

    A prediction with a logit or coordinate that is not finite never becomes a detection.

    Args:
        heads: one (B, h, w, K, 5 + C) per head, finest stride first, of any float type; h, w may be unknown.

    Raises:
        ValueError: the shapes of the heads do not fit `config`.
    """
    heads = [tf.convert_to_tensor(head) for head in heads]
    boxes, scores, classes = candidates(heads, config)
    return nms.suppress(
        boxes,
        scores,
        classes,
        num_classes=heads[0].shape[-1] - 5,
        method=_METHODS[config.nms_method],
        max_detections=config.max_detections,
        score_threshold=config.score_threshold,
        class_agnostic=config.nms_class_agnostic,
        iou_threshold=config.nms_iou,
        beta=config.diou_beta,
    )


def candidates(heads: list[tf.Tensor], config: YOLOv4Config) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the best K predictions of each image before NMS, best first.

    Returns:
        boxes float32 (B, K, 4), ltrb, normalised to the network input, not clipped; scores float32 (B, K);
        classes int32 (B, K).
    """
    finest = config.strides[0]
    _check_shapes(heads, config, [side and side * finest for side in heads[0].shape[1:3]])
    best = [_best_of_head(head, config, number) for number, head in enumerate(heads)]
    boxes, scores = zip(*best, strict=True)
    scores, rows, classes = nms.top_candidates(scores, config.nms_candidates)  # (B, K)
    return tf.gather(tf.concat(boxes, axis=1), rows, batch_dims=1), scores, classes


def _best_of_head(raw: tf.Tensor, config: YOLOv4Config, head: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes the R = min(nms_candidates, h * w * K) best-scored predictions of one head.

    Returns:
        boxes (B, R, 4); scores (B, R, C).
    """
    shape = tf.shape(raw)
    grid_height, grid_width, num_anchors = shape[1], shape[2], config.anchors_per_location
    flat = tf.reshape(raw, [shape[0], -1, raw.shape[-1]])  # (B, h * w * K, 5 + C)
    best_scores = _probability(flat[..., 4]) * _probability(tf.reduce_max(flat[..., 5:], axis=-1))
    index = nms.top_rows(best_scores, config.nms_candidates)  # (B, R)
    flat = tf.cast(tf.gather(flat, index, batch_dims=1), tf.float32)
    offsets = flat[..., :4]
    boxes = decode_offsets(
        # Replace infinity by NaN, because decoding would turn infinity into a valid box.
        tf.where(tf.math.is_finite(offsets), offsets, math.nan),
        rows=index // (num_anchors * grid_width),
        columns=index // num_anchors % grid_width,
        config=config,
        head=head,
        grid_size=(grid_height, grid_width),
        anchors=index % num_anchors,
    )
    return boxes, _probability(flat[..., 4:5]) * _probability(flat[..., 5:])


def _probability(logits: tf.Tensor) -> tf.Tensor:
    """Returns the sigmoid in float32; 0 for logits that are not finite."""
    return tf.sigmoid(nms.without_nonfinite(tf.cast(logits, tf.float32)))


def _check_shapes(heads: list[tf.Tensor], config: YOLOv4Config, image_size: Sequence[int | None]) -> None:
    if len(heads) != len(config.strides):
        raise ValueError(f"{len(heads)} heads, but {config.model_name} has {len(config.strides)}")
    if any(side and side % STRIDE for side in image_size):
        raise ValueError(f"image_size={image_size}: both sides must be multiples of {STRIDE}")
    for head, stride in zip(heads, config.strides, strict=True):
        grid = [side and side // stride for side in image_size]
        expected = [None, *grid, config.anchors_per_location, heads[0].shape[-1]]
        if not head.shape.is_compatible_with(expected) or head.shape[-1] < 6:
            raise ValueError(
                f"a head has the shape {tuple(head.shape)}, but {config.model_name} at stride {stride} "
                f"for image_size={tuple(image_size)} needs {tuple(expected)}, the last axis at least 6"
            )
