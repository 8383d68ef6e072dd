"""The converter: what is in the records, that the bytes depend on the input alone, and what is refused."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common import tfrecord_index
from common.annotations import load_coco
from common.errors import UserError
from common.labels import LabelMap
from common.tfrecord import write_tfrecords

ROOT = pathlib.Path(__file__).resolve().parents[2]


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
    files = write_tfrecords(load(drawn), drawn / "images", tmp_path / "sub" / "t", num_shards=3)
    assert [os.path.basename(file) for file in files] == [f"t-0000{i}-of-00003.tfrecord" for i in range(3)]
    assert [len(records([file])) for file in files] == [4, 4, 4]
    document = json.loads((drawn / "instances.json").read_text())
    written = records(files)
    assert set(written) == {image["id"] for image in document["images"]}
    names = {c["id"]: c["name"].encode() for c in document["categories"]}
    for image in document["images"]:
        features = written[image["id"]]

        def one(key, kind, features=features):
            (value,) = getattr(features[key], kind).value
            return value

        content = (drawn / "images" / image["file_name"]).read_bytes()
        assert one("image/encoded", "bytes_list") == content
        assert one("image/format", "bytes_list") == (b"png" if content[1:4] == b"PNG" else b"jpeg")
        assert one("image/filename", "bytes_list") == image["file_name"].encode()
        assert one("image/height", "int64_list") == image["height"]
        assert one("image/width", "int64_list") == image["width"]

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


def test_indexes_and_label_map_come_along(drawn, tmp_path):
    annotations = load(drawn)
    files = write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=2, seed=5)
    for file in files:
        index = pathlib.Path(f"{file}.idx").read_bytes()
        assert index == tfrecord_index.format_index(tfrecord_index.record_spans(file))
    assert LabelMap.load(tmp_path / "t.label_map.json") == annotations.label_map
    source = json.loads((tmp_path / "t.label_map.json").read_text())["source"]
    assert source["seed"] == 5
    assert source["annotations"] == "instances.json"
    assert source["fingerprint"] == annotations.fingerprint()


def test_the_format_is_that_of_the_content_not_of_the_name(data, tmp_path):
    PIL.Image.open(data / "images" / "00.jpg").save(data / "images" / "00.jpg", format="PNG")
    annotations = load(data)
    files = write_tfrecords(annotations, data / "images", tmp_path / "t", num_shards=1)
    features = records(files)[int(annotations.image_ids[0])]
    assert list(features["image/format"].bytes_list.value) == [b"png"]


def spoil_size(data):
    PIL.Image.new("RGB", (33, 44)).save(data / "images" / "03.jpg")


def spoil_rotated(data):
    picture = PIL.Image.open(data / "images" / "03.jpg").transpose(PIL.Image.Transpose.ROTATE_90)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    picture.save(data / "images" / "03.jpg", exif=exif)


def spoil_kind(data):
    PIL.Image.open(data / "images" / "03.jpg").save(data / "images" / "03.jpg", format="BMP")


def spoil_content(data):
    (data / "images" / "03.jpg").write_bytes(b"no image")


def spoil_header(data):
    (data / "images" / "03.jpg").write_bytes((data / "images" / "03.jpg").read_bytes()[:50])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_size, "03.jpg is 33 x 44 pixels, the annotations say 127 x 81; .*correct width and height"),
        (spoil_rotated, "03.jpg is 81 x 127 pixels, the annotations say 127 x 81; its EXIF tag turns it"),
        (spoil_kind, "03.jpg is a BMP file: the schema knows JPEG and PNG"),
        (spoil_content, "03.jpg is no image that can be read"),
        (spoil_header, "03.jpg is no image that can be read"),
    ],
)
def test_images_that_do_not_fit_are_refused_and_nothing_looks_finished(data, tmp_path, spoil, message):
    write_tfrecords(load(data), data / "images", tmp_path / "t", num_shards=1)
    spoil(data)
    with pytest.raises(UserError, match=message):
        write_tfrecords(load(data), data / "images", tmp_path / "t", num_shards=1)
    assert not (tmp_path / "t.label_map.json").exists()
    assert not list(tmp_path.glob(".tmp*"))


def test_another_set_with_the_same_prefix_is_in_the_way(drawn, tmp_path):
    annotations = load(drawn)
    write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=2)
    write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=2)  # the same: replaced
    write_tfrecords(annotations, drawn / "images", tmp_path / "t-more", num_shards=3)  # another prefix
    with pytest.raises(UserError, match=r"t-00000-of-00002.tfrecord belongs to another set"):
        write_tfrecords(annotations, drawn / "images", tmp_path / "t", num_shards=3)


@pytest.mark.parametrize("num_shards", [0, 13])
def test_as_many_files_as_images_at_most(drawn, tmp_path, num_shards):
    with pytest.raises(UserError, match=f"--num_shards={num_shards} is not in 1..12"):
        write_tfrecords(load(drawn), drawn / "images", tmp_path / "t", num_shards=num_shards)


def test_output_problems_are_named(drawn, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        write_tfrecords(load(drawn), drawn / "images", tmp_path / "file" / "t", num_shards=1)
    with pytest.raises(UserError, match="is a directory: add the beginning of the file names"):
        write_tfrecords(load(drawn), drawn / "images", f"{tmp_path}/", num_shards=1)


def run(*arguments):
    command = [sys.executable, "common/tfrecord.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command(drawn, tmp_path):
    done = run(
        f"--images={drawn}/images",
        f"--annotations={drawn}/instances.json",
        f"--output={tmp_path}/t",
        "--num_shards=2",
    )
    assert done.returncode == 0, done.stderr
    # The same bytes as from another process: protobuf's maps must not be written in order of their hashes.
    write_tfrecords(load(drawn), drawn / "images", tmp_path / "again" / "t", num_shards=2)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert "1 boxes clipped to their image, 2 without area dropped" in done.stdout
    assert "Writing records" in done.stderr and "Writing records" not in done.stdout


def test_the_command_says_what_is_wrong_in_one_line(drawn, tmp_path):
    done = run(f"--images={drawn}", f"--annotations={drawn}/instances.json", f"--output={tmp_path}/t")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "12 of 12 image files are not in" in line
