"""YOLO's text labels: one .txt for each image, one line `class cx cy w h` for each object.

The four numbers are the centre and the size of the box as fractions of the image's width and height. An image
with an empty label file, or without any, holds no object. Label files are where Darknet and Ultralytics look:
in `labels` where the image's path has `images` (or `JPEGImages`), else beside the image.

A line with more numbers is read as a polygon, `class x1 y1 x2 y2 x3 y3 ...` (Ultralytics' segmentation and
oriented boxes), and gives its bounding box. Six numbers are a detection with its confidence, and no label.

Labels do not contain the size of their image; its header does. Nor do they tell whether an EXIF turn had been
applied when they were drawn: Ultralytics and OpenCV apply it, others do not. Such images are refused unless
`pixels` is given.

Source: AlexeyAB/darknet README "How to train"; https://docs.ultralytics.com/datasets/detect/ and
ultralytics/data/utils.py (verify_image_label).
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from common.annotations import Annotations
from common.datacheck.images import ImageFacts, ImagePolicy
from common.datacheck.issues import Issues
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion.labels import LabelledImage, as_annotations, inspect_images, read_label_file
from tools.conversion.yolo_layout import YoloFiles, find_files

_SHOWN = 60  # characters of a line that a message shows
_FARTHEST = 1.0  # how far outside a box may reach, in images: farther are pixels that nobody normalised
_DECIMALS = 6  # of pixels: what is beyond comes from multiplying, files have six decimals of a whole image
# EXIF orientations that, undone, mirror left and right, or top and bottom; from 5 on after a transposition.
_MIRROR_X = (2, 3, 7, 8)
_MIRROR_Y = (3, 4, 6, 7)


def read_yolo(
    path: str | os.PathLike,
    *,
    split: str | None = None,
    names: str | os.PathLike | None = None,
    label_map: LabelMap | None = None,
    pixels: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a set with YOLO's labels.

    Args:
        path: a directory, Ultralytics' data.yaml, or Darknet's list of images (.txt); see yolo_layout.py.
        split: which part of a directory or of a data.yaml.
        names: a file with one class name a line, or a data.yaml. Default: those of yolo_layout.py.
        label_map: ids of the names. Default: class 0 is category 1, class 1 category 2, and so on.
        pixels: of images with an EXIF turn, those that labels refer to: stored or turned; None refuses them.
        policy: about images that cannot be used.

    Returns:
        The annotations, and the directory that their file names refer to.

    Raises:
        DataError: everything that is wrong, with file and line.
        UserError: files or directories that are not there, or no class names.
    """
    issues = Issues(os.fspath(path))
    files = find_files(path, split, names, issues)
    label_map, category_ids = _categories(files.names, files.names_origin, label_map)
    images = []
    label_files: dict[str, str] = {}
    for name in files.images:
        image = LabelledImage(name, files.label_file(name))
        other = label_files.setdefault(image.label_file, name)
        if other != name:
            issues.add("label-file", f"{image.label_file} is of both {other!r} and {name!r}")
        _read_labels(image, category_ids, issues)
        images.append(image)
    _find_orphans(files, label_files, issues)
    sound, facts = inspect_images(images, files.images_dir, policy, issues)
    for image, fact in zip(sound, facts, strict=True):
        _to_pixels(image, fact, pixels, issues)
    return as_annotations(sound, label_map, policy, issues), files.images_dir


def _categories(
    names: Mapping[int, str], origin: str, label_map: LabelMap | None
) -> tuple[LabelMap, dict[int, int]]:
    """The label map, and the category id of each class."""
    try:
        numbered = LabelMap.from_categories({"id": c + 1, "name": name} for c, name in names.items())
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error
    if label_map is None:
        return numbered, {c: c + 1 for c in names}
    known = dict(zip(label_map.names, label_map.category_ids, strict=True))
    absent = [name for name in numbered.names if name not in known]
    if absent:
        raise UserError(f"--label_map lacks {', '.join(map(repr, absent))}, which {origin} names")
    return label_map, {c: known[name] for c, name in names.items()}


def _read_labels(image: LabelledImage, category_ids: Mapping[int, int], issues: Issues) -> None:
    """Adds the objects of a label file, their boxes still as fractions of the image."""
    if not os.path.lexists(image.label_file):
        issues.add("label-missing", str(image))
        return
    content = read_label_file(image.label_file, issues)
    if content is None:
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        issues.add("label-file", f"{image.label_file} is no UTF-8 text: {error}")
        return
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words:
            continue
        where = f"{image.label_file} line {number} {line.strip()[:_SHOWN]!r}"
        try:
            class_index, box = parse_line(words)
        except ValueError as error:
            issues.add("label-line", f"{where} {error}")
            continue
        if class_index not in category_ids:
            issues.add("unknown-category", f"{where} has class {class_index} of {len(category_ids)}")
            continue
        if len(words) > 5:
            issues.add("polygon", where)
        image.add(box, category_ids[class_index])


def parse_line(words: Sequence[str]) -> tuple[int, tuple[float, float, float, float]]:
    """The class and the box of a label, (left, top, width, height) as fractions of the image.

    Raises:
        ValueError: what is wrong with it.
    """
    if len(words) == 6:
        raise ValueError("has six numbers: with a confidence it is a detection and no label")
    if len(words) < 5 or len(words) % 2 == 0:
        raise ValueError(
            f"has {len(words)} numbers: a box is class cx cy w h, a polygon class x1 y1 x2 y2 ..."
        )
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError("holds something that is no number") from None
    if not all(map(math.isfinite, numbers)):
        raise ValueError("holds a number that is NaN or infinite")
    class_index = numbers[0]
    if class_index < 0 or not class_index.is_integer():
        raise ValueError(f"has class {words[0]}, which is no whole number from 0 on")
    if any(abs(number - 0.5) > 0.5 + _FARTHEST for number in numbers[1:]):
        raise ValueError("is not normalised: the numbers are fractions of the image's width and height")
    if len(words) > 5:
        left, top = min(numbers[1::2]), min(numbers[2::2])
        return int(class_index), (left, top, max(numbers[1::2]) - left, max(numbers[2::2]) - top)
    x, y, width, height = numbers[1:]
    if width < 0 or height < 0:
        raise ValueError("has a negative side")
    return int(class_index), (x - width / 2, y - height / 2, width, height)


def _to_pixels(image: LabelledImage, fact: ImageFacts, pixels: str | None, issues: Issues) -> None:
    if not image.boxes_ltwh_px:
        return
    boxes = np.array(image.boxes_ltwh_px)
    if fact.orientation != 1:
        if pixels is None:
            issues.add("label-turned", f"{image} has orientation {fact.orientation}")
        elif pixels == "turned":
            boxes = turn_back(boxes, fact.orientation)
    height, width = image.size
    image.boxes_ltwh_px = np.round(boxes * [width, height, width, height], _DECIMALS).tolist()


def turn_back(boxes_ltwh: np.ndarray, orientation: int) -> np.ndarray:
    """Boxes (N, 4) as fractions of an image that was turned by its EXIF orientation, 1 to 8, as fractions of
    the stored one."""
    left, top, width, height = boxes_ltwh.T
    if orientation >= 5:
        left, top, width, height = top, left, height, width
    if orientation in _MIRROR_X:
        left = 1 - left - width
    if orientation in _MIRROR_Y:
        top = 1 - top - height
    return np.stack([left, top, width, height], axis=1)


def _find_orphans(files: YoloFiles, label_files: Collection[str], issues: Issues) -> None:
    """Label files whose image is not there, in directories that hold nothing but labels of these images."""
    folders = {os.path.dirname(label) for label in label_files}
    folders -= {os.path.dirname(os.path.join(files.images_dir, image)) for image in files.images}
    for folder in [] if files.listed else sorted(filter(os.path.isdir, folders)):
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if name.endswith(".txt") and name != "classes.txt" and path not in label_files:
                issues.add("image-missing", f"{path} has no image")
