"""Tests common/data/check/recognition.py on the exports that the converters read."""

import json
import re

import pytest

from common.data.check.issues import DataError
from common.data.check.recognition import HEAD, recognise, recognise_path
from common.data.coco import load_coco
from tests.refusal import refusal
from tests.tools.conversion import exports

FORMATS = {
    "CVAT's xml": (
        exports.write_cvat,
        "--from=cvat --to=coco --input=PATH --images=IMAGES --output=FILE.json",
    ),
    "an xml of Pascal VOC": (
        exports.write_voc,
        "--from=voc --to=coco --input=DIR --images=IMAGES --output=FILE.json",
    ),
    "labelme's json": (exports.write_labelme, "--from=labelme --to=coco --input=DIR --output=FILE.json"),
    "a csv of boxes": (
        exports.write_tensorflow_csv,
        "--from=csv --to=coco --input=PATH --images=IMAGES --output=FILE.json",
    ),
    "a csv of boxes without names of columns, as Keras-RetinaNet's": (
        exports.write_retinanet_csv,
        "--from=csv --to=coco --input=PATH --images=IMAGES --output=FILE.json",
    ),
    "OpenImages' csv of boxes": (
        exports.write_openimages,
        "--from=csv --to=coco --input=PATH --images=IMAGES --names=class-descriptions-boxable.csv",
    ),
    "a list of images, as Darknet's train.txt": (
        exports.write_darknet_list,
        "--from=yolo --to=coco --input=PATH --names=obj.names",
    ),
    "a data.yaml of YOLO": (exports.write_yolo_yaml, "--from=yolo --to=coco --input=PATH --output=FILE.json"),
    "Label Studio's own json": (exports.write_label_studio, "as 'COCO with Images'"),
    "Label Studio's own json (min)": (exports.write_label_studio_min, "as 'COCO with Images'"),
    "CreateML's json": (exports.write_createml, "--input=PATH --output=FILE.json --from=create-ml"),
    "Labelbox's ndjson": (exports.write_labelbox, "--from=labelbox --allow-lossy"),
    "Supervisely's json": (exports.write_supervisely, "export the project again with Supervisely's app"),
    "Supervisely's json (meta)": (exports.write_supervisely_meta, "app 'Export to COCO'"),
    "a project of VGG VIA 3": (exports.write_via3_project, "write its boxes to a csv with the columns"),
    "VGG VIA's json": (exports.write_via, "choose 'Export Annotations (COCO format)' in VIA's menu"),
    "VGG VIA's json (project)": (exports.write_via_project, "choose 'Export Annotations (COCO format)'"),
    "VGG VIA's csv": (exports.write_via_csv, "import it into VIA"),
    "a list of detections (COCO results), not annotations": (
        exports.write_coco_results,
        "give the json that has `images`, `annotations` and `categories`",
    ),
    "a tar archive, as WebDataset's": (exports.write_webdataset, "else unpack it with tar -xf PATH"),
    "an archive (zip, 7z or rar)": (exports.write_zip, "unpack it, and give the files in it"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_file_of_another_format_is_named_in_one_line_with_what_to_do(tmp_path, name):
    write, step = FORMATS[name]
    path = write(tmp_path)
    message = refusal(load_coco, path, tmp_path, error=DataError)
    step = step.replace("PATH", str(path)).replace("DIR", str(tmp_path))
    assert f"file in another format: it is {re.sub(r' [(](min|project|meta)[)]', '', name)}: " in message
    assert step in message and message.endswith("The table in docs/data.md has all formats"), message
    assert "\n" not in message


def formats_of(path):
    return {row.name: file for row, file in recognise_path(path).items()}


def test_directory_is_recognised_by_all_its_kinds_of_label_files_also_in_its_folders(tmp_path):
    exports.write_labelme(tmp_path / "labels")
    assert formats_of(tmp_path) == {"labelme's json": f"{tmp_path}/labels/a.json"}
    exports.write_voc(tmp_path / "Annotations")
    (tmp_path / "classes.txt").write_text("cat\n")
    assert formats_of(tmp_path) == {
        "an xml of Pascal VOC": f"{tmp_path}/Annotations/a.xml",
        "labelme's json": f"{tmp_path}/labels/a.json",
    }


def test_directory_of_yolo_labels_is_recognised_and_its_data_set_is_named_as_input(tmp_path):
    exports.write_yolo_yaml(tmp_path / "set")
    (tmp_path / "set" / "data.yaml").unlink()
    exports.write_darknet_list(tmp_path / "list")
    (tmp_path / "list" / "train.txt").unlink()
    (tmp_path / "list" / "obj.names").unlink()
    for folder, expected in (("set", "set"), ("set/labels", "set"), ("set/labels/train", "set")):
        assert formats_of(tmp_path / folder) == {"a directory of YOLO's labels": f"{tmp_path}/{expected}"}
    assert formats_of(tmp_path / "list" / "obj") == {"a directory of YOLO's labels": f"{tmp_path}/list/obj"}
    message = refusal(load_coco, tmp_path / "set" / "labels", tmp_path, error=DataError)
    assert f"--from=yolo --to=coco --input={tmp_path}/set --output=FILE.json" in message


def test_directory_of_yolo_labels_is_recognised_after_many_empty_label_files(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text("")
    (tmp_path / "99.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    assert formats_of(tmp_path) == {"a directory of YOLO's labels": str(tmp_path)}


def test_message_of_a_format_keeps_a_path_that_contains_its_placeholders(tmp_path):
    exports.write_voc(tmp_path / "PATH" / "DIR")
    message = refusal(load_coco, tmp_path / "PATH" / "DIR" / "a.xml", tmp_path, error=DataError)
    assert f"--input={tmp_path}/PATH/DIR --images=IMAGES" in message


FORMATS_OF_CSV = "a csv of boxes without names of columns, as Keras-RetinaNet's"
OTHERS = {
    "VIA 1.0": (b"#filename,file_size,file_attributes,region_count,region_id,", "VGG VIA's csv"),
    "CVAT without a declaration": (b"<annotations>\n  <version>1.1</version>", "CVAT's xml"),
    "byte order mark": (b"\xef\xbb\xbf<annotations>", "CVAT's xml"),
    "Darknet's data": (b"classes= 2\ntrain=train.txt\nnames = obj.names\n", "Darknet's .data file"),
    "YOLO labels": (b"0 0.5 0.5 0.25 0.5\n1 0.1 .2 0.3 1\n", "YOLO's labels of one image"),
    "YOLO labels with tabs": (b" 0\t0.5\t0.5  0.25 5e-1\r\n", "YOLO's labels of one image"),
    "UTF-16": ("<annotation>\n".encode("utf-16"), "an xml of Pascal VOC"),
    "relative list": (b"./images/a b.JPG\n./images/c.jpg\n", "a list of images, as Darknet's train.txt"),
    "csv without objects": (b"images/a b.JPG,,,,,\nb.png,1,2,3,4,cat\n", FORMATS_OF_CSV),
    "csv with fractions and quotes": (b'"/home/me/a.tiff",.1,0.2,.5,1,"cat"\n', FORMATS_OF_CSV),
    "list of Labelbox": (b'[{"data_row": {"id": "r0"}, "media_attributes": {', "Labelbox's ndjson"),
    "CreateML, indented": (
        b'[\n  {\n    "annotation": [\n      {\n        "coordinates": {\n          "y": 5,',
        "CreateML's json",
    ),
    "old labelme": (b'{"version": "3.16.7", "flags": {}, "shapes": [', "labelme's json"),
    "old Label Studio": (b'[{"completions": [{"id": 1, "result": []}], "data": {', "Label Studio's own json"),
}


@pytest.mark.parametrize(("head", "name"), OTHERS.values(), ids=OTHERS)
def test_older_and_shorter_forms_are_recognised(head, name):
    assert recognise(head).name == name


UNKNOWN = {
    "empty": b"",
    "COCO": b'{"info": {"version": "1.0"}, "images": [{"file_name": "a.jpg"}], "annotations": [{"image_id"',
    "TFRecord": b"\x10\0\0\0\0\0\0\0abcd left, right",
    "COCO cut off": b'{"images": [{"id": 1, "file_name": "left.jpg", "shapes": [',
    "csv of classes": b"cat.png,0\ndog,1\n",
    "COCO with sizes": b'{"info": {"size": {"height": 1}}, "images": [{"id": 1, "file_name": "a.jpg"}], "a',
    "panoptic": b'{"annotations": [{"segments_info": [{"id": 1}], "image_id": 2}], "categories": []}',
    "text": b"Dear reader, the box was left here.\n",
    "other json": b'{"a": 1}',
    "html": b"<!DOCTYPE html><html>",
    "JPEG": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "COCO of another exporter": json.dumps(
        {
            "images": [{"id": 1, "file_name": "a.jpg", "original_width": 3, "imagePath": "a.jpg"}],
            "annotations": [{"image_id": 1, "category_id": 1, "shape_attributes": {}, "result": 1}],
        }
    ).encode()[:40],
}


@pytest.mark.parametrize("head", UNKNOWN.values(), ids=UNKNOWN)
def test_other_files_are_not_taken_for_a_known_format(head):
    assert recognise(head) is None


LONG = (
    *(b'[{"annotations": [{', b'{"shape', b"a.jpg ", b"1 0.5 ", b"train = \n", b"<!-- --> "),
    *(b'[{"annotations": [', b'{"size": {"height": ', b'{"classes": [{', b"a.png,"),
)


def test_recognising_the_label_format_of_a_long_file_takes_less_than_a_second():
    """No expression repeats its search for each byte: each of these heads would take minutes."""
    for text in (
        b'[{"annotations": [{',
        b'{"shape',
        b"a.jpg ",
        b"1 0.5 ",
        b"train = \n",
        b"<!-- --> ",
        b"a.png,",
        *LONG,
    ):
        assert recognise((text * HEAD)[:HEAD]) is None or text == b"1 0.5 "
