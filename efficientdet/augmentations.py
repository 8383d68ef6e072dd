"""Augmentations of EfficientDet's training images in DALI. Each has fields in config.py that turn it on.

Images may be on the GPU; boxes and labels are on the CPU. common/augmentations.py has the augmentations that
both apps use.
"""

import math

from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.augmentations import auto_augment, random_cutout, random_rotation
from common.dali_ops import IMAGENET_MEAN, int32, uniform
from efficientdet.config import EfficientDetConfig

# GridMask (arXiv 2001.04086) divides the image into tiles and blacks out one square in each tile.
GRID_MASK_RATIO = 0.4  # side of the square / side of the tile; this is 1 - r in the paper
GRID_MASK_TILE = (0.2, 0.6)  # side of the tile / shorter side of the network input
GRID_MASK_ANGLE = math.radians(10)  # google/automl efficientdet/aug/gridmask.py


def augment(
    config: EfficientDetConfig, images: DataNode, boxes: DataNode, labels: DataNode
) -> tuple[DataNode, DataNode, DataNode]:
    """Applies the random changes. New stages belong here.

    Args:
        images: uint8 (h, w, 3), a resized crop.
        boxes: float32 (N, 4), ltrb normalised by the crop.
        labels: int32 (N,), 1-based.
    """
    if config.flip_prob:
        images, boxes = random_flip(images, boxes, config.flip_prob)
    if config.rotation:
        fill = sum(IMAGENET_MEAN) / 3  # fn.rotate fills corners with one level for all channels
        images, boxes, labels = random_rotation(images, boxes, labels, config.rotation, fill)
    if config.auto_augment != "none":
        ops, magnitude = config.rand_augment_ops, config.rand_augment_magnitude
        images = auto_augment(images, config.auto_augment, ops, magnitude)
    if config.grid_mask_prob:
        images = random_grid_mask(images, config.image_size, config.grid_mask_prob)
    if config.brightness or config.contrast or config.saturation or config.hue:
        images = random_color(images, config.brightness, config.contrast, config.saturation, config.hue)
    if config.cutout_prob:
        images = random_cutout(images, config.cutout_prob, IMAGENET_MEAN)
    return images, boxes, labels


def random_flip(images: DataNode, boxes: DataNode, prob: float) -> tuple[DataNode, DataNode]:
    """Mirrors image and boxes horizontally with probability `prob`."""
    coin = fn.random.coin_flip(probability=prob)
    flipped = fn.flip(images, horizontal=coin)
    return flipped, fn.bb_flip(boxes, horizontal=coin, ltrb=True)


def random_grid_mask(images: DataNode, image_size: tuple[int, int], prob: float) -> DataNode:
    """Blacks out a randomly rotated and shifted grid of squares; boxes do not change (arXiv 2001.04086)."""
    tile = uniform(*GRID_MASK_TILE) * float(min(image_size))
    chosen = fn.cast(fn.random.coin_flip(probability=prob), dtype=types.FLOAT)
    return fn.grid_mask(
        images,
        tile=int32(dali_math.max(tile, 2.0)),
        ratio=GRID_MASK_RATIO * chosen,  # a ratio of 0 masks nothing
        angle=uniform(-GRID_MASK_ANGLE, GRID_MASK_ANGLE),
        shift_x=uniform(0.0, 1.0) * tile,
        shift_y=uniform(0.0, 1.0) * tile,
    )


def random_color(
    images: DataNode, brightness: float, contrast: float, saturation: float, hue: float
) -> DataNode:
    """Changes the colours at random.

    `hue` is the largest change in degrees. Each other argument x means a random factor from 1 - x to 1 + x.
    """
    return fn.color_twist(
        images,
        brightness=uniform(1 - brightness, 1 + brightness),
        contrast=uniform(1 - contrast, 1 + contrast),
        saturation=uniform(1 - saturation, 1 + saturation),
        hue=uniform(-hue, hue),
    )
