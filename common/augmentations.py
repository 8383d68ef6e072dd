"""Augmentations of both apps in DALI, off by default: rotation, RandAugment, TrivialAugment and cutout.

    --augmentation_preset=strong
    --hparams=rotation=5,cutout_prob=0.5

Images may be on the GPU; boxes and labels are on the CPU.
"""

import warnings
from typing import Any

from nvidia.dali import fn, types
from nvidia.dali.auto_aug import rand_augment, trivial_augment
from nvidia.dali.data_node import DataNode

from common.dali_ops import int32, uniform

# These operations are left out, because DALI would not move the boxes with the pixels.
MOVES_PIXELS = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
RAND_AUGMENT = [op for op in rand_augment.get_rand_augment_suite() if op.name not in MOVES_PIXELS]
TRIVIAL_AUGMENT = [
    op for op in trivial_augment.get_trivial_augment_wide_suite() if op.name not in MOVES_PIXELS
]
CUTOUT_SIDE = (0.1, 0.4)  # square's side / image's shorter side; arXiv 1708.04552 section 4.1: 0.25 and 0.5


def random_rotation(
    images: DataNode, boxes: DataNode, labels: DataNode, degrees: float, fill: float
) -> tuple[DataNode, DataNode, DataNode]:
    """Rotates an image about its centre by a random angle. The size of the image does not change.

    Args:
        images: uint8 (h, w, 3).
        boxes: float32 (N, 4), ltrb normalised by the image.
        labels: int32 (N,), 1-based.
        degrees: the largest angle in both directions.
        fill: the grey level that fills the empty corners.

    Returns:
        The image; the boxes that enclose the rotated boxes, clipped to the image; their labels.
    """
    angle = uniform(-degrees, degrees)
    sides = boxes[:, 2:4] - boxes[:, 0:2]
    # fn.bbox_rotate gives an area to boxes without area, so mark these boxes with label 0.
    labels = labels * fn.reductions.min(int32(sides > 0), axes=[1])
    rotated: Any = fn.bbox_rotate(
        boxes, labels, angle=angle, input_shape=images.shape()[0:2], keep_size=True, remove_threshold=0.0
    )
    boxes, labels = rotated
    images = fn.rotate(images, angle=angle, keep_size=True, fill_value=fill)
    return images, boxes * fn.expand_dims(labels > 0, axes=[1]), labels


def auto_augment(images: DataNode, policy: str, num_ops: int, magnitude: int) -> DataNode:
    """Applies operations that change pixels but move none. The pipeline needs enable_conditionals=True.

    Args:
        images: uint8 (h, w, 3).
        policy: "rand" for RandAugment (arXiv 1909.13719), "trivial" for TrivialAugment (arXiv 2103.10158).
        num_ops: operations per image, of RandAugment.
        magnitude: strength of the operations, 0 to 30, of RandAugment.
    """
    # Hide DALI 2.4's warnings about deprecated operator names, which DALI itself uses.
    with warnings.catch_warnings(record=True):
        if policy == "trivial":
            images = trivial_augment.apply_trivial_augment(TRIVIAL_AUGMENT, images)
        else:
            images = rand_augment.apply_rand_augment(RAND_AUGMENT, images, num_ops, magnitude)
    return images


def random_cutout(images: DataNode, prob: float, fill: tuple[float, ...]) -> DataNode:
    """Cutout (arXiv 1708.04552): fills a random square that may cross the image's edge. Keeps the boxes.

    Args:
        images: (h, w, 3), any dtype.
        prob: probability that an image gets a square.
    """
    chosen = fn.random.coin_flip(probability=prob)
    size = fn.cast(images.shape()[0:2], dtype=types.FLOAT)
    side = uniform(*CUTOUT_SIDE) * fn.reductions.min(size) * chosen
    center = fn.random.uniform(range=(0.0, 1.0), shape=[2]) * size
    square = fn.stack(side, side)
    return fn.erase(images, anchor=center - square / 2, shape=square, axes=[0, 1], fill_value=list(fill))
