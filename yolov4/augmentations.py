"""Augmentations of YOLOv4's training images in DALI. Each has fields in config.py that turn it on.

Images may be on the GPU; boxes and labels are on the CPU. common/augmentations.py has the augmentations that
both apps use.
"""

from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.augmentations import auto_augment, random_cutout, random_rotation
from common.dali_ops import uniform
from yolov4.config import FILL, YOLOv4Config


def augment(
    config: YOLOv4Config, images: DataNode, boxes: DataNode, labels: DataNode
) -> tuple[DataNode, DataNode, DataNode]:
    """Rotates an image, then applies `augment_pixels`. New stages belong here.

    Args:
        images: uint8 (h, w, 3), a resized and flipped crop.
        boxes: float32 (N, 4), ltrb normalised by the crop; some may have no area.
        labels: int32 (N,), 1-based.

    Returns:
        The image, float32 (h, w, 3) in [0, 1]; its boxes; their labels.
    """
    if config.rotation:
        images, boxes, labels = random_rotation(images, boxes, labels, config.rotation, FILL)
    (images,) = augment_pixels(config, [images])
    return images, boxes, labels


def augment_pixels(config: YOLOv4Config, images: list[DataNode]) -> list[DataNode]:
    """Applies augmentations that move no pixels to one image, or to the four images of a fresh mosaic."""
    if config.auto_augment != "none":
        ops, magnitude = config.rand_augment_ops, config.rand_augment_magnitude
        images = [auto_augment(image, config.auto_augment, ops, magnitude) for image in images]
    images = random_hsv(images, config.hue, config.saturation, config.exposure)
    if config.cutout_prob:
        images = [random_cutout(image, config.cutout_prob, (FILL / 255,) * 3) for image in images]
    return images


def random_flip(place: DataNode, image_size: DataNode, prob: float) -> tuple[DataNode, DataNode]:
    """Decides with probability `prob` to mirror an image.

    Returns:
        int32 (), 1 to mirror the image, else 0; the place of the image after mirroring.
    """
    coin = fn.random.coin_flip(probability=prob)
    top, left, height, width = (place[i] for i in range(4))
    return coin, fn.stack(top, left + coin * (image_size[1] - width - 2 * left), height, width)


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
