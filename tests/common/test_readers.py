"""Both readers by DALI give the same examples, in the order that is promised, and go on where they were.

Which rank reads which images is in test_dali_ops.py.
"""

import dataclasses
import pathlib

import numpy as np
import nvidia.dali.plugin.tf as dali_tf
import pytest
import tensorflow as tf

from common import readers, tf_readers
from common.datacheck.coco import load_coco
from common.datacheck.datasets import open_tfrecords
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.errors import UserError
from common.readers import coco_reader, tfrecord_reader
from tests.common.reading import (
    assert_saved_iterator_goes_on,
    build,
    first_images,
    ids,
    numbered_images,
    read,
)
from tests.common.record_writing import LABELS, empty_record, png, record, write
from tools.conversion.coco_to_tfrecord import write_tfrecords


def both_readers(directory, record_directory):
    """A json and the records made from it, as functions of the readers' options."""
    annotations = load_coco(directory / "instances.json", directory / "images")
    prefix = record_directory / "t"
    records = write_tfrecords(annotations, directory / "images", prefix, num_shards=3, seed=1)

    def coco(**options):
        return coco_reader(directory / "images", annotations, **options)

    def tfrecord(**options):
        return tfrecord_reader(records, annotations.label_map, **options)

    return annotations, coco, tfrecord


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Thirteen images, by the kind of the source."""
    directory = tmp_path_factory.mktemp("numbered")
    source = numbered_images(directory, range(100, 113))
    return {kind: first_images(source, 13, kind, directory) for kind in ("coco", "tfrecord")}


# --- what is read ---


@pytest.mark.parametrize("name", ["coco128", "drawn"])
def test_json_and_records_give_the_same(name, request, tmp_path):
    directory = request.getfixturevalue(name)
    annotations, coco, tfrecord = both_readers(directory, tmp_path)
    n = annotations.num_images
    from_json = read(coco, n, batch_size=4, training=False)
    from_records = {example.image_id: example for example in read(tfrecord, n, batch_size=4, training=False)}
    assert ids(from_json) == annotations.image_ids.tolist()
    assert len(from_records) == n
    targets = annotations.target_boxes
    for row, example in enumerate(from_json):
        file = (directory / "images" / annotations.file_names[row]).read_bytes()
        rows = slice(*targets.row_splits[row : row + 2])
        for found in (example, from_records[example.image_id]):
            assert found.encoded == file
            assert found.labels.tolist() == (targets.classes[rows] + 1).tolist()
            np.testing.assert_allclose(found.boxes, targets.boxes[rows], atol=1e-6, rtol=0)
            assert found.boxes.min(initial=0) >= 0 and found.boxes.max(initial=1) <= 1


@pytest.mark.parametrize("category_ids", [[0, 65_536, 2**31 - 1], [5, 2**32 + 5, 2**63 - 1]])
def test_ids_of_any_size_and_boxes_as_thin_as_they_come(tmp_path, category_ids):
    """Category ids beyond DALI's lookup_table (65535) and its constants, image ids beyond its COCO reader,
    and boxes under 0.1 pixel, which that drops unless told not to."""
    image_ids = [0, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1]
    numbered_images(tmp_path, image_ids, category_ids[::-1], box=[1, 1, 0.05, 3])
    _, *both = both_readers(tmp_path, tmp_path)
    for reader in both:
        examples = read(reader, 5, training=False)
        assert sorted(ids(examples)) == image_ids
        for example in examples:
            assert example.labels.tolist() == [3, 2, 1]
            expected = [1 / 8, 1 / 9, 1.05 / 8, 4 / 9]
            np.testing.assert_allclose(example.boxes, [expected] * 3, atol=1e-6)


def test_bad_images_are_left_out_by_policy(tmp_path):
    """By both record readers alike."""
    bad = png()[:-20]
    records = [record(source_id=b"1", encoded=bad), record(source_id=b"2")]
    file = write(tmp_path / "x", *records, empty_record(3, encoded=bad), empty_record(4))
    LABELS.save(tmp_path / "labels.json")
    labels = str(tmp_path / "labels.json")
    source = open_tfrecords(str(file), labels, ImagePolicy(on_bad_image="skip"))
    by_dali = read(source.read, 2, training=False)
    assert [(example.image_id, example.labels.tolist()) for example in by_dali] == [(2, [2]), (4, [])]
    by_tensorflow = tf_readers.examples(source, training=False).as_numpy_iterator()
    assert [int(example["image_id"]) for example in by_tensorflow] == [2, 4]
    with pytest.raises(DataError, match=r"image that is cut off \(2\)|truncated"):
        open_tfrecords(str(file), labels)


def test_records_without_a_data_check_get_an_index_and_are_looked_through(tmp_path):
    def build_reader(*contents):
        return build(lambda: tfrecord_reader([write(tmp_path / "x", *contents)], LABELS, training=False))

    build_reader(record(object__is_crowd=[0]), record(object__is_crowd=[1]))
    assert len(pathlib.Path(f"{tmp_path}/x.idx").read_text().splitlines()) == 2
    with pytest.raises(UserError, match="x record 1 lacks image/object/bbox/xmax: convert the data set"):
        build_reader(record(), record(object__bbox__xmax=None))
    with pytest.raises(UserError, match="x: some records lack image/object/is_crowd: convert the data set"):
        build_reader(record(), record(object__is_crowd=[1]))


# --- the json that DALI gets ---


def test_the_clean_json_is_made_once(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    annotations = load_coco(drawn / "instances.json", drawn / "images")

    def first(annotations):
        return ids(read(lambda **o: coco_reader(drawn / "images", annotations, **o), 5, training=False))

    def made():
        return sorted((tmp_path / "dali-detection").glob("*.coco.json"))

    read_first = first(annotations)
    (path,) = made()
    assert path.name == f"{annotations.fingerprint()[:32]}-{readers._CLEAN_JSON}.coco.json"
    before = path.stat()
    with monkeypatch.context() as patch:
        patch.setattr(readers, "_clean_json", None)
        assert first(dataclasses.replace(annotations, origin="elsewhere")) == read_first
    assert path.stat() == before
    # Other annotations, and another version of what is made of them.
    first(annotations.select(annotations.image_ids != 10))
    assert len(made()) == 2
    monkeypatch.setattr(readers, "_CLEAN_JSON", "next")
    first(annotations)
    assert len(made()) == 3


# --- order and state ---


@pytest.mark.parametrize("kind", ["coco", "tfrecord"])
def test_shuffling_follows_the_seed_and_nothing_else(numbered, kind):
    def order(**options):
        return ids(read(numbered[kind].read, 39, training=True, **options))

    one = order(seed=0)
    epochs = [tuple(one[i : i + 13]) for i in (0, 13, 26)]
    in_order = tuple(range(100, 113))
    assert all(sorted(epoch) == list(in_order) for epoch in epochs)
    assert len({*epochs, in_order}) == 4  # the first epoch is shuffled too
    assert order(seed=0, pipeline_seed=99) == one
    assert order(seed=0, batch_size=5) == one
    for seed in (1, 2**31 - 1):
        other = order(seed=seed)
        # Not the same epochs in another order either.
        assert not {tuple(other[i : i + 13]) for i in (0, 13, 26)} & {*epochs, in_order}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["coco", "tfrecord"])
def test_a_saved_iterator_goes_on_in_the_middle_of_an_epoch(numbered, kind, training, tmp_path):
    options = {"shard_id": 1, "num_shards": 2, "training": training, "seed": 4}

    def iterate():
        pipeline = build(lambda: numbered[kind].read(**options)[3:], batch_size=2)
        outputs = {"output_shapes": (2,), "output_dtypes": tf.int64}
        with tf.device("/cpu:0"):
            dataset = dali_tf.DALIDataset(pipeline=pipeline, batch_size=2, device_id=None, **outputs)
            return iter(dataset.map(lambda image_ids: image_ids))

    assert_saved_iterator_goes_on(iterate, tmp_path, before=6, after=12)
