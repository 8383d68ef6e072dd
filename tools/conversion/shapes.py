"""Builds Annotations from objects that are drawn in pixels, as in CVAT's xml, labelme's json and csv files.

COCO has upright boxes: any other shape becomes the smallest box around it.

CVAT and labelme show an image as turned by its EXIF orientation (cvat-ai/cvat
cvat/apps/engine/media_extractors.py, image_size_within_orientation; wkentaro/labelme
labelme/_label_file.py, load_image_file). Boxes of such images are converted to the stored pixels, which
training reads.
"""

import math
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common.data.annotations import Annotations
from common.data.check.image_headers import SWAPS_SIDES, ImageFacts
from common.data.check.images import path_fault
from common.data.check.issues import Issues
from common.data.coco import turn_back
from common.data.image_files import list_tree
from common.data.labels import LabelMap
from tools.conversion.labels import LabelledImage, Object, check_images, make_annotations

_DECIMALS = 6

Ltrb = tuple[float, float, float, float]


class Shape(NamedTuple):
    """An object of an image.

    Attributes:
        location: name for messages, such as `a.json shape 3 'cat'`.
        category: name of its category.
        box: left, top, right, bottom in pixels.
        is_crowd: whether it marks a crowd.
    """

    location: str
    category: str
    box: Ltrb
    is_crowd: bool = False


def box_around(points: Iterable[tuple[float, float]]) -> Ltrb:
    """Returns the box around points (x, y)."""
    xs, ys = zip(*points, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def box_around_ellipse(x: float, y: float, rx: float, ry: float, degrees: float = 0) -> Ltrb:
    """Returns the box around an ellipse that is rotated about its centre (x, y)."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _box_at(x, y, math.hypot(rx * cos, ry * sin), math.hypot(rx * sin, ry * cos))


def _box_at(x: float, y: float, half_width: float, half_height: float) -> Ltrb:
    sides = (x - half_width, y - half_height, x + half_width, y + half_height)
    left, top, right, bottom = (round(side, _DECIMALS) for side in sides)
    return left, top, right, bottom


def locate(name: str, images_dir: str) -> str:
    """Returns the path of an image below `images_dir`.

    A label file may name a path of another computer. If there is no such image, the last part of the path
    counts.
    """
    path = posixpath.normpath(name.replace("\\", "/"))
    last = posixpath.basename(path)
    choices = (last,) if path_fault(path) else (path, last)
    exists = (choice for choice in choices if os.path.isfile(os.path.join(images_dir, choice)))
    return next(exists, choices[0])


def annotations_of_shapes(
    shapes_of: Mapping[LabelledImage, Sequence[Shape]],
    images_dir: str,
    issues: Issues,
    *,
    names: Sequence[str] = (),
    label_map_file: str | None = None,
    normalised: bool = False,
    turned: bool = False,
) -> Annotations:
    """Checks images and shapes, and builds the annotations.

    Args:
        shapes_of: the shapes of each image.
        names: the categories in their order; categories of shapes that it lacks follow in alphabetic order.
        label_map_file: file that replaces `names`.
        normalised: whether boxes are fractions of the image's width and height.
        turned: whether boxes refer to images as turned by EXIF, if the size of an image does not tell.

    Raises:
        DataError: see `make_annotations`.
    """
    if label_map_file:
        label_map = LabelMap.load(label_map_file)
    else:
        others = {shape.category for shapes in shapes_of.values() for shape in shapes} - {*names, ""}
        names = [*names, *sorted(others)]
        label_map = LabelMap(tuple(range(1, len(names) + 1)), tuple(names))
    category_ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    files = [image.file_name for image in shapes_of]
    images = list(shapes_of)
    issues.add_repeats("image-labelled-twice", "image", files, lambda row: images[row].label_file)
    _report_others(images_dir, files, issues)
    # The size is compared below, because it may be that of the turned image.
    usable, facts = check_images([image._replace(size=(0, 0)) for image in images], images_dir, issues)
    objects = []
    for image, fact, is_usable in zip(images, facts, usable, strict=True):
        is_turned = is_usable and _is_turned(image, fact, turned, issues)
        objects.append(list(_objects(shapes_of[image], fact, is_turned, category_ids, normalised, issues)))
    return make_annotations(images, usable, facts, objects, label_map, issues)


def _report_others(images_dir: str, files: Iterable[str], issues: Issues) -> None:
    """Adds the images below `images_dir` that are not in `files`, and what is skipped there."""
    tree = list_tree(images_dir)
    tree.report(issues)
    for kind, paths in (("image-unlabelled", tree.images), ("format-skipped", tree.unsupported)):
        names = {os.path.relpath(path, images_dir) for path in paths}
        issues.add_each(kind, sorted(names - {*files}), repr)


def _is_turned(image: LabelledImage, fact: ImageFacts, default: bool, issues: Issues) -> bool:
    """Whether the boxes of an image refer to it as turned by EXIF. Reports a size of another image."""
    stored = (fact.height, fact.width)
    shown = stored[::-1] if fact.orientation >= SWAPS_SIDES else stored
    if 0 not in image.size and image.size not in (stored, shown):
        text = "{} is {} x {} pixels, the annotations have {} x {}"
        issues.add("image-size-differs", text.format(image, *stored[::-1], *image.size[::-1]))
        return False
    is_turned = fact.orientation != 1 and default
    if 0 not in image.size and stored != shown:
        is_turned = image.size == shown
    if is_turned:
        issues.add("boxes-turned-back", f"{image} has EXIF orientation {fact.orientation}")
    return is_turned


def _objects(
    shapes: Iterable[Shape],
    fact: ImageFacts,
    is_turned: bool,
    category_ids: Mapping[str, int],
    normalised: bool,
    issues: Issues,
) -> Iterator[Object]:
    stored = np.array([fact.width, fact.height] * 2)
    shown = stored[::-1] if is_turned and fact.orientation >= SWAPS_SIDES else stored
    for shape in shapes:
        left, top, right, bottom = shape.box
        if not (-math.inf < left <= right < math.inf and -math.inf < top <= bottom < math.inf):  # or NaN
            issues.add("label-line", f"{shape.location} has left, top, right, bottom = {list(shape.box)}")
        elif shape.category not in category_ids:
            text = f"{shape.location} has {shape.category!r}, not one of {len(category_ids)} categories"
            issues.add("unknown-category", text)
        else:
            box = np.array([[left, top, right - left, bottom - top]])
            if normalised:
                box = box * shown
            if is_turned:
                box = turn_back(box, stored[None, :2], np.array([fact.orientation]))
            x, y, width, height = np.round(box[0], _DECIMALS).tolist()
            yield (x, y, width, height), category_ids[shape.category], shape.is_crowd
