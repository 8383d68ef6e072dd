"""The boxes of a data set in the input of a network, and those that training drops.

Images are whole, letterboxed to the top left corner as in evaluation of EfficientDet.
"""

import dataclasses

import numpy as np

from common.annotations import Annotations
from common.letterbox import geometry


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkBoxes:
    """The M boxes of a sample of images, `sample.target_boxes`, in one network input.

    Attributes:
        sample: the annotations of the images.
        image_size: (height, width) of the network input.
        boxes: float32 (M, 4), ltrb normalised to the network input.
        image: int (M,), ascending.
        too_small, over_limit: bool (M,), boxes that training drops for min_box_size, for max_instances.
    """

    sample: Annotations
    image_size: tuple[int, int]
    boxes: np.ndarray
    image: np.ndarray
    too_small: np.ndarray
    over_limit: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """int (K,): the boxes that training keeps."""
        return np.flatnonzero(~(self.too_small | self.over_limit))

    @property
    def num_true(self) -> int:
        """True boxes without crowds; those without area, which have no target, are among them."""
        return int(np.count_nonzero(~self.sample.is_crowd))

    def sides_px(self, numbers: np.ndarray) -> np.ndarray:
        """float (N,): square roots of the areas of these boxes, in pixels of the network input."""
        return np.sqrt(_sides(self.boxes[numbers]).prod(axis=1) * np.prod(self.image_size))


def sample_images(annotations: Annotations, max_images: int, random: np.random.Generator) -> Annotations:
    """The images that have a true box, or `max_images` of them at random."""
    images = np.unique(annotations.box_image[~annotations.is_crowd])
    if len(images) > max_images:
        images = random.choice(images, max_images, replace=False)
    return annotations.select(np.isin(np.arange(annotations.num_images), images))


def network_boxes(
    sample: Annotations,
    image_size: tuple[int, int],
    *,
    max_instances: int,
    min_box_size: float,
) -> NetworkBoxes:
    """Puts the boxes to train on into a network input.

    Args:
        sample: the images.
        image_size: (height, width) of the network input.
        max_instances: boxes kept per image, the largest first, of equals the first.
        min_box_size: pixels of the network input; boxes with a shorter side are dropped.
    """
    targets = sample.target_boxes
    image = np.repeat(np.arange(sample.num_images), np.diff(targets.row_splits))
    height, width = sample.image_sizes.astype(np.int64).T
    sides = geometry(height, width, image_size, False, np.minimum, np.maximum)
    place = np.stack(np.broadcast_arrays(*sides), axis=1)  # top, left, height, width
    top, left, new_height, new_width = np.split(
        (place / np.tile(image_size, 2)).astype(np.float32), 4, axis=1
    )
    scale, shift = np.hstack([new_width, new_height] * 2), np.hstack([left, top] * 2)
    boxes = targets.boxes * scale[image] + shift[image]
    large = np.all(_sides(boxes) * np.array(image_size[::-1], np.float32) >= min_box_size, axis=1)
    order = np.lexsort((-_sides(boxes).prod(axis=1), ~large, image))
    rank = np.empty(len(boxes), np.int64)
    rank[order] = np.arange(len(boxes)) - np.searchsorted(image, image)
    return NetworkBoxes(sample, image_size, boxes, image, ~large, large & (rank >= max_instances))


def _sides(boxes: np.ndarray) -> np.ndarray:
    """(M, 4) ltrb -> (M, 2) widths and heights."""
    return boxes[:, 2:] - boxes[:, :2]
