"""Checks boxes of all formats: their unit, boxes outside images, areas, crowds, numbers of objects."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from common.data.annotations import MAX_DETECTIONS, Annotations
from common.data.check.issues import Issues

LARGE_ID = 2**31  # DALI only accepts smaller ids
_FRACTION = 1.05  # upper limit for edges of normalised boxes, because rounding may give numbers above 1
_SMALL = 32**2  # COCOeval's limit of small objects in square pixels
_MANY = 8  # least number of boxes outside their images that are reported as x1y1x2y2


def check_unit(
    boxes_ltwh_px: np.ndarray, sizes: np.ndarray, name: Callable[[int], str], issues: Issues
) -> None:
    """Reports normalised boxes, and boxes that are x1y1x2y2 instead of ltwh.

    Args:
        boxes_ltwh_px: float64 (N, 4), without negative sides and NaN.
        sizes: int64 (N, 2), width and height of each box's image; both exceed 1.
        name: i -> the name of box i for messages.
    """
    left_top, sides = np.split(boxes_ltwh_px, 2, axis=1)
    with np.errstate(over="ignore"):
        is_within = (np.abs(left_top) <= _FRACTION) & (left_top + sides <= _FRACTION)
    if is_within.all() and np.all(sides > 0, axis=1).any():
        issues.add_each("boxes-not-in-pixels", range(len(boxes_ltwh_px)), name)
        return
    # The boxes are probably x1y1x2y2 if all boxes, read as x1y1x2y2, are inside their images, and at least
    # half of them, read as ltwh, are not.
    limits = sizes + 1.0  # tolerance: one pixel
    is_outside = np.any(left_top + sides > limits, axis=1)
    would_fit = np.all((left_top >= -1) & (sides > left_top) & (sides <= limits), axis=1)
    outside = np.flatnonzero(is_outside)
    if len(outside) >= max(_MANY, len(boxes_ltwh_px) / 2) and would_fit.all():
        issues.add_each("boxes-of-corners", outside, name)


def report_annotations(
    annotations: Annotations, name_image: Callable[[int], str], name_box: Callable[[int], str], issues: Issues
) -> Annotations:
    """Reports fixes and warnings for valid annotations, or an error if no image or no box can be used.

    Args:
        annotations: the annotations of the usable images, without errors.
        name_image: i -> the name of image i for messages.
        name_box: i -> the name of box i and its image for messages.
        issues: receives no-images, no-boxes, box-outside (the worst first), box-empty, area-differs, crowd,
            image-without-boxes, many-objects, large-id.

    Returns:
        The annotations, with `issues` in their attribute `issues`.

    Raises:
        DataError: no image or no box can be used.
    """
    boxes, _, has_area = annotations.clipped_boxes
    is_crowd = annotations.is_crowd
    is_target = has_area & ~is_crowd
    if not annotations.num_images:
        left_out = sum(issue.count for issue in issues if issue.skipped)
        issues.add("no-images", f"all {left_out} images are skipped")
    elif not is_target.any():
        issues.add("no-boxes", f"each of the {len(boxes)} boxes is a crowd or has no area")
    counts = np.bincount(annotations.box_image[is_target], minlength=annotations.num_images)
    report_clipped(annotations, name_box, issues)
    # An object touches all edges of its box. So its area is at least that of a line along the longer
    # side, here half a pixel wide. A mask may exceed its box by a pixel at each edge.
    sides, areas = annotations.boxes_ltwh_px[:, 2:], annotations.areas
    with np.errstate(over="ignore"):
        too_large = areas > (sides[:, 0] + 2) * (sides[:, 1] + 2)
        too_small = (areas < sides.max(axis=1, initial=0) / 2) & (annotations.box_areas > _SMALL)
    for kind, which, name in (
        (
            "area-differs",
            is_target & (too_large | too_small),
            lambda row: f"area {areas[row]:g}: {name_box(row)}",
        ),
        ("crowd", is_crowd, name_box),
        ("image-without-boxes", counts == 0, name_image),
        ("large-id", annotations.image_ids >= LARGE_ID, name_image),
    ):
        issues.add_each(kind, np.flatnonzero(which), name)
    _report_many_objects(annotations, name_image, issues)
    large = [category for category in annotations.label_map.categories() if category["id"] >= LARGE_ID]
    issues.add_each("large-id", large, lambda category: f"category {category['id']} ({category['name']!r})")
    issues.raise_if_stopping()
    return dataclasses.replace(annotations, issues=issues)


def report_clipped(annotations: Annotations, name_box: Callable[[int], str], issues: Issues) -> None:
    """Adds boxes that reach outside their images (the worst first), and those without area inside them.

    Args:
        name_box: i -> the name of box i and its image for messages.
    """
    _, is_clipped, has_area = annotations.clipped_boxes
    outside = np.flatnonzero(has_area & is_clipped & ~annotations.is_crowd)
    issues.add_each("box-outside", outside[np.argsort(-_overhang(annotations, outside))], name_box)
    issues.add_each("box-empty", np.flatnonzero(~has_area), name_box)


def _report_many_objects(annotations: Annotations, name_image: Callable[[int], str], issues: Issues) -> None:
    """Adds each image with more than MAX_DETECTIONS objects of a category, the largest number first."""
    is_object = ~annotations.is_crowd
    counts = np.bincount(annotations.box_image[is_object], minlength=annotations.num_images)
    rows = np.flatnonzero(is_object & (counts > MAX_DETECTIONS)[annotations.box_image])
    images, categories = annotations.box_image[rows].tolist(), annotations.category_ids[rows].tolist()
    pairs = collections.Counter(zip(images, categories, strict=True)).most_common()
    names = dict(zip(annotations.label_map.category_ids, annotations.label_map.names, strict=True))

    def describe(item: tuple[tuple[int, int], int]) -> str:
        (image, category), count = item
        recall = MAX_DETECTIONS / count
        return f"{name_image(image)} has {count} of {names[category]!r}: recall is at most {recall:.3f}"

    issues.add_each("many-objects", [item for item in pairs if item[1] > MAX_DETECTIONS], describe)


def _overhang(annotations: Annotations, rows: np.ndarray) -> np.ndarray:
    """Returns float64 (M,), by how many pixels each of the boxes `rows` reaches outside its image at most."""
    left_top, sides = np.split(annotations.boxes_ltwh_px[rows], 2, axis=1)
    limits = annotations.image_sizes[annotations.box_image[rows]][:, ::-1]
    with np.errstate(over="ignore"):
        return np.concatenate([-left_top, left_top + sides - limits], axis=1).max(axis=1)
