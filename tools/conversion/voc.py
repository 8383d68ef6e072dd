"""Pascal VOC: one xml file for each image, in Annotations/, and the images in JPEGImages/.

Coordinates of VOC count pixels from 1 and include the last one: a box over the whole image is 1, 1, width,
height, and is width = xmax - xmin + 1 pixels wide (VOCdevkit, VOCcode/VOCevaldet.m; so does Detectron2,
detectron2/data/datasets/pascal_voc.py). Many tools write the same files with edges that are counted from 0
(labelImg; BCCD's boxes are meant so): `pixels` says which.

Objects marked `difficult` are kept as they are by default, as in Detectron2 and in TensorFlow Object
Detection (dataset_tools/create_pascal_tf_record.py). The devkit's evaluation counts them neither as found nor
as missed; of what COCO knows, a crowd is nearest to that.
"""

import os
import re
from collections.abc import Mapping, Sequence

from common import progress
from common.annotations import Annotations
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import IMAGE_SUFFIXES
from common.errors import UserError
from common.issues import Findings
from common.labels import LabelMap
from tools.conversion.labelled_images import (
    LabelledImage,
    as_annotations,
    inspect_images,
    read_label_file,
    read_list,
)
from tools.conversion.voc_xml import VocDocument, parse_xml

DIFFICULT = ("keep", "crowd", "drop")
PIXELS = {"one_based": 1, "zero_based": 0}  # the first pixel's coordinate
_SHOW_PROGRESS = 5000  # files, which take about a second


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
        difficult: what becomes of objects so marked: one of DIFFICULT.
        pixels: how coordinates are counted: one of PIXELS.
        policy: about images that cannot be used.

    Returns:
        The annotations, and the directory that their file names refer to.

    Raises:
        DataError: everything that is wrong, with file and line.
        UserError: files or directories that are not there.
    """
    directory = os.fspath(directory)
    xml_dir, images_dir = _directories(directory, images_dir)
    findings = Findings(directory)
    stems = sorted(name[:-4] for name in _files(xml_dir) if name.endswith(".xml"))
    if not stems:
        raise UserError(f"--input={directory}: no xml file there")
    wanted = stems if split is None else _read_split(directory, split, set(stems), findings)
    documents = _read_documents(xml_dir, stems if label_map is None else wanted, findings)
    if label_map is None:
        names = sorted({o.name for document in documents.values() for o in document.objects} - {""})
        label_map = LabelMap(tuple(range(1, len(names) + 1)), tuple(names))

    category_ids = dict(zip(label_map.names, label_map.category_ids, strict=True))
    of_wanted = {stem: documents[stem] for stem in wanted if stem in documents}
    images = _find_images(of_wanted, images_dir, findings)
    for stem, image in images.items():
        _add_objects(image, documents[stem], category_ids, difficult, pixels, findings)
    sound, _ = inspect_images(list(images.values()), images_dir, policy, findings)
    return as_annotations(sound, label_map, policy, findings), images_dir


def _directories(directory: str, images_dir: str | os.PathLike | None) -> tuple[str, str]:
    annotations = os.path.join(directory, "Annotations")
    xml_dir = annotations if os.path.isdir(annotations) else directory
    if images_dir is None:
        images_dir = os.path.join(directory, "JPEGImages")
        if not os.path.isdir(images_dir):
            raise UserError(
                f"--input={directory} has no JPEGImages/: give the directory of the images as --images=DIR"
            )
    return xml_dir, os.fspath(images_dir)


def _files(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_file()]
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from error


def _read_split(directory: str, split: str, stems: set[str], findings: Findings) -> list[str]:
    """The names in a list. Per-class lists of VOC have 1, -1 or 0 behind the name: all their names count."""
    path = os.path.join(directory, "ImageSets", "Main", f"{split}.txt")
    if not os.path.isfile(path):
        if not os.path.isfile(split):
            raise UserError(f"--split={split}: neither {path} nor {split} is a file")
        path = split
    wanted: dict[str, int] = {}
    for number, line in read_list(path):
        choices = (line, re.sub(r"\s+(-1|0|1)$", "", line), os.path.splitext(line)[0])
        stem = next((choice for choice in choices if choice in stems), None)
        if stem is None:
            findings.add("label-file", f"{path} line {number}: there is no {line}.xml")
        elif stem in wanted:
            findings.add(
                "label-line", f"{path} line {number}: {stem!r} stands in line {wanted[stem]} already"
            )
        else:
            wanted[stem] = number
    return list(wanted)


def _read_documents(xml_dir: str, stems: Sequence[str], findings: Findings) -> dict[str, VocDocument]:
    bar = progress.Bar("Reading labels", len(stems)) if len(stems) > _SHOW_PROGRESS else None
    documents = {}
    for stem in stems:
        path = os.path.join(xml_dir, f"{stem}.xml")
        content = read_label_file(path, findings)
        if content is not None:
            try:
                documents[stem] = parse_xml(path, content)
            except ValueError as error:
                findings.add("label-file", f"{path} {error}")
        if bar:
            bar.step()
    return documents


def _find_images(
    documents: Mapping[str, VocDocument], images_dir: str, findings: Findings
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
        given = re.split(r"[\\/]", document.fields.get("filename", ""))[-1]
        found = by_stem.get(stem) or ([given] if given in names else [])
        found = found or by_stem.get(given) or by_stem.get(os.path.splitext(given)[0]) or []
        name = given if given in found else found[0] if len(found) == 1 else None
        if not found:
            also = f" or {given!r}" if given and os.path.splitext(given)[0] != stem else ""
            findings.add("image-missing", f"{document.path}: no image {stem!r}{also} in {images_dir}")
        elif name is None:
            findings.add("label-file", f"{document.path}: its image may be any of {', '.join(found)}")
        elif name in owners:
            findings.add(
                "label-file", f"{document.path}: its image {name!r} is that of {owners[name]} already"
            )
        else:
            owners[name] = document.path
            images[stem] = LabelledImage(name, document.path)
            _set_size(images[stem], document, findings)
            if given in names and name != given:
                findings.add("voc-filename", f"{document.path} says {given!r}, taken is {name!r}")
    return images


def _set_size(image: LabelledImage, document: VocDocument, findings: Findings) -> None:
    try:
        image.size = document.size
    except ValueError:
        width, height = (document.fields.get(f"size/{side}") for side in ("width", "height"))
        findings.add("label-file", f"{document.path} has the size {width!r} x {height!r}")
    else:
        if image.size is None:
            findings.add("size-missing", str(image))


def _add_objects(
    image: LabelledImage,
    document: VocDocument,
    category_ids: Mapping[str, int],
    difficult: str,
    pixels: str,
    findings: Findings,
) -> None:
    for an_object in document.objects:
        where = f"{document.path} line {an_object.line}: object {an_object.name!r}"
        try:
            box = an_object.box(PIXELS[pixels])
        except ValueError as error:
            findings.add("label-line", f"{where} {error}")
            continue
        if an_object.name not in category_ids:
            findings.add("unknown-category", f"{where} is none of {len(category_ids)} categories")
            continue
        if pixels == "one_based" and min(box[:2]) < 0:
            findings.add("voc-zero", f"{where} begins at {box[0] + 1:g}, {box[1] + 1:g}")
        is_difficult = an_object.fields.get("difficult") == "1"
        if is_difficult:
            findings.add("difficult", f"{where}: {difficult}")
        if not (is_difficult and difficult == "drop"):
            image.boxes_ltwh_px.append(box)
            image.category_ids.append(category_ids[an_object.name])
            image.is_crowd.append(is_difficult and difficult == "crowd")
