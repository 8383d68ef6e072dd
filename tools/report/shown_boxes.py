"""The boxes of a data set as a network sees them: in its input, without those that training drops.

For reports: images are whole, as in evaluation. Boxes keep their number in `Annotations.target_boxes`, so
what becomes of each of them can be said with its image and its size.
"""

import dataclasses

import numpy as np
from keras import ops

from common.annotations import Annotations
from common.issues import KEPT
from common.letterbox import boxes_from_letterbox, boxes_to_letterbox, fit
from tools.report.data_statistics import Spread


@dataclasses.dataclass(frozen=True)
class Group:
    """Boxes that share a fate.

    Attributes:
        count: how many.
        images: how many images have any.
        sides: square roots of their areas in pixels of the network input.
        offenders: the first KEPT of them in words.
    """

    count: int
    images: int
    sides: Spread
    offenders: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ShownBoxes:
    """The M boxes of the I images of a sample, in one network input.

    Attributes:
        sample: the annotations of its images.
        image_size: (height, width) of the network input.
        places: int (I, 4), where each image lies in it: (top, left, height, width) in pixels.
        boxes: float32 (M, 4), ltrb normalised to the network input.
        image: int (M,), ascending.
        too_small, truncated: bool (M,), boxes that training drops because of min_box_size, of max_instances.
    """

    sample: Annotations
    image_size: tuple[int, int]
    places: np.ndarray
    boxes: np.ndarray
    image: np.ndarray
    too_small: np.ndarray
    truncated: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """int (K,): the boxes that training keeps."""
        return np.flatnonzero(~(self.too_small | self.truncated))

    @property
    def num_true(self) -> int:
        """True boxes, no crowds; those without area, which have no target, are among them."""
        return int(np.count_nonzero(~self.sample.is_crowd))

    def in_original(self, boxes: np.ndarray, image: np.ndarray) -> np.ndarray:
        """float32 (D, 4): boxes of the network input -> normalised to the original images (D,)."""
        return ops.convert_to_numpy(boxes_from_letterbox(boxes, self.places[image], self.image_size))

    def group(self, numbers: np.ndarray) -> Group:
        """The boxes of these numbers, in words and in numbers."""
        sides = _sides(self.boxes[numbers]) * _width_height(self.image_size)
        targets, names = self.sample.target_boxes, self.sample.label_map.names
        offenders = []
        for (width, height), number in zip(sides[:KEPT].tolist(), numbers[:KEPT].tolist(), strict=True):
            row = int(self.image[number])
            size = self.sample.image_sizes[row][::-1]
            left, top, right, bottom = (targets.boxes[number] * np.tile(size, 2)).tolist()
            file_name = self.sample.file_names[row]
            offenders.append(
                f"image {self.sample.image_ids[row]}{f' ({file_name!r})' if file_name else ''} has "
                f"{names[targets.classes[number]]!r} at [{left:.1f}, {top:.1f}, {right - left:.1f}, "
                f"{bottom - top:.1f}], {width:.2f} x {height:.2f} pixels in the network"
            )
        return Group(
            count=len(numbers),
            images=len(np.unique(self.image[numbers])),
            sides=Spread.of(np.sqrt(sides.prod(axis=1))),
            offenders=tuple(offenders),
        )


def sample_images(annotations: Annotations, max_images: int, random: np.random.Generator) -> Annotations:
    """The images that have a true box, or `max_images` of them, drawn."""
    images = np.unique(annotations.box_image[~annotations.is_crowd])
    if len(images) > max_images:
        images = random.choice(images, max_images, replace=False)
    return annotations.select(np.isin(np.arange(annotations.num_images), images))


def show(
    sample: Annotations,
    image_size: tuple[int, int],
    *,
    keep_aspect: bool,
    centered: bool,
    max_instances: int,
    min_box_size: float,
) -> ShownBoxes:
    """Puts the boxes to train on into a network input.

    Args:
        sample: the images.
        image_size: (height, width) of the network input.
        keep_aspect: images are letterboxed; False: stretched.
        centered: letterboxed images lie in the middle instead of the top left corner.
        max_instances: boxes kept per image, the largest first.
        min_box_size: pixels of the network input; boxes with a shorter side are dropped.
    """
    targets = sample.target_boxes
    image = np.repeat(np.arange(sample.num_images), np.diff(targets.row_splits))
    shown = np.full((sample.num_images, 2), image_size, np.int64)  # height, width
    if keep_aspect:
        height, width = sample.image_sizes.astype(np.int64).T
        shown = np.stack(fit(height, width, image_size, np.minimum, np.maximum), axis=1)
    corner = (np.array(image_size) - shown) // 2 if centered else np.zeros_like(shown)
    places = np.concatenate([corner, shown], axis=1)
    boxes = ops.convert_to_numpy(boxes_to_letterbox(targets.boxes, places[image], image_size))
    large = (_sides(boxes) * _width_height(image_size) >= min_box_size).all(axis=1)
    kept = large.copy()
    kept[large] = largest(boxes[large], image[large], max_instances)
    return ShownBoxes(sample, image_size, places, boxes, image, ~large, large & ~kept)


def largest(boxes: np.ndarray, image: np.ndarray, count: int) -> np.ndarray:
    """bool (M,): the `count` largest boxes (M, 4) of each image (M,), as in `box_encoder.keep_largest`."""
    order = np.lexsort((-_sides(boxes).prod(axis=1), image))  # of equals the first goes first
    kept = np.zeros(len(boxes), bool)
    kept[order] = np.arange(len(boxes)) - np.searchsorted(image, image) < count
    return kept


def _sides(boxes: np.ndarray) -> np.ndarray:
    """(M, 4) ltrb -> (M, 2) widths and heights."""
    return boxes[:, 2:] - boxes[:, :2]


def _width_height(image_size: tuple[int, int]) -> np.ndarray:
    return np.array(image_size[::-1], np.float32)
