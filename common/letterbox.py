"""Letterbox: resize an image as large as the network input allows, keep its aspect ratio, fill the rest.

The image goes to the top left corner (google/automl efficientdet/dataloader.py) or to the centre (Darknet
src/image.c, letterbox_image). Its place is four whole numbers in pixels of the network input, (top, left,
height, width), and all else follows from them. Boxes are scaled per axis by what the resize really did, so
`boxes_from_letterbox` is the exact inverse. Python, DALI and TensorFlow share one integer formula.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import ops
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common import dali_ops


def geometry(
    height: Any,
    width: Any,
    image_size: tuple[int, int],
    centered: bool = False,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Any, Any, Any, Any]:
    """Where an image of `height` x `width` pixels goes in a network input of `image_size`.

    One side fills the input; the other is rounded to the nearest pixel, halves up, and is at least 1.
    For the whole numbers of any library: `minimum` and `maximum` are its functions for the smaller and the
    larger of two.

    Returns:
        (top, left, new height, new width) in pixels of the network input.
    """
    new_height, new_width = fit(height, width, image_size, minimum, maximum)
    share = 1 if centered else 0  # a factor, not a branch: 0 has to be a node of the DALI graph, too
    top = share * ((image_size[0] - new_height) // 2)
    left = share * ((image_size[1] - new_width) // 2)
    return top, left, new_height, new_width


def fit(
    height: Any,
    width: Any,
    image_size: tuple[int, int],
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Any, Any]:
    """The (new height, new width) of `geometry`, with the same arguments."""
    input_height, input_width = image_size
    # Each side as if the other one filled the input; where that is too long, this one fills it.
    new_height = (2 * input_width * height + width) // (2 * width)
    new_width = (2 * input_height * width + height) // (2 * height)
    return maximum(minimum(new_height, input_height), 1), maximum(minimum(new_width, input_width), 1)


# --- images and boxes, inside a DALI graph ---


def letterbox(
    images: DataNode,
    boxes: DataNode,
    image_size: tuple[int, int],
    *,
    fill: Sequence[int],
    shape: DataNode | None = None,
    centered: bool = False,
) -> tuple[DataNode, DataNode, DataNode]:
    """Letterboxes one image and its boxes; runs in a DALI graph.

    The resize is linear, with antialiasing where it shrinks.

    Args:
        images: uint8 (H, W, 3), on the CPU or the GPU.
        boxes: float32 (N, 4), ltrb normalised; N may be 0; on the CPU.
        image_size: (height, width) of the network input.
        fill: the three channels of the pixels around the image.
        shape: int64, starts with (H, W), on the CPU; the shape of `images` by default.
        centered: the image in the middle instead of the top left corner.

    Returns:
        uint8 (height, width, 3); float32 (N, 4) normalised to the network input; float32 (4,), the place of
        the image as (top, left, height, width) in pixels, for `boxes_from_letterbox`.
    """
    shape = images.shape() if shape is None else shape
    top, left, height, width = geometry(
        shape[0], shape[1], image_size, centered, dali_math.min, dali_math.max
    )
    place = fn.stack(*[fn.cast(side, dtype=types.FLOAT) for side in (top, left, height, width)])

    images = dali_ops.resize(images, place[2:])
    images = dali_ops.place(images, place[:2], list(image_size), fill)

    input_height, input_width = image_size
    scale_y, scale_x = place[2] / input_height, place[3] / input_width
    shift_y, shift_x = place[0] / input_height, place[1] / input_width
    boxes = boxes * fn.stack(scale_x, scale_y, scale_x, scale_y)
    boxes = boxes + fn.stack(shift_x, shift_y, shift_x, shift_y)
    return images, boxes, place


# --- the same in TensorFlow ---


def letterbox_tf(
    image: tf.Tensor,
    boxes: tf.Tensor,
    image_size: tuple[int, int],
    *,
    fill: Sequence[int],
    centered: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """`letterbox` for one image by TensorFlow operations, for `tf.data.Dataset.map`.

    Boxes are equal; pixels differ by the rounding of two resize implementations, under one level on average.
    """
    shape = tf.shape(image)
    place = tf.stack(geometry(shape[0], shape[1], image_size, centered, tf.minimum, tf.maximum))
    top, left, height, width = tf.unstack(place)

    image = tf.image.resize(image, [height, width], method="bilinear", antialias=True)
    image = tf.round(tf.clip_by_value(image, 0.0, 255.0))
    fill = tf.constant(fill, tf.float32)
    image = tf.image.pad_to_bounding_box(image - fill, top, left, *image_size) + fill  # it pads with 0 only
    image = tf.ensure_shape(tf.cast(image, tf.uint8), [*image_size, 3])

    place = tf.cast(place, tf.float32)
    return image, boxes_to_letterbox(boxes, place, image_size), place


# --- boxes ---


def boxes_to_letterbox(boxes: Any, letterbox: Any, image_size: tuple[int, int]) -> Any:
    """Boxes normalised to the original image -> normalised to the network input.

    Args:
        boxes: (..., 4), ltrb.
        letterbox: (top, left, height, width) of the image in the network input, in pixels. Its shape (..., 4)
            broadcasts against that of the boxes: for a batch of boxes (B, N, 4) it is (B, 1, 4).
        image_size: (height, width) of the network input.

    Returns:
        float32 (..., 4), ltrb.
    """
    scale, shift = _scale_and_shift(letterbox, image_size)
    return ops.cast(boxes, "float32") * scale + shift


def boxes_from_letterbox(boxes: Any, letterbox: Any, image_size: tuple[int, int]) -> Any:
    """Boxes normalised to the network input -> normalised to the original image; not clipped.

    The inverse of `boxes_to_letterbox`, with the same arguments.
    """
    scale, shift = _scale_and_shift(letterbox, image_size)
    return (ops.cast(boxes, "float32") - shift) / scale


def _scale_and_shift(letterbox: Any, image_size: tuple[int, int]) -> tuple[Any, Any]:
    """What boxes (..., 4) ltrb are multiplied by, and what is then added; both (..., 4)."""
    top, left, height, width = ops.unstack(ops.cast(letterbox, "float32"), 4, axis=-1)
    input_height, input_width = image_size
    x, y = width / input_width, height / input_height
    dx, dy = left / input_width, top / input_height
    return ops.stack([x, y, x, y], axis=-1), ops.stack([dx, dy, dx, dy], axis=-1)
