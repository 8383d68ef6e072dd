"""Reads a COCO json of instances: its boxes become the `Annotations` of the images that can be used.

    annotations = load_coco("instances.json", "images/")
    source = CocoSource("images/", annotations)  # source.read adds readers.coco_reader to a DALI graph

Boxes are left, top, width, height in pixels, until `Annotations.target_boxes` normalises them. This module
changes only these, and reports them:

    box with `ignore`: 1              becomes a crowd
    box with CVAT's `rotation`        is replaced by the upright box around it
    box in pixels after EXIF rotation is turned back to the stored pixels, with --coco_pixels=turned
    repeated box                      is dropped
    image that cannot be used         is left out with its boxes, with --on_bad_image=skip

The modules in check/ report all other faults, and change nothing.

Format: https://cocodataset.org/#format-data
"""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from common.args import ImagePolicy
from common.data.annotations import NONE, Annotations, CocoImage, CocoObject, table_of, to_annotations
from common.data.check import coco_parse
from common.data.check.boxes import report_annotations
from common.data.check.coco import ObjectTable, check_lists, check_pixels, image_name
from common.data.check.coco_cache import CocoCache
from common.data.check.coco_parse import CocoExtra
from common.data.check.image_headers import SWAPS_SIDES, ImageFacts
from common.data.check.images import check_files
from common.data.check.issues import Issues
from common.data.check.repeated_images import report_repeated_images
from common.data.labels import LabelMap
from common.data.sources import Source
from common.errors import UserError

if TYPE_CHECKING:
    from common.dali_ops import Nodes

MIRRORS_X, MIRRORS_Y = (2, 3, 7, 8), (3, 4, 6, 7)  # EXIF orientations that mirror x, and y
_DECIMALS = 6  # of the edges of a box around a rotated box, because cosines are rounded


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
    return annotations or _read(os.fspath(json_path), images_dir, policy, cache)


def _read(
    json_path: str, images_dir: str | os.PathLike | None, policy: ImagePolicy, cache: CocoCache | None
) -> Annotations:
    issues = Issues(json_path, policy)
    lists = coco_parse.parse(issues.origin, issues)
    if lists["extras"]:
        _apply_extras(lists["extras"], lists["annotations"] or [], issues)
    images = lists["images"] or []
    table = ObjectTable(table_of(lists["annotations"] or []), images)
    check_lists(lists, table, issues)
    del lists["annotations"], lists["extras"]  # frees memory
    usable, checksums, state = np.ones(len(images), np.bool_), None, ""
    if images_dir is not None and not os.path.isdir(images_dir):
        issues.add("no-image-directory", os.fspath(images_dir))
    elif images_dir is not None:
        usable, facts, state = check_files(images_dir, images, lambda row: image_name(images, row), issues)
        check_pixels(table, facts, issues)
        if policy.coco_pixels == "turned":
            _turn_boxes(table, images, facts, issues)
        checksums = np.array([fact.checksum for fact in facts], np.int64)
    issues.raise_if_stopping()
    label_map = LabelMap.from_categories(_without_root(lists["categories"] or [], table, issues))
    annotations = to_annotations(images, table.rows, table.image_row, label_map, issues.origin)
    annotations = dataclasses.replace(annotations, checksums=checksums)
    order = np.argsort(table.image_row, kind="stable")  # that of `annotations`
    repeated = annotations.is_repeated
    issues.add_each("box-repeated", order[repeated], table.name_with_box)
    order = order[~repeated & usable[table.image_row[order]]]
    annotations = annotations.select_boxes(~repeated).select(usable)
    if images_dir is not None:
        report_repeated_images(images_dir, annotations, issues)
    annotations = report_annotations(
        annotations, annotations.image_name, lambda row: table.name_in_image(order[row]), issues
    )
    if cache:
        cache.save(annotations, [image.file_name for image in images], usable, state)
        return cache.load(state) or annotations  # the memory of the loaded arrays is shared
    return annotations


# --- what changes boxes and categories ---


def _apply_extras(extras: list[CocoExtra], objects: list[CocoObject], issues: Issues) -> None:
    """Marks annotations with `ignore` as crowds, and replaces rotated boxes by the upright boxes around them.

    Converters of Pascal VOC write `ignore` for difficult objects (mmdetection,
    tools/dataset_converters/pascal_voc.py).
    """
    for number, (an_object, extra) in enumerate(zip(objects, extras, strict=True)):
        ignore, angle = extra.ignore, _angle(extra)
        if not ignore and not angle:
            continue
        known = {"id": an_object.id, "image_id": an_object.image_id}
        known = {key: value for key, value in known.items() if value not in (None, NONE)}
        name = coco_parse.record_name(known, "annotations", number)
        if ignore not in (None, 0, 1):
            issues.add("wrong-type", f"{name} has ignore {coco_parse.shown(ignore)}: 0 or 1 is needed")
        elif ignore:
            an_object.iscrowd = 1
            issues.add("ignored", name)
        before = an_object.bbox
        if angle and min(before[2:]) >= 0:  # false for NaN
            an_object.bbox = box_around_rotated(before, angle)
            text = f"{name} has bbox {list(before)} and rotation {angle:g}"
            issues.add("box-rotated", f"{text}: {list(an_object.bbox)} is used")


def _angle(extra: CocoExtra) -> float:
    """Returns the angle of a rotated rectangle of CVAT in degrees, from 0 up to 180.

    CVAT stores the box before the rotation about its center, and the angle as the attribute `rotation`. An
    ellipse has this attribute, too, but its box already encloses its mask
    (cvat/apps/dataset_manager/formats/transformers.py, RotatedBoxesToPolygons and EllipsesToMasks).
    """
    angle = extra.attributes.get("rotation") if isinstance(extra.attributes, dict) else None
    if not isinstance(angle, int | float) or not abs(angle) < math.inf or extra.segmentation:
        return 0
    return angle % 180


def box_around_rotated(box_ltwh_px: tuple[float, ...], degrees: float) -> tuple[float, float, float, float]:
    """Returns the upright box, ltwh in pixels, around a box that is rotated about its center."""
    left, top, width, height = box_ltwh_px
    cosine, sine = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    sides = width * cosine + height * sine, width * sine + height * cosine
    corner = left + (width - sides[0]) / 2, top + (height - sides[1]) / 2
    left, top, width, height = (round(edge, _DECIMALS) for edge in (*corner, *sides))
    return left, top, width, height


def _turn_boxes(
    table: ObjectTable, images: Sequence[CocoImage], facts: Sequence[ImageFacts], issues: Issues
) -> None:
    """Turns boxes of images with an EXIF orientation back to the stored pixels. Sets the sizes of these."""
    orientation = np.array([fact.orientation for fact in facts])
    turned_rows = np.flatnonzero(orientation != 1).tolist()
    rows = table.rows_of(orientation != 1)
    image_row = table.image_row[rows]
    stored = np.array([(fact.width, fact.height) for fact in facts], np.int64).reshape(-1, 2)
    boxes = table.rows["bbox"]
    boxes[rows] = turn_back(boxes[rows], stored[image_row], orientation[image_row])
    for row in turned_rows:
        table.sizes[row] = images[row].width, images[row].height = stored[row].tolist()
    text = "{} has EXIF orientation {}".format
    issues.add_each("box-turned", turned_rows, lambda row: text(image_name(images, row), orientation[row]))


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


def _without_root(categories: list[Any], table: ObjectTable, issues: Issues) -> list[Any]:
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


# --- the data set ---


class CocoSource(Source):
    """A directory of images, and a COCO json with file names relative to it."""

    name = "coco"

    def __init__(self, images_dir: str, annotations: Annotations) -> None:
        self.images_dir, self.annotations = images_dir, annotations

    @functools.cached_property
    def files(self) -> Sequence[str]:  # type: ignore[override]
        return [os.path.join(self.images_dir, name) for name in self.annotations.file_names]

    def read(self, *, training: bool, shuffle: str = "global", **options: Any) -> "Nodes":
        from common.data import readers  # check_data.py needs no DALI

        return readers.coco_reader(self.images_dir, self.annotations, training=training, **options)
