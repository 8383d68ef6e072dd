"""Pascal VOC: one xml file for each image, in Annotations/, and the images in JPEGImages/.

Coordinates of VOC count pixels from 1 and include the last one: a box over the whole image is 1, 1, width,
height, and is width = xmax - xmin + 1 pixels wide (VOCdevkit, VOCcode/VOCevaldet.m; so does Detectron2,
detectron2/data/datasets/pascal_voc.py). Many tools write the same files with edges that are counted from 0
(labelImg; BCCD's boxes are meant so): `pixels` chooses.

Objects marked `difficult` are kept as they are by default, as in Detectron2 and in TensorFlow Object
Detection (dataset_tools/create_pascal_tf_record.py). The devkit's evaluation counts them neither as found nor
as missed; the nearest that COCO has is a crowd. An object's parts (head, hand, foot) are left out.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from common.annotations import Annotations
from common.datacheck.images import IMAGE_SUFFIXES, ImagePolicy
from common.datacheck.issues import Issues
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion.labels import (
    LabelledImage,
    as_annotations,
    find_listed,
    inspect_images,
    read_label_file,
)

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_MAX_SIDE = 2**31 - 1


def read_voc(
    directory: str | os.PathLike,
    images_dir: str | os.PathLike | None = None,
    *,
    split: str | None = None,
    label_map: LabelMap | None = None,
    difficult: str = "keep",
    pixels: str = "one_based",
    policy: ImagePolicy = ImagePolicy(),
) -> tuple[Annotations, str]:
    """Reads and checks a set in the format of Pascal VOC.

    The image of an xml file is the one of the same name; only where there is none does its `filename` count,
    which copies and renamed files often carry wrongly.

    Args:
        directory: with Annotations/ and JPEGImages/, such as VOCdevkit/VOC2012; or of xml files.
        images_dir: of the images, instead of JPEGImages/.
        split: a name in ImageSets/Main/, or the path of a list of names; None: all xml files.
        label_map: ids of the names. Default: 1, 2, ... in alphabetic order of all names in all xml files of
            the directory, whatever the split, so that the ids of two splits agree.
        difficult: what becomes of objects so marked: keep, crowd or drop.
        pixels: how coordinates are counted: one_based or zero_based.
        policy: about images that cannot be used.

    Returns:
        The annotations, and the directory that their file names refer to.

    Raises:
        DataError: everything that is wrong, with the file.
        UserError: files or directories that are not there.
    """
    directory = os.fspath(directory)
    xml_dir = os.path.join(directory, "Annotations")
    xml_dir = xml_dir if os.path.isdir(xml_dir) else directory
    images_dir = os.path.join(directory, "JPEGImages") if images_dir is None else os.fspath(images_dir)
    if not os.path.isdir(images_dir):
        raise UserError(f"{images_dir} is no directory: give that of the images as --images=DIR")
    issues = Issues(directory)
    stems = sorted(name[:-4] for name in _files(xml_dir) if name.endswith(".xml"))
    if not stems:
        raise UserError(f"--input={directory}: no xml file there")
    wanted = stems if split is None else _read_split(directory, split, set(stems), issues)
    documents = _read_documents(xml_dir, stems if label_map is None else wanted, issues)
    if label_map is None:
        objects = [of for document in documents.values() for of in document.iterfind("object")]
        names = sorted({_text(of, "name") for of in objects} - {""})
        label_map = LabelMap(tuple(range(1, len(names) + 1)), tuple(names))

    category_ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    of_wanted = {stem: documents[stem] for stem in wanted if stem in documents}
    images = _find_images(of_wanted, xml_dir, images_dir, issues)
    for stem, image in images.items():
        _add_objects(image, documents[stem], category_ids, difficult, pixels == "one_based", issues)
    sound, _ = inspect_images(list(images.values()), images_dir, policy, issues)
    return as_annotations(sound, label_map, policy, issues), images_dir


def read_box(an_object: Element, one_based: bool) -> tuple[float, float, float, float]:
    """Left, top, width, height of an object in pixels.

    Raises:
        ValueError: what is wrong with the object.
    """
    if not _text(an_object, "name"):
        raise ValueError("has no name")
    for path in ("name", *(f"bndbox/{side}" for side in _SIDES)):
        if (count := len(an_object.findall(path))) != 1:
            raise ValueError(f"has {'more than one' if count else 'no'} {path}")
    edges = []
    for side in _SIDES:
        text = _text(an_object, f"bndbox/{side}")
        try:
            edges.append(float(text))
        except ValueError:
            raise ValueError(f"has {side} {text!r}, which is no number") from None
        if not math.isfinite(edges[-1]):
            raise ValueError(f"has {side} {text!r}")
    left, top, right, bottom = edges
    if right < left or bottom < top:
        raise ValueError(f"has xmin, ymin, xmax, ymax = {left:g}, {top:g}, {right:g}, {bottom:g}")
    first = 1 if one_based else 0
    return left - first, top - first, right - left + first, bottom - top + first


def _files(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_file()]
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from error


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _read_split(directory: str, split: str, stems: set[str], issues: Issues) -> list[str]:
    """The names in a list. Per-class lists of VOC have 1, -1 or 0 behind the name: all their names count."""
    path = os.path.join(directory, "ImageSets", "Main", f"{split}.txt")
    if not os.path.isfile(path):
        if not os.path.isfile(split):
            raise UserError(f"--split={split}: neither {path} nor {split} is a file")
        path = split

    def find(line: str) -> str | None:
        choices = (line, re.sub(r"\s+(-1|0|1)$", "", line), os.path.splitext(line)[0])
        return next((choice for choice in choices if choice in stems), None)

    return find_listed(path, find, "label-file", issues)


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses a document type: its entities could expand to gigabytes or name other files."""

    def doctype(self, name: str, *_: object) -> None:
        raise ValueError(f"declares a document type ({name}), which is refused: its entities are not safe")


def _read_documents(xml_dir: str, stems: Sequence[str], issues: Issues) -> dict[str, Element]:
    documents = {}
    for stem in stems:
        path = os.path.join(xml_dir, f"{stem}.xml")
        content = read_label_file(path, issues)
        if content is None:
            continue
        try:
            document = ElementTree.XML(content, ElementTree.XMLParser(target=_NoDoctype()))
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            issues.add("label-file", f"{path} is no valid xml: {error}")
            continue
        if document.tag == "annotation":
            documents[stem] = document
        else:
            what = f"is no annotation of Pascal VOC: it begins with <{document.tag}>"
            issues.add("label-file", f"{path} {what}")
    return documents


def _find_images(
    documents: Mapping[str, Element], xml_dir: str, images_dir: str, issues: Issues
) -> dict[str, LabelledImage]:
    names = set(_files(images_dir))
    by_stem: dict[str, list[str]] = {}
    for name in sorted(names):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() in IMAGE_SUFFIXES:
            by_stem.setdefault(stem, []).append(name)
    images: dict[str, LabelledImage] = {}
    owners: dict[str, str] = {}
    for stem, document in documents.items():
        path = os.path.join(xml_dir, f"{stem}.xml")
        given = re.split(r"[\\/]", _text(document, "filename"))[-1]
        found = by_stem.get(stem) or [name for name in [given] if name in names]
        name = given if given in found else found[0] if len(found) == 1 else None
        if not found:
            also = f" or {given!r}" if given and os.path.splitext(given)[0] != stem else ""
            issues.add("image-missing", f"{path}: no image {stem!r}{also} in {images_dir}")
        elif name is None:
            issues.add("label-file", f"{path}: its image may be any of {', '.join(found)}")
        elif name in owners:
            issues.add("label-file", f"{path}: its image {name!r} is that of {owners[name]} already")
        else:
            owners[name] = path
            images[stem] = LabelledImage(name, path)
            _set_size(images[stem], document, issues)
            if given in names and name != given:
                issues.add("voc-filename", f"{path} has {given!r}, taken is {name!r}")
    return images


def _set_size(image: LabelledImage, document: Element, issues: Issues) -> None:
    texts = [_text(document, f"size/{side}") for side in ("width", "height")]
    try:
        width, height = (float(text or 0) for text in texts)
        if not all(side.is_integer() and 0 <= side <= _MAX_SIDE for side in (width, height)):
            raise ValueError
    except ValueError:
        issues.add("label-file", f"{image.label_file} has the size {texts[0]!r} x {texts[1]!r}")
        return
    if width and height:
        image.size = int(height), int(width)
    else:
        issues.add("size-missing", str(image))


def _add_objects(
    image: LabelledImage,
    document: Element,
    category_ids: Mapping[str, int],
    difficult: str,
    one_based: bool,
    issues: Issues,
) -> None:
    for number, an_object in enumerate(document.iterfind("object"), 1):
        name = _text(an_object, "name")
        where = f"{image.label_file} object {number} {name!r}"
        try:
            box = read_box(an_object, one_based)
        except ValueError as error:
            issues.add("label-line", f"{where} {error}")
            continue
        if name not in category_ids:
            issues.add("unknown-category", f"{where} is none of {len(category_ids)} categories")
            continue
        if one_based and min(box[:2]) < 0:
            issues.add("voc-zero", f"{where} begins at {box[0] + 1:g}, {box[1] + 1:g}")
        is_difficult = _text(an_object, "difficult") == "1"
        if is_difficult:
            issues.add("difficult", f"{where}: {difficult}")
        if not (is_difficult and difficult == "drop"):
            image.add(box, category_ids[name], is_crowd=is_difficult and difficult == "crowd")
