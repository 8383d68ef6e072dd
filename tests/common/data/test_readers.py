"""DALI's readers of COCO json, TFRecords and WebDataset, compared with the annotations and each other."""

import dataclasses
import functools
import io
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from common.data import readers, tf_readers
from common.data.coco import load_coco
from common.data.loader import from_pipeline
from common.data.open import open_coco, open_images, open_webdataset
from common.data.readers import coco_reader, tfrecord_reader
from common.errors import UserError
from tests.common.coco_documents import write_json
from tests.common.reading import assert_iterator_resumes, build, first_images, ids, numbered_images, read
from tests.common.record_writing import LABELS, record, write, write_tfrecords
from tests.common.shard_writing import write_shards
from tests.conftest import ROOT


def all_readers(source, directory):
    """Returns a reader of the source, and of records and shards that are written from it."""
    options = {"num_shards": 3, "seed": 1}
    annotations, images_dir = source.annotations, source.images_dir
    records = write_tfrecords(annotations, images_dir, directory / "t", **options)
    write_shards(annotations, images_dir, directory / "json", **options)
    write_shards(annotations, images_dir, directory / "npy", **options, with_arrays=True)
    shards = [open_webdataset(f"{directory / form}-*.tar").read for form in ("json", "npy")]
    return source.read, functools.partial(tfrecord_reader, records, source.label_map), *shards


KINDS = ("coco", "tfrecord", "webdataset")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """The same thirteen images as {kind: source}."""
    directory = tmp_path_factory.mktemp("numbered")
    source = numbered_images(directory, range(100, 113))
    return {kind: first_images(source, 13, kind, directory) for kind in KINDS}


# --- examples ---


@pytest.mark.parametrize("data_set", ["coco128", "drawn"])
def test_readers_of_all_formats_give_the_images_and_boxes_of_the_annotations(data_set, request, tmp_path):
    directory = request.getfixturevalue(data_set)
    source = open_coco(directory / "images", directory / "instances.json")
    from_json, *from_containers = (
        read(reader, source.size, batch_size=4, training=False) for reader in all_readers(source, tmp_path)
    )
    assert ids(from_json) == source.annotations.image_ids.tolist()
    by_id = [{example.image_id: example for example in examples} for examples in from_containers]
    assert all(len(examples) == source.size for examples in by_id)
    targets = source.annotations.target_boxes
    for row, example in enumerate(from_json):
        rows = slice(*targets.row_splits[row : row + 2])
        for actual in (example, *(examples[example.image_id] for examples in by_id)):
            assert actual.encoded == source.encoded(row)
            assert actual.labels.tolist() == (targets.classes[rows] + 1).tolist()
            np.testing.assert_allclose(actual.boxes, targets.boxes[rows], atol=1e-6, rtol=0)
            assert actual.boxes.min(initial=0) >= 0 and actual.boxes.max(initial=1) <= 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("num_shards", [1, 5])
def test_shards_and_records_of_the_same_images_give_equal_batches(drawn, tmp_path, num_shards, training):
    source = open_coco(drawn / "images", drawn / "instances.json")
    _, from_records, *from_shards = all_readers(source, tmp_path)
    for shard_id in range(num_shards):
        options = {"shard_id": shard_id, "num_shards": num_shards, "training": training, "seed": 2}
        expected, *others = (
            read(reader, 30, batch_size=3, **options) for reader in (from_records, *from_shards)
        )
        for examples in others:
            for example, desired in zip(examples, expected, strict=True):
                assert (example.image_id, example.encoded) == (desired.image_id, desired.encoded)
                np.testing.assert_array_equal(example.boxes, desired.boxes)
                np.testing.assert_array_equal(example.labels, desired.labels)


@pytest.mark.parametrize("suffix", ["jfif", "jpe", "JPE"])
def test_jpeg_files_with_rare_suffixes_are_read_by_every_reader(drawn, tmp_path, suffix):
    content = (drawn / "images" / "00.jpg").read_bytes()
    width, height = PIL.Image.open(drawn / "images" / "00.jpg").size
    (tmp_path / f"a.{suffix}").write_bytes(content)
    document = {
        "images": [{"id": 4, "file_name": f"a.{suffix}", "width": width, "height": height}],
        "annotations": [{"id": 1, "image_id": 4, "category_id": 1, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    source, images = open_coco(tmp_path, write_json(tmp_path, document)), open_images(str(tmp_path))
    for opened in (source, images):
        assert [example.encoded for example in read(opened.read, 1, training=False)] == [content]
        (example,) = tf_readers.examples(opened, training=False).as_numpy_iterator()
        assert example["encoded"] == content
    assert not source.annotations.issues["wrong-extension"].count


def test_dali_readers_give_image_ids_up_to_int64_and_boxes_thinner_than_a_pixel(tmp_path):
    image_ids = [0, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1]
    category_ids = [0, 5, 65_536, 2**31 - 1, 2**32 + 5, 2**63 - 1]
    source = numbered_images(tmp_path, image_ids, category_ids[::-1], box=[1, 1, 0.05, 3])
    for reader in all_readers(source, tmp_path):
        examples = read(reader, 5, training=False)
        assert sorted(ids(examples)) == image_ids
        for example in examples:
            assert example.labels.tolist() == [6, 5, 4, 3, 2, 1]
            expected = [1 / 8, 1 / 9, 1.05 / 8, 4 / 9]
            np.testing.assert_allclose(example.boxes, [expected] * 6, atol=1e-6)


# --- records that the data check did not see ---


@pytest.fixture
def open_unchecked(tmp_path):
    """A function that writes records to the file x and builds a reader of this path."""
    return lambda *contents: build(
        lambda: tfrecord_reader([write(tmp_path / "x", *contents)], LABELS, training=False)
    )


SHRINK = """
import os, pathlib, sys
from nvidia.dali import pipeline_def
from common.data.open import open_coco, open_images
images, json = map(pathlib.Path, sys.argv[1:])
source = open_coco(images, json) if json.suffix else open_images(str(images))
pipeline = pipeline_def(lambda: source.read(training=False), batch_size=2, num_threads=1, device_id=None)()
pipeline.run()
for file in images.iterdir():
    os.truncate(file, 10)
sizes = [jpeg.shape()[0] for _ in range(9) for jpeg in pipeline.run()[0]]
print(max(sizes), min(sizes))
"""


@pytest.mark.parametrize("kind", ["coco", "images"])
def test_image_that_shrinks_after_dali_has_opened_it_does_not_end_the_process(kind, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    stream = io.BytesIO()
    PIL.Image.new("RGB", (9, 7)).save(stream, "JPEG")
    for number in range(20):
        (images / f"{number:02}.jpg").write_bytes(stream.getvalue() + bytes(10**5))
    listed = [{"id": i, "file_name": f"{i:02}.jpg", "width": 9, "height": 7} for i in range(20)]
    box = {"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 5, 5]}
    document = {"images": listed, "annotations": [box], "categories": [{"id": 1, "name": "a"}]}
    json_path = write_json(tmp_path, document) if kind == "coco" else tmp_path
    command = [sys.executable, "-c", SHRINK, str(images), str(json_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{len(stream.getvalue()) + 10**5} 10\n"), done.stderr


def test_reader_of_unchecked_records_writes_their_index(open_unchecked, tmp_path):
    open_unchecked(record(object__is_crowd=[0]), record(object__is_crowd=[1]))
    assert len(pathlib.Path(f"{tmp_path}/x.idx").read_text().splitlines()) == 2


@pytest.mark.parametrize("key", ["object/bbox/xmax", "source_id"])
def test_reader_of_unchecked_records_names_the_record_that_lacks_a_key(open_unchecked, key):
    with pytest.raises(UserError, match=rf"record 1 of .*x lacks image/{key}: convert the data"):
        open_unchecked(record(), record(**{key.replace("/", "__"): None}))


def test_reader_of_unchecked_records_refuses_crowds_where_some_records_lack_the_key(open_unchecked):
    with pytest.raises(UserError, match="some records lack image/object/is_crowd: convert the data set of"):
        open_unchecked(record(), record(object__is_crowd=[1]))


# --- the files that are written for DALI ---


@pytest.mark.parametrize("space", [" ", "\t", "\v", "\f", "\r"])
def test_boxes_of_images_with_a_space_in_a_file_name_have_the_same_bits_as_without(fuzzed, tmp_path, space):
    """DALI reads arrays if no file name has a space, else a json."""
    annotations = fuzzed.source.annotations
    names = [f"{number}{space}.jpg" for number in range(annotations.num_images)]
    for row, name in enumerate(names):
        (tmp_path / name).write_bytes(fuzzed.source.encoded(row))
    renamed = dataclasses.replace(annotations, file_names=names)
    options = {"count": annotations.num_images, "batch_size": 3, "training": False}
    examples = read(functools.partial(coco_reader, fuzzed.source.images_dir, annotations), **options)
    of_renamed = read(functools.partial(coco_reader, tmp_path, renamed), **options)
    assert sum(len(example.boxes) for example in examples) == len(annotations.target_boxes.boxes) > 50
    for example, other in zip(examples, of_renamed, strict=True):
        assert example.image_id == other.image_id and example.encoded == other.encoded
        assert example.boxes.tobytes() == other.boxes.tobytes()
        assert example.labels.tolist() == other.labels.tolist()


@pytest.mark.parametrize(("has_space", "kind"), [(False, "coco"), (True, "coco.json")])
def test_annotations_for_dali_are_written_once_per_annotations_and_format_version(
    drawn, tmp_path, monkeypatch, has_space, kind
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    annotations = load_coco(drawn / "instances.json")
    if has_space:
        annotations = dataclasses.replace(annotations, file_names=[f"a {i}" for i in range(12)])
    writer, version = ("clean_json", "_CLEAN_JSON") if has_space else ("write_dali_files", "_DALI_FILES")

    def cached_after_reading(annotations):
        """Returns the paths of all annotations for DALI in the cache."""
        build(lambda: coco_reader(drawn / "images", annotations, training=False))
        return sorted((tmp_path / "dali-detection").glob(f"*.{kind}"))

    (path,) = cached_after_reading(annotations)
    assert path.name == f"{annotations.fingerprint()[:32]}-{getattr(readers, version)}.{kind}"
    with monkeypatch.context() as patch:
        patch.setattr(readers, writer, None)
        assert cached_after_reading(dataclasses.replace(annotations, origin="elsewhere")) == [path]
    assert len(cached_after_reading(annotations.select(annotations.image_ids != 10))) == 2
    monkeypatch.setattr(readers, version, "next")
    assert len(cached_after_reading(annotations)) == 3


def test_annotations_for_dali_that_were_written_only_in_part_are_written_again(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = open_coco(drawn / "images", drawn / "instances.json")
    expected = read(source.read, source.size, training=False)
    (directory,) = (tmp_path / "dali-detection").glob("*.coco")
    names = sorted(path.name for path in directory.iterdir())
    assert names[-1] == readers.LAST_FILE
    for name in names[2:]:
        (directory / name).unlink()
    for example, other in zip(read(source.read, source.size, training=False), expected, strict=True):
        assert example.encoded == other.encoded and example.boxes.tobytes() == other.boxes.tobytes()


# --- order and state ---


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_training_images_of_dali_readers_depends_on_the_seed_alone(numbered, kind):
    def epochs(**options):
        order = ids(read(numbered[kind].read, 39, training=True, **options))
        return {tuple(order[i : i + 13]) for i in (0, 13, 26)}

    first = epochs(seed=0)
    in_order = tuple(range(100, 113))
    assert all(sorted(epoch) == list(in_order) for epoch in first)
    assert len({*first, in_order}) == 4
    assert epochs(seed=0, pipeline_seed=99) == epochs(seed=0, batch_size=5) == first
    for seed in (1, 2**31 - 1):
        assert not epochs(seed=seed) & first


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_dali_iterator_continues_in_the_middle_of_an_epoch(numbered, kind, training, tmp_path):
    options = {"shard_id": 1, "num_shards": 2, "training": training, "seed": 4}

    def iterate():
        pipeline = build(lambda: numbered[kind].read(**options)[3:], batch_size=2)
        dataset = from_pipeline(pipeline, tf.TensorSpec([2], tf.int64), device_id=None)
        return iter(dataset.map(lambda image_ids: image_ids + 1).prefetch(2))

    assert_iterator_resumes(iterate, tmp_path, before=6, after=12)
