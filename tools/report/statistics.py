"""Computes statistics of a data set: images, boxes and their sizes, in total and of each class.

The boxes are `Annotations.target_boxes`, on which a network is trained.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from common.data.annotations import Annotations, TargetBoxes

SMALL, LARGE = 32.0**2, 96.0**2  # pycocotools cocoeval.py, Params.setDetParams: areaRng


class ClassCount(NamedTuple):
    """One class: number of boxes, and of images with such a box.

    `small`, `medium` and `large` are the numbers of boxes with an area below 32 x 32 pixels, below 96 x 96,
    and of the others. As in pycocotools, the area is read from the annotations.
    """

    category_id: int
    name: str
    boxes: int
    images: int
    small: int
    medium: int
    large: int


class DataStatistics(NamedTuple):
    """The statistics of one data set of I images and M boxes.

    Attributes:
        origin: path from which the annotations were read.
        targets: the boxes, and how many boxes were clipped, dropped or left out.
        classes: all classes, the most frequent first.
        formats: image format -> number of images; empty if they were not counted.
        image_sizes: int (I, 2), height and width in pixels.
        boxes_per_image: int (I,).
        box_sides_px: float (M,), square root of the box area in pixels of the image.
        box_aspects: float (M,), width / height in pixels.
    """

    origin: str
    targets: TargetBoxes
    classes: tuple[ClassCount, ...]
    formats: Mapping[str, int]
    image_sizes: np.ndarray
    boxes_per_image: np.ndarray
    box_sides_px: np.ndarray
    box_aspects: np.ndarray

    @property
    def images(self) -> int:
        return len(self.image_sizes)

    @property
    def boxes(self) -> int:
        return len(self.box_sides_px)

    @property
    def by_area(self) -> dict[str, int]:
        """Number of small, medium and large boxes of all classes."""
        return {
            name: sum(getattr(row, name) for row in self.classes) for name in ("small", "medium", "large")
        }


def describe(annotations: Annotations, formats: Mapping[str, int] = {}) -> DataStatistics:
    """Computes the statistics. `formats`: image format -> number of image files."""
    targets = annotations.target_boxes
    counts = np.diff(targets.row_splits)
    image = np.repeat(np.arange(annotations.num_images), counts)
    sides = (targets.boxes[:, 2:] - targets.boxes[:, :2]).astype(np.float64)  # (M, 2) width, height
    sides_px = sides * annotations.image_sizes[image][:, ::-1]
    return DataStatistics(
        origin=annotations.origin,
        targets=targets,
        classes=_classes(annotations, image),
        formats=formats,
        image_sizes=annotations.image_sizes,
        boxes_per_image=counts,
        box_sides_px=np.sqrt(sides_px.prod(axis=1)),
        box_aspects=sides_px[:, 0] / sides_px[:, 1],
    )


def _classes(annotations: Annotations, image: np.ndarray) -> tuple[ClassCount, ...]:
    classes, label_map = annotations.target_boxes.classes, annotations.label_map
    pairs = np.unique(np.stack([classes, image]), axis=1)
    images = np.bincount(pairs[0], minlength=label_map.num_classes)
    *_, has_area = annotations.clipped_boxes
    areas = annotations.areas[has_area & ~annotations.is_crowd]
    size = np.searchsorted([SMALL, LARGE], areas, side="right")  # 0, 1, 2: small, medium, large
    by_size = np.bincount(3 * classes + size, minlength=3 * label_map.num_classes).reshape(-1, 3)
    columns = by_size.sum(axis=1), images, *by_size.T
    rows = zip(label_map.category_ids, label_map.names, *(column.tolist() for column in columns), strict=True)
    return tuple(sorted((ClassCount(*row) for row in rows), key=lambda row: (-row.boxes, row.category_id)))
