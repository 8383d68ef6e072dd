"""Recognises by its first bytes a file that is not what a command reads, and says what to do with it.

The check of annotations and record files calls it before it reports that a file is invalid, and
tools/convert.py before it reads. docs/data.md has the table of these formats for users.
"""

import codecs
import contextlib
import itertools
import os
import re
from typing import NamedTuple

from common.data.check.issues import Fault
from common.data.image_files import list_tree

HEAD = 2**12  # number of bytes that are searched


class Format(NamedTuple):
    """A format of files.

    Attributes:
        name: what the file is, in messages.
        source: the value of --from with which tools/convert.py reads it; "" if it does not.
        advice: what to do with the file PATH in the directory DIR; a sentence without full stop.
        beginning: regular expression that the first bytes match. (?i) ignores case, and . also matches \\n.
    """

    name: str
    source: str
    advice: str
    beginning: bytes

    def message(self, path: str) -> str:
        """Returns what a file is and what to do with it."""
        values = {"PATH": path, "DIR": os.path.dirname(path) or "."}
        advice = re.sub("PATH|DIR", lambda word: values[word[0]], self.advice)
        return f"it is {self.name}: {advice}"


_XML = rb"\s*(<\?xml[^>]*>)?\s*(<!--.*?-->\s*)?"
_IMAGE = rb"\.(jpe?g|jpe|jfif|png|bmp|webp|tiff?|jp2)"
_CONVERT = "run tools/convert.py --from={} --to=coco --input={} --output=FILE.json"
_PANLABEL = "convert it with panlabel: panlabel convert --to=coco --input=PATH --output=FILE.json --from="

# The first row that matches counts.
FORMATS = (
    Format(
        "an archive (zip, 7z or rar)",
        "",
        "unpack it, and give the files in it",
        rb"PK\x03\x04|7z\xbc\xaf\x27\x1c|Rar!\x1a",
    ),
    Format(
        "a tar archive, as WebDataset's",
        "webdataset",
        "give it to --train_file_pattern, or to convert.py --from=webdataset, if its labels have the form in "
        "docs/data.md, else unpack it with tar -xf PATH",
        rb".{257}ustar",
    ),
    # cvat-ai/cvat cvat/apps/dataset_manager/formats/cvat.py, dump_as_cvat_annotation
    Format("CVAT's xml", "cvat", _CONVERT.format("cvat", "PATH --images=IMAGES"), _XML + rb"<annotations\b"),
    Format(
        "an xml of Pascal VOC", "voc", _CONVERT.format("voc", "DIR --images=IMAGES"), _XML + rb"<annotation\b"
    ),
    # HumanSignal/label-studio docs/source/guide/export.md, JSON and JSON_MIN
    Format(
        "Label Studio's own json",
        "",
        "export it again in Label Studio, as 'COCO with Images'",
        rb'\s*\[.*("(annotations|completions|predictions)"\s*:\s*\[\s*\{.*"(result|was_cancelled)"\s*:'
        rb'|"original_width"\s*:)',
    ),
    # HumanSignal/labelImg libs/create_ml_io.py, CreateMLWriter.write
    Format(
        "CreateML's json",
        "",
        f"{_PANLABEL}create-ml",
        rb'\s*\[(?=.*"annotations?"\s*:\s*\[)(?=.*"coordinates"\s*:\s*\{\s*"(x|y|width|height)"\s*:)',
    ),
    # docs.labelbox.com/reference/export-image-annotations
    Format(
        "Labelbox's ndjson",
        "",
        f"{_PANLABEL}labelbox --allow-lossy",
        rb'\s*(\[\s*)?\{\s*"data_row"\s*:\s*\{',
    ),
    # cocodataset.org, format-results
    Format(
        "a list of detections (COCO results), not annotations",
        "detections",
        "give the json that has `images`, `annotations` and `categories`, or "
        + _CONVERT.format("detections", "PATH --images=IMAGES"),
        rb'\s*\[\s*\{(?=[^{}]*"image_id"\s*:)(?=[^{}]*"category_id"\s*:)',
    ),
    # gitlab.com/vgg/via via-2.x.y/via.js, pack_via_metadata and project_save_with_confirm
    Format(
        "VGG VIA's json",
        "",
        "choose 'Export Annotations (COCO format)' in VIA's menu 'Annotation'",
        rb'\s*\{.*("_via_(settings|img_metadata)"|"(shape|file)_attributes")',
    ),
    Format(
        "VGG VIA's csv",
        "",
        "import it into VIA, and choose 'Export Annotations (COCO format)' in its menu 'Annotation'",
        rb"#?filename,file_size,file_attributes,region_count,",
    ),
    # gitlab.com/vgg/via via-3.x.y/src/js/_via_data.js; its COCO export has no sizes of images
    Format(
        "a project of VGG VIA 3",
        "",
        "write its boxes to a csv with the columns filename,xmin,ymin,xmax,ymax,class, and convert that",
        rb'\s*\{\s*"project"\s*:\s*\{\s*"pid"\s*:',
    ),
    # supervisely/supervisely supervisely/annotation/annotation.py and project/project_meta.py, to_json
    Format(
        "Supervisely's json",
        "",
        "export the project again with Supervisely's app 'Export to COCO'",
        rb'\s*\{((?=.*"size"\s*:\s*\{\s*"(height|width)"\s*:).*"objects"\s*:\s*\['
        rb'|\s*"classes"\s*:\s*\[\s*\{[^{}]*"shape"\s*:)',
    ),
    # wkentaro/labelme labelme/_label_file.py, LabelFile.save
    Format(
        "labelme's json",
        "labelme",
        _CONVERT.format("labelme", "DIR"),
        rb'\s*\{(?!.*"(images|annotations|categories)"\s*:).*("shapes"\s*:\s*\[|"imagePath"\s*:)',
    ),
    # storage.googleapis.com/openimages/v6/oidv6-train-annotations-bbox.csv
    Format(
        "OpenImages' csv of boxes",
        "csv",
        _CONVERT.format("csv", "PATH --images=IMAGES --names=class-descriptions-boxable.csv"),
        rb"ImageID,Source,LabelName,Confidence,XMin,",
    ),
    # fizyr/keras-retinanet README, "CSV datasets"; images without objects have empty values
    Format(
        "a csv of boxes without names of columns, as Keras-RetinaNet's",
        "csv",
        _CONVERT.format("csv", "PATH --images=IMAGES"),
        rb"(?i)[^\n\0{<\[,]+" + _IMAGE + rb"\"?,((-?[\d.]+,){4}[^,\n]|,,,,)",
    ),
    # datitran/raccoon_dataset xml_to_csv.py; Roboflow's _annotations.csv
    Format(
        "a csv of boxes",
        "csv",
        _CONVERT.format("csv", "PATH --images=IMAGES"),
        rb"(?i)[^\n\0{<\[]*\b(x_?min|x1|left)\b[^\n]*[,;\t]",
    ),
    # AlexeyAB/darknet README, "How to train (to detect your custom objects)"
    Format(
        "a list of images, as Darknet's train.txt",
        "yolo",
        _CONVERT.format("yolo", "PATH --names=obj.names"),
        rb"(?i)[^\n\0{<\[,;]+" + _IMAGE + rb"\s*(\n|\Z)",
    ),
    Format(
        "Darknet's .data file",
        "",
        "give the files that it names, as in tools/convert.py --from=yolo --input=TRAIN --names=NAMES",
        rb"(?=.*(\A|\n)\s*train\s*=)(?=.*(\A|\n)\s*names\s*=)",
    ),
    Format(
        "a data.yaml of YOLO",
        "yolo",
        _CONVERT.format("yolo", "PATH"),
        rb"(?=.*(\A|\n)(train|path|val)\s*:)(?=.*(\A|\n)(names|nc)\s*:)",
    ),
    Format(
        "YOLO's labels of one image",
        "",
        "give the directory that has the images and their labels to tools/convert.py --from=yolo",
        rb"\s*\d+([ \t]+-?[\d.]+(e-?\d+)?){4,}\s*(\n|\Z)",
    ),
)
_YOLO_LABELS = FORMATS[-1]
_YOLO_DIRECTORY = Format("a directory of YOLO's labels", "yolo", _CONVERT.format("yolo", "PATH"), b"")
_SUFFIXES = (".xml", ".json", ".ndjson", ".csv", ".yaml", ".yml", ".txt")  # of label files in a directory
_READ = 20  # number of files of each suffix that are read


def recognise(head: bytes) -> Format | None:
    """Returns the format of a file with these first bytes; None if it is unknown."""
    text = head.removeprefix(codecs.BOM_UTF8)
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = text.decode("utf-16", "ignore").encode("utf-8", "ignore")
    return next((row for row in FORMATS if re.match(row.beginning, text, re.DOTALL)), None)


def foreign(head: bytes, path: str) -> Fault | None:
    """Returns the fault of a file in another format; None if the format is unknown."""
    row = recognise(head)
    return Fault("foreign-format", row.message(path)) if row else None


def recognise_path(path: str | os.PathLike) -> dict[Format, str]:
    """Returns the formats of a file or of the label files in a directory, with the path for `message`."""
    formats: dict[Format, str] = {}
    for file in _label_files(os.fspath(path)):
        with contextlib.suppress(OSError), open(file, "rb") as stream:  # its reader reports the error
            row = recognise(stream.read(HEAD))
            if row is _YOLO_LABELS and os.path.isdir(path):
                # The labels are in labels/ next to images/, or next to the images.
                root, labels, _ = os.path.join(".", file).rpartition("/labels/")
                formats.setdefault(_YOLO_DIRECTORY, root if labels else os.fspath(path))
            elif row:
                formats.setdefault(row, file)
    return formats


def _label_files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path] if os.path.isfile(path) else []
    try:
        tree = list_tree(path)
    except OSError:
        return []
    files: list[str] = []
    for suffix in _SUFFIXES:  # opening a pipe would block; an empty file has the labels of no object
        has_content = (f for f in tree.with_suffix(suffix) if os.path.isfile(f) and os.path.getsize(f))
        files += itertools.islice(has_content, _READ)
    return files
