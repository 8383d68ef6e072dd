"""Computes statistics of a data set: images, boxes, classes, sizes, shapes, boxes per image.

The boxes are `Annotations.target_boxes`, on which a network is trained.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from common.data.annotations import Annotations, TargetBoxes

SMALL, LARGE = 32.0**2, 96.0**2  # pycocotools cocoeval.py, Params.setDetParams: areaRng
CROWDED = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025)  # first value of each bin of boxes per image


class ClassCount(NamedTuple):
    category_id: int
    name: str
    boxes: int
    images: int


class DataStatistics(NamedTuple):
    """The statistics of one data set of I images and M boxes.

    Attributes:
        origin: path from which the annotations were read.
        targets: the boxes, and how many boxes were clipped, dropped or left out.
        classes: all classes, the most frequent first.
        formats: image format -> number of images; empty if they were not counted.
        image_sizes: int (I, 2), height and width in pixels.
        frequent_sizes: (height, width, number of images) of each size, the most frequent first.
        boxes_per_image: int (I,).
        box_sides_px: float (M,), square root of the box area in pixels of the image.
        box_aspects: float (M,), width / height in pixels.
        by_area: number of small boxes (area below 32 x 32 pixels), medium boxes (below 96 x 96) and large
            boxes. As in pycocotools, the area is read from the annotations.
    """

    origin: str
    targets: TargetBoxes
    classes: tuple[ClassCount, ...]
    formats: Mapping[str, int]
    image_sizes: np.ndarray
    frequent_sizes: list[tuple[int, int, int]]
    boxes_per_image: np.ndarray
    box_sides_px: np.ndarray
    box_aspects: np.ndarray
    by_area: dict[str, int]

    @property
    def images(self) -> int:
        return len(self.image_sizes)

    @property
    def boxes(self) -> int:
        return len(self.box_sides_px)

    @property
    def crowding(self) -> dict[str, int]:
        """Number of boxes, such as "3-4" -> number of images with so many boxes."""
        largest = int(self.boxes_per_image.max(initial=0))
        starts = [start for start in CROWDED if start <= largest]
        ends = [start - 1 for start in starts[1:]] + [largest]
        images, _ = np.histogram(self.boxes_per_image, [*starts, largest + 1])
        names = [f"{low}" if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True)]
        return dict(zip(names, images.tolist(), strict=True))


def describe(annotations: Annotations, formats: Mapping[str, int] = {}) -> DataStatistics:
    """Computes the statistics. `formats`: image format -> number of image files."""
    targets = annotations.target_boxes
    counts = np.diff(targets.row_splits)
    image = np.repeat(np.arange(annotations.num_images), counts)
    sides = (targets.boxes[:, 2:] - targets.boxes[:, :2]).astype(np.float64)  # (M, 2) width, height
    sides_px = sides * annotations.image_sizes[image][:, ::-1]
    sizes, images = np.unique(annotations.image_sizes, axis=0, return_counts=True)
    order = np.argsort(-images, kind="stable")
    *_, has_area = annotations.clipped_boxes
    kept_areas = annotations.areas[has_area & ~annotations.is_crowd]
    areas = np.histogram(kept_areas, [-np.inf, SMALL, LARGE, np.inf])[0].tolist()
    return DataStatistics(
        origin=annotations.origin,
        targets=targets,
        classes=_classes(annotations, image),
        formats=formats,
        image_sizes=annotations.image_sizes,
        frequent_sizes=[tuple(row) for row in np.column_stack([sizes, images])[order].tolist()],
        boxes_per_image=counts,
        box_sides_px=np.sqrt(sides_px.prod(axis=1)),
        box_aspects=sides_px[:, 0] / sides_px[:, 1],
        by_area=dict(zip(("small", "medium", "large"), areas, strict=True)),
    )


def _classes(annotations: Annotations, image: np.ndarray) -> tuple[ClassCount, ...]:
    classes, label_map = annotations.target_boxes.classes, annotations.label_map
    boxes = np.bincount(classes, minlength=label_map.num_classes)
    pairs = np.unique(np.stack([classes, image]), axis=1)
    images = np.bincount(pairs[0], minlength=label_map.num_classes)
    columns = label_map.category_ids, label_map.names, boxes.tolist(), images.tolist()
    counts = [ClassCount(*row) for row in zip(*columns, strict=True)]
    return tuple(sorted(counts, key=lambda count: (-count.boxes, count.category_id)))
