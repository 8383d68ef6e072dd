"""Converts the boxes of a data set to the input of a network, and finds boxes that training drops.

The images are letterboxed without cropping, in the top left corner of the network input.
"""

from typing import NamedTuple

import numpy as np

from common.data.annotations import Annotations
from common.letterbox import fit


class NetworkBoxes(NamedTuple):
    """The boxes of a sample of images, converted to the input of a network.

    Attributes:
        sample: annotations of the sample. The M boxes are its `target_boxes`.
        image_size: (height, width) of the network input.
        boxes: float32 (M, 4), ltrb normalised to the network input.
        image: int (M,), index of the image of each box, ascending.
        too_small: bool (M,), whether training drops a box because a side is below min_box_size.
        over_limit: bool (M,), whether training drops a box because its image has more than max_instances.
    """

    sample: Annotations
    image_size: tuple[int, int]
    boxes: np.ndarray
    image: np.ndarray
    too_small: np.ndarray
    over_limit: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """The indices of the boxes that training keeps, int (K,)."""
        return np.flatnonzero(~(self.too_small | self.over_limit))

    def sides_px(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the square roots of the areas of N boxes, float (N,), in pixels of the network input.

        Args:
            numbers: the indices of the N boxes.
        """
        return np.sqrt(_sides(self.boxes[numbers]).prod(axis=1) * np.prod(self.image_size))


def sample_images(annotations: Annotations, max_images: int, random: np.random.Generator) -> Annotations:
    """Selects at most `max_images` images that have boxes, without crowds."""
    images = np.unique(annotations.box_image[~annotations.is_crowd])
    if len(images) > max_images:
        images = random.choice(images, max_images, replace=False)
    return annotations.select(np.isin(np.arange(annotations.num_images), images))


def network_boxes(
    sample: Annotations, image_size: tuple[int, int], *, max_instances: int, min_box_size: float
) -> NetworkBoxes:
    """Converts the boxes that training uses to a network input, and marks those that training drops.

    Args:
        max_instances: number of boxes kept per image. The largest boxes are kept.
        min_box_size: length in pixels of the network input; boxes with a shorter side are dropped.
    """
    targets = sample.target_boxes
    image = np.repeat(np.arange(sample.num_images), np.diff(targets.row_splits))
    height, width = sample.image_sizes.astype(np.int64).T
    new_height, new_width = fit(height, width, image_size, np.minimum, np.maximum)
    scale = (np.stack([new_width, new_height], axis=1) / image_size[::-1]).astype(np.float32)
    boxes = targets.boxes * np.tile(scale, 2)[image]
    large = np.all(_sides(boxes) * np.array(image_size[::-1], np.float32) >= min_box_size, axis=1)
    order = np.lexsort((-_sides(boxes).prod(axis=1), ~large, image))
    rank = np.empty(len(boxes), np.int64)
    rank[order] = np.arange(len(boxes)) - np.searchsorted(image, image)
    return NetworkBoxes(sample, image_size, boxes, image, ~large, large & (rank >= max_instances))


def _sides(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 2:] - boxes[:, :2]
