"""The converter: what is in the records, that the bytes depend on the input alone, and what is refused."""

import json
import os
import pathlib
import shutil
import threading

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common import tfrecord
from common.datacheck.coco import load_coco
from common.errors import UserError
from common.labels import LabelMap
from tools.conversion import coco_to_tfrecord
from tools.conversion.coco_to_tfrecord import write_tfrecords


@pytest.fixture
def data(drawn, tmp_path):
    """A copy of the drawn set that a test may spoil: (annotations loader, image directory)."""
    shutil.copytree(drawn, tmp_path / "data")
    return tmp_path / "data"


def load(directory):
    return load_coco(directory / "instances.json", directory / "images")


def records(files):
    """{image id: features} by TensorFlow's own reader."""
    result = {}
    for record in tf.data.TFRecordDataset(files).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        result[int(features["image/source_id"].bytes_list.value[0])] = features
    return result


def test_every_image_with_its_objects(drawn, tmp_path):
    annotations = load(drawn)
    files = write_tfrecords(annotations, drawn / "images", tmp_path / "sub" / "t", num_shards=3)
    assert LabelMap.load(tmp_path / "sub" / "t.label_map.json") == annotations.label_map
    for file in files:
        index = pathlib.Path(f"{file}.idx").read_bytes()
        assert index == tfrecord.format_index(tfrecord.record_spans(file))
    assert [os.path.basename(file) for file in files] == [f"t-0000{i}-of-00003.tfrecord" for i in range(3)]
    assert [len(records([file])) for file in files] == [4, 4, 4]
    document = json.loads((drawn / "instances.json").read_text())
    written = records(files)
    assert set(written) == {image["id"] for image in document["images"]}
    names = {c["id"]: c["name"].encode() for c in document["categories"]}
    for image in document["images"]:
        features = written[image["id"]]

        content = (drawn / "images" / image["file_name"]).read_bytes()
        expected = {
            "encoded": [content],
            "format": [b"png" if content[1:4] == b"PNG" else b"jpeg"],
            "filename": [image["file_name"].encode()],
            "height": [image["height"]],
            "width": [image["width"]],
        }
        for key, value in expected.items():
            kind = "int64_list" if key in ("height", "width") else "bytes_list"
            assert getattr(features[f"image/{key}"], kind).value == value

        expected = []
        for o in (o for o in document["annotations"] if o["image_id"] == image["id"]):
            x, y, w, h = o["bbox"]
            left, right = np.clip([x / image["width"], (x + w) / image["width"]], 0, 1)
            top, bottom = np.clip([y / image["height"], (y + h) / image["height"]], 0, 1)
            if right > left and bottom > top:
                expected.append([left, top, right, bottom, o["category_id"], o["iscrowd"], o["area"]])
        keys = [f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax")]
        assert all(features[key].WhichOneof("kind") == "float_list" for key in [*keys, "image/object/area"])
        found = [features[key].float_list.value for key in keys]
        labels = features["image/object/class/label"].int64_list.value
        found += [labels, features["image/object/is_crowd"].int64_list.value]
        found.append(features["image/object/area"].float_list.value)
        np.testing.assert_allclose(np.array(found).T, np.reshape(expected, (-1, 7)), rtol=1e-6, atol=1e-7)
        assert list(features["image/object/class/text"].bytes_list.value) == [names[i] for i in labels]


def test_images_are_shuffled_by_the_seed_and_workers_change_nothing(drawn, tmp_path):
    annotations = load(drawn)

    def contents(name, **options):
        directory = tmp_path / name
        files = write_tfrecords(annotations, drawn / "images", directory / "t", num_shards=2, **options)
        return {path.name: path.read_bytes() for path in directory.iterdir()}, list(records(files))

    one, order = contents("one", seed=0, num_workers=1)
    assert contents("two", seed=0, num_workers=7)[0] == one
    _, other_order = contents("three", seed=1, num_workers=4)
    assert sorted(order) == sorted(other_order) == sorted(annotations.image_ids.tolist())
    assert len({tuple(order), tuple(other_order), tuple(annotations.image_ids.tolist())}) == 3
    assert sorted(one) == [
        "t-00000-of-00002.tfrecord",
        "t-00000-of-00002.tfrecord.idx",
        "t-00001-of-00002.tfrecord",
        "t-00001-of-00002.tfrecord.idx",
        "t.label_map.json",
    ]


def test_the_format_is_that_of_the_content_not_of_the_name(data, tmp_path):
    PIL.Image.open(data / "images" / "00.jpg").save(data / "images" / "00.jpg", format="PNG")
    annotations = load(data)
    files = write_tfrecords(annotations, data / "images", tmp_path / "t", num_shards=1)
    features = records(files)[int(annotations.image_ids[0])]
    assert list(features["image/format"].bytes_list.value) == [b"png"]


def contents_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda file: PIL.Image.new("RGB", (33, 44)).save(file),
            "is damaged, or is not of 143 x 67 pixels as its annotations say",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:-30]), "is damaged"),
        (lambda file: PIL.Image.open(file).save(file, "BMP"), "is BMP: TFRecords hold JPEG and PNG"),
    ],
)
def test_an_image_that_does_not_fit_is_named_and_nothing_is_touched(data, tmp_path, spoil, message):
    annotations = load(data)
    write_tfrecords(annotations, data / "images", tmp_path / "t", num_shards=3)
    before = contents_of(tmp_path)
    spoil(data / "images" / "01.jpg")
    with pytest.raises(UserError, match=rf"01\.jpg {message}"):
        write_tfrecords(annotations, data / "images", tmp_path / "t", num_shards=3)
    assert contents_of(tmp_path) == before
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "/x/y"), KeyboardInterrupt("now")])
def test_what_fails_halfway_leaves_the_old_set_whole(drawn, tmp_path, monkeypatch, error):
    annotations = load(drawn)
    write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=4, seed=1)
    before = contents_of(tmp_path)
    real, seen, stopped = coco_to_tfrecord._serialize, [], threading.Event()
    pool = coco_to_tfrecord.concurrent.futures.ThreadPoolExecutor
    real_exit = pool.__exit__

    def serialize(*arguments):
        seen.append(arguments)
        if len(seen) == 5:
            raise error
        assert len(seen) < 5 or stopped.wait(30)
        return real(*arguments)

    def leave(self, error_type, *details):
        if error_type:
            stopped.set()
        real_exit(self, error_type, *details)

    monkeypatch.setattr(coco_to_tfrecord, "_serialize", serialize)
    monkeypatch.setattr(pool, "__exit__", leave)
    with pytest.raises(type(error), match=str(error.args[-1])):
        write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=4, num_workers=1)
    assert len(seen) <= 6  # the other shards stop, after the image that they are at
    assert contents_of(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_set_that_was_replaced_by_halves_looks_unfinished(drawn, tmp_path, monkeypatch):
    annotations = load(drawn)
    write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=4, seed=1)
    real, moved = os.replace, []

    def replace(source, target):
        if pathlib.Path(target).suffix == ".tfrecord":
            moved.append(target)
        if len(moved) == 3:
            raise OSError(5, "Input/output error", target)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="Input/output error"):
        write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=4)
    assert not (tmp_path / "t.label_map.json").exists()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_shards_are_written_at_once(drawn, tmp_path, monkeypatch):
    """As many as there are workers: each waits until all are at it."""
    together = threading.Barrier(3, timeout=30)
    real = coco_to_tfrecord.write_index

    def write_index(file):
        together.wait()
        return real(file)

    monkeypatch.setattr(coco_to_tfrecord, "write_index", write_index)
    write_tfrecords(load(drawn), drawn / "images", tmp_path / "t", num_shards=3, num_workers=3)


def test_another_set_with_the_same_prefix_is_in_the_way(drawn, tmp_path):
    annotations = load(drawn)
    for name, num_shards in (("t", 2), ("t", 2), ("t-more", 3)):  # a new set, the same again, another prefix
        write_tfrecords(annotations, drawn / "images", tmp_path / name, num_shards=num_shards)
    with pytest.raises(UserError, match=r"t-00000-of-00002.tfrecord belongs to another set"):
        write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=3)


@pytest.mark.parametrize(
    ("name", "num_shards", "message"),
    [
        ("t", 0, r"--num_shards=0 is not in 1\.\.12"),
        ("t", 13, r"--num_shards=13 is not in 1\.\.12"),
        ("", 1, "is a directory: add the beginning of the file names"),
    ],
)
def test_a_name_is_needed_and_as_many_files_as_images_at_most(drawn, tmp_path, name, num_shards, message):
    with pytest.raises(UserError, match=message):
        write_tfrecords(load(drawn), drawn / "images", f"{tmp_path}/{name}", num_shards=num_shards)
