"""Builds Annotations from images that have one label file each, as in Pascal VOC and YOLO.

The id of an image is the number that the digits of its name form: 2007000027 for 2007_000027.jpg. If that
gives no unique ids, all images are numbered from 1.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from common.data.annotations import NONE, Annotations, CocoImage, CocoObject, table_of, to_annotations
from common.data.check.boxes import report_clipped
from common.data.check.image_headers import ImageFacts
from common.data.check.images import check_files
from common.data.check.issues import Issues
from common.data.labels import LabelMap, is_text
from common.errors import UserError
from common.files import encoding_of

_SIDES = "has left, top, width, height"
_MAX_IMAGE_ID = 2**31 - 1  # DALI keeps ids up to this one unchanged


class LabelledImage(NamedTuple):
    """An image and the file of its labels.

    Attributes:
        file_name: path relative to the directory of images.
        label_file: path of the file with its objects.
        size: (height, width) in pixels in the label file; 0 if the file does not contain it.
    """

    file_name: str
    label_file: str
    size: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"image {self.file_name!r} ({self.label_file})"


Box = tuple[float, float, float, float]  # left, top, width, height in pixels, or in yolo.py as fractions
Object = tuple[Box, int, bool]  # box, category id, is a crowd


def image_ids(file_names: Sequence[str]) -> list[int]:
    """Returns an id for each image, by the rule in the module docstring."""
    digits = [re.sub(r"[^0-9]", "", pathlib.PurePath(name).stem) for name in file_names]
    ids = [int(number) if 0 < len(number) < 19 else _MAX_IMAGE_ID + 1 for number in digits]
    if len(set(ids)) == len(ids) and max(ids, default=0) <= _MAX_IMAGE_ID:
        return ids
    return list(range(1, len(file_names) + 1))


def require_directory(images_dir: str) -> None:
    """Raises UserError if the directory of the images does not exist."""
    if not os.path.isdir(images_dir):
        raise UserError(f"{images_dir} is not a directory: give the images' directory as --images=DIR")


def read_lines(path: str) -> list[str]:
    """Returns the lines of a UTF-8 file, stripped, without empty lines at the end. Raises UserError."""
    try:
        text = pathlib.Path(path).read_text(encoding_of(path))
    except UnicodeError as error:
        raise UserError(f"{path} is not text in UTF-8: save it as UTF-8") from error
    return [line.strip() for line in text.rstrip().split("\n")]


def find_listed(
    path: str,
    find: Callable[[str], str | None],
    kind: str,
    issues: Issues,
    hints: Callable[[Sequence[str]], Mapping[str, str]] = lambda lines: {},
) -> list[str]:
    """Returns the items that a list file names, without duplicates.

    Args:
        find: function that returns the item of a line, or None if it does not exist.
        kind: kind of issue for lines whose item does not exist.
        hints: function that returns texts for some of these lines.
    """
    lines = {number: line for number, line in enumerate(read_lines(path), 1) if line}
    items = {number: find(line) for number, line in lines.items()}
    missing = [number for number, item in items.items() if item is None]
    hint_of = hints([lines[number] for number in missing])
    for number in missing:
        hint = f", but {hint_of[lines[number]]}" if lines[number] in hint_of else ""
        issues.add(kind, f"{path} line {number}: {lines[number]!r} does not exist{hint}")
    return list(dict.fromkeys(item for item in items.values() if item is not None))


def check_images(
    images: Sequence[LabelledImage], images_dir: str, issues: Issues
) -> tuple[np.ndarray, Sequence[ImageFacts]]:
    """Checks the image files, and adds their errors to `issues`.

    Args:
        images_dir: the directory that the file names of the images are relative to.

    Returns:
        bool (I,), whether each image can be used; and what its file says about it.
    """
    for image in images:
        if not is_text(image.file_name):
            issues.add("image-unreadable", f"{image}: its name is not UTF-8, which json requires")
    headers = [CocoImage(NONE, _name(image), *image.size[::-1]) for image in images]
    return check_files(images_dir, headers, lambda row: str(images[row]), issues)[:2]


def make_annotations(
    images: Sequence[LabelledImage],
    usable: np.ndarray,
    facts: Sequence[ImageFacts],
    objects: Sequence[Sequence[Object]],
    label_map: LabelMap,
    issues: Issues,
) -> Annotations:
    """Builds the annotations of the images that can be used.

    Args:
        usable, facts: the results of `check_images`.
        objects: the objects of each image.
        issues: the errors in images and objects.

    Raises:
        DataError: `issues` has errors, or no image can be used, or no image has a box.
    """
    if not issues.stopping and not any(compress(objects, usable)):
        kind = "no-boxes" if usable.any() else "no-images"
        issues.add(kind, f"{np.count_nonzero(usable)} images, none with an object")
    issues.raise_if_stopping()
    reported = {*issues["label-missing"].offenders}
    empty = [
        str(image) for image, of_image in compress(zip(images, objects, strict=True), usable) if not of_image
    ]
    issues.add_each("image-without-boxes", [name for name in empty if name not in reported], str)
    names = [_name(image) for image in images]
    records = [
        CocoImage(image_id, name, fact.width, fact.height)
        for image_id, name, fact in zip(image_ids(names), names, facts, strict=True)
    ]
    table = table_of(
        [CocoObject(NONE, category_id, box, iscrowd=crowd) for box, category_id, crowd in chain(*objects)]
    )
    image_row = np.repeat(np.arange(len(images)), list(map(len, objects)))
    annotations = to_annotations(records, table, image_row, label_map, issues.origin)
    repeated = annotations.is_repeated
    boxes = annotations.boxes_ltwh_px
    issues.add_each(
        "box-repeated",
        np.flatnonzero(repeated),
        lambda row: f"{images[image_row[row]]} {_SIDES} = {boxes[row].tolist()}",
    )
    annotations = dataclasses.replace(annotations.select_boxes(~repeated), issues=issues).select(usable)
    usable_images, boxes = list(compress(images, usable)), annotations.boxes_ltwh_px
    report_clipped(
        annotations,
        lambda row: f"{usable_images[annotations.box_image[row]]} {_SIDES} = {boxes[row].tolist()}",
        issues,
    )
    return annotations


def _name(image: LabelledImage) -> str:
    return image.file_name if is_text(image.file_name) else ""
