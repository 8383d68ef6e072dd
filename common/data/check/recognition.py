"""Recognises by its first bytes a file that is not what a command reads, and says what to do with it.

The check of annotations and record files calls it before it reports that a file is invalid, and
tools/convert.py before it reads. docs/data.md has the table of these formats for users.
"""

import codecs
import contextlib
import os
import re
from typing import NamedTuple

from common.data.check.issues import Fault

HEAD = 2**12  # number of bytes that are searched


class Format(NamedTuple):
    """A format of files.

    Attributes:
        name: what the file is, in messages.
        source: the value of --from with which tools/convert.py reads it; "" if it does not.
        beginning: regular expression that the first bytes match.
        advice: what to do with the file PATH in the directory DIR; a sentence without full stop.
    """

    name: str
    source: str
    beginning: bytes
    advice: str


_CONVERT = "run tools/convert.py --from={} --to=coco --input={} --output=FILE.json"
_XML = rb"\s*(<\?xml[^>]*>)?\s*(<!--.*?-->\s*)?"
_YOLO_LINE = rb"\d+( -?[\d.]+(e-?\d+)?){4,}\s*(\n|\Z)"

# The first row that matches counts. (?i) ignores case; in these expressions . matches a line feed, too.
FORMATS = (
    Format(
        "an archive (zip, 7z or rar)",
        "",
        rb"PK\x03\x04|7z\xbc\xaf\x27\x1c|Rar!\x1a",
        "unpack it, and give the files in it",
    ),
    Format(
        "a tar archive, as WebDataset's",
        "webdataset",
        rb".{257}ustar",
        "give it to --train_file_pattern, or to convert.py --from=webdataset, if its labels have the form in "
        "docs/data.md, else unpack it with tar -xf PATH",
    ),
    # cvat-ai/cvat cvat/apps/dataset_manager/formats/cvat.py, dump_as_cvat_annotation
    Format("CVAT's xml", "cvat", _XML + rb"<annotations\b", _CONVERT.format("cvat", "PATH --images=IMAGES")),
    Format("an xml of Pascal VOC", "voc", _XML + rb"<annotation\b", _CONVERT.format("voc", "DIR")),
    # HumanSignal/label-studio docs/source/guide/export.md, JSON and JSON_MIN
    Format(
        "Label Studio's own json",
        "",
        rb'\s*\[.*("(annotations|completions|predictions)"\s*:\s*\[\s*\{.*"(result|was_cancelled)"\s*:'
        rb'|"original_width"\s*:)',
        "export it again in Label Studio, as 'COCO with Images'",
    ),
    # cocodataset.org, format-results
    Format(
        "a list of detections (COCO results), not annotations",
        "",
        rb'\s*\[\s*\{(?=[^{}]*"image_id"\s*:)(?=[^{}]*"category_id"\s*:)',
        "give the json that has `images`, `annotations` and `categories`",
    ),
    # gitlab.com/vgg/via via-2.x.y/via.js, pack_via_metadata and project_save_with_confirm
    Format(
        "VGG VIA's json",
        "",
        rb'\s*\{.*("_via_(settings|img_metadata)"|"(shape|file)_attributes")',
        "choose 'Export Annotations (COCO format)' in VIA's menu 'Annotation'",
    ),
    Format(
        "VGG VIA's csv",
        "",
        rb"#?filename,file_size,file_attributes,region_count,",
        "import it into VIA, and choose 'Export Annotations (COCO format)' in its menu 'Annotation'",
    ),
    # wkentaro/labelme labelme/_label_file.py, LabelFile.save
    Format(
        "labelme's json",
        "labelme",
        rb'\s*\{(?!.*"(images|annotations|categories)"\s*:).*("shapes"\s*:\s*\[|"imagePath"\s*:)',
        _CONVERT.format("labelme", "DIR"),
    ),
    # storage.googleapis.com/openimages/v6/oidv6-train-annotations-bbox.csv
    Format(
        "OpenImages' csv of boxes",
        "csv",
        rb"ImageID,Source,LabelName,Confidence,XMin,",
        _CONVERT.format("csv", "PATH --images=IMAGES --names=class-descriptions-boxable.csv"),
    ),
    # datitran/raccoon_dataset xml_to_csv.py; Roboflow's _annotations.csv
    Format(
        "a csv of boxes",
        "csv",
        rb"(?i)[^\n\0{<\[]*\b(x_?min|x1|left)\b[^\n]*[,;\t]",
        _CONVERT.format("csv", "PATH --images=IMAGES"),
    ),
    # AlexeyAB/darknet README, "How to train (to detect your custom objects)"
    Format(
        "a list of images, as Darknet's train.txt",
        "yolo",
        rb"(?i)[^\n\0{<\[,;]+\.(jpe?g|png|bmp|webp|tiff?)\s*(\n|\Z)",
        _CONVERT.format("yolo", "PATH --names=obj.names"),
    ),
    Format(
        "Darknet's .data file",
        "",
        rb"(?=.*(\A|\n)\s*train\s*=)(?=.*(\A|\n)\s*names\s*=)",
        _CONVERT.format("yolo", "TRAIN --names=NAMES") + ", with the files that it names",
    ),
    Format(
        "a data.yaml of YOLO",
        "yolo",
        rb"(?=.*(\A|\n)(train|path|val)\s*:)(?=.*(\A|\n)(names|nc)\s*:)",
        _CONVERT.format("yolo", "PATH"),
    ),
    Format("YOLO's labels of one image", "", _YOLO_LINE, _CONVERT.format("yolo", "DATASET")),
)
_DIRECTORY_SUFFIXES = (".xml", ".json", ".csv")  # of files that stand for their directory
_OTHER_SETS = ("labels", "Annotations")  # directories of YOLO's and Pascal VOC's labels


def recognise(head: bytes) -> Format | None:
    """Returns the format of a file with these first bytes; None if it is unknown."""
    text = head.removeprefix(codecs.BOM_UTF8)
    return next((row for row in FORMATS if re.match(row.beginning, text, re.DOTALL)), None)


def recognise_path(path: str | os.PathLike) -> tuple[Format, str] | None:
    """Returns the format of a file, or of the label files in a directory, and the file that shows it."""
    path = os.fspath(path)
    with contextlib.suppress(OSError):  # the reader of the file reports it
        file = _label_file_in(path) if os.path.isdir(path) else path
        if file and os.path.isfile(file):
            with open(file, "rb") as stream:
                row = recognise(stream.read(HEAD))
            return (row, file) if row else None
    return None


def advice(row: Format, file: str) -> str:
    """Returns what a file is and what to do with it, for messages."""
    text = row.advice.replace("PATH", file).replace("DIR", os.path.dirname(file) or ".")
    return f"it is {row.name}: {text}"


def foreign(head: bytes, file: str) -> Fault | None:
    """Returns the fault of a file in another format; None if the format is unknown."""
    row = recognise(head)
    return Fault("foreign-format", advice(row, file)) if row else None


def _label_file_in(directory: str) -> str | None:
    """Returns the first label file of a directory; None if it is the root of a YOLO or VOC data set."""
    names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    if {*_OTHER_SETS} & {*names} or any(name.endswith((".txt", ".yaml", ".yml")) for name in names):
        return None
    for suffix in _DIRECTORY_SUFFIXES:
        for name in names:
            if name.lower().endswith(suffix):
                return os.path.join(directory, name)
    return None
