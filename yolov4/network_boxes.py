"""The boxes of a data set in the input of a network, and those that training drops.

Images are whole, letterboxed or stretched to the network input as in evaluation.
"""

import dataclasses

import numpy as np
from keras import ops

from common.annotations import Annotations
from common.letterbox import boxes_to_letterbox, geometry

KEPT = 1000  # boxes that are put in words


@dataclasses.dataclass(frozen=True, eq=False)
class BoxGroup:
    """Boxes with the same problem.

    Attributes:
        count: number of boxes.
        images: number of images that have any.
        sides: float (count,), square roots of their areas in pixels of the network input.
        offenders: the first KEPT of them in words.
    """

    count: int
    images: int
    sides: np.ndarray
    offenders: tuple[str, ...]


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

    def group(self, numbers: np.ndarray) -> BoxGroup:
        """The boxes of these numbers, counted and in words."""
        sides = _sides(self.boxes[numbers]) * np.array(self.image_size[::-1])
        targets, names = self.sample.target_boxes, self.sample.label_map.names
        offenders = []
        for (width, height), number in zip(sides[:KEPT].tolist(), numbers[:KEPT].tolist(), strict=True):
            row = int(self.image[number])
            size = self.sample.image_sizes[row][::-1]
            left, top, right, bottom = (targets.boxes[number] * np.tile(size, 2)).tolist()
            offenders.append(
                f"{self.sample.image_name(row)} has {names[targets.classes[number]]!r} at [{left:.1f}, "
                f"{top:.1f}, {right - left:.1f}, {bottom - top:.1f}], {width:.2f} x {height:.2f} pixels in "
                "the network"
            )
        images = len(np.unique(self.image[numbers]))
        return BoxGroup(len(numbers), images, np.sqrt(sides.prod(axis=1)), tuple(offenders))


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
    keep_aspect: bool,
    centered: bool,
    max_instances: int,
    min_box_size: float,
) -> NetworkBoxes:
    """Puts the boxes to train on into a network input.

    Args:
        sample: the images.
        image_size: (height, width) of the network input.
        keep_aspect: images are letterboxed; False: stretched.
        centered: letterboxed images lie in the middle instead of the top left corner.
        max_instances: boxes kept per image, the largest first, of equals the first.
        min_box_size: pixels of the network input; boxes with a shorter side are dropped.
    """
    targets = sample.target_boxes
    image = np.repeat(np.arange(sample.num_images), np.diff(targets.row_splits))
    place = np.tile([0, 0, *image_size], (sample.num_images, 1))  # top, left, height, width
    if keep_aspect:
        height, width = sample.image_sizes.astype(np.int64).T
        sides = geometry(height, width, image_size, centered, np.minimum, np.maximum)
        place = np.stack(np.broadcast_arrays(*sides), axis=1)
    boxes = ops.convert_to_numpy(boxes_to_letterbox(targets.boxes, place[image], image_size))
    large = np.all(_sides(boxes) * np.array(image_size[::-1], np.float32) >= min_box_size, axis=1)
    order = np.lexsort((-_sides(boxes).prod(axis=1), ~large, image))
    rank = np.empty(len(boxes), np.int64)
    rank[order] = np.arange(len(boxes)) - np.searchsorted(image, image)
    return NetworkBoxes(sample, image_size, boxes, image, ~large, large & (rank >= max_instances))


def _sides(boxes: np.ndarray) -> np.ndarray:
    """(M, 4) ltrb -> (M, 2) widths and heights."""
    return boxes[:, 2:] - boxes[:, :2]
