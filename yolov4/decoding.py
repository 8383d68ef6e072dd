"""Decodes the raw outputs of a head to boxes.

Follows AlexeyAB/darknet src/yolo_layer.c, get_yolo_box and forward_yolo_layer. The centre of a box is in its
cell, or up to (scale_xy - 1) / 2 cells outside. The box's width is the anchor's width times the exponential
of a raw output, and the same is true for the height.
"""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from yolov4.config import YOLOv4Config


# Limit of raw widths and heights: a box is at most e**10 times its anchor. This keeps the exponential finite
# if a network diverges.
MAX_LOG_SIZE = 10.0


def decode_offsets(
    offsets: tf.Tensor,
    rows: Any,
    columns: Any,
    anchor_sizes: Any,
    scale_xy: float,
    grid_size: tuple[Any, Any],
    image_size: tuple[Any, Any],
) -> tf.Tensor:
    """Decodes raw x, y, width and height of single predictions to boxes.

    Args:
        offsets: (..., 4), raw outputs.
        rows, columns: (...), the cell of each prediction.
        anchor_sizes: (..., 2), width and height of each prediction's anchor in pixels of the network input.
        scale_xy: the head's scale_xy in the config.
        grid_size: (rows, columns) of the head.
        image_size: (height, width) of the network input in pixels.

    Returns:
        float32 (..., 4), ltrb, normalised to the network input, not clipped; finite for finite offsets.
    """
    offsets = tf.cast(offsets, tf.float32)
    grid_height, grid_width = (tf.cast(side, tf.float32) for side in grid_size)
    height, width = (tf.cast(side, tf.float32) for side in image_size)
    centers = scale_xy * tf.sigmoid(offsets[..., :2]) - 0.5 * (scale_xy - 1.0)
    center_x = (tf.cast(columns, tf.float32) + centers[..., 0]) / grid_width
    center_y = (tf.cast(rows, tf.float32) + centers[..., 1]) / grid_height
    factors = tf.exp(tf.minimum(offsets[..., 2:], MAX_LOG_SIZE))
    half_sizes = 0.5 * factors * tf.cast(anchor_sizes, tf.float32) / tf.stack([width, height])
    half_width, half_height = half_sizes[..., 0], half_sizes[..., 1]
    return tf.stack(
        [center_x - half_width, center_y - half_height, center_x + half_width, center_y + half_height], -1
    )


def decode_boxes(raw: tf.Tensor, config: "YOLOv4Config", head: int) -> tf.Tensor:
    """Decodes all boxes of one head.

    Args:
        raw: (B, h, w, K, 5 + C), the output of head `head` for inputs of h * stride x w * stride pixels.

    Returns:
        float32 (B, h, w, K, 4), ltrb, normalised to the network input, not clipped.
    """
    shape = tf.shape(raw)
    grid_size = shape[1], shape[2]
    stride = config.strides[head]
    sizes = [config.anchor_sizes[anchor] for anchor in config.masks[head]]
    return decode_offsets(
        raw[..., :4],
        rows=tf.range(shape[1])[:, None, None],
        columns=tf.range(shape[2])[:, None],
        anchor_sizes=tf.constant(sizes, tf.float32),
        scale_xy=config.scale_xy[head],
        grid_size=grid_size,
        image_size=(stride * shape[1], stride * shape[2]),
    )
