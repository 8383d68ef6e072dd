"""Reads Pascal VOC: one xml file for each image, in Annotations/, and the images in JPEGImages/.

VOC's coordinates count pixels from 1, and a box includes its last pixel: its width is xmax - xmin + 1
(VOCdevkit, VOCcode/VOCevaldet.m). Many tools, such as labelImg, write edges that are counted from 0.
--voc_pixels selects one of the two conventions.

CVAT writes a rotated rectangle as the box before the rotation, and the angle in degrees as the attribute
`rotation` (cvat/apps/dataset_manager/formats/transformers.py; datumaro,
plugins/data_formats/voc/exporter.py). It becomes the upright box around the rotated one.

Annotations/ and JPEGImages/ may have folders: datumaro writes Annotations/cam1/a.xml for cam1/a.jpg.

By default objects marked `difficult` are kept, as in TensorFlow Object Detection
(dataset_tools/create_pascal_tf_record.py). Parts of an object (head, hand) are left out.
"""

import codecs
import collections
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.data.annotations import Annotations
from common.data.check.issues import Issues
from common.data.coco import box_around_rotated
from common.data.image_files import difference, list_tree, spelling
from common.data.labels import LabelMap
from common.errors import UserError
from tools.conversion.labels import (
    Box,
    LabelledImage,
    Object,
    check_images,
    find_listed,
    make_annotations,
    require_directory,
)

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_ENCODING = re.compile(rb"""(?:\xef\xbb\xbf)?\s*<\?xml[^>]*?\sencoding\s*=\s*["']([\w.:-]+)["']""")
# Encodings, as Python names them, and those with more characters that files with this declaration often use.
_LARGER_ENCODINGS = {
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
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
        images_dir: directory of the images; default: JPEGImages/ in `directory`, or `directory` itself if it
            has both xml files and images, as labelImg leaves them.
        split: name or path of a list of the images to read; default: all.
        difficult: what to do with objects that are marked difficult: "keep", "crowd" or "drop".
        voc_pixels: "one_based" or "zero_based".

    Returns:
        The annotations, and the directory that their file names are relative to.

    Raises:
        DataError: the data have errors; the message lists all of them with their files.
        UserError, OSError: files or directories do not exist.
    """
    if not os.path.isdir(directory):
        raise UserError(f"--input={directory} is not a directory")
    xml_dir = os.path.join(directory, "Annotations")
    xml_dir = xml_dir if os.path.isdir(xml_dir) else directory
    images_dir = images_dir or _default_images_dir(directory, xml_dir)
    require_directory(images_dir)
    issues = Issues(directory, policy)
    files = _find_documents(xml_dir, issues)
    if not files:
        raise UserError(f"--input={directory} contains no xml file")
    selected = _read_split(directory, split, files, issues) if split else list(files)
    documents = _read_documents({stem: files[stem] for stem in selected} if label_map_file else files, issues)
    if label_map_file:
        label_map = LabelMap.load(label_map_file)
    else:
        elements = [element for document in documents.values() for element in document.iterfind("object")]
        names = sorted({_text(element, "name") for element in elements} - {""})
        label_map = LabelMap(tuple(range(1, len(names) + 1)), tuple(names))
    category_ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    documents = {stem: documents[stem] for stem in selected if stem in documents}
    document_of = _find_images(documents, files, xml_dir, images_dir, issues, all_images=not split)
    images = list(document_of)
    usable, facts = check_images(images, images_dir, issues)
    objects = [
        list(_read_objects(image, document_of[image], category_ids, difficult, voc_pixels, issues))
        for image in images
    ]
    return make_annotations(images, usable, facts, objects, label_map, issues), images_dir


def _default_images_dir(directory: str, xml_dir: str) -> str:
    images_dir = os.path.join(directory, "JPEGImages")
    if xml_dir != directory or os.path.exists(images_dir):
        return images_dir
    has_images = any(name.lower().endswith(IMAGE_SUFFIXES) for name in os.listdir(directory))
    return directory if has_images else images_dir


def _find_documents(xml_dir: str, issues: Issues) -> dict[str, str]:
    """Returns {stem: path} of the xml files in a directory and its folders, such as {"cam1/a": PATH}."""
    tree = list_tree(xml_dir)
    tree.report(issues)
    files: dict[str, str] = {}
    for path in tree.with_suffix(".xml"):
        stem = os.path.relpath(os.path.splitext(path)[0], xml_dir)
        if files.setdefault(stem, path) != path:
            issues.add("label-file", f"{path} is a second file for {stem!r}, beside {files[stem]}")
    return dict(sorted(files.items()))


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


def _read_documents(files: Mapping[str, str], issues: Issues) -> dict[str, Element]:
    """Parses the files {stem: path}, and returns {stem: document}."""
    documents = {}
    for stem, path in files.items():
        try:
            parser = ElementTree.XMLParser(target=NoDoctype())
            parser.feed(_decode(pathlib.Path(path).read_bytes()))
            document = parser.close()
            if document.tag != "annotation":
                raise ValueError(f"an annotation of Pascal VOC does not begin with <{document.tag}>")
            documents[stem] = document
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            issues.add("label-file", f"{path} is not valid xml: {error}")
    return documents


def _decode(content: bytes) -> bytes | str:
    """Returns an xml document as text. ElementTree's parser does not know encodings such as GBK.

    Raises:
        ValueError, LookupError: the document is not in the encoding that it declares, or has an unknown one.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content
    declaration = _ENCODING.match(content)
    encoding = codecs.lookup(declaration[1].decode() if declaration else "utf-8").name
    encoding = _LARGER_ENCODINGS.get(encoding, encoding)
    if encoding.startswith("utf") or content.startswith(codecs.BOM_UTF8):
        encoding = "utf-8"  # also for "utf-16", because the declaration has one byte per character
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not in the encoding {encoding}: save it as UTF-8 ({error})") from error


def _find_images(
    documents: Mapping[str, Element],
    files: Mapping[str, str],
    xml_dir: str,
    images_dir: str,
    issues: Issues,
    *,
    all_images: bool,
) -> dict[LabelledImage, Element]:
    """Finds the image of each document {stem: document}.

    An image with the same stem is preferred, then the one that <filename> names, then one with either name in
    another folder. Among several, <filename> selects one.

    Args:
        files: stem -> path of all documents of the data set.
        all_images: whether an image without a document is reported.
    """
    tree = list_tree(images_dir)
    if not pathlib.Path(images_dir).resolve().is_relative_to(pathlib.Path(xml_dir).resolve()):
        tree.report(issues)
    names = {os.path.relpath(file, images_dir) for file in tree.files}
    by_stem, elsewhere = collections.defaultdict(list), collections.defaultdict(list)
    for file in (*tree.images, *tree.unsupported):
        name = os.path.relpath(file, images_dir)
        stem = os.path.splitext(name)[0]
        by_stem[stem].append(name)
        if stem not in files:
            elsewhere[os.path.basename(stem)].append(name)
            elsewhere[os.path.basename(name)].append(name)
    spellings = {spelling(os.path.basename(stem)): of_stem[0] for stem, of_stem in by_stem.items()}

    images: dict[LabelledImage, Element] = {}
    owners: dict[str, str] = {}
    for stem, document in documents.items():
        path, filename = files[stem], re.sub(r"[\\/]+", "/", _text(document, "filename"))
        folder, last = os.path.dirname(stem), os.path.basename(filename)
        suffixes = [filename.split("/", number)[-1] for number in range(filename.count("/") + 1)]
        choices = (
            by_stem.get(stem) or [end for end in (os.path.join(folder, last), *suffixes) if end in names][:1]
        )
        choices = choices or elsewhere.get(last) or elsewhere.get(os.path.basename(stem)) or []
        choices = [name for name in choices if os.path.basename(name) == last] or choices
        if len(choices) > 1:
            text = f"{path}: several images are called {stem!r}: name one in <filename>"
            issues.add("label-file", f"{text} ({', '.join(choices[:3])})")
        elif not choices:
            text = f"{path}: no image {stem!r} in {images_dir}"
            if similar := spellings.get(spelling(os.path.basename(stem))):
                how = difference(os.path.splitext(os.path.basename(similar))[0], os.path.basename(stem))
                text = f"{text}, but {similar!r} exists, {how}"
            issues.add("image-missing", text)
        elif owners.setdefault(choices[0], path) != path:
            issues.add(
                "label-file", f"{path}: its image {choices[0]!r} already belongs to {owners[choices[0]]}"
            )
        else:
            images[LabelledImage(choices[0], path, _read_size(document))] = document
    if all_images:
        for kind, paths in (("image-unlabelled", tree.images), ("format-skipped", tree.unsupported)):
            others = [os.path.relpath(file, images_dir) for file in paths]
            others = [
                name for name in others if name not in owners and os.path.splitext(name)[0] not in files
            ]
            issues.add_each(kind, others, repr)
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
    paths = (".//bndbox", "object/bndbox", "object/part/bndbox")
    num_boxes, *num_read = (len(document.findall(path)) for path in paths)
    if num_boxes > sum(num_read):
        text = f"{image.label_file} has {num_boxes - sum(num_read)} <bndbox> outside an <object>"
        issues.add("label-line", text)
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
        try:
            degrees = _rotation(element)
        except ValueError as error:
            issues.add("label-line", f"{location} has a rotation that is not a number: {error}")
            continue
        if degrees % 360:
            issues.add("box-rotated", f"{location} by {degrees:g} degrees")
            box = box_around_rotated(box, degrees)
        elif min(box[:2]) < 0 < first:
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


def _rotation(element: Element) -> float:
    """Returns the angle of an object in degrees, 0 if it has none. Raises ValueError."""
    for attribute in element.iterfind("attributes/attribute"):
        if _text(attribute, "name") == "rotation":
            degrees = float(_text(attribute, "value"))
            if not math.isfinite(degrees):
                raise ValueError(f"{degrees}")
            return degrees
    return 0.0
