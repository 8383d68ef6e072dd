"""Transforms pixels in float64 NumPy.

Pixel i has its centre at i + 1/2. After every stage, pixel values are rounded to integers in 0..255.
"""

import fractions
import math

import numpy as np

# NTSC (47 CFR 73.682) defines luma and the colour differences I and Q. Hue is the angle of (I, Q).
_LUMA = np.array([0.299, 0.587, 0.114])
_RED_MINUS_LUMA, _BLUE_MINUS_LUMA = [1, 0, 0] - _LUMA, [0, 0, 1] - _LUMA
_IN_PHASE = 0.736 * _RED_MINUS_LUMA - 0.268 * _BLUE_MINUS_LUMA
_QUADRATURE = 0.478 * _RED_MINUS_LUMA + 0.413 * _BLUE_MINUS_LUMA
_RGB_TO_YIQ = np.stack([_LUMA, _IN_PHASE, _QUADRATURE])
_GREY = 128.0


def nearest(value: float) -> int:
    """Halves are rounded up."""
    return math.floor(value + 0.5)


def to_uint8(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def letterbox(
    size: tuple[int, int], image_size: tuple[int, int], *, centered: bool
) -> tuple[int, int, int, int]:
    """Returns top, left, height, width of an image that is scaled to fit into `image_size`.

    The height and the width are rounded, halves up, and are at least 1. If the padding of a centred image is
    odd, the extra pixel is below or on the right.
    """
    scale = min(fractions.Fraction(*sides) for sides in zip(image_size, size, strict=True))
    height, width = (max(math.floor(side * scale + fractions.Fraction(1, 2)), 1) for side in size)
    if not centered:
        return 0, 0, height, width
    return (image_size[0] - height) // 2, (image_size[1] - width) // 2, height, width


def crop(image: np.ndarray, window: tuple[int, int, int, int]) -> np.ndarray:
    """`window` is (top, left, height, width)."""
    top, left, height, width = window
    assert 0 <= top < top + height <= image.shape[0] and 0 <= left < left + width <= image.shape[1]
    return image[top : top + height, left : left + width]


def resample(rows: np.ndarray, new_length: int, antialias: bool = True) -> np.ndarray:
    """Resizes the first axis: (length, ...) -> float64 (new_length, ...).

    This is linear interpolation. With `antialias`, the filter becomes wider if the axis becomes shorter.
    Beyond the border, the last pixel is repeated.
    """
    step = len(rows) / new_length
    reach = max(step, 1.0) if antialias else 1.0
    middles = (np.arange(new_length) + 0.5) * step
    firsts = np.ceil(middles - reach - 0.5).astype(int)
    old = firsts[:, np.newaxis] + np.arange(math.ceil(2 * reach) + 1)
    weights = np.maximum(1 - np.abs(old + 0.5 - middles[:, np.newaxis]) / reach, 0)
    weights /= weights.sum(1, keepdims=True)
    result = np.zeros((new_length, *rows.shape[1:]))
    for numbers, weight in zip(np.clip(old, 0, len(rows) - 1).T, weights.T, strict=True):
        result += weight.reshape(-1, *[1] * (rows.ndim - 1)) * rows[numbers]
    return result


def resize(image: np.ndarray, size: tuple[int, int], antialias: bool = True) -> np.ndarray:
    """uint8 (h, w, 3) -> uint8 (*size, 3)."""
    columns = np.ascontiguousarray(resample(image, size[0], antialias).swapaxes(0, 1))
    return to_uint8(resample(columns, size[1], antialias).swapaxes(0, 1))


def twist_color(image, *, hue=0.0, saturation=1.0, brightness=1.0, contrast=1.0) -> np.ndarray:
    """Hue (degrees) rotates a colour's vector (I, Q), saturation scales it. Both keep the luma."""
    turn = np.exp(-1j * np.radians(hue)) * saturation  # negative, because yellow has a smaller angle than red
    plane = np.array([[turn.real, -turn.imag], [turn.imag, turn.real]])
    matrix = np.eye(3)
    matrix[1:, 1:] = plane
    matrix = np.linalg.inv(_RGB_TO_YIQ) @ matrix @ _RGB_TO_YIQ
    return to_uint8(brightness * (contrast * (image @ matrix.T - _GREY) + _GREY))


def mask_grid(image: np.ndarray, tile: int, ratio: float, angle: float, shift: np.ndarray) -> np.ndarray:
    """GridMask (arXiv 2001.04086): a black square of side `ratio * tile` in a corner of every tile.

    The grid is turned by `angle` (radians) about the first pixel, and moved by `shift` (x, y) along the
    turned axes.
    """
    y, x = np.indices(image.shape[:2])
    along = x * np.cos(angle) - y * np.sin(angle) - shift[0]
    across = x * np.sin(angle) + y * np.cos(angle) - shift[1]
    masked = (along / tile % 1 < ratio) & (across / tile % 1 < ratio)
    return np.where(masked[..., np.newaxis], np.uint8(0), image)


def assert_small(difference: np.ndarray, config, where: str, has_halves: bool = False) -> None:
    """Asserts that the difference of two images is small. `has_halves` allows a larger difference."""
    highest, mean = (4.001, 0.5) if config.hue else (1.001, 0.1)
    if has_halves:
        highest, mean = highest + 0.5, 0.6
    assert difference.max(initial=0) <= highest, where
    assert difference.mean() <= mean, where


def put(image: np.ndarray, top_left: tuple[int, int], canvas_size: tuple[int, int], fill: int) -> np.ndarray:
    """Returns a canvas of level `fill` with the image at `top_left`."""
    canvas = np.full((*canvas_size, 3), fill, np.uint8)
    top, left = top_left
    height, width = image.shape[:2]
    canvas[top : top + height, left : left + width] = image
    return canvas
