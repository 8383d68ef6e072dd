"""Decodes the raw outputs of a head to boxes (AlexeyAB/darknet src/yolo_layer.c, get_yolo_box).

The centre of a box is in its cell, or up to (scale_xy - 1) / 2 cells outside.
"""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from yolov4.config import YOLOv4Config


MAX_LOG_SIZE = 10.0  # limit of raw widths and heights, which keeps the exponential finite


def decode_offsets(
    offsets: tf.Tensor,
    rows: Any,
    columns: Any,
    config: "YOLOv4Config",
    head: int,
    grid_size: tuple[Any, Any],
    anchors: tf.Tensor | None = None,
) -> tf.Tensor:
    """Decodes raw x, y, width and height of single predictions to boxes.

    Args:
        offsets: (..., 4), raw outputs.
        rows, columns: (...), the cell of each prediction.
        head: number of the head, the finest stride first.
        grid_size: (rows, columns) of the head.
        anchors: int (...), the index of each prediction's anchor in the head. If None, the last axis of (...)
            is the axis of the anchors.

    Returns:
        float32 (..., 4), ltrb, normalised to the network input, not clipped.
    """
    offsets = tf.cast(offsets, tf.float32)
    grid_height, grid_width = (tf.cast(side, tf.float32) for side in grid_size)
    stride, scale_xy = config.strides[head], config.scale_xy[head]
    anchor_sizes = tf.constant([config.anchor_sizes[i] for i in config.masks[head]], tf.float32)  # (K, 2)
    if anchors is not None:
        anchor_sizes = tf.gather(anchor_sizes, anchors)
    centers = scale_xy * tf.sigmoid(offsets[..., :2]) - 0.5 * (scale_xy - 1.0)
    center_x = (tf.cast(columns, tf.float32) + centers[..., 0]) / grid_width
    center_y = (tf.cast(rows, tf.float32) + centers[..., 1]) / grid_height
    factors = tf.exp(tf.minimum(offsets[..., 2:], MAX_LOG_SIZE))
    half_sizes = 0.5 * factors * anchor_sizes / tf.stack([grid_width * stride, grid_height * stride])
    half_width, half_height = half_sizes[..., 0], half_sizes[..., 1]
    return tf.stack(
        [center_x - half_width, center_y - half_height, center_x + half_width, center_y + half_height], -1
    )


def decode_boxes(raw: tf.Tensor, config: "YOLOv4Config", head: int) -> tf.Tensor:
    """Decodes all boxes of one head.

    Args:
        raw: (B, h, w, K, 5 + C).

    Returns:
        float32 (B, h, w, K, 4), ltrb, normalised to the network input, not clipped.
    """
    height, width = tf.unstack(tf.shape(raw)[1:3])
    rows, columns = tf.range(height)[:, None, None], tf.range(width)[:, None]
    return decode_offsets(raw[..., :4], rows, columns, config, head, (height, width))
