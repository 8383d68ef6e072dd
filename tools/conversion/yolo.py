"""Reads YOLO's text labels: one .txt for each image, with one line `class cx cy w h` for each object.

The four numbers are the centre and the size of the box as fractions of the image's width and height. An image
has no objects if its label file is empty or missing. The label file has the image's path with `labels` in
place of `images` (or `JPEGImages`), else it is next to the image.

A line with more numbers is a polygon, `class x1 y1 x2 y2 x3 y3 ...`, and becomes its bounding box. Six
numbers are refused: the last one would be a confidence.

Labels do not tell whether the image was rotated by its EXIF orientation before it was labelled. So images
with an EXIF rotation are refused unless --yolo_pixels is given.

Source: AlexeyAB/darknet README "How to train"; https://docs.ultralytics.com/datasets/detect/ and
ultralytics/data/utils.py (verify_image_label).
"""

import os
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np

from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import Issues
from common.data.labels import LabelMap
from common.errors import UserError
from tools.conversion.labels import Box, LabelledImage, Object, make_annotations
from tools.conversion.options import Options
from tools.conversion.yolo_layout import find_files, find_names, label_file_of, read_names

_SHOWN = 60  # characters of a label line that a message shows
_FARTHEST = 1.0  # limit outside the image, in image sides; larger numbers are pixels
_DECIMALS = 6  # of coordinates in pixels, as many as labels have
# EXIF orientations that mirror x, and those that mirror y.
_MIRROR_X = (2, 3, 7, 8)
_MIRROR_Y = (3, 4, 6, 7)


def read_yolo(options: Options, policy: ImagePolicy = ImagePolicy()) -> tuple[Annotations, str]:
    """Reads and checks a data set with YOLO's labels.

    yolo_layout.py lists what --input can be. Without --label_map, class 0 becomes category 1, and so on.

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with file and line.
        UserError, OSError: files or directories do not exist, or class names are missing.
    """
    issues = Issues(options.input, policy)
    files, images_dir = find_files(options.input, options.split, issues)
    names_file = options.names or find_names(options.input)
    names = read_names(names_file)
    if options.label_map:
        label_map = LabelMap.load(options.label_map)
    else:
        try:
            label_map = LabelMap.from_categories({"id": i + 1, "name": name} for i, name in names.items())
        except UserError as error:
            raise UserError(f"{names_file}: {error}") from error
    ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    category_ids: dict[float, int] = {
        number: ids[str(name)] for number, name in names.items() if str(name) in ids
    }
    images: dict[str, LabelledImage] = {}
    for file in files:
        image = LabelledImage(os.path.relpath(file, images_dir), label_file_of(file))
        other = images.setdefault(image.label_file, image)
        if other != image:
            twice = f"{image.label_file} belongs to {other.file_name!r} and to {image.file_name!r}"
            issues.add("label-file", twice)
    annotations = make_annotations(
        list(images.values()),
        images_dir,
        label_map,
        lambda image, facts: _read_objects(image, facts, category_ids, options.yolo_pixels, issues),
        issues,
    )
    return annotations, images_dir


def _read_objects(
    image: LabelledImage,
    facts: ImageFacts,
    category_ids: Mapping[float, int],
    pixels: str | None,
    issues: Issues,
) -> Iterable[Object]:
    try:
        text = pathlib.Path(image.label_file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        issues.add("label-missing", str(image))
        return []
    except UnicodeDecodeError as error:
        issues.add("label-file", f"{image.label_file} is not UTF-8 text: {error}")
        return []
    boxes, found_ids = [], []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words:
            continue
        where = f"{image.label_file} line {number} {line.strip()[:_SHOWN]!r}"
        try:
            class_index, box = parse_line(words)
            if class_index not in category_ids:
                raise ValueError(f"has class {words[0]}, which is not one of the {len(category_ids)} classes")
        except ValueError as error:
            issues.add("label-line", f"{where} {error}")
            continue
        if len(words) > 5:
            issues.add("polygon", where)
        boxes.append(box)
        found_ids.append(category_ids[class_index])
    found = np.array(boxes).reshape(-1, 4)
    if facts.orientation != 1 and len(found):
        if pixels is None:
            issues.add("label-turned", f"{image} has orientation {facts.orientation}")
        elif pixels == "turned":
            found = turn_back(found, facts.orientation)
    found = np.round(found * [facts.width, facts.height, facts.width, facts.height], _DECIMALS)
    return [
        (box, found_id, False) for box, found_id in zip(map(tuple, found.tolist()), found_ids, strict=True)
    ]


def parse_line(words: list[str]) -> tuple[float, Box]:
    """Parses a line of a label file; raises ValueError if it is not a label.

    Returns:
        The class, and the box (left, top, width, height) as fractions of the image's width and height.
    """
    if len(words) < 5 or len(words) % 2 == 0:
        shapes = "a box is class cx cy w h without a confidence, a polygon is class x1 y1 x2 y2 ..."
        raise ValueError(f"has {len(words)} numbers: {shapes}")
    try:
        class_index, *numbers = map(float, words)
    except ValueError:
        raise ValueError("holds something that is not a number") from None
    if not all(abs(number - 0.5) <= 0.5 + _FARTHEST for number in numbers):  # True for NaN, too
        raise ValueError("is not normalised: the numbers are fractions of the image's width and height")
    if len(words) > 5:
        left, top = min(numbers[::2]), min(numbers[1::2])
        return class_index, (left, top, max(numbers[::2]) - left, max(numbers[1::2]) - top)
    x, y, width, height = numbers
    if width < 0 or height < 0:
        raise ValueError("has a negative side")
    return class_index, (x - width / 2, y - height / 2, width, height)


def turn_back(boxes_ltwh: np.ndarray, orientation: int) -> np.ndarray:
    """Converts boxes (N, 4) from fractions of the EXIF-rotated image to fractions of the stored image."""
    left, top, width, height = boxes_ltwh.T
    if orientation >= 5:
        left, top, width, height = top, left, height, width
    if orientation in _MIRROR_X:
        left = 1 - left - width
    if orientation in _MIRROR_Y:
        top = 1 - top - height
    return np.stack([left, top, width, height], axis=1)
