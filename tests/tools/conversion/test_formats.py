"""Runs each row of the table "Your format, what to do" in docs/data.md on a file of that format."""

import random
import re

import pytest

from common.data.check.issues import DataError
from common.data.coco import load_coco
from common.data.labels import LabelMap
from common.data.open import open_source
from common.errors import UserError
from tests.conftest import ROOT
from tests.refusal import refusal
from tests.tools.conversion import exports
from tests.tools.conversion.labelled_images import options_of
from tools.convert import convert

PAGE = (ROOT / "docs" / "data.md").read_text()
TABLE = PAGE.split("## Your format, what to do")[1].split("\n## ")[0]
ROWS = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", TABLE, re.MULTILINE)[1:])
BOXES = [[3, 4, 7, 8], [0, 5, 20, 10]]
OTHER_BOXES = {"labelImg's xml": [[3, 4, 7, 8], [1, 5, 19, 10]]}


def write_own_csv(directory):
    table = exports.write_tensorflow_csv(directory)
    lines = ["filename,xmin,ymin,xmax,ymax,class", "a.png,3,4,10,12,cat", "b.png,0,5,20,15,dog"]
    table.write_text("\n".join(lines))
    return table


def write_yolo_directory(directory):
    exports.write_yolo_yaml(directory)
    return directory


def write_cvat_video(directory):
    path = exports.write_cvat(directory)
    track = '  <track id="0" label="cat" source="manual">\n  </track>\n</annotations>'
    path.write_text(exports.cvat_xml(["", ""]).replace("</annotations>", track))
    return path


# Rows that name a command -> the function that writes the data set.
COMMANDS = {
    "labelImg's xml": exports.write_labelimg_xml,
    "labelImg's txt": exports.write_labelimg_txt,
    "Pascal VOC (xml)": exports.write_voc,
    "YOLO (txt)": write_yolo_directory,
    "YOLO's data.yaml": exports.write_yolo_yaml,
    "Darknet's train.txt": exports.write_darknet_list,
    "CVAT for images (xml)": exports.write_cvat,
    "labelme, X-AnyLabeling (json)": exports.write_labelme,
    "TensorFlow's or Roboflow's csv": exports.write_tensorflow_csv,
    "OpenImages' csv": exports.write_openimages,
    "Keras-RetinaNet's csv, without names of columns": exports.write_retinanet_csv,
    "Another csv with a box in each line": write_own_csv,
    "COCO results (a list of detections)": exports.write_coco_results,
}
# Other rows -> the function that writes the file, and words of the row that the message repeats.
MESSAGES = {
    "CVAT for video (xml)": (write_cvat_video, "CVAT for images 1.1"),
    "Label Studio's json": (exports.write_label_studio, "COCO with Images"),
    "VGG VIA's json": (exports.write_via, "Export Annotations (COCO format)"),
    "VGG VIA's csv": (exports.write_via_csv, "mport it into VIA"),
    "VGG VIA 3's project (json)": (exports.write_via3_project, "filename,xmin,ymin,xmax,ymax,class"),
    "CreateML's json": (exports.write_createml, "onvert it with panlabel"),
    "Labelbox's ndjson": (exports.write_labelbox, "onvert it with panlabel"),
    "Supervisely's json": (exports.write_supervisely, "Export to COCO"),
    "WebDataset (tar)": (exports.write_webdataset, "tar -xf"),
    "An archive (zip, 7z, rar)": (exports.write_zip, "npack it"),
}
# Rows that other tests run.
OTHER_ROWS = {"COCO json", "TFRecords", "KITTI, WIDER FACE, VoTT, MPII and others"}


def test_every_row_of_the_table_of_formats_is_run():
    assert {*ROWS} == {*COMMANDS, *MESSAGES, *OTHER_ROWS}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_of_the_table_of_formats_converts_boxes_and_names(tmp_path, name):
    path = COMMANDS[name](tmp_path)
    (source,) = re.findall(r"--from=(\w+)", ROWS[name])
    options = {"input": path, "output": tmp_path / "out.json"}
    if "--images" in ROWS[name] or source in ("voc", "csv"):
        options["images"] = tmp_path
    if "--names" in ROWS[name]:
        options["names"] = tmp_path / re.search(r"--names=([\w.-]+)", ROWS[name])[1]
    if "--voc_pixels=zero_based" in ROWS[name]:
        options["voc_pixels"] = "zero_based"
    if source == "yolo" and (tmp_path / "data.yaml").exists() and path == tmp_path:
        (tmp_path / "data.yaml").replace(tmp_path / "names.yaml")
        options |= {"split": "train", "names": tmp_path / "names.yaml"}
    _, images_dir = convert(source, "coco", options_of(**options))
    annotations = load_coco(tmp_path / "out.json", images_dir)
    assert annotations.boxes_ltwh_px.tolist() == OTHER_BOXES.get(name, BOXES)
    ids = dict(zip(annotations.label_map.category_ids, annotations.label_map.names, strict=True))
    assert [ids[category_id] for category_id in annotations.category_ids.tolist()] == ["cat", "dog"]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_of_another_format_names_the_right_one(tmp_path, name):
    path = COMMANDS[name](tmp_path)
    (source,) = re.findall(r"--from=(\w+)", ROWS[name])
    for other in {"voc", "yolo", "cvat", "labelme", "csv", "coco", "detections"} - {source}:
        options = options_of(input=path, images=tmp_path, output=tmp_path / "out.json")
        message = refusal(convert, other, "coco", options)
        assert f"--from={other}, but " in message and f"run tools/convert.py --from={source} " in message


@pytest.mark.parametrize("name", MESSAGES)
def test_message_about_a_format_repeats_what_the_table_says(tmp_path, name):
    write, words = MESSAGES[name]
    assert words in ROWS[name]
    options = options_of(input=write(tmp_path), images=tmp_path, output=tmp_path / "out.json")
    for source in ("cvat",) if "CVAT" in name else ("voc", "yolo", "cvat", "labelme", "csv", "coco"):
        (tmp_path / "images").mkdir(exist_ok=True)
        assert words in refusal(convert, source, "coco", options)


def test_webdataset_with_other_labels_is_answered_with_the_page_that_shows_the_format(tmp_path):
    path = exports.write_webdataset(tmp_path)
    LabelMap((1,), ("cat",)).save(tmp_path / "map.json")
    flags = {"file_pattern": str(path), "label_map": f"{tmp_path}/map.json"}
    message = refusal(open_source, **flags, error=DataError)
    assert f"{path} sample 'a': json: expected `object`, got `array`" in message
    assert "docs/data.md shows the format" in message


TOKENS = (b"", b"\0", b'"', b"<", b">", b"nan", b"-1", b"1e999", b"null", b"[]", b"{}", b"\xff", b"\n", b",")


@pytest.mark.parametrize(
    "name", ["CVAT for images (xml)", "labelme, X-AnyLabeling (json)", "OpenImages' csv"]
)
def test_damaged_export_is_refused_in_a_message_or_loses_no_box_silently(tmp_path, name):
    path = COMMANDS[name](tmp_path)
    file = tmp_path / "a.json" if path.is_dir() else path
    content, random_numbers = file.read_bytes(), random.Random(41)
    (source,) = re.findall(r"--from=(\w+)", ROWS[name])
    images = tmp_path / "images" if source == "cvat" else tmp_path
    options = options_of(input=path, images=images, output=tmp_path / "out.json", overwrite=True)
    for _ in range(100):
        start = random_numbers.randrange(len(content))
        end = start + random_numbers.choice((0, 1, 3, 10, 40, 400))
        file.write_bytes(content[:start] + random_numbers.choice(TOKENS) + content[end:])
        try:
            parts, _ = convert(source, "coco", options)
        except UserError:
            continue
        (annotations,) = parts.values()
        assert annotations.num_boxes == len(BOXES) or list(annotations.issues), file.read_bytes()
