"""Reads YOLO's text labels: one .txt for each image, with one line `class cx cy w h` for each object.

The four numbers are the centre and the size of the box as fractions of the image's width and height. An image
has no objects if its label file is empty or missing. The label file has the image's path with `labels` in
place of `images` (or `JPEGImages`), else it is next to the image.

A line with more numbers is a polygon, `class x1 y1 x2 y2 x3 y3 ...`, and becomes its bounding box. Six
numbers are refused: the last one would be a confidence.

Labels do not tell whether the image was rotated by its EXIF orientation before it was labelled. So images
with an EXIF rotation are refused unless --yolo_pixels is given.

A data set is given as one of these:

- a directory with images/ and labels/; `split` selects images/<split>, or <split>/images as in Roboflow's
  exports;
- a directory that has the images and their labels together;
- Ultralytics' data.yaml: `path`, `names`, and for each split one or more directories or lists of images;
- Darknet's list of images, one path per line (train.txt).

Source: AlexeyAB/darknet README "How to train"; https://docs.ultralytics.com/datasets/detect/ and
ultralytics/data/utils.py (verify_image_label).
"""

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.data.annotations import Annotations
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import Issues
from common.data.labels import LabelMap
from common.errors import UserError
from tools.conversion.labels import (
    Box,
    LabelledImage,
    Object,
    check_images,
    find_listed,
    make_annotations,
    read_lines,
)

_YAML = (".yaml", ".yml")
_NAME_FILES = ("data.yaml", "classes.txt", "obj.names", "labels/classes.txt")
_IMAGE_FOLDERS = ("images", "JPEGImages")  # Darknet, src/utils.c replace_image_to_label
_SHOWN = 60  # characters of a label line that a message shows
_FARTHEST = 1.0  # limit outside the image, in image sides; larger numbers are pixels
_DECIMALS = 6  # of coordinates in pixels, as many as labels have
# EXIF orientations that mirror x, and those that mirror y.
_MIRROR_X = (2, 3, 7, 8)
_MIRROR_Y = (3, 4, 6, 7)


def read_yolo(
    path: str,
    *,
    split: str | None = None,
    names_file: str | None = None,
    label_map_file: str | None = None,
    yolo_pixels: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a data set with YOLO's labels.

    Without a label map, class 0 becomes category 1, and so on.

    Args:
        path: path of the data set, see the module docstring.
        split: name of a split; the default of a data.yaml is "train".
        names_file: file of the class names; default: the data.yaml, or the first file of _NAME_FILES.
        yolo_pixels: "stored" or "turned": how labels of images with an EXIF rotation were made.

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with file and line.
        UserError, OSError: files or directories do not exist, or class names are missing.
    """
    issues = Issues(path, policy)
    files, images_dir = find_files(path, split, issues)
    names_file = names_file or find_names(path)
    names = read_names(names_file)
    if label_map_file:
        label_map = LabelMap.load(label_map_file)
    else:
        try:
            label_map = LabelMap.from_categories({"id": i + 1, "name": name} for i, name in names.items())
        except UserError as error:
            raise UserError(f"{names_file}: {error}") from error
    ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    category_ids: dict[float, int] = {
        number: ids[str(name)] for number, name in names.items() if str(name) in ids
    }
    by_label_file: dict[str, LabelledImage] = {}
    for file in files:
        image = LabelledImage(os.path.relpath(file, images_dir), label_file_of(file))
        other = by_label_file.setdefault(image.label_file, image)
        if other != image:
            message = f"{image.label_file} belongs to {other.file_name!r} and to {image.file_name!r}"
            issues.add("label-file", message)
    images = list(by_label_file.values())
    usable, facts = check_images(images, images_dir, issues)
    objects = [
        _read_objects(image, fact, category_ids, yolo_pixels, issues)
        for image, fact in zip(images, facts, strict=True)
    ]
    return make_annotations(images, usable, facts, objects, label_map, issues), images_dir


# --- label files ---


def _read_objects(
    image: LabelledImage,
    facts: ImageFacts,
    category_ids: Mapping[float, int],
    pixels: str | None,
    issues: Issues,
) -> list[Object]:
    try:
        text = pathlib.Path(image.label_file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        issues.add("label-missing", str(image))
        return []
    except UnicodeDecodeError as error:
        issues.add("label-file", f"{image.label_file} is not UTF-8 text: {error}")
        return []
    boxes, object_ids = [], []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words:
            continue
        location = f"{image.label_file} line {number} {line.strip()[:_SHOWN]!r}"
        try:
            class_index, box = parse_line(words)
            if class_index not in category_ids:
                raise ValueError(f"has class {words[0]}, which is not one of the {len(category_ids)} classes")
        except ValueError as error:
            issues.add("label-line", f"{location} {error}")
            continue
        if len(words) > 5:
            issues.add("polygon", location)
        boxes.append(box)
        object_ids.append(category_ids[class_index])
    boxes_ltwh = np.array(boxes).reshape(-1, 4)
    if facts.orientation != 1 and len(boxes_ltwh):
        if pixels is None:
            issues.add("label-turned", f"{image} has orientation {facts.orientation}")
        elif pixels == "turned":
            boxes_ltwh = turn_back(boxes_ltwh, facts.orientation)
    boxes_ltwh_px = np.round(boxes_ltwh * ([facts.width, facts.height] * 2), _DECIMALS)
    rows = zip(map(tuple, boxes_ltwh_px.tolist()), object_ids, strict=True)
    return [(box, category_id, False) for box, category_id in rows]


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


# --- images, label files and class names of a data set ---


def find_files(path: str, split: str | None, issues: Issues) -> tuple[list[str], str]:
    """Finds the images of a data set.

    Args:
        path: path of the data set, see the module docstring.
        split: name of a split of a directory or a data.yaml; the default of a data.yaml is "train".
        issues: listed images that do not exist are added here.

    Returns:
        (paths, directory). The paths of the images are absolute. Those from a directory are sorted; those
        from a list keep its order. The directory contains all images.

    Raises:
        UserError: a file or directory does not exist, or a file cannot be parsed.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        sources = [_image_directory(path, split)]
    elif path.endswith(_YAML):
        sources = _yaml_entries(path, split or "train")
    elif path.endswith(".txt") and not split:
        sources = [path]
    else:
        raise UserError(
            f"--input={path}: give a directory, a data.yaml or, without --split, a list of images (.txt)"
        )
    files, directories = [], []
    for source in sources:  # directories and lists
        if os.path.isdir(source):
            paths = pathlib.Path(source).rglob("*")
            files += sorted(str(file) for file in paths if file.suffix.lower() in IMAGE_SUFFIXES)
            directories.append(source)
        else:
            find_image = functools.partial(_find_image, list_file=source)
            images = find_listed(source, find_image, "image-missing", issues)
            files += images
            directories += map(os.path.dirname, images or [source])
    return files, os.path.commonpath(directories)


def label_file_of(image: str) -> str:
    """Returns the path of an image's label file, by the rule in the module docstring."""
    path = pathlib.PurePath(image).with_suffix(".txt")
    folders = list(path.parent.parts)
    for number in reversed(range(len(folders))):
        if folders[number] in _IMAGE_FOLDERS:
            folders[number] = "labels"
            labels = os.path.join(*folders)
            return os.path.join(labels, path.name) if os.path.isdir(labels) else str(path)
    return str(path)


def find_names(path: str) -> str:
    """Returns the file with the class names: the data.yaml, or the first file of _NAME_FILES."""
    if path.endswith(_YAML):
        return path
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    for name in _NAME_FILES:
        if os.path.isfile(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise UserError(
        f"no class names for {path}: give --names=FILE with one name per line, or a data.yaml"
        f" (none of {', '.join(_NAME_FILES)} is in {directory})"
    )


def read_names(path: str) -> dict[int, str]:
    """Reads class -> name from a text file or a data.yaml; raises UserError if it has no names."""
    if not path.endswith(_YAML):
        return dict(enumerate(read_lines(path)))
    value = _read_yaml(path).get("names")
    names = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(names, dict) or not all(isinstance(key, int) for key in names):
        raise UserError(f"names in {path} is {value!r}: write a list, or a mapping such as 0: cat")
    return names


def _image_directory(path: str, split: str | None) -> str:
    folder = os.path.join(path, "images")
    if split is not None:
        choices = [os.path.normpath(os.path.join(folder, split)), os.path.join(path, split, "images")]
        for choice in filter(os.path.isdir, choices):
            return choice
        raise UserError(f"--split={split}: neither {choices[0]} nor {choices[1]} is a directory")
    if not os.path.isdir(folder):
        return path
    splits = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if len(splits) > 1:
        raise UserError(f"{folder} contains {', '.join(splits)}: give --split=NAME, or --split=. for all")
    return folder


def _yaml_entries(path: str, split: str) -> list[str]:
    """Returns the directories and lists of images of a split."""
    document = _read_yaml(path)
    entries = document.get(split)
    if not entries:
        raise UserError(f"{path} has no split {split!r}: choose one of its splits by --split")
    directory = os.path.dirname(path)
    roots = [os.path.join(directory, str(document.get("path") or "")), directory]
    sources = []
    for entry in entries if isinstance(entries, list) else [entries]:
        # Roboflow's data.yaml has the path ../train/images for train/images.
        names = [str(entry), str(entry).removeprefix("../")]
        choices = [os.path.normpath(os.path.join(root, name)) for name in names for root in roots]
        source = next(filter(os.path.exists, choices), None)
        if source is None:
            raise UserError(f"{path}: {split} is {entry!r}, but {choices[0]} does not exist")
        sources.append(source)
    return sources


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a data.yaml: it holds no keys")
    if "kpt_shape" in document:
        raise UserError(f"{path} has pose labels (kpt_shape): give a data set with boxes or polygons")
    return document


def _find_image(line: str, list_file: str) -> str | None:
    """Returns the path of the image that a line of a list names, or None if the image does not exist."""
    directories = (os.path.dirname(list_file), os.getcwd())
    choices = [os.path.normpath(os.path.join(directory, line)) for directory in directories]
    return next(filter(os.path.exists, choices), None)
