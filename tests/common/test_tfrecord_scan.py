"""The record scan: annotations as in the json, records of other writers, damage and nonsense refused."""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from common import tfrecord_scan
from common.annotations import load_coco
from common.errors import UserError
from common.labels import LabelMap
from common.tfrecord import write_tfrecords

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))


def feature(value):
    value = value if isinstance(value, list) else [value]
    if value and isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if value and isinstance(value[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def record(**changes):
    """A sound record of one object; a change of None removes its key."""
    values = {
        "image/encoded": b"not decoded here",
        "image/source_id": b"42",
        "image/height": 50,
        "image/width": 100,
        "image/object/bbox/xmin": [0.1],
        "image/object/bbox/xmax": [0.5],
        "image/object/bbox/ymin": [0.2],
        "image/object/bbox/ymax": [0.8],
        "image/object/class/label": [17],
        **{f"image/{key.replace('__', '/')}": value for key, value in changes.items()},
    }
    features = {key: feature(value) for key, value in values.items() if value is not None}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def empty_record(image_id):
    """An image without objects, as google/automl's converter writes it: no key of objects at all."""
    keys = ("bbox__xmin", "bbox__xmax", "bbox__ymin", "bbox__ymax", "class__label")
    return record(source_id=b"%d" % image_id, **{f"object__{key}": None for key in keys})


def write(path, *records):
    with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for content in records:
            writer.write(content)
    return os.fspath(path)


def scan_one(tmp_path, content):
    return tfrecord_scan.scan_records([write(tmp_path / "one.tfrecord", content)], LABELS)


@pytest.mark.parametrize(
    "name", ["coco128/instances.json", "bccd/instances_val.json", "drawn/instances.json"]
)
def test_records_say_what_the_json_says(name, request, tmp_path):
    directory, file = name.split("/")
    path = request.getfixturevalue(directory) / file
    annotations = load_coco(path, path.parent / "images")
    files = write_tfrecords(annotations, path.parent / "images", tmp_path / "t", num_shards=3)
    scanned = tfrecord_scan.scan_records(files, annotations.label_map)
    assert scanned.origin == f"{files[0]} and 2 more files"
    rows = {image_id: row for row, image_id in enumerate(scanned.image_ids.tolist())}
    assert sorted(rows) == sorted(annotations.image_ids.tolist())
    for row, image_id in enumerate(annotations.image_ids.tolist()):
        other = rows[image_id]
        assert scanned.file_names[other] == annotations.file_names[row]
        assert scanned.image_sizes[other].tolist() == annotations.image_sizes[row].tolist()
        ours = slice(*scanned.row_splits[other : other + 2])
        theirs = np.arange(*annotations.row_splits[row : row + 2])
        clipped = annotations.clipped_boxes[0][theirs]
        theirs = theirs[(clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])]
        assert np.array_equal(scanned.clipped_boxes[0][ours], annotations.clipped_boxes[0][theirs])
        assert scanned.category_ids[ours].tolist() == annotations.category_ids[theirs].tolist()
        assert scanned.is_crowd[ours].tolist() == annotations.is_crowd[theirs].tolist()
        np.testing.assert_allclose(scanned.areas[ours], annotations.areas[theirs], rtol=1e-6)


def test_pixels_and_defaults(tmp_path):
    annotations = scan_one(tmp_path, record())
    np.testing.assert_allclose(annotations.boxes_ltwh_px, [[10, 10, 40, 30]], rtol=1e-6)
    np.testing.assert_allclose(annotations.areas, [1200], rtol=1e-6)
    assert annotations.is_crowd.tolist() == [False]
    assert annotations.file_names == [""]
    assert annotations.image_sizes.tolist() == [[50, 100]]


def test_ids_have_up_to_19_digits(tmp_path):
    assert scan_one(tmp_path, record(source_id=b"9223372036854775807")).image_ids.tolist() == [2**63 - 1]
    assert scan_one(tmp_path, record(source_id=b"000000000042")).image_ids.tolist() == [42]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoded": None}, "0 values in image/encoded, which must be 1"),
        ({"encoded": b""}, "empty image/encoded"),
        ({"encoded": 3}, "int64_list in image/encoded, which must be a bytes_list"),
        ({"source_id": None}, "0 values in image/source_id"),
        ({"source_id": b""}, "image/source_id b''"),
        ({"source_id": b"a.jpg"}, "image/source_id b'a.jpg'.*decimal digits"),
        ({"source_id": b"-3"}, "image/source_id b'-3'"),
        ({"source_id": b"9223372036854775808"}, "image/source_id b'9223372036854775808'"),
        ({"source_id": 42}, "int64_list in image/source_id"),
        ({"height": None}, "0 values in image/height"),
        ({"height": 0}, "100 x 0 pixels"),
        ({"width": [100, 100]}, "2 values in image/width"),
        ({"width": 100.0}, "float_list in image/width"),
        (
            {"object__class__label": [17.0]},
            "float_list in image/object/class/label, which must be a int64_list",
        ),
        (
            {"object__class__label": [18]},
            "the label 18, which the label map lacks .3 categories from 3 to 90",
        ),
        ({"object__class__label": [17, 3]}, "1 values in image/object/bbox/xmin, which must be 2"),
        ({"object__class__label": None}, "1 values in image/object/bbox/xmin, which must be 0"),
        ({"object__bbox__ymax": None}, "0 values in image/object/bbox/ymax, which must be 1"),
        ({"object__bbox__ymax": [1]}, "int64_list in image/object/bbox/ymax"),
        ({"object__bbox__ymax": [float("nan")]}, "the box .*nan"),
        ({"object__bbox__ymax": [float("inf")]}, "the box .*inf"),
        ({"object__bbox__ymax": [0.1]}, "the box xmin, ymin, xmax, ymax = "),
        ({"object__is_crowd": [0, 0]}, r"image/object/is_crowd \[0, 0\] for its 1 boxes"),
        ({"object__is_crowd": [2]}, r"image/object/is_crowd \[2\]"),
        ({"object__area": [-1.0]}, r"image/object/area \[-1.0\]"),
        ({"object__area": [float("nan")]}, r"image/object/area \[nan\]"),
    ],
)
def test_records_outside_the_schema_are_named(tmp_path, changes, message):
    file = write(tmp_path / "bad.tfrecord", record(source_id=b"1"), record(**changes))
    with pytest.raises(UserError, match=f"{file} record 1.*{message}") as error:
        tfrecord_scan.scan_records([file], LABELS)
    assert "\n" not in str(error.value)


def test_what_is_no_example(tmp_path):
    file = write(tmp_path / "bad.tfrecord", b"\xff\xff\xff")
    with pytest.raises(UserError, match=f"{file} record 0 is no tf.train.Example"):
        tfrecord_scan.scan_records([file], LABELS)


def test_an_image_id_given_twice_names_both_records(tmp_path):
    first = write(tmp_path / "a", record(source_id=b"1"), record())
    second = write(tmp_path / "b", record())
    with pytest.raises(UserError, match=f"{second} record 0 .image 42. .*{first} record 1"):
        tfrecord_scan.scan_records([first, second], LABELS)


def test_records_without_any_object_are_refused(tmp_path):
    with pytest.raises(UserError, match="no record holds an object"):
        scan_one(tmp_path, empty_record(1))


@pytest.mark.parametrize("position", [12, 100, -5, -1])
def test_a_flipped_bit_is_found(tmp_path, position):
    first, second = record(source_id=b"1"), record(encoded=bytes(range(256)))
    file = write(tmp_path / "a", first, second)
    content = bytearray(pathlib.Path(file).read_bytes())
    begin = len(first) + 16
    content[begin + position if position > 0 else position] ^= 1
    pathlib.Path(file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} record 1 at byte {begin} is damaged"):
        tfrecord_scan.scan_records([file], LABELS)


def test_a_truncated_file_is_refused(tmp_path):
    file = write(tmp_path / "a", record(source_id=b"1"), record())
    os.truncate(file, os.path.getsize(file) - 3)
    with pytest.raises(UserError, match=f"{file} is cut off: record 1"):
        tfrecord_scan.scan_records([file], LABELS)


def test_a_file_is_read_again_when_it_changes(tmp_path):
    file = write(tmp_path / "a", record())
    first = tfrecord_scan.open_records([file], LABELS)
    assert tfrecord_scan.open_records([file], LABELS) is first
    write(file, record(source_id=b"43"))
    os.utime(file, (1, 1))
    assert tfrecord_scan.scan_records([file], LABELS).image_ids.tolist() == [43]


def test_sound_files_are_read_where_they_are(drawn, tmp_path):
    annotations = load_coco(drawn / "instances.json", drawn / "images")
    files = write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=2)
    records = tfrecord_scan.open_records(files, annotations.label_map)
    assert list(records.files) == files
    assert list(records.indexes) == [f"{file}.idx" for file in files]


def test_records_that_dali_cannot_read_are_mended(tmp_path):
    """No keys of objects where there are none, and crowds told of some records only."""
    sound = record(source_id=b"1", object__is_crowd=[1])
    without_crowds = record(source_id=b"3")
    a = write(tmp_path / "a", sound, empty_record(2), without_crowds)
    b = write(tmp_path / "b", empty_record(4))
    records = tfrecord_scan.open_records([a, b], LABELS)
    assert records.annotations.image_ids.tolist() == [1, 2, 3, 4]
    assert records.files[0] == a
    assert a not in records.files[1:] and b not in records.files

    read = {}
    for number, offset, size in records.spans.tolist():
        content = pathlib.Path(records.files[number]).read_bytes()[offset + 12 : offset + size - 4]
        features = tf.train.Example.FromString(content).features.feature
        read[int(features["image/source_id"].bytes_list.value[0])] = features
        assert features["image/encoded"].bytes_list.value[0] == b"not decoded here"
        for key in (*tfrecord_scan.BOX_KEYS, tfrecord_scan.LABEL_KEY, tfrecord_scan.CROWD_KEY):
            assert features[key].WhichOneof("kind") is not None
    assert sorted(read) == [1, 2, 3, 4]
    assert [list(read[i][tfrecord_scan.CROWD_KEY].int64_list.value) for i in range(1, 5)] == [
        [1],
        [],
        [0],
        [],
    ]
    assert [list(read[i][tfrecord_scan.LABEL_KEY].int64_list.value) for i in range(1, 5)] == [
        [17],
        [],
        [17],
        [],
    ]
    assert len(pathlib.Path(a).read_bytes()) == sum(
        len(r) + 16 for r in (sound, empty_record(2), without_crowds)
    )
