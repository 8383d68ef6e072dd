"""Levels and colours, in DALI: uint8 0..255 in, float32 0..1 out."""

from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.dali_ops import normalize, uniform


def to_unit(images: DataNode) -> DataNode:
    """uint8 (H, W, 3), 0..255 -> float32, 0..1."""
    return normalize(images, [0.0] * 3, [255.0] * 3)


def random_hsv(images: list[DataNode], hue: float, saturation: float, exposure: float) -> list[DataNode]:
    """`change_hsv`, drawn anew for each image: -hue .. hue degrees, and twice a `random_factor`.

    If none of the three changes anything, nothing is drawn at random.
    """
    if not hue and saturation == exposure == 1:
        return [to_unit(image) for image in images]
    count = len(images)
    degrees = fn.random.uniform(range=(-hue, hue), shape=[count]) if hue else [0.0] * count
    saturations, brightnesses = random_factor(saturation, count), random_factor(exposure, count)
    return [
        change_hsv(image, degrees[number], saturations[number], brightnesses[number])
        for number, image in enumerate(images)
    ]


def change_hsv(
    images: DataNode, degrees: DataNode | float, saturation: DataNode, brightness: DataNode
) -> DataNode:
    """Turns the hue, multiplies saturation and brightness: uint8 0..255 -> float32 0..1.

    fn.hsv is a linear map of RGB that comes near to hue, saturation and value: a colour's hue turns by up to
    half as much again as it should, or as much less, its saturation grows away from the grey of the same
    luma. Brightness is exact. Darknet goes through HSV (src/image_opencv.cpp, image_data_augmentation).

    On a CPU fn.hsv takes two to three times as long if it has to round to uint8.
    """
    changed = fn.hsv(images, hue=degrees, saturation=saturation, value=brightness / 255.0, dtype=types.FLOAT)
    return dali_math.min(dali_math.max(changed, 0.0), 1.0)  # `clamp` takes three times as long


def random_factor(limit: float, count: int) -> DataNode:
    """(count,), uniform in 1 .. limit, or one over that, each half of the time (src/utils.c, rand_scale)."""
    inverted = fn.random.coin_flip(probability=0.5, shape=[count])
    return uniform(1.0, limit, [count]) ** (1 - 2 * inverted)
