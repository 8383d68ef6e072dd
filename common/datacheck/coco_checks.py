"""The columns of a COCO json, checked against each other: ids, references, categories, boxes."""

import collections
import functools
import itertools
from typing import Any

import msgspec
import numpy as np

from common.annotations import Annotations
from common.datacheck import coco_parse
from common.datacheck.checked_annotations import report_fixes
from common.datacheck.coco_columns import NONE, Images, Objects, some
from common.issues import Findings
from common.labels import MAX_CATEGORY_ID, LabelMap, category_faults

_FRACTION = 1.05  # edges of boxes that are fractions: rounding may put them a little outside
_MANY = 8  # boxes outside their images from which on a wrong form is the better explanation


def check(
    images: Images | None, objects: Objects | None, records: list[msgspec.Raw] | None, findings: Findings
) -> Annotations | None:
    """Checks all columns, also where some of them cannot be used.

    Args:
        images: None where the whole list was reported.
        objects: the annotations; None where the whole list was reported.
        records: the categories, undecoded; None where the whole list was reported.
        findings: gets all errors but those of single values; without errors, what is fixed or remarkable.

    Returns:
        The annotations; None where `findings` has errors.
    """
    categories = [coco_parse.decode_record(record) for record in records or []]
    if images is not None:
        _check_images(images, findings)
    if objects is not None:
        _check_objects(objects, findings)
    if records is not None:
        category_ids = _check_categories(categories, findings)
        if objects is not None and len(category_ids):
            _check_references(objects, "category_id", category_ids, "unknown-category", findings)
    if objects is None or images is None or not len(images.ids):
        return None
    image_row = _check_references(objects, "image_id", images.ids, "unknown-image", findings)
    _check_unit(images, objects, image_row, findings)
    if findings.stopping:
        return None
    order = np.argsort(image_row, kind="stable")  # grouped by image, otherwise in the order of the file
    boxes_ltwh_px = objects.boxes_ltwh_px[order]
    areas = objects.areas[order]
    with np.errstate(over="ignore"):
        box_areas = boxes_ltwh_px[:, 2] * boxes_ltwh_px[:, 3]
    annotations = Annotations(
        label_map=LabelMap.from_categories(categories),
        image_ids=images.ids,
        file_names=images.file_names,
        image_sizes=images.sizes,
        box_image=image_row[order],
        boxes_ltwh_px=boxes_ltwh_px,
        category_ids=objects.category_ids[order],
        is_crowd=objects.is_crowd[order],
        areas=np.where(np.isnan(areas), box_areas, areas),
        origin=findings.origin,
        findings=findings,
    )

    def name_box(row: int) -> str:
        return _text_in_image(images, objects, image_row, order[row])

    report_fixes(annotations, images.name, name_box, findings)
    return None if findings.stopping else annotations


def _check_categories(categories: list[Any], findings: Findings) -> np.ndarray:
    """Returns int64 (C,), the ids that annotations may have; NONE where one was reported."""
    faults = list(category_faults(categories))
    findings.add_many("bad-category", len(faults), faults)
    ids, names = [], []
    for category in categories:
        category_id = category.get("id") if isinstance(category, dict) else None
        is_usable = type(category_id) is int and 0 <= category_id <= MAX_CATEGORY_ID
        ids.append(category_id if is_usable else NONE)
        names.append(f"category {category_id} ({category.get('name')!r})" if is_usable else "")
    for before, (category_id, name) in itertools.pairwise(zip(ids, names, strict=True)):
        if NONE < category_id < before[0]:
            findings.add("category-order", f"{name} is listed after {before[1]}")
    return np.array(ids, np.int64)


def _check_images(images: Images, findings: Findings) -> None:
    if not len(images.ids):
        findings.add("no-images", "`images` is empty")
    findings.add_each("repeated-image-id", _repeats(images.ids), images.repeat_name)
    rows_of = collections.defaultdict(list)
    for row, name in enumerate(images.file_names):
        if name:
            rows_of[name].append(row)
    for rows in rows_of.values():
        if len(rows) > 1:
            findings.add("repeated-file", f"{some(list(map(images.name, rows)))} have one file")


def _check_objects(objects: Objects, findings: Findings) -> None:
    if not len(objects.ids):
        findings.add("no-boxes", "`annotations` is empty")
    findings.add_each("repeated-annotation-id", _repeats(objects.ids), objects.repeat_name)
    findings.add_each("box-negative", np.flatnonzero(objects.is_negative), objects.box_name)


def _check_references(
    objects: Objects, key: str, known: np.ndarray, kind: str, findings: Findings
) -> np.ndarray:
    """Looks for annotations of images or categories that are not there.

    Args:
        objects: the annotations.
        key: "image_id" or "category_id".
        known: int64 (K,), the ids of all images or categories; NONE where one was reported.
        kind: what to find.
        findings: where to.

    Returns:
        int64 (N,), the place in `known` of what each annotation refers to; NONE where it is not there.
    """
    ids = objects.image_ids if key == "image_id" else objects.category_ids
    order = np.argsort(known, kind="stable")
    places = np.minimum(np.searchsorted(known[order], ids), len(known) - 1)
    is_known = (known[order][places] == ids) & (ids != NONE)
    unknown = np.flatnonzero(~is_known & (ids != NONE))
    # An id may be unknown because the record that should have it was reported. That is said once.
    num_lost = len(known) - len(np.unique(known[known != NONE]))
    if len(np.unique(ids[unknown])) > num_lost:
        of = key.removesuffix("_id")
        findings.add_each(
            kind, unknown, lambda row: f"{objects.name(row)} has {key} {ids[row]}, which no {of} has"
        )
    return np.where(is_known, order[places], NONE)


def _check_unit(images: Images, objects: Objects, image_row: np.ndarray, findings: Findings) -> None:
    """Looks for boxes in another unit or form: all of them fractions, or corners in place of sides."""
    name_box = functools.partial(_text_in_image, images, objects, image_row)
    is_larger = np.append(np.all(images.sizes > 1, axis=1), False)[image_row]  # NONE is the last one
    is_sound = ~objects.is_negative & ~np.isnan(objects.boxes_ltwh_px[:, 0])
    rows = np.flatnonzero(is_larger & is_sound)
    left_top, sides = np.split(objects.boxes_ltwh_px[rows], 2, axis=1)
    with np.errstate(over="ignore"):
        is_within = (np.abs(left_top) <= _FRACTION) & (left_top + sides <= _FRACTION)
    if is_within.all() and np.all(sides > 0, axis=1).any():
        findings.add_each("boxes-not-in-pixels", rows, name_box)
        return
    # Corners in place of sides: half of the boxes reach far outside, and as corners all would fit.
    limits = images.sizes[image_row[rows]][:, ::-1] + 1.0  # (M, 2) width, height, and a pixel
    is_outside = np.any(left_top + sides > limits, axis=1)
    would_fit = np.all((left_top >= -1) & (sides > left_top) & (sides <= limits), axis=1)
    outside = rows[is_outside]
    if len(outside) >= max(_MANY, len(rows) / 2) and would_fit.all():
        findings.add_each("boxes-of-corners", outside, name_box)


def _text_in_image(images: Images, objects: Objects, image_row: np.ndarray, row: int) -> str:
    height, width = images.sizes[image_row[row]].tolist()
    return f"{objects.box_name(row)} in {width} x {height} pixels"


def _repeats(ids: np.ndarray) -> list[list[int]]:
    """The rows of each id that is given more than once."""
    order = np.argsort(ids, kind="stable")
    unique, first, counts = np.unique(ids[order], return_index=True, return_counts=True)
    is_repeated = (counts > 1) & (unique != NONE)
    spans = zip(first[is_repeated].tolist(), counts[is_repeated].tolist(), strict=True)
    return [order[begin : begin + count].tolist() for begin, count in spans]
