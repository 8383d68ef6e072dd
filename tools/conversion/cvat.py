"""Reads "CVAT for images": one annotations.xml for all images, with the images in images/.

The xml has an element for each image, with its size and its shapes in pixels, counted from 0. A rotated box
has its sides before the rotation, and `rotation` in degrees about its centre. Category ids are 1, 2, ... in
the order of the labels in `meta`.

Source: cvat-ai/cvat cvat/apps/dataset_manager/formats/cvat.py, dump_as_cvat_annotation.
"""

import os
import reprlib
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check.issues import Issues
from common.data.coco import box_around_rotated
from common.errors import UserError
from tools.conversion.labels import LabelledImage, require_directory
from tools.conversion.shapes import (
    Ltrb,
    Shape,
    annotations_of_shapes,
    box_around,
    box_around_ellipse,
    locate,
)
from tools.conversion.voc import NoDoctype

_FOR_VIDEO = "is CVAT for video: export the task as 'CVAT for images 1.1', which has the boxes of each frame"
_REPR = reprlib.Repr()
_REPR.maxdict = 8
_DIGITS = 9  # of a side in pixels at most


def read_cvat(
    path: str,
    *,
    images_dir: str | None = None,
    label_map_file: str | None = None,
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks an export of CVAT.

    Args:
        path: the xml, or the directory with annotations.xml.
        images_dir: directory of the images; default: images/ next to the xml.

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them.
        UserError, OSError: files or directories do not exist, or the file is not such an xml.
    """
    file = os.path.join(path, "annotations.xml") if os.path.isdir(path) else path
    images_dir = images_dir or os.path.join(os.path.dirname(file), "images")
    require_directory(images_dir)
    try:
        root = ElementTree.parse(file, ElementTree.XMLParser(target=NoDoctype())).getroot()
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UserError(f"{file} is not valid xml: {error}") from error
    if root.tag != "annotations":
        raise UserError(f"{file} begins with <{root.tag}>: CVAT's xml begins with <annotations>")
    if root.find("track") is not None:
        raise UserError(f"{file} {_FOR_VIDEO}")
    labels = root.iterfind("meta//labels/label")
    names = [label.findtext("name", "").strip() for label in labels if label.find("parent") is None]
    issues = Issues(path, policy)
    shapes_of = {}
    for element in root.iterfind("image"):
        name, subset = element.get("name", ""), element.get("subset", "")
        inside = f"{subset}/{name}"  # a project's images are in images/<subset>/
        is_inside = subset and os.path.isfile(os.path.join(images_dir, inside))
        size = (_number(element, "height"), _number(element, "width"))
        place = f"{file} image {element.get('id')}"
        image = LabelledImage(inside if is_inside else locate(name, images_dir), place, size)
        if image in shapes_of:
            issues.add("image-labelled-twice", f"{image}: two elements have this name and id")
        shapes_of[image] = list(_read_shapes(element, f"{place} {name!r}", issues))
    annotations = annotations_of_shapes(
        shapes_of,
        images_dir,
        issues,
        names=list(dict.fromkeys(filter(None, names))),
        label_map_file=label_map_file,
        turned=True,
    )
    return annotations, images_dir


def _number(element: Element, key: str) -> int:
    text = element.get(key, "")
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else 0


def _read_shapes(image: Element, place: str, issues: Issues) -> Iterator[Shape]:
    for number, element in enumerate(image, 1):
        label = element.get("label", "").strip()
        location = f"{place} {element.tag} {number} {label!r}"
        try:
            box = _parse_box(element)
        except (KeyError, ValueError):
            values = {key: value for key, value in element.items() if key != "label"}
            issues.add("label-line", f"{location} has no valid coordinates: {_REPR.repr(values)}")
            continue
        if box is None:
            issues.add("shape-without-box", location)
            continue
        if float(element.get("rotation", 0)):
            issues.add("box-rotated", f"{location} by {element.get('rotation')} degrees")
        elif element.tag not in ("box", "mask"):
            issues.add("polygon", location)
        yield Shape(location, label, box)


def _parse_box(element: Element) -> Ltrb | None:
    """Returns the box of a shape; None if it has none. Raises KeyError or ValueError."""

    def numbers(*keys: str) -> list[float]:
        return [float(element.attrib[key]) for key in keys]

    degrees = float(element.get("rotation", 0))
    if element.tag == "box":
        left, top, right, bottom = numbers("xtl", "ytl", "xbr", "ybr")
        if degrees:
            left, top, width, height = box_around_rotated((left, top, right - left, bottom - top), degrees)
            right, bottom = left + width, top + height
        return left, top, right, bottom
    if element.tag == "polygon":
        points = [point.split(",") for point in element.attrib["points"].split(";")]
        return box_around((float(x), float(y)) for x, y in points)
    if element.tag == "mask":
        left, top, width, height = numbers("left", "top", "width", "height")
        return left, top, left + width, top + height
    if element.tag == "ellipse":
        x, y, rx, ry = numbers("cx", "cy", "rx", "ry")
        return box_around_ellipse(x, y, rx, ry, degrees)
    if element.tag == "cuboid":
        corners = [f"{side}{face}" for face in (1, 2) for side in ("tl", "bl", "tr", "br")]
        return box_around(
            zip(*(numbers(*(axis + corner for corner in corners)) for axis in "xy"), strict=True)
        )
    return None
