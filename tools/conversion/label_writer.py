"""Writes annotations as the label files of YOLO, Pascal VOC or CVAT, with a copy of the images.

    yolo: images/a.jpg, labels/a.txt, data.yaml, classes.txt; other folders `images` in names are left out
    voc:  JPEGImages/a.jpg, Annotations/a.xml
    cvat: images/a.jpg, annotations.xml

The readers in yolo.py, voc.py and cvat.py describe these formats and read the directory back. Boxes are
clipped to their image. CVAT shows images as turned by their EXIF orientation, so its boxes refer to the
turned image. The labels of YOLO and Pascal VOC refer to the stored pixels.
"""

import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import yaml

from common.args import ImagePolicy
from common.data.annotations import Annotations
from common.data.check.image_headers import SWAPS_SIDES
from common.data.check.images import inspect_files
from common.data.coco import turn_back
from common.data.labels import LabelMap
from common.errors import UserError
from common.files import write_into
from common.progress import log

_FOLDERS = {"yolo": ("images", "labels"), "voc": ("JPEGImages", "Annotations"), "cvat": ("images", "")}
# https://www.w3.org/TR/xml, Char
_NOT_IN_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_INVERSE = {6: 8, 8: 6}  # EXIF orientations that undo each other; each of the others undoes itself


class _Image(NamedTuple):
    """An image and its objects.

    Attributes:
        name: path below the directory of the images.
        size: (height, width) in pixels.
        boxes_ltrb_px: float64 (N, 4).
        classes: the class of each box, from 0.
        is_crowd: whether each box marks a crowd.
    """

    name: str
    size: tuple[int, int]
    boxes_ltrb_px: np.ndarray
    classes: list[int]
    is_crowd: list[bool]


def write_labels(
    target: str, annotations: Annotations, images_dir: str, directory: str, *, voc_pixels: str = "one_based"
) -> None:
    """Writes a data set, all or nothing.

    Args:
        target: "yolo", "voc" or "cvat".
        images_dir: the directory of the images, which are copied.
        directory: a directory that is empty or does not exist.
        voc_pixels: "one_based" or "zero_based", as for `read_voc`.

    Raises:
        UserError: two images would have the same labels, or xml cannot hold a name.
        OSError: a file cannot be read or written.
    """
    image_folder, label_folder = _FOLDERS[target]
    places = {name: _without_images(name) if target == "yolo" else name for name in annotations.file_names}
    files: dict[str, str] = {}
    for name in annotations.file_names:
        file = os.path.splitext(places[name])[0] if label_folder else name
        if file in files:
            problem = f"{files[file]!r} and {name!r} would have the same labels"
            advice = "merge these images" if name == files[file] else "rename one of them"
            raise UserError(f"{problem}: {advice}")
        files[file] = name
    for name in (*annotations.file_names, *annotations.label_map.names) if target != "yolo" else ():
        if _NOT_IN_XML.search(name):
            raise UserError(f"{name!r} has a character that xml cannot hold: rename it, or use --to=yolo")
    images = list(_images(annotations, images_dir, turned=target == "cvat"))
    label_map = annotations.label_map

    def write(staged: pathlib.Path) -> None:
        for image in images:
            place = places[image.name]
            _write(staged / image_folder / place, pathlib.Path(images_dir, image.name).read_bytes())
            label = staged / label_folder / place
            if target == "yolo":
                _write(label.with_suffix(".txt"), _yolo_lines(image).encode())
            elif target == "voc":
                first = 1 if voc_pixels == "one_based" else 0
                _write(label.with_suffix(".xml"), _xml(_voc_document(image, label_map, first)))
        if target == "yolo":
            names = dict(enumerate(label_map.names))
            content = {"train": image_folder, "names": names}
            _write(
                staged / "data.yaml", yaml.safe_dump(content, allow_unicode=True, sort_keys=False).encode()
            )
            lines = (" ".join(name.splitlines()) for name in label_map.names)  # one line for each class
            _write(staged / "classes.txt", "".join(f"{line}\n" for line in lines).encode())
        elif target == "cvat":
            _write(staged / "annotations.xml", _xml(_cvat_document(images, label_map)))

    os.makedirs(directory, exist_ok=True)
    write_into(directory, write)
    if target != "voc" and (count := int(np.count_nonzero(annotations.is_crowd))):
        log(f"{count} crowds are left out: labels of {target} have no mark for them")


def _without_images(name: str) -> str:
    """Returns a path without the folders `images`, which YOLO's trainers would replace by `labels`."""
    return "/".join(part for part in name.split("/") if part != "images")


def _write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _images(annotations: Annotations, images_dir: str, *, turned: bool) -> Iterator[_Image]:
    """Yields the images with clipped boxes. If `turned`, sizes and boxes are those of the turned image."""
    facts = inspect_files(images_dir, annotations.file_names, ImagePolicy())
    num_rotated = sum(fact.orientation != 1 for fact in facts)
    if num_rotated and not turned:
        labels = f"{num_rotated} images have an EXIF orientation, and their labels refer to the stored pixels"
        log(f"{labels}: a tool that turns these images shows the boxes in wrong places")
    classes = annotations.label_map.classes_of(annotations.category_ids)
    stored_sizes = annotations.image_sizes[:, ::-1].astype(np.float64)  # (I, 2): width, height
    limits = np.tile(stored_sizes[annotations.box_image], 2)
    boxes = annotations.boxes_ltwh_px
    edges = np.clip(np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1), 0, limits)
    has_area = (edges[:, 2:] > edges[:, :2]).all(axis=1)
    for row, (name, fact) in enumerate(zip(annotations.file_names, facts, strict=True)):
        rows = np.arange(*annotations.row_splits[row : row + 2])
        rows = rows[has_area[rows]]
        size, boxes_ltrb_px = stored_sizes[row], edges[rows]
        if turned and fact.orientation != 1:
            size = size[::-1] if fact.orientation >= SWAPS_SIDES else size
            boxes_ltrb_px = _turn(boxes_ltrb_px, size, fact.orientation)
        width, height = size.astype(int).tolist()
        crowds = annotations.is_crowd[rows].tolist()
        yield _Image(name, (height, width), boxes_ltrb_px, classes[rows].tolist(), crowds)


def _turn(boxes_ltrb_px: np.ndarray, turned_size: np.ndarray, orientation: int) -> np.ndarray:
    """Converts boxes in pixels of the stored image to pixels of the turned one, which has (width, height)."""
    left_top, right_bottom = np.split(boxes_ltrb_px, 2, axis=1)
    boxes_ltwh_px = np.concatenate([left_top, right_bottom - left_top], axis=1)
    inverse = np.full(len(boxes_ltwh_px), _INVERSE.get(orientation, orientation))
    boxes_ltwh_px = turn_back(boxes_ltwh_px, np.tile(turned_size, (len(inverse), 1)), inverse)
    left_top, sides = np.split(boxes_ltwh_px, 2, axis=1)
    return np.concatenate([left_top, left_top + sides], axis=1)


def _yolo_lines(image: _Image) -> str:
    height, width = image.size
    left_top, right_bottom = np.split(image.boxes_ltrb_px / [width, height, width, height], 2, axis=1)
    rows = zip(
        image.classes, (left_top + right_bottom) / 2, right_bottom - left_top, image.is_crowd, strict=True
    )
    return "".join(
        f"{number} {x:.8f} {y:.8f} {w:.8f} {h:.8f}\n" for number, (x, y), (w, h), crowd in rows if not crowd
    )


def _voc_document(image: _Image, label_map: LabelMap, first: int) -> Element:
    root = Element("annotation")
    _add(root, "filename", os.path.basename(image.name))
    size = _add(root, "size")
    for name, side in zip(("width", "height", "depth"), (*image.size[::-1], 3), strict=True):
        _add(size, name, side)
    for box, number, is_crowd in zip(image.boxes_ltrb_px, image.classes, image.is_crowd, strict=True):
        element = _add(root, "object")
        _add(element, "name", label_map.names[number])
        _add(element, "difficult", int(is_crowd))
        sides = _add(element, "bndbox")
        for name, edge in zip(("xmin", "ymin", "xmax", "ymax"), box + [first, first, 0, 0], strict=True):
            _add(sides, name, f"{edge:.3f}".rstrip("0").rstrip("."))
    return root


def _cvat_document(images: Sequence[_Image], label_map: LabelMap) -> Element:
    root = Element("annotations")
    _add(root, "version", "1.1")
    labels = _add(_add(_add(root, "meta"), "task"), "labels")
    for name in label_map.names:
        _add(_add(labels, "label"), "name", name)
    for image_id, image in enumerate(images):
        height, width = image.size
        attributes = {"id": image_id, "name": image.name, "width": width, "height": height}
        element = ElementTree.SubElement(
            root, "image", {key: str(value) for key, value in attributes.items()}
        )
        for box, number, is_crowd in zip(image.boxes_ltrb_px, image.classes, image.is_crowd, strict=True):
            if not is_crowd:
                edges = zip(("xtl", "ytl", "xbr", "ybr"), box, strict=True)
                label = {"label": label_map.names[number], "source": "auto", "occluded": "0", "z_order": "0"}
                ElementTree.SubElement(element, "box", label | {key: f"{edge:.2f}" for key, edge in edges})
    return root


def _add(parent: Element, tag: str, text: object = "") -> Element:
    element = ElementTree.SubElement(parent, tag)
    element.text = str(text)
    return element


def _xml(root: Element) -> bytes:
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"
