"""Reads a csv file with one line for each box, and usually the names of its columns in the first line.

- TensorFlow's tutorials (datitran/raccoon_dataset xml_to_csv.py) and Roboflow write
  filename,width,height,class,xmin,ymin,xmax,ymax.
- OpenImages has ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,...
- Keras-RetinaNet has path,x1,y1,x2,y2,class, without a line of names (fizyr/keras-retinanet README).
- Your program may use any of the names in _COLUMNS, in any order.

Coordinates are edges, counted from 0: in pixels, or as fractions of the image if most boxes have no edge
above 1. A line whose four coordinates are empty is an image without objects. OpenImages' groups (IsGroupOf)
become crowds. Category ids are 1, 2, ... in alphabetic order of the names.
"""

import collections
import csv
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.data.annotations import Annotations
from common.data.check.issues import Issues
from common.errors import UserError
from common.files import encoding_of
from tools.conversion.labels import LabelledImage, require_directory
from tools.conversion.shapes import Shape, annotations_of_shapes, locate

# Meaning of a column -> its names in lower case, without underscores and spaces.
_COLUMNS = {
    "image": ("filename", "imageid", "image", "imagename", "imagepath", "path", "file"),
    "category": ("class", "labelname", "label", "classname", "category", "categoryname", "name"),
    "left": ("xmin", "x1", "left"),
    "top": ("ymin", "y1", "top"),
    "right": ("xmax", "x2", "right"),
    "bottom": ("ymax", "y2", "bottom"),
    "width": ("width", "imagewidth"),
    "height": ("height", "imageheight"),
    "group": ("isgroupof",),
}
_SIDES = ("left", "top", "right", "bottom")
_NEEDED = ("image", "category", *_SIDES)
_RETINANET = ("path", "x1", "y1", "x2", "y2", "class")
_DELIMITERS = ",;\t"
_FARTHEST = 2.0  # largest edge of a box that is a fraction of its image


def read_csv(
    file: str,
    *,
    images_dir: str | None = None,
    names_file: str | None = None,
    label_map_file: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a csv file of boxes.

    Args:
        images_dir: directory of the images; default: the directory of the csv.
        names_file: csv without column names, with a label and its name in each line, as OpenImages'
            class-descriptions-boxable.csv.

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with their lines.
        UserError, OSError: files or directories do not exist, or the csv lacks columns.
    """
    images_dir = images_dir or os.path.dirname(file) or "."
    require_directory(images_dir)
    issues = Issues(file, policy)
    names = dict(row[:2] for row in _rows(names_file) if len(row) > 1) if names_file else {}
    images: dict[str, LabelledImage] = {}
    shapes_of: dict[LabelledImage, list[Shape]] = collections.defaultdict(list)
    for location, row in _read_rows(file, issues):
        name = row["image"]
        if name not in images:
            size = [row.get(side, "") for side in ("height", "width")]
            height, width = (int(float(side)) if _is_number(side) else 0 for side in size)
            images[name] = LabelledImage(_find_image(name, images_dir), location, (height, width))
        shapes = shapes_of[images[name]]
        sides = [row[side] for side in _SIDES]
        if not any(sides):
            continue
        if not all(map(_is_number, sides)):
            issues.add("label-line", f"{location} has {', '.join(_SIDES)} = {', '.join(map(repr, sides))}")
            continue
        left, top, right, bottom = map(float, sides)
        category = names.get(row["category"], row["category"])
        is_group = row.get("group") == "1"
        shapes.append(Shape(f"{location} {category!r}", category, (left, top, right, bottom), is_group))
    normalised = _check_unit([shape for shapes in shapes_of.values() for shape in shapes], issues)
    annotations = annotations_of_shapes(
        shapes_of,
        images_dir,
        issues,
        label_map_file=label_map_file,
        normalised=normalised,
    )
    return annotations, images_dir


def _check_unit(shapes: Sequence[Shape], issues: Issues) -> bool:
    """Returns whether most boxes are fractions of their image. Reports boxes that are not like most."""
    edges = [max(shape.box) for shape in shapes]
    # Some programs write 0, 0, 0, 0 for an image without objects.
    normalised = statistics.median_low([edge for edge in edges if edge > 0] or [0.0]) <= 1
    for shape, edge in zip(shapes, edges, strict=True):
        if (edge > _FARTHEST) if normalised else (0 < edge < 1):
            units = ("fractions", "pixels")
            text = f"is in {units[normalised]}, most others are in {units[not normalised]}"
            issues.add("label-line", f"{shape.location} {text}: {list(shape.box)}")
    return normalised


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) < float("inf")
    except ValueError:
        return False


def _rows(file: str) -> Iterator[list[str]]:
    try:
        with open(file, encoding=encoding_of(file), newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            delimiter = max(_DELIMITERS, key=first.count)
            yield from csv.reader(lines, delimiter=delimiter, strict=True)
    except UnicodeError as error:
        raise UserError(f"{file} is not text in UTF-8: save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"{file} is not a csv file: {error}") from error


def _read_rows(file: str, issues: Issues) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yields a name for messages, and meaning -> text, of each line that is not empty."""
    rows = enumerate(_rows(file), 1)
    _, titles = next(rows, (1, []))
    if _has_no_names(titles):
        rows, titles = enumerate(_rows(file), 1), list(_RETINANET)
    keys = [title.strip().lower().replace("_", "").replace(" ", "") for title in titles]
    columns: dict[str, int] = {}
    for meaning, names in _COLUMNS.items():
        name = next((name for name in names if name in keys), None)
        columns |= {meaning: keys.index(name)} if name else {}
    absent = [meaning for meaning in _NEEDED if meaning not in columns]
    if absent:
        raise UserError(
            f"{file} has no column for {', '.join(absent)}: its first line is {','.join(titles)[:80]!r};"
            " name the columns, for example filename,xmin,ymin,xmax,ymax,class"
        )
    for number, row in rows:
        location = f"{file} line {number}"
        if not any(row):
            continue
        if len(row) < len(titles) or any(row[len(titles) :]):
            text = f"{location} has {len(row)} values for {len(titles)} columns: {','.join(row)[:80]!r}"
            issues.add("label-line", text)
            continue
        if any("\n" in text for text in row):
            issues.add("label-line", f"{location} has a quoted line feed: {','.join(row)[:80]!r}")
            continue
        yield location, {meaning: row[column].strip() for meaning, column in columns.items()}


def _has_no_names(row: Sequence[str]) -> bool:
    """Whether the first line of a csv is an image and its box, as in Keras-RetinaNet's csv."""
    is_complete = len(row) == len(_RETINANET) and row[0].lower().endswith(IMAGE_SUFFIXES)
    return is_complete and (all(map(_is_number, row[1:5])) or not any(row[1:]))


def _find_image(name: str, images_dir: str) -> str:
    """Returns the path of an image below `images_dir`. OpenImages gives names without .jpg."""
    if name.lower().endswith(IMAGE_SUFFIXES):
        return locate(name, images_dir)
    paths = (locate(name + suffix, images_dir) for suffix in IMAGE_SUFFIXES)
    existing = (path for path in paths if os.path.isfile(os.path.join(images_dir, path)))
    return next(existing, None) or locate(name + IMAGE_SUFFIXES[0], images_dir)
