"""Reads labelme's annotations: one json for each image, usually in the same directory as the images.

`points` are in pixels, counted from 0. A rectangle has two opposite corners in any order, a circle its centre
and a point on its edge. A mask has the corners of its box, and its pixels as a PNG. Category ids are 1, 2,
... in alphabetic order of the labels. X-AnyLabeling writes the same format.

Source: wkentaro/labelme labelme/_label_file.py (LabelFile.save) and labelme/_utils/shape.py (shape_to_mask,
shapes_to_label).
"""

import base64
import json
import math
import os
import pathlib
import reprlib
from collections.abc import Iterator
from typing import Any

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.data.annotations import Annotations
from common.data.check.issues import Issues
from common.data.image_files import Tree, list_tree
from common.data.labels import is_text
from common.errors import UserError
from tools.conversion.labels import LabelledImage, require_directory
from tools.conversion.shapes import Ltrb, Shape, annotations_of_shapes, box_around, locate

_REPR = reprlib.Repr()
_REPR.maxdict = 8
_WITHOUT_BOX = ("point", "points", "line", "linestrip")
_NUM_POINTS = {"circle": 2, "rectangle": 2, "polygon": 3}  # the least number of points of a shape


class _ShapeError(ValueError):
    """Tells what is wrong with a shape."""


def read_labelme(
    path: str,
    *,
    images_dir: str | None = None,
    label_map_file: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a data set of labelme.

    Args:
        path: directory with the json files, also in its subdirectories; or one json file.
        images_dir: directory of the images; default: the directory of the json files.

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with their files.
        UserError, OSError: files or directories do not exist.
    """
    directory = path if os.path.isdir(path) else os.path.dirname(path) or "."
    is_default = not images_dir
    images_dir = images_dir or directory
    require_directory(images_dir)
    issues = Issues(path, policy)
    shapes_of = {}
    files = [path]
    if os.path.isdir(path):
        tree = list_tree(path)
        files = tree.with_suffix(".json")
        # annotations_of_shapes reports what is skipped below images_dir.
        Tree(hidden=_outside(images_dir, tree.hidden), links=_outside(images_dir, tree.links)).report(issues)
    for file in files:
        try:
            document = json.loads(pathlib.Path(file).read_bytes())
        except (ValueError, RecursionError) as error:
            issues.add("label-file", f"{file} is not valid JSON: {error}")
            continue
        shapes = document.get("shapes") if isinstance(document, dict) else None
        if not isinstance(shapes, list):
            issues.add("not-labels", f"{file} has no list `shapes`")
            continue
        size = [document.get(key) for key in ("imageHeight", "imageWidth")]
        height, width = (side if type(side) is int else 0 for side in size)
        image_path = str(document.get("imagePath") or "")
        name = _find_image(file, image_path, images_dir)
        if is_default and name.startswith("../"):
            folder = os.path.normpath(os.path.join(images_dir, os.path.dirname(name)))
            text = f"{file} names {image_path!r}, which is not below {images_dir}"
            raise UserError(f"{text}: give the images' directory as --images={folder}")
        shapes_of[LabelledImage(name, file, (height, width))] = list(_read_shapes(file, shapes, issues))
    if not shapes_of and not issues.stopping:
        raise UserError(f"--input={path} contains no json file of labelme")
    annotations = annotations_of_shapes(
        shapes_of, images_dir, issues, label_map_file=label_map_file, turned=True
    )
    return annotations, images_dir


def _outside(directory: str, paths: list[str]) -> list[str]:
    folder = os.path.abspath(directory)
    return [path for path in paths if os.path.commonpath([folder, os.path.abspath(path)]) != folder]


def _find_image(file: str, image_path: str, images_dir: str) -> str:
    """Returns the image of a json, relative to `images_dir`: by `imagePath`, else by the name of the json."""
    image_path = image_path.replace("\\", "/")
    folder = os.path.dirname(file)
    stem = os.path.splitext(file)[0]
    choices = [
        *(os.path.join(folder, image_path), os.path.join(folder, os.path.basename(image_path))),
        os.path.join(images_dir, locate(image_path, images_dir)),
        *(stem + suffix for suffix in IMAGE_SUFFIXES),
    ]
    choice = next(filter(os.path.isfile, choices), os.path.join(folder, os.path.basename(image_path)))
    return os.path.relpath(choice, images_dir)


def _read_shapes(file: str, shapes: list[Any], issues: Issues) -> Iterator[Shape]:
    for number, shape in enumerate(shapes, 1):
        location = f"{file} shape {number}"
        try:
            label, kind = shape["label"], shape.get("shape_type") or "polygon"
            location = f"{location} {label!r}"
            if not isinstance(label, str | int | float):
                raise _ShapeError(f"its label is {_REPR.repr(label)}, not a text")
            if not is_text(label := str(label)):
                raise _ShapeError("UTF-8 cannot encode the label")
            if kind in _WITHOUT_BOX:
                issues.add("shape-without-box", f"{location}: {kind}")
                continue
            box = _box_of(kind, [(float(x), float(y)) for x, y in shape["points"]], shape)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            reason = error if isinstance(error, _ShapeError) else _REPR.repr(shape)
            issues.add("label-line", f"{location} has no valid label or points: {reason}")
            continue
        if kind in ("oriented_rectangle", "rotation"):  # the latter is X-AnyLabeling's
            issues.add("box-rotated", location)
        elif kind not in ("rectangle", "mask"):
            issues.add("polygon", f"{location}: {kind}")
        yield Shape(location, label, box)


def _box_of(kind: str, points: list[tuple[float, float]], shape: dict[str, Any]) -> Ltrb:
    if len(points) < (needed := _NUM_POINTS.get(kind, 1)):
        raise _ShapeError(f"a {kind} needs at least {needed} points, it has {len(points)}")
    if kind == "circle":
        (x, y), edge = points[:2]
        radius = math.dist((x, y), edge)
        return x - radius, y - radius, x + radius, y + radius
    left, top, right, bottom = box_around(points)
    if kind == "mask" and shape.get("mask"):  # labelme also counts from the corner, with the PNG's size
        header = base64.b64decode(shape["mask"])[:24]
        if not header.startswith(b"\x89PNG") or len(header) < 24:
            raise _ShapeError("the mask is not a PNG")
        left, top = round(left), round(top)
        right, bottom = left + int.from_bytes(header[16:20]), top + int.from_bytes(header[20:])
    return left, top, right, bottom
