"""Checks the lists of a COCO json: ids, references, categories, and the pixels that its boxes refer to.

coco_parse.py has checked each value. Nothing is changed here: common/data/coco.py does that.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.data.annotations import NONE, CocoImage, find_rows, sizes_of
from common.data.check import coco_parse
from common.data.check.boxes import check_unit
from common.data.check.image_headers import SWAPS_SIDES, ImageFacts
from common.data.check.issues import Issues
from common.data.labels import MAX_CATEGORY_ID, category_faults


class ObjectTable:
    """The annotations of a json as arrays.

    Attributes:
        rows: array (N,) from `table_of`; NONE and NaN replace invalid values.
        sizes: int64 (I, 2), width and height of the images.
        files: the file names of the images.
        image_row: int64 (N,), index of each annotation's image; NONE if its `image_id` is unknown.
        is_negative: bool (N,), whether a side of the box is negative.
    """

    def __init__(self, rows: np.ndarray, images: Sequence[CocoImage]):
        self.rows = rows
        self.image_row = _find_ids(rows["image_id"], np.array([image.id for image in images], np.int64))
        self.sizes = sizes_of(images)[:, ::-1].astype(np.int64)
        self.files = [image.file_name for image in images]
        self.is_negative = np.any(rows["bbox"][:, 2:] < 0, axis=1)

    def rows_of(self, is_selected: np.ndarray) -> np.ndarray:
        """Returns the rows of the annotations of the images for which `is_selected`, bool (I,), is true."""
        # NONE (-1), the index of an unknown image, selects the appended False.
        return np.flatnonzero(np.append(is_selected, False)[self.image_row])

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


def check_lists(lists: dict[str, list | None], table: ObjectTable, issues: Issues) -> None:
    """Checks the lists from `coco_parse.parse` and the ids in them. A list is None if it is invalid."""
    for key, kind in (("images", "no-images"), ("annotations", "no-boxes")):
        if lists[key] == []:
            issues.add(kind, f"`{key}` is empty")
    images, categories = lists["images"] or [], lists["categories"]
    ids, files = [image.id for image in images], table.files
    issues.add_repeats("repeated-image-id", "image", ids, lambda row: repr(files[row]))
    issues.add_repeats("repeated-file", "file", files, lambda row: image_name(images, row))
    numbers = table.rows["id"].tolist()
    issues.add_repeats("repeated-annotation-id", "annotation", numbers, "annotations[{}]".format)
    issues.add_each("box-negative", np.flatnonzero(table.is_negative), table.name_with_box)
    if categories is not None:
        known = _check_categories(categories, issues)
        rows = _find_ids(table.rows["category_id"], known)
        _check_references(table, "category", rows, known, issues)
    _check_references(table, "image", table.image_row, np.array(ids, np.int64), issues)
    if images:
        boxes = table.rows["bbox"]
        rows = table.rows_of(np.all(table.sizes > 1, axis=1))
        rows = rows[~table.is_negative[rows] & ~np.isnan(boxes[rows, 0])]
        sizes = table.sizes[table.image_row[rows]]
        check_unit(boxes[rows], sizes, lambda i: table.name_in_image(rows[i]), issues)


def _find_ids(ids: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns the index into `known` of each id, int64 (N,); NONE if the id is NONE or not in `known`."""
    return np.where(ids == NONE, NONE, find_rows(ids, known))


def _check_references(
    objects: ObjectTable, of: str, rows: np.ndarray, known: np.ndarray, issues: Issues
) -> None:
    """Reports annotations whose image or category does not exist.

    Args:
        of: "image" or "category".
        rows: int64 (N,), index into `known` of each annotation's image or category, from `_find_ids`.
        known: int64 (K,), the ids of all images or categories; NONE replaces an invalid id.
        issues: receives the unknown references.
    """
    ids = objects.rows[f"{of}_id"]
    unknown = np.flatnonzero((rows == NONE) & (ids != NONE))
    # Reports no unknown ids if invalid or repeated ids in `known` can explain all of them.
    num_lost = len(known) - len(np.unique(known[known != NONE]))
    if len(known) and len(np.unique(ids[unknown])) > num_lost:
        text = "{} has {}_id {}, which no {} has".format
        issues.add_each(f"unknown-{of}", unknown, lambda row: text(objects.name(row), of, ids[row], of))


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


def image_name(images: Sequence[CocoImage], row: int) -> str:
    """Returns a name for messages, such as `image 12 ('a.jpg')`."""
    known = {"id": images[row].id, "file_name": images[row].file_name}
    known = {key: value for key, value in known.items() if value not in (NONE, "")}
    return coco_parse.record_name(known, "images", row)


def check_pixels(table: ObjectTable, facts: Sequence[ImageFacts], issues: Issues) -> None:
    """Without --coco_pixels, reports images whose boxes fit only after their EXIF rotation.

    An EXIF orientation of 5 to 8 swaps the sides of an image. Some labelling tools turn an image before they
    show it, and store the size of the file. Then boxes reach outside the stored image, but not outside the
    turned one.
    """
    orientation = np.array([fact.orientation for fact in facts])
    if issues.policy.coco_pixels or not np.any(orientation != 1):
        return
    stored = np.array([(fact.width, fact.height) for fact in facts], np.int64)
    upright = np.where(orientation[:, None] >= SWAPS_SIDES, stored[:, ::-1], stored)
    rows = table.rows_of(orientation != 1)
    image_row = table.image_row[rows]
    # Counts the images that only one of the two readings fits. Tolerance: one pixel.
    left_top, sides = np.split(table.rows["bbox"][rows], 2, axis=1)
    with np.errstate(over="ignore"):
        exceeds = [np.any(left_top + sides > size[image_row] + 1, axis=1) for size in (stored, upright)]
    outside_stored, outside_upright = (np.bincount(image_row[e], minlength=len(facts)) > 0 for e in exceeds)
    has_stored_size = np.all(table.sizes == stored, axis=1)  # others have the fault image-turned
    only_upright = np.flatnonzero(outside_stored & ~outside_upright & has_stored_size)
    if len(only_upright) > np.count_nonzero(outside_upright & ~outside_stored):
        outside = {table.image_row[row]: row for row in rows[exceeds[0]][::-1]}
        issues.add_each("boxes-turned", only_upright, lambda image: table.name_in_image(outside[image]))
