"""Changes colours in DALI."""

from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.dali_ops import uniform


def to_unit(images: DataNode) -> DataNode:
    """Converts uint8 (H, W, 3) in 0..255 to float32 in 0..1."""
    return fn.crop_mirror_normalize(images, std=[255.0] * 3, dtype=types.FLOAT, output_layout="HWC")


def random_hsv(images: list[DataNode], hue: float, saturation: float, exposure: float) -> list[DataNode]:
    """Turns the hue by -hue to hue degrees; multiplies saturation and brightness by random factors."""
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
    """Turns the hue and multiplies saturation and brightness. Takes uint8 in 0..255, returns float32 in 0..1.

    fn.hsv approximates HSV: the hue turns by up to 50 % more or less than `degrees`. Darknet converts to HSV
    and back (src/image_opencv.cpp, image_data_augmentation).
    """
    changed = fn.hsv(images, hue=degrees, saturation=saturation, value=brightness / 255.0, dtype=types.FLOAT)
    return dali_math.min(dali_math.max(changed, 0.0), 1.0)  # `clamp` takes three times as long


def random_factor(limit: float, count: int) -> DataNode:
    """Returns (count,) factors from 1 to limit, or with probability 0.5 their reciprocals.

    As in Darknet (utils.c, rand_scale).
    """
    inverted = fn.random.coin_flip(probability=0.5, shape=[count])
    return uniform(1.0, limit, [count]) ** (1 - 2 * inverted)
