import json
import os
import pathlib
import shutil
import threading
import types

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common.data import tfrecord
from common.data.coco import load_coco
from common.data.labels import LabelMap
from tests.common.record_writing import record
from tests.refusal import refusal
from tests.tools.conversion.labelled_images import contents_of
from tools.conversion import coco_to_tfrecord, numbered_files
from tools.conversion.coco_to_tfrecord import write_tfrecords


@pytest.fixture
def data(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "data")


def write(directory, prefix, num_shards=3, **options):
    annotations, images = load_coco(directory / "instances.json"), directory / "images"
    return write_tfrecords(annotations, images, prefix, num_shards=num_shards, **options)


def records(files):
    examples = map(tf.train.Example.FromString, tf.data.TFRecordDataset(files).as_numpy_iterator())
    return {int(e.features.feature["image/source_id"].bytes_list.value[0]): e for e in examples}


def test_tfrecords_contain_every_image_with_its_objects(data, tmp_path):
    PIL.Image.open(data / "images" / "00.jpg").save(data / "images" / "00.jpg", format="PNG")
    files = write(data, tmp_path / "sub" / "t")
    document = json.loads((data / "instances.json").read_text())
    label_map = LabelMap.load(tmp_path / "sub" / "t.label_map.json")
    assert label_map == LabelMap.from_categories(document["categories"])
    assert files == [f"{tmp_path}/sub/t-0000{i}-of-00003.tfrecord" for i in range(3)]
    other_files = [tmp_path / "sub" / "t.label_map.json", *(pathlib.Path(f"{file}.idx") for file in files)]
    assert {*(tmp_path / "sub").iterdir()} == {*other_files, *map(pathlib.Path, files)}
    for file, index in zip(files, other_files[1:], strict=True):
        assert index.read_bytes() == tfrecord.format_index(tfrecord.record_spans(file))
    assert [len(records([file])) for file in files] == [4, 4, 4]
    written = records(files)
    assert set(written) == {image["id"] for image in document["images"]}
    names = {c["id"]: c["name"].encode() for c in document["categories"]}
    for image in document["images"]:
        objects, boxes, areas = [], [], []
        for o in (o for o in document["annotations"] if o["image_id"] == image["id"]):
            x, y, w, h = o["bbox"]
            box = np.clip(np.divide([x, y, x + w, y + h], [image["width"], image["height"]] * 2), 0, 1)
            if box[2] > box[0] and box[3] > box[1]:
                objects.append(o)
                boxes.append(box)
                size = (box[2:] - box[:2]) * (image["width"], image["height"])
                areas.append(size.prod() if o["area"] == w * h else float(o["area"]))
        sides = zip(("xmin", "ymin", "xmax", "ymax"), np.reshape(boxes, (-1, 4)).T, strict=True)
        content = (data / "images" / image["file_name"]).read_bytes()
        labels, crowds = ([o[key] for o in objects] for key in ("category_id", "iscrowd"))
        expected = record(
            source_id=str(image["id"]).encode(),
            encoded=content,
            format=b"png" if content[1:4] == b"PNG" else b"jpeg",
            filename=image["file_name"].encode(),
            height=image["height"],
            width=image["width"],
            object__class__text=tf.train.Feature(bytes_list={"value": [names[label] for label in labels]}),
            object__class__label=tf.train.Feature(int64_list={"value": labels}),
            object__is_crowd=tf.train.Feature(int64_list={"value": crowds}),
            object__area=areas,
            **{f"object__bbox__{side}": values.tolist() for side, values in sides},
        )
        assert written[image["id"]] == tf.train.Example.FromString(expected)


def test_record_of_a_box_outside_its_image_has_the_clipped_area_unless_it_is_the_area_of_a_mask(
    data, tmp_path
):
    document = json.loads((data / "instances.json").read_text())
    image, ids = document["images"][0], [category["id"] for category in document["categories"]]
    box = {"image_id": image["id"], "bbox": [-10, 5, 20, 8], "iscrowd": 0}
    areas = {"of the box": 160.0, "of a mask": 90.0}
    document["annotations"] = [
        box | {"id": number, "category_id": ids[number], "area": area}
        for number, area in enumerate(areas.values())
    ]
    (data / "instances.json").write_text(json.dumps(document))
    feature = records(write(data, tmp_path / "t"))[image["id"]].features.feature
    np.testing.assert_allclose(feature["image/object/area"].float_list.value, [10 * 8, 90], rtol=1e-6)


def test_crowd_without_area_that_a_record_does_not_have_is_reported(data, tmp_path):
    document = json.loads((data / "instances.json").read_text())
    crowd = {"image_id": document["images"][0]["id"], "bbox": [3, 5, 0, 8], "iscrowd": 1, "id": 999}
    document["annotations"].append(crowd | {"category_id": 3, "area": 9})
    (data / "instances.json").write_text(json.dumps(document))
    issues = load_coco(data / "instances.json", data / "images").issues
    assert any("annotation 999 " in offender for offender in issues["box-empty"].offenders)


def test_order_of_converted_tfrecords_depends_on_the_seed_and_not_on_the_number_of_workers(drawn, tmp_path):
    orders = [[image["id"] for image in json.loads((drawn / "instances.json").read_text())["images"]]]
    cases = {"a": {"num_workers": 1}, "b": {"seed": 0, "num_workers": 7}, "c": {"seed": 1}}
    for name, options in cases.items():
        orders.append(list(records(write(drawn, tmp_path / name / "t", **options))))
    assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1


CHANGES = {
    "another size": (
        lambda file: PIL.Image.new("RGB", (33, 44)).save(file),
        "is damaged, or its size is not 143 x 67 as in",
    ),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-30]), "is damaged"),
    "BMP": (
        lambda file: PIL.Image.open(file).save(file, "BMP"),
        "is BMP: convert it, TFRecords contain only JPEG",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_image_changed_after_the_check_is_refused_and_earlier_tfrecords_stay(data, tmp_path, change, message):
    write(data, tmp_path / "out" / "t")
    before = contents_of(tmp_path / "out")
    change(data / "images" / "01.jpg")
    assert f"01.jpg {message}" in refusal(write, data, tmp_path / "out" / "t")
    assert contents_of(tmp_path / "out") == before


ERRORS = [OSError(28, "No space left on device", "/x/y"), KeyboardInterrupt("now")]


@pytest.mark.parametrize("error", ERRORS, ids=["full disk", "interrupt"])
def test_failure_while_writing_tfrecords_keeps_the_earlier_tfrecords(drawn, tmp_path, monkeypatch, error):
    write(drawn, tmp_path / "t", seed=1)
    before, calls, is_over = contents_of(tmp_path), [], threading.Event()
    original = coco_to_tfrecord._serialize

    def serialize(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise error
        assert len(calls) < 5 or is_over.wait(30)
        return original(*arguments)

    one_event = types.SimpleNamespace(Lock=threading.Lock, Event=lambda: is_over)
    monkeypatch.setattr(numbered_files, "threading", one_event)
    monkeypatch.setattr(coco_to_tfrecord, "_serialize", serialize)
    assert str(error.args[-1]) in refusal(write, drawn, tmp_path / "t", num_workers=1, error=type(error))
    assert is_over.is_set() and len(calls) <= 6
    assert contents_of(tmp_path) == before


def test_interrupted_replacing_of_tfrecords_removes_their_label_map(drawn, tmp_path, monkeypatch):
    write(drawn, tmp_path / "t", seed=1)
    original, targets = os.replace, []

    def replace(source, target):
        targets.extend([target] * (pathlib.Path(target).suffix == ".tfrecord"))
        if len(targets) == 2:
            raise OSError(5, "Input/output error", target)
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert "Input/output error" in refusal(write, drawn, tmp_path / "t", error=OSError)
    assert len(list(tmp_path.iterdir())) == 6  # three record files and three indexes, but no label map


def test_tfrecord_shards_are_written_in_parallel(drawn, tmp_path, monkeypatch):
    """Each worker waits for the other workers."""
    barrier = threading.Barrier(3, timeout=30)
    original = coco_to_tfrecord.write_index

    def write_index(file):
        barrier.wait()
        return original(file)

    monkeypatch.setattr(coco_to_tfrecord, "write_index", write_index)
    write(drawn, tmp_path / "t", num_workers=3)


def test_existing_tfrecords_of_the_same_prefix_and_another_number_of_shards_are_refused(drawn, tmp_path):
    for name, num_shards in (("t", 2), ("t", 2), ("t-more", 3)):
        write(drawn, tmp_path / name, num_shards)
    message = refusal(write, drawn, tmp_path / "t", 3)
    assert "t-00000-of-00002.tfrecord is a file of an earlier conversion" in message


@pytest.mark.parametrize("num_shards", [0, 13])
def test_shard_count_below_1_or_above_the_number_of_images_is_refused(drawn, tmp_path, num_shards):
    message = refusal(write, drawn, tmp_path / "t", num_shards)
    assert f"--num_shards={num_shards} is not in 1..12" in message


def test_tfrecords_with_one_shard_per_image_are_written(drawn, tmp_path):
    assert len(write(drawn, tmp_path / "t", 12)) == 12


def test_tfrecord_prefix_without_a_file_name_is_refused(drawn, tmp_path):
    assert "is a directory: add a file name" in refusal(write, drawn, f"{tmp_path}/", 1)
