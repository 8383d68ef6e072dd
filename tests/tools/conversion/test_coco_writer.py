"""Tests COCO jsons from Annotations and images from TFRecords: equal, safe names, no overwriting."""

import dataclasses
import json
import os

import numpy as np
import pytest
import tensorflow as tf

from common.datacheck.coco import load_coco
from tests.common import record_writing
from tests.common.image_variants import pillow
from tests.common.made_annotations import annotations
from tests.common.record_writing import PNG
from tests.refusal import refusal
from tools.conversion.coco_writer import extract_images, file_names, round_boxes, write_coco

JPEG = pillow("JPEG")


def named(*names):
    """Returns Annotations of images 101, 102, ... with these names."""
    return dataclasses.replace(annotations([(20, 30)] * len(names), []), file_names=list(names))


def write_records(path, *images):
    """Writes a record file of images, each (image id, name, bytes)."""
    records = ({"source_id": b"%d" % i, "filename": name.encode(), "encoded": e} for i, name, e in images)
    return record_writing.write(path, *(record_writing.record(**record) for record in records))


@pytest.fixture
def two(tmp_path):
    """A record file of two images."""
    return write_records(tmp_path / "r", (101, "a.jpg", JPEG), (102, "b.jpg", JPEG))


def test_what_is_read_again_is_equal(drawn, tmp_path):
    written = load_coco(drawn / "instances.json")
    write_coco(written, tmp_path / "sub" / "out.json")
    assert load_coco(tmp_path / "sub" / "out.json").fingerprint() == written.fingerprint()
    document = json.loads((tmp_path / "sub" / "out.json").read_text())
    keys = {"id", "image_id", "category_id", "bbox", "area", "iscrowd"}
    assert all(set(annotation) == keys for annotation in document["annotations"])
    assert [a["id"] for a in document["annotations"]] == list(range(1, written.num_boxes + 1))
    assert [c["id"] for c in document["categories"]] == [3, 17, 90]
    assert os.listdir(tmp_path / "sub") == ["out.json"]


UNUSABLE = [
    *("../up.jpg", "sub/../../up.jpg", "/etc/passwd", "", ".", "..", "nul\0.jpg", "line\nfeed.jpg"),
    "sub//b.jpg",  # another image has this name
]


@pytest.mark.parametrize("name", UNUSABLE)
def test_names_stay_unless_one_leaves_the_directory_or_is_taken(name):
    given = ["a.jpg", "sub/./b.jpg", "grün 1.jpg", "no_suffix"]
    assert file_names(named(*given)) == ["a.jpg", "sub/b.jpg", "grün 1.jpg", "no_suffix"]
    assert file_names(named(*given, name)) is None


def test_names_by_id_where_a_record_gives_none(tmp_path):
    file = write_records(tmp_path / "r", (101, "x.jpg", JPEG), (102, "", PNG), (103, "2.png", JPEG))
    found = extract_images([file], named("x.jpg", "", "2.png"), tmp_path / "images")
    assert found.file_names == ["101.jpg", "102.png", "103.jpg"]
    assert [(tmp_path / "images" / name).read_bytes() for name in found.file_names] == [JPEG, PNG, JPEG]


def test_records_that_were_left_out_leave_no_image(tmp_path):
    file = write_records(tmp_path / "r", (101, "a.jpg", JPEG), (99, "b.jpg", b""), (102, "s/c.jpg", JPEG))
    extract_images([file], named("a.jpg", "s/c.jpg"), tmp_path / "images")
    assert sorted(os.listdir(tmp_path / "images")) == ["a.jpg", "s"]


def test_files_in_the_way(two, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.txt").write_text("mine")
    (tmp_path / "elsewhere.jpg").write_text("not to be touched")
    (tmp_path / "images" / "b.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    given = [two], named("a.jpg", "b.jpg"), tmp_path / "images"
    assert "images/b.jpg exists already" in refusal(extract_images, *given)
    assert sorted(os.listdir(tmp_path / "images")) == ["b.jpg", "mine.txt"]
    extract_images(*given, overwrite=True)
    assert sorted(os.listdir(tmp_path / "images")) == ["a.jpg", "b.jpg", "mine.txt"]
    assert (tmp_path / "images" / "b.jpg").read_bytes() == JPEG
    assert (tmp_path / "elsewhere.jpg").read_text() == "not to be touched"


def test_a_fault_on_the_way_leaves_nothing(two, tmp_path):
    record_writing.flip(two, -100)
    with pytest.raises(tf.errors.DataLossError):
        extract_images([two], named("a.jpg", "b.jpg"), tmp_path / "images")
    assert not os.listdir(tmp_path / "images")


def test_boxes_of_fractions_become_pixels_again():
    """Boxes in whole pixels or with two decimals, as in COCO, survive as float32 fractions of 640 pixels."""
    random = np.random.default_rng(5)
    left_top = np.round(random.uniform(0, 300, (500, 2)), 2)
    boxes = np.concatenate([left_top, np.round(random.uniform(1, 150, (500, 2)), 2)], axis=1)
    boxes[:100] = np.round(boxes[:100])
    limits = np.array([640, 480, 640, 480])
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    stored = (edges / limits).astype(np.float32).astype(np.float64) * limits
    read = np.concatenate([stored[:, :2], stored[:, 2:] - stored[:, :2]], axis=1)
    assert np.abs(read - boxes).max() > 1e-6
    areas = np.round(boxes[:, 2] * boxes[:, 3] * 0.7, 4)
    rows = [(0, 0, *box) for box in read.tolist()]
    found = round_boxes(annotations([(480, 640)], rows, areas=areas.astype(np.float32)))
    np.testing.assert_array_equal(found.boxes_ltwh_px, boxes)
    np.testing.assert_array_equal(found.areas.astype(np.float32), areas.astype(np.float32))
    assert np.mean(found.areas == areas) > 0.5  # float32 has seven digits, these areas have up to nine
    own_areas = round_boxes(annotations([(480, 640)], rows)).areas
    np.testing.assert_array_equal(own_areas, boxes[:, 2] * boxes[:, 3])
