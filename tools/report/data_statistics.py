"""What a data set holds, in numbers: images, boxes, classes, sizes, shapes, crowding.

Boxes are those that a network is trained on (`Annotations.target_boxes`): clipped to their image, with an
area, no crowds.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.annotations import Annotations

SMALL, LARGE = 32.0**2, 96.0**2  # pycocotools cocoeval.py, Params.setDetParams: areaRng
MAX_SIZES = 1000  # different image sizes that are listed, the most frequent first
CROWDED = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025)  # where the bins of boxes per image begin


@dataclasses.dataclass(frozen=True)
class Spread:
    """How values lie: the smallest, some quantiles and the largest. All 0 where there is no value."""

    minimum: float = 0.0
    p5: float = 0.0
    p25: float = 0.0
    median: float = 0.0
    p75: float = 0.0
    p95: float = 0.0
    maximum: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        if not len(values):
            return cls()
        quantiles = np.quantile(values, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
        return cls(*quantiles.tolist(), float(np.mean(values)))


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts (n,) between edges (n + 1,): a value on an edge belongs to the bin on its right, on the last
    edge to the last bin."""

    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def of_logarithm(cls, values: np.ndarray, per_doubling: int) -> "Histogram":
        """Bins whose width is a fixed ratio, `per_doubling` of them from x to 2 x, over all `values` > 0."""
        if not len(values):
            return cls()
        # The powers are those around the values, so that a value never lies outside by rounding.
        low, high = np.floor(np.log2(values.min())), np.floor(np.log2(values.max())) + 1
        edges = 2.0 ** np.linspace(low, high, int(high - low) * per_doubling + 1)
        counts, _ = np.histogram(values, edges)
        return cls(tuple(edges.tolist()), tuple(counts.tolist()))


@dataclasses.dataclass(frozen=True)
class ClassCount:
    """Boxes of one class, and the images that have any."""

    category_id: int
    name: str
    boxes: int
    images: int


@dataclasses.dataclass(frozen=True)
class DataStatistics:
    """The numbers of one data set. `to_json` gives what JSON can hold.

    Attributes:
        origin: where the annotations were read from.
        images, boxes: how many.
        crowds: annotations that mark a crowd: no targets.
        clipped, dropped: boxes that reached outside their image; those without an area in it.
        images_without_boxes: how many.
        classes: in the order of the label map, those without boxes too.
        formats: image format -> images; None where nobody looked.
        heights, widths: of the images, in pixels.
        image_aspects: width / height of the images.
        image_sizes: (height, width, images) of the most frequent sizes, the most frequent first.
        num_image_sizes: how many different ones there are.
        box_sides_px: square root of the area of a box in pixels of its image.
        box_sides: the same, of its share of the image, 0 to 1.
        box_aspects: width / height of the boxes in pixels.
        small, medium, large: boxes by COCO's areas, below 32 x 32, below 96 x 96, others; the area is that of
            the annotations (of the outline, where there is one), as pycocotools takes it.
        boxes_per_image: over all images.
        crowding: (from, to, images) by number of boxes, `to` included.
        sides_histogram, aspects_histogram: of box_sides_px and box_aspects.
    """

    origin: str
    images: int
    boxes: int
    crowds: int
    clipped: int
    dropped: int
    images_without_boxes: int
    classes: tuple[ClassCount, ...]
    formats: dict[str, int] | None
    heights: Spread
    widths: Spread
    image_aspects: Spread
    image_sizes: tuple[tuple[int, int, int], ...]
    num_image_sizes: int
    box_sides_px: Spread
    box_sides: Spread
    box_aspects: Spread
    small: int
    medium: int
    large: int
    boxes_per_image: Spread
    crowding: tuple[tuple[int, int, int], ...]
    sides_histogram: Histogram
    aspects_histogram: Histogram

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def describe(annotations: Annotations, formats: Mapping[str, int] | None = None) -> DataStatistics:
    """The numbers of a data set; `formats` are counted by whoever looks at the image files."""
    targets = annotations.target_boxes
    counts = np.diff(targets.row_splits)
    image = np.repeat(np.arange(annotations.num_images), counts)
    heights, widths = annotations.image_sizes.astype(np.float64).T
    sides = (targets.boxes[:, 2:] - targets.boxes[:, :2]).astype(
        np.float64
    )  # (M, 2) width, height, in shares
    sides_px = sides * np.stack([widths, heights], axis=1)[image]
    side, aspect = np.sqrt(sides_px.prod(axis=1)), sides_px[:, 0] / sides_px[:, 1]
    sizes = _frequent_sizes(annotations.image_sizes)
    areas = _target_areas(annotations)
    return DataStatistics(
        origin=annotations.origin,
        images=annotations.num_images,
        boxes=len(targets.boxes),
        crowds=targets.num_crowds,
        clipped=targets.num_clipped,
        dropped=targets.num_dropped,
        images_without_boxes=int(np.count_nonzero(counts == 0)),
        classes=_classes(annotations, image),
        formats=None if formats is None else dict(formats),
        heights=Spread.of(heights),
        widths=Spread.of(widths),
        image_aspects=Spread.of(widths / heights),
        image_sizes=tuple(sizes[:MAX_SIZES]),
        num_image_sizes=len(sizes),
        box_sides_px=Spread.of(side),
        box_sides=Spread.of(np.sqrt(sides.prod(axis=1))),
        box_aspects=Spread.of(aspect),
        small=int(np.count_nonzero(areas < SMALL)),
        medium=int(np.count_nonzero((areas >= SMALL) & (areas < LARGE))),
        large=int(np.count_nonzero(areas >= LARGE)),
        boxes_per_image=Spread.of(counts),
        crowding=_crowding(counts),
        sides_histogram=Histogram.of_logarithm(side, 4),
        aspects_histogram=Histogram.of_logarithm(aspect, 4),
    )


def _classes(annotations: Annotations, image: np.ndarray) -> tuple[ClassCount, ...]:
    classes, label_map = annotations.target_boxes.classes, annotations.label_map
    boxes = np.bincount(classes, minlength=label_map.num_classes)
    pairs = np.unique(classes.astype(np.int64) * annotations.num_images + image)
    images = np.bincount(pairs // max(annotations.num_images, 1), minlength=label_map.num_classes)
    columns = label_map.category_ids, label_map.names, boxes.tolist(), images.tolist()
    return tuple(ClassCount(*row) for row in zip(*columns, strict=True))


def _target_areas(annotations: Annotations) -> np.ndarray:
    """The areas of the boxes that `target_boxes` keeps."""
    boxes, _ = annotations.clipped_boxes
    has_area = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return annotations.areas[has_area & ~annotations.is_crowd]


def _frequent_sizes(image_sizes: np.ndarray) -> list[tuple[int, int, int]]:
    """(height, width, images), the most frequent first, of equals the smallest."""
    keys = image_sizes[:, 0].astype(np.int64) << 32 | image_sizes[:, 1]
    different, counts = np.unique(keys, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rows = np.stack([different >> 32, different & 0xFFFFFFFF, counts], axis=1)[order]
    return [tuple(row) for row in rows.tolist()]


def _crowding(counts: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    largest = int(counts.max(initial=0))
    starts = [start for start in CROWDED if start <= largest]
    ends = [start - 1 for start in starts[1:]] + [largest]
    images, _ = np.histogram(counts, [*starts, largest + 1])
    return tuple(zip(starts, ends, images.tolist(), strict=True))
