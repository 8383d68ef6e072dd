"""Reads Pascal VOC: one xml file for each image, in Annotations/, and the images in JPEGImages/.

VOC's coordinates count pixels from 1, and a box includes its last pixel: its width is xmax - xmin + 1
(VOCdevkit, VOCcode/VOCevaldet.m). Many tools, such as labelImg, write edges that are counted from 0.
--voc_pixels selects one of the two conventions.

By default objects marked `difficult` are kept, as in TensorFlow Object Detection
(dataset_tools/create_pascal_tf_record.py). Parts of an object (head, hand) are left out.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.data.annotations import Annotations
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
)

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_WHOLE_NUMBER = re.compile(r"\d{1,9}(\.0*)?")


def read_voc(
    directory: str,
    *,
    images_dir: str | None = None,
    split: str | None = None,
    label_map_file: str | None = None,
    difficult: str = "keep",
    voc_pixels: str = "one_based",
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a data set in the format of Pascal VOC.

    An image has the same name as its xml file. The element `filename` is used only if no image has this name.
    Without a label map, category ids are 1, 2, ... in alphabetic order of the class names in all xml files.

    Args:
        directory: has Annotations/ with the xml files, or the xml files themselves.
        images_dir: directory of the images; default: JPEGImages/ in `directory`.
        split: name or path of a list of the images to read; default: all.
        difficult: what to do with objects that are marked difficult: "keep", "crowd" or "drop".
        voc_pixels: "one_based" or "zero_based".

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with their files.
        UserError, OSError: files or directories do not exist.
    """
    xml_dir = os.path.join(directory, "Annotations")
    xml_dir = xml_dir if os.path.isdir(xml_dir) else directory
    images_dir = images_dir or os.path.join(directory, "JPEGImages")
    if not os.path.isdir(images_dir):
        raise UserError(f"{images_dir} is not a directory: give the images' directory as --images=DIR")
    issues = Issues(directory, policy)
    stems = sorted(name.removesuffix(".xml") for name in os.listdir(xml_dir) if name.endswith(".xml"))
    if not stems:
        raise UserError(f"--input={directory} contains no xml file")
    selected = _read_split(directory, split, stems, issues) if split else stems
    documents = _read_documents(xml_dir, selected if label_map_file else stems, issues)
    if label_map_file:
        label_map = LabelMap.load(label_map_file)
    else:
        elements = [element for document in documents.values() for element in document.iterfind("object")]
        names = sorted({_text(element, "name") for element in elements} - {""})
        label_map = LabelMap(tuple(range(1, len(names) + 1)), tuple(names))
    category_ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    documents = {stem: documents[stem] for stem in selected if stem in documents}
    document_of = _find_images(documents, xml_dir, images_dir, issues)
    images = list(document_of)
    usable, facts = check_images(images, images_dir, issues)
    objects = [
        list(_read_objects(image, document_of[image], category_ids, difficult, voc_pixels, issues))
        for image in images
    ]
    return make_annotations(images, usable, facts, objects, label_map, issues), images_dir


def _text(element: Element, path: str) -> str:
    return element.findtext(path, "").strip()


def _read_split(directory: str, split: str, stems: Iterable[str], issues: Issues) -> list[str]:
    """Returns all names in a list file. Ignores the 1, -1 or 0 after a name."""
    path = os.path.join(directory, "ImageSets", "Main", f"{split}.txt")
    if not os.path.isfile(path):
        if not os.path.isfile(split):
            raise UserError(f"--split={split}: neither {path} nor {split} is a file")
        path = split
    known = set(stems)

    def find(line: str) -> str | None:
        choices = (line, re.sub(r"\s+(-1|0|1)$", "", line), os.path.splitext(line)[0])
        return next((choice for choice in choices if choice in known), None)

    return find_listed(path, find, "label-file", issues)


class NoDoctype(ElementTree.TreeBuilder):
    """Refuses an xml with a DOCTYPE, whose entities could expand to gigabytes."""

    def doctype(self, name: str, *_: object) -> None:
        raise ValueError(f"declares a document type ({name}), which is refused: its entities are not safe")


def _read_documents(xml_dir: str, stems: Iterable[str], issues: Issues) -> dict[str, Element]:
    documents = {}
    for stem in stems:
        path = os.path.join(xml_dir, f"{stem}.xml")
        try:
            parser = ElementTree.XMLParser(target=NoDoctype())
            document = ElementTree.parse(path, parser).getroot()
            if document.tag != "annotation":
                raise ValueError(f"an annotation of Pascal VOC does not begin with <{document.tag}>")
            documents[stem] = document
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            issues.add("label-file", f"{path} is not valid xml: {error}")
    return documents


def _find_images(
    documents: Mapping[str, Element], xml_dir: str, images_dir: str, issues: Issues
) -> dict[LabelledImage, Element]:
    names = set(os.listdir(images_dir))
    by_stem: dict[str, str] = {}
    ambiguous = set()
    for file in sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES)):
        stem = os.path.splitext(file)[0]
        if by_stem.setdefault(stem, file) != file:
            ambiguous.add(stem)
    images: dict[LabelledImage, Element] = {}
    owners: dict[str, str] = {}
    for stem, document in documents.items():
        path = os.path.join(xml_dir, f"{stem}.xml")
        filename = re.split(r"[\\/]", _text(document, "filename"))[-1]
        is_usable = filename in names and (stem not in by_stem or os.path.splitext(filename)[0] == stem)
        name = filename if is_usable else by_stem.get(stem)
        if name != filename and stem in ambiguous:
            issues.add("label-file", f"{path}: several images are called {stem!r}: name one in <filename>")
            continue
        if name is None:
            issues.add("image-missing", f"{path}: no image {stem!r} in {images_dir}")
        elif owners.setdefault(name, path) != path:
            issues.add("label-file", f"{path}: its image {name!r} already belongs to {owners[name]}")
        else:
            images[LabelledImage(name, path, _read_size(document))] = document
    return images


def _read_size(document: Element) -> tuple[int, int]:
    """Returns (height, width) in pixels; 0 for a side that is missing or is not a whole number."""
    sides = [_text(document, f"size/{side}") for side in ("height", "width")]
    height, width = (int(float(side)) if _WHOLE_NUMBER.fullmatch(side) else 0 for side in sides)
    return height, width


def _read_objects(
    image: LabelledImage,
    document: Element,
    category_ids: Mapping[str, int],
    difficult: str,
    voc_pixels: str,
    issues: Issues,
) -> Iterator[Object]:
    first = 1 if voc_pixels == "one_based" else 0
    for number, element in enumerate(document.iterfind("object"), 1):
        name = _text(element, "name")
        location = f"{image.label_file} object {number} {name!r}"
        sides = [_text(element, f"bndbox/{side}") for side in _SIDES]
        box = _parse_box(sides, first)
        if box is None:
            issues.add("label-line", f"{location} has {', '.join(_SIDES)} = {', '.join(map(repr, sides))}")
            continue
        if name not in category_ids:
            issues.add("unknown-category", f"{location} is not one of {len(category_ids)} categories")
            continue
        if min(box[:2]) < 0 < first:
            issues.add("voc-zero", f"{location} begins at {sides[0]}, {sides[1]}")
        is_difficult = _text(element, "difficult") == "1"
        if is_difficult:
            issues.add("difficult", f"{location}: {difficult}")
        if not (is_difficult and difficult == "drop"):
            yield box, category_ids[name], is_difficult and difficult == "crowd"


def _parse_box(sides: Iterable[str], first: int) -> Box | None:
    """Returns left, top, width, height in pixels; None if the numbers are not a box.

    Args:
        sides: xmin, ymin, xmax, ymax.
        first: number of the first pixel, 0 or 1; if it is 1, a box includes its last pixel.
    """
    try:
        left, top, right, bottom = map(float, sides)
    except ValueError:
        return None
    if not (-math.inf < left <= right < math.inf and -math.inf < top <= bottom < math.inf):  # or NaN
        return None
    return left - first, top - first, right - left + first, bottom - top + first
