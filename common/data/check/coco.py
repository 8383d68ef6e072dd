"""Reads and checks a COCO json of instances: values, ids, references, categories, boxes, image files.

All errors are reported together, with the ids of the records. DALI reads arrays that readers.py writes from
the result of `load_coco`.

Format: https://cocodataset.org/#format-data
"""

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from common.args import ImagePolicy
from common.data.annotations import (
    MAX_DETECTIONS,
    NONE,
    Annotations,
    CocoImage,
    find_rows,
    sizes_of,
    table_of,
    to_annotations,
)
from common.data.check import coco_parse
from common.data.check.coco_cache import CocoCache
from common.data.check.image_headers import ImageFacts
from common.data.check.images import check_files
from common.data.check.issues import Issues
from common.data.check.repeated_images import report_repeated_images
from common.data.labels import MAX_CATEGORY_ID, LabelMap, category_faults
from common.errors import UserError

LARGE_ID = 2**31  # DALI only accepts smaller ids
_FRACTION = 1.05  # upper limit for edges of normalised boxes, because rounding may give numbers above 1
_SMALL = 32**2  # COCOeval's limit of small objects in square pixels
# EXIF orientations: from this one on, they swap width and height; and those that mirror x, and y.
SWAPS_SIDES = 5
MIRRORS_X, MIRRORS_Y = (2, 3, 7, 8), (3, 4, 6, 7)
_MANY = 8  # least number of boxes outside their images that are reported as x1y1x2y2


def load_coco(
    json_path: str | os.PathLike,
    images_dir: str | os.PathLike | None = None,
    *,
    policy: ImagePolicy = ImagePolicy(),
) -> Annotations:
    """Reads and checks a COCO json of instances.

    Annotations may lack `area` (default: the area of the box), `iscrowd` (default: 0) and `id`. Boxes that
    reach outside their image or have no area are accepted and reported. A negative side is an error. Boxes
    with `ignore` are crowds. Repeated boxes and a category that only groups all others are dropped.

    Args:
        images_dir: the directory that `file_name` is relative to; if None, image files are not checked.

    Returns:
        The annotations; with on_bad_image="skip", only those of usable images. Their attribute `issues` lists
        fixes, skipped images and warnings.

    Raises:
        DataError: the json or the image files have errors; the message lists all of them.
        UserError: `policy` contradicts itself.
    """
    if policy.coco_pixels == "turned" and policy.check != "all":
        raise UserError("--coco_pixels=turned needs the orientation of every image: use --check=all")
    cache = CocoCache(os.fspath(json_path), images_dir, policy) if images_dir is not None else None
    annotations = cache.load() if cache else None
    return annotations or _load(os.fspath(json_path), images_dir, policy, cache)


def _load(
    json_path: str, images_dir: str | os.PathLike | None, policy: ImagePolicy, cache: CocoCache | None
) -> Annotations:
    issues = Issues(json_path, policy)
    lists = coco_parse.parse(issues.origin, issues)
    images = lists["images"] or []
    table = _Objects(table_of(lists["annotations"] or []), images)
    _check(lists, table, issues)
    del lists["annotations"]  # frees memory
    usable, checksums, state = np.ones(len(images), np.bool_), None, ""
    if images_dir is not None and not os.path.isdir(images_dir):
        issues.add("no-image-directory", os.fspath(images_dir))
    elif images_dir is not None:
        usable, facts, state = check_files(images_dir, images, lambda row: _image_name(images, row), issues)
        _turn_boxes(table, images, facts, issues)
        checksums = np.array([fact.checksum for fact in facts], np.int64)
    issues.raise_if_stopping()
    categories = _without_root(lists["categories"] or [], table, issues)
    label_map = LabelMap.from_categories(categories)
    annotations = to_annotations(images, table.rows, table.image_row, label_map, issues.origin)
    annotations = dataclasses.replace(annotations, checksums=checksums)
    order = np.argsort(table.image_row, kind="stable")
    repeated = annotations.is_repeated
    issues.add_each("box-repeated", order[repeated], table.name_with_box)
    order = order[~repeated & usable[table.image_row[order]]]
    annotations = annotations.select_boxes(~repeated).select(usable)
    if images_dir is not None:
        report_repeated_images(images_dir, annotations, issues)
    result = finish(annotations, annotations.image_name, lambda row: table.name_in_image(order[row]), issues)
    if cache:
        cache.save(result, [image.file_name for image in images], usable, state)
        return cache.load(state) or result  # the memory of the loaded arrays is shared
    return result


def _check(lists: dict[str, list | None], table: "_Objects", issues: Issues) -> None:
    """Checks the lists from `coco_parse.parse` and the ids in them. A list is None if it is invalid."""
    for key, kind in (("images", "no-images"), ("annotations", "no-boxes")):
        if lists[key] == []:
            issues.add(kind, f"`{key}` is empty")
    images, categories = lists["images"] or [], lists["categories"]
    ids, files = [image.id for image in images], table.files
    issues.add_repeats("repeated-image-id", "image", ids, lambda row: repr(files[row]))
    issues.add_repeats("repeated-file", "file", files, lambda row: _image_name(images, row))
    numbers = table.rows["id"].tolist()
    issues.add_repeats("repeated-annotation-id", "annotation", numbers, "annotations[{}]".format)
    issues.add_each("box-negative", np.flatnonzero(table.is_negative), table.name_with_box)
    if categories is not None:
        _check_references(table, "unknown-category", _check_categories(categories, issues), issues)
    table.image_row = _check_references(table, "unknown-image", np.array(ids, np.int64), issues)
    if images:
        boxes = table.rows["bbox"]
        # The index NONE (-1) selects the appended False.
        is_larger = np.append(np.all(table.sizes > 1, axis=1), False)[table.image_row]
        rows = np.flatnonzero(is_larger & ~table.is_negative & ~np.isnan(boxes[:, 0]))
        sizes = table.sizes[table.image_row[rows]]
        check_unit(boxes[rows], sizes, lambda i: table.name_in_image(rows[i]), issues)


class _Objects:
    """The annotations of a json as arrays.

    Attributes:
        rows: array (N,) from `table_of`; NONE and NaN replace invalid values.
        sizes: int64 (I, 2), width and height of the images.
        files: the file names of the images.
        image_row: int64 (N,), index of each annotation's image; NONE if it is unknown.
        is_negative: bool (N,), whether a side of the box is negative.
    """

    image_row: np.ndarray

    def __init__(self, rows: np.ndarray, images: Sequence[CocoImage]):
        self.rows = rows
        self.sizes = sizes_of(images)[:, ::-1].astype(np.int64)
        self.files = [image.file_name for image in images]
        self.is_negative = np.any(rows["bbox"][:, 2:] < 0, axis=1)

    def name(self, row: int) -> str:
        """Returns a name for messages, such as `annotation 7 (image 3)`."""
        known = {key: self.rows[key][row].item() for key in ("id", "image_id")}
        known = {key: number for key, number in known.items() if number != NONE}
        return coco_parse.record_name(known, "annotations", row)

    def name_with_box(self, row: int) -> str:
        return f"{self.name(row)} has bbox {self.rows['bbox'][row].tolist()}"

    def name_in_image(self, row: int) -> str:
        width, height = self.sizes[self.image_row[row]].tolist()
        file = self.files[self.image_row[row]]
        return f"{self.name_with_box(row)} in {width} x {height} pixels of {file!r}"


def _image_name(images: Sequence[CocoImage], row: int) -> str:
    """Returns a name for messages, such as `image 12 ('a.jpg')`."""
    known = {"id": images[row].id, "file_name": images[row].file_name}
    known = {key: value for key, value in known.items() if value not in (NONE, "")}
    return coco_parse.record_name(known, "images", row)


def _check_categories(categories: list[Any], issues: Issues) -> np.ndarray:
    """Returns the ids of the categories, int64 (C,); NONE replaces an invalid id."""
    issues.add_each("bad-category", list(category_faults(categories)), str)
    stored_ids = [category.get("id") if isinstance(category, dict) else None for category in categories]
    ids = [i if type(i) is int and 0 <= i <= MAX_CATEGORY_ID else NONE for i in stored_ids]
    for row, (before, after) in enumerate(itertools.pairwise(ids)):
        if NONE < after < before:
            names = [f"category {c['id']} ({c.get('name')!r})" for c in categories[row : row + 2]]
            issues.add("category-order", f"{names[1]} is listed after {names[0]}")
    return np.array(ids, np.int64)


def _without_root(categories: list[Any], table: "_Objects", issues: Issues) -> list[Any]:
    """Drops a category without boxes that all other categories name as their supercategory.

    Roboflow's exports begin with such a category, which has the name of the project. A category that only
    some of the others name stays, because it may have boxes in other data, such as the evaluation data.
    """
    for root in categories:
        is_root = all(c is root or c.get("supercategory") == root["name"] for c in categories)
        if is_root and len(categories) > 1 and not np.any(table.rows["category_id"] == root["id"]):
            issues.add("root-category", f"category {root['id']} ({root['name']!r})")
            return [category for category in categories if category is not root]
    return categories


def _turn_boxes(
    table: "_Objects", images: Sequence[CocoImage], facts: Sequence[ImageFacts], issues: Issues
) -> None:
    """Turns boxes back to the stored pixels if --coco_pixels=turned. Sets the sizes of these images.

    Without --coco_pixels, reports images with an EXIF orientation of 5 to 8 (which swaps the sides) whose
    boxes reach outside the stored image, but not outside the turned one. Some labelling tools turn an image
    before they show it, and store the size of the file.
    """
    orientation = np.array([fact.orientation for fact in facts])
    turned = orientation != 1
    if not turned.any() or issues.policy.coco_pixels == "stored":
        return
    stored = np.array([(fact.width, fact.height) for fact in facts], np.int64)
    upright = np.where(orientation[:, None] >= SWAPS_SIDES, stored[:, ::-1], stored)
    rows = np.flatnonzero(np.append(turned, False)[table.image_row])  # NONE (-1) selects False
    image_row = table.image_row[rows]
    if issues.policy.coco_pixels == "turned":
        boxes = table.rows["bbox"]
        boxes[rows] = turn_back(boxes[rows], stored[image_row], orientation[image_row])
        table.sizes[turned] = stored[turned]
        turned_rows = np.flatnonzero(turned).tolist()
        for row in turned_rows:
            images[row].width, images[row].height = stored[row].tolist()
        text = "{} has EXIF orientation {}".format
        issues.add_each(
            "box-turned", turned_rows, lambda row: text(_image_name(images, row), orientation[row])
        )
        return
    # Counts the images that only one of the two readings fits. Tolerance: one pixel.
    left_top, sides = np.split(table.rows["bbox"][rows], 2, axis=1)
    with np.errstate(over="ignore"):
        exceeds = [np.any(left_top + sides > size[image_row] + 1, axis=1) for size in (stored, upright)]
    outside_stored, outside_upright = (np.bincount(image_row[e], minlength=len(images)) > 0 for e in exceeds)
    has_stored_size = np.all(table.sizes == stored, axis=1)  # others have the fault image-turned
    only_upright = np.flatnonzero(outside_stored & ~outside_upright & has_stored_size)
    if len(only_upright) > np.count_nonzero(outside_upright & ~outside_stored):
        outside = {table.image_row[row]: row for row in rows[exceeds[0]][::-1]}
        issues.add_each("boxes-turned", only_upright, lambda image: table.name_in_image(outside[image]))


def turn_back(boxes_ltwh_px: np.ndarray, stored: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    """Converts boxes in pixels of the turned image to pixels of the stored image.

    Args:
        boxes_ltwh_px: float64 (N, 4).
        stored: (N, 2), width and height of each box's image as stored; 1, 1 if boxes are fractions of them.
        orientation: int64 (N,), EXIF orientation of each box's image.
    """
    swaps = orientation[:, None] >= SWAPS_SIDES
    left, top, width, height = np.where(swaps, boxes_ltwh_px[:, [1, 0, 3, 2]], boxes_ltwh_px).T
    left = np.where(np.isin(orientation, MIRRORS_X), stored[:, 0] - left - width, left)
    top = np.where(np.isin(orientation, MIRRORS_Y), stored[:, 1] - top - height, top)
    return np.stack([left, top, width, height], axis=1)


def _check_references(objects: _Objects, kind: str, known: np.ndarray, issues: Issues) -> np.ndarray:
    """Reports annotations whose image or category does not exist.

    Args:
        kind: the kind of issue to report, "unknown-image" or "unknown-category".
        known: int64 (K,), the ids of all images or categories; NONE replaces an invalid id.
        issues: receives the unknown references.

    Returns:
        int64 (N,), index into `known` of each annotation's image or category; NONE if it does not exist.
    """
    of = kind.removeprefix("unknown-")
    ids = objects.rows[f"{of}_id"]
    rows = np.where(ids == NONE, NONE, find_rows(ids, known))
    unknown = np.flatnonzero((rows == NONE) & (ids != NONE))
    # Reports no unknown ids if invalid or repeated ids in `known` can explain all of them.
    num_lost = len(known) - len(np.unique(known[known != NONE]))
    if len(known) and len(np.unique(ids[unknown])) > num_lost:
        text = "{} has {}_id {}, which no {} has".format
        issues.add_each(kind, unknown, lambda row: text(objects.name(row), of, ids[row], of))
    return rows


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


def finish(
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
