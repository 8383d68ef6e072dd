"""Letterbox: resize an image to the largest size that fits the network input, keep its aspect ratio, and pad.

The image is placed in the top left corner (google/automl efficientdet/dataloader.py) or in the centre
(Darknet src/image.c, letterbox_image). Its place is (top, left, height, width) in pixels of the input.
"""

from collections.abc import Callable
from typing import Any


def fit(
    height: Any,
    width: Any,
    image_size: tuple[Any, Any],
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Any, Any]:
    """Returns the (new height, new width) of an image of `height` x `width` pixels in a network input.

    One side fills the input. The other side is rounded to a whole pixel (halves up), at least 1.

    Args:
        height, width: integers of Python, DALI or TensorFlow.
        image_size: (height, width) of the network input, integers of the same library.
        minimum, maximum: functions of this library for the smaller and the larger of two numbers.
    """
    input_height, input_width = image_size
    new_height = (2 * input_width * height + width) // (2 * width)
    new_width = (2 * input_height * width + height) // (2 * height)
    return maximum(minimum(new_height, input_height), 1), maximum(minimum(new_width, input_width), 1)


def boxes_from_letterbox(boxes: Any, letterbox: Any, image_size: tuple[int, int]) -> Any:
    """Converts boxes normalised by the network input to boxes normalised by the original image, unclipped.

    Args:
        boxes: (..., 4), ltrb.
        letterbox: (..., 4), (top, left, height, width) in pixels of the input. For boxes (B, N, 4), pass
            (B, 1, 4).
        image_size: (height, width) of the network input.

    Returns:
        float32 (..., 4), ltrb.
    """
    from keras import ops

    top, left, height, width = ops.unstack(ops.cast(letterbox, "float32"), 4, axis=-1)
    input_height, input_width = image_size
    x, y = width / input_width, height / input_height
    dx, dy = left / input_width, top / input_height
    scale, shift = ops.stack([x, y, x, y], axis=-1), ops.stack([dx, dy, dx, dy], axis=-1)
    return (ops.cast(boxes, "float32") - shift) / scale
