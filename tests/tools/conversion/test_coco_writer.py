"""COCO json from Annotations, and images out of TFRecords: equal, safe names, nothing overwritten or left."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from common.annotations import Annotations
from common.datacheck.coco import load_coco
from common.datacheck.issues import Issues
from common.datacheck.tfrecord import expand_pattern, open_records
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion.coco_writer import extract_images, file_names, round_boxes, write_coco


def annotations_of(names, *, sizes=None, boxes=(), areas=None):
    """Images 1, 2, ... with these names, and boxes (left, top, width, height) in the first of them."""
    boxes = np.array(boxes, np.float64).reshape(-1, 4)
    return Annotations(
        label_map=LabelMap((1,), ("thing",)),
        image_ids=np.arange(1, len(names) + 1),
        file_names=list(names),
        image_sizes=np.array(sizes or [(20, 30)] * len(names), np.int32),
        box_image=np.zeros(len(boxes), np.int64),
        boxes_ltwh_px=boxes,
        category_ids=np.ones(len(boxes), np.int64),
        is_crowd=np.zeros(len(boxes), bool),
        areas=boxes[:, 2] * boxes[:, 3] if areas is None else np.array(areas),
        origin="test",
        issues=Issues("test"),
    )


def write_records(path, images):
    """A record file of (image id, name, bytes)."""
    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for image_id, name, encoded in images:
            values = {"source_id": str(image_id).encode(), "filename": name.encode(), "encoded": encoded}
            features = {
                f"image/{key}": tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
                for key, value in values.items()
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    return path


def test_what_is_read_again_is_equal(drawn, tmp_path):
    annotations = load_coco(drawn / "instances.json")
    write_coco(annotations, tmp_path / "sub" / "out.json")
    assert load_coco(tmp_path / "sub" / "out.json").fingerprint() == annotations.fingerprint()
    document = json.loads((tmp_path / "sub" / "out.json").read_text())
    keys = {"id", "image_id", "category_id", "bbox", "area", "iscrowd"}
    assert all(set(annotation) == keys for annotation in document["annotations"])
    assert [a["id"] for a in document["annotations"]] == list(range(1, annotations.num_boxes + 1))
    assert [c["id"] for c in document["categories"]] == [3, 17, 90]
    assert sorted(os.listdir(tmp_path / "sub")) == ["out.json"]


def test_names_below_the_directory_that_differ_stay():
    given = ["a.jpg", "sub/./b.jpg", "grün 1.jpg", "no_suffix"]
    assert file_names(annotations_of(given)) == ["a.jpg", "sub/b.jpg", "grün 1.jpg", "no_suffix"]


@pytest.mark.parametrize(
    "name",
    [
        *("../up.jpg", "sub/../../up.jpg", "/etc/passwd", "", ".", "..", "nul\0.jpg", "line\nfeed.jpg"),
        "sub//b.jpg",  # taken
    ],
)
def test_names_that_leave_the_directory_or_meet_are_none(name):
    assert file_names(annotations_of(["a.jpg", "sub/b.jpg", name])) is None


def test_images_come_out_byte_for_byte(drawn, drawn_records, tmp_path):
    files = expand_pattern(f"{drawn_records}*.tfrecord")
    annotations = open_records(files, LabelMap.load(f"{drawn_records}.label_map.json")).annotations
    found = extract_images(files, annotations, tmp_path / "new" / "images")
    assert found.file_names == annotations.file_names
    assert sorted(os.listdir(tmp_path / "new")) == ["images"]
    written = {path.name: path.read_bytes() for path in (tmp_path / "new" / "images").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (drawn / "images").iterdir()}


def test_names_by_id_where_a_record_gives_none(drawn, jpeg, tmp_path):
    png = (drawn / "images" / "11.png").read_bytes()
    names, contents = ["x.jpg", "", "2.png"], [jpeg, png, jpeg]
    file = write_records(tmp_path / "r", zip(range(1, 4), names, contents, strict=True))
    found = extract_images([file], annotations_of(names), tmp_path / "images")
    assert found.file_names == ["1.jpg", "2.png", "3.jpg"]
    for name, content in zip(found.file_names, contents, strict=True):
        assert (tmp_path / "images" / name).read_bytes() == content


@pytest.fixture
def jpeg(drawn):
    return (drawn / "images" / "00.jpg").read_bytes()


def test_records_that_were_left_out_leave_no_image(jpeg, tmp_path):
    file = write_records(tmp_path / "r", [(1, "a.jpg", jpeg), (99, "b.jpg", b""), (2, "s/c.jpg", jpeg)])
    extract_images([file], annotations_of(["a.jpg", "s/c.jpg"]), tmp_path / "images")
    assert sorted(os.listdir(tmp_path / "images")) == ["a.jpg", "s"]


def test_files_in_the_way(jpeg, tmp_path):
    file = write_records(tmp_path / "r", [(1, "a.jpg", jpeg), (2, "b.jpg", jpeg)])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.txt").write_text("mine")
    (tmp_path / "elsewhere.jpg").write_text("not to be touched")
    (tmp_path / "images" / "b.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    annotations = annotations_of(["a.jpg", "b.jpg"])
    with pytest.raises(UserError, match=r"images/b\.jpg is there already"):
        extract_images([file], annotations, tmp_path / "images")
    assert sorted(os.listdir(tmp_path / "images")) == ["b.jpg", "mine.txt"]
    extract_images([file], annotations, tmp_path / "images", overwrite=True)
    assert sorted(os.listdir(tmp_path / "images")) == ["a.jpg", "b.jpg", "mine.txt"]
    assert (tmp_path / "images" / "b.jpg").read_bytes() == jpeg
    assert (tmp_path / "elsewhere.jpg").read_text() == "not to be touched"


def test_a_fault_on_the_way_leaves_nothing(jpeg, tmp_path):
    file = write_records(tmp_path / "r", [(1, "a.jpg", jpeg), (2, "b.jpg", jpeg)])
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError):
        extract_images([file], annotations_of(["a.jpg", "b.jpg"]), tmp_path / "images")
    assert not os.listdir(tmp_path / "images")


def test_boxes_of_fractions_become_pixels_again():
    """What COCO has, two decimals, and whole pixels, survive float32 fractions of images up to 640 pixels."""
    random = np.random.default_rng(5)
    sizes = [(480, 640)]
    left_top = np.round(random.uniform(0, 300, (500, 2)), 2)
    boxes = np.concatenate([left_top, np.round(random.uniform(1, 150, (500, 2)), 2)], axis=1)
    boxes[:100] = np.round(boxes[:100])
    limits = np.array([640, 480, 640, 480])
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    stored = (edges / limits).astype(np.float32).astype(np.float64) * limits
    read = np.concatenate([stored[:, :2], stored[:, 2:] - stored[:, :2]], axis=1)
    assert np.abs(read - boxes).max() > 1e-6
    areas = np.round(boxes[:, 2] * boxes[:, 3] * 0.7, 4)
    stored_areas = areas.astype(np.float32).astype(np.float64)
    found = round_boxes(annotations_of(["a"], sizes=sizes, boxes=read, areas=stored_areas))
    np.testing.assert_array_equal(found.boxes_ltwh_px, boxes)
    np.testing.assert_array_equal(found.areas.astype(np.float32), areas.astype(np.float32))
    assert np.mean(found.areas == areas) > 0.5  # float32 has seven digits, these have up to nine

    own_areas = round_boxes(annotations_of(["a"], sizes=sizes, boxes=read)).areas
    np.testing.assert_array_equal(own_areas, boxes[:, 2] * boxes[:, 3])
