"""Tests the class names of Darknet's files. test_darknet_weights.py tests the weights."""

import json

import pytest

from common.data.labels import LabelMap
from common.errors import UserError
from common.weights.fine_tuning import coco_label_map
from yolov4.import_weights.darknet_files import read_label_map


def test_coco_label_map_equals_the_categories_of_the_data_set(coco128):
    document = json.loads((coco128 / "instances.json").read_text())
    assert coco_label_map() == LabelMap.from_categories(document["categories"])


def test_coco_label_map_has_the_order_of_darknets_coco_names():
    """Lines of Darknet's data/coco.names, counted from 0."""
    label_map = coco_label_map()
    assert label_map.num_classes == 80
    lines = {0: "person", 11: "stop sign", 39: "bottle", 59: "bed", 61: "toilet", 79: "toothbrush"}
    assert {number: label_map.names[number] for number in lines} == lines
    assert label_map.category_ids[79] == 90


def test_darknet_weights_without_names_file_get_coco_names_for_80_classes_and_none_for_79(tmp_path):
    assert read_label_map(tmp_path / "yolov4.weights", 80) == coco_label_map()
    assert read_label_map(tmp_path / "yolov4.weights", 79) is None


@pytest.mark.parametrize("spelling", ["coco", "voc"])
def test_darknet_names_file_with_coco_names_in_coco_or_voc_spelling_gives_coco_ids(tmp_path, spelling):
    names = list(coco_label_map().names)
    if spelling == "voc":
        voc = {3: "motorbike", 4: "aeroplane", 57: "sofa", 58: "pottedplant", 60: "diningtable"}
        voc[62] = "tvmonitor"
        for number, name in voc.items():
            names[number] = name
    (tmp_path / "my.names").write_text("\n".join(names))
    assert read_label_map(tmp_path / "my.weights", 80) == coco_label_map()


def test_darknet_class_names_that_are_not_cocos_get_category_ids_from_1(tmp_path):
    names = ["a thing", *coco_label_map().names[1:]]
    (tmp_path / "my.names").write_text("".join(f"{name}\r\n" for name in names))
    label_map = read_label_map(tmp_path / "my.weights", 80)
    assert label_map.names == tuple(names)
    assert label_map.category_ids == tuple(range(1, 81))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a\nb\n", "has 2 class names, but "), (b"a\nb\na\n", "same name 'a'"), (b"a\n\xff\nb\n", "decode")],
    ids=["too few", "same name twice", "not UTF-8"],
)
def test_darknet_names_file_with_too_few_repeated_or_non_utf8_names_is_refused(tmp_path, content, message):
    (tmp_path / "my.names").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_label_map(tmp_path / "my.weights", 3)
