"""Both DALI readers: equal outputs, orders, resuming. Who reads what is in test_shards.py."""

import dataclasses
import itertools
import json
import pathlib
from typing import NamedTuple

import numpy as np
import nvidia.dali.plugin.tf as dali_tf
import PIL.Image
import PIL.ImageDraw
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common import files, readers, tf_readers
from common.datacheck.coco import load_coco
from common.datacheck.datasets import open_tfrecords
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import DataError
from common.datacheck.tfrecord import open_records
from common.errors import UserError
from common.readers import coco_reader, tfrecord_reader
from tests.common.record_writing import LABELS, empty_record, png, record, write
from tools.conversion.coco_to_tfrecord import write_tfrecords

PICTURE = png(8, 9)


class Example(NamedTuple):
    image_id: int
    jpeg: bytes
    boxes: np.ndarray
    labels: np.ndarray


def build(reader, batch_size=1, pipeline_seed=None, **options):
    """A pipeline that does nothing but read."""
    pipeline = dali.Pipeline(
        batch_size=batch_size, num_threads=1, device_id=None, seed=pipeline_seed, enable_checkpointing=True
    )
    with pipeline:
        pipeline.set_outputs(*reader(**options))
    pipeline.build()
    return pipeline


def read(reader, count, batch_size=1, **options):
    """The first `count` examples."""
    pipeline = build(reader, batch_size, **options)
    examples = []
    while len(examples) < count:
        jpegs, boxes, labels, image_ids = ([np.array(x) for x in output] for output in pipeline.run())
        for i in range(batch_size):
            assert (boxes[i].dtype, labels[i].dtype, image_ids[i].dtype) == (np.float32, np.int32, np.int64)
            assert boxes[i].shape == (len(labels[i]), 4) and image_ids[i].shape == ()
            examples.append(Example(int(image_ids[i]), jpegs[i].tobytes(), boxes[i], labels[i]))
    return examples[:count]


def ids(reader, count, **options):
    return [example.image_id for example in read(reader, count, **options)]


def both_readers(directory, file, record_directory, num_shards=3):
    """The json and the records made from it, as functions of the readers' options."""
    annotations = load_coco(directory / file, directory / "images")
    files = write_tfrecords(
        annotations, directory / "images", record_directory / "t", num_shards=num_shards, seed=1
    )

    def coco(**options):
        return coco_reader(directory / "images", annotations, **options)

    def tfrecord(**options):
        return tfrecord_reader(files, annotations.label_map, **options)

    return annotations, coco, tfrecord


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Makes sets of n images."""
    root = tmp_path_factory.mktemp("numbered")
    made = {}

    def make(n):
        if n in made:
            return made[n]
        directory = root / str(n)
        (directory / "images").mkdir(parents=True)
        for i in range(n):
            (directory / "images" / f"{i}.png").write_bytes(PICTURE)
        document = {
            "images": [{"id": 100 + i, "file_name": f"{i}.png", "width": 8, "height": 9} for i in range(n)],
            "annotations": [{"image_id": 100 + i, "category_id": 5, "bbox": [1, 1, 2, 2]} for i in range(n)],
            "categories": [{"id": 5, "name": "five"}],
        }
        (directory / "x.json").write_text(json.dumps(document))
        annotations = load_coco(directory / "x.json", directory / "images")
        files = write_numbered_records(directory, n)
        made[n] = {
            "coco": lambda **options: coco_reader(directory / "images", annotations, **options),
            "tfrecord": checked_reader(files, annotations.label_map),
        }
        return made[n]

    return make


def checked_reader(files, label_map):
    """`tfrecord_reader` of records that were checked, and whose indexes were made."""
    records = open_records(files, label_map).records
    return lambda **options: tfrecord_reader(records, label_map, **options)


def write_numbered_records(directory, n):
    """The same in three files of unequal length (one file where there are fewer images)."""

    bounds = [0, n] if n < 4 else [0, n // 4, n // 4 + 1, n]
    files = []
    for begin, end in itertools.pairwise(bounds):
        files.append(str(directory / f"{begin}.tfrecord"))
        contents = (
            record(
                encoded=PICTURE,
                source_id=b"%d" % (100 + i),
                height=9,
                width=8,
                object__class__label=[5],
            )
            for i in range(begin, end)
        )
        write(files[-1], *contents)
    return files


# --- what is read ---


@pytest.mark.parametrize(
    "name", ["coco128/instances.json", "bccd/instances_test.json", "drawn/instances.json"]
)
def test_json_and_records_give_the_same(name, request, tmp_path):
    fixture, file = name.split("/")
    directory = request.getfixturevalue(fixture)
    annotations, coco, tfrecord = both_readers(directory, file, tmp_path)
    n = annotations.num_images
    from_json = read(coco, n, batch_size=4, training=False)
    from_records = {example.image_id: example for example in read(tfrecord, n, batch_size=4, training=False)}
    assert [example.image_id for example in from_json] == annotations.image_ids.tolist()
    assert len(from_records) == n
    targets = annotations.target_boxes
    for row, example in enumerate(from_json):
        other = from_records[example.image_id]
        assert example.jpeg == other.jpeg == (directory / "images" / annotations.file_names[row]).read_bytes()
        assert example.labels.tolist() == other.labels.tolist()
        np.testing.assert_allclose(example.boxes, other.boxes, atol=1e-6, rtol=0)
        rows = slice(*targets.row_splits[row : row + 2])
        np.testing.assert_allclose(example.boxes, targets.boxes[rows], atol=1e-6, rtol=0)
        assert example.labels.tolist() == (targets.classes[rows] + 1).tolist()
        assert example.boxes.min(initial=0) >= 0 and example.boxes.max(initial=1) <= 1


@pytest.mark.parametrize(
    "category_ids",
    [[0, 65_536, 2**31 - 1], [5, 2**31, 2**32 + 5], [2**31 - 1, 2**31 + 5, 2**63 - 1], [2**32, 2**33, 2**34]],
)
def test_labels_and_ids_of_any_size(tmp_path, category_ids):
    """Category ids beyond DALI's lookup_table (65535) and its constants, image ids beyond its COCO reader."""
    (tmp_path / "images").mkdir()
    image_ids = [0, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1]
    objects = []
    for number, image_id in enumerate(image_ids):
        PIL.Image.new("RGB", (20, 10)).save(tmp_path / "images" / f"{number}.png")
        objects += [
            {"image_id": image_id, "category_id": i, "bbox": [number, 1, 2, 3]}
            for i in reversed(category_ids)
        ]
    document = {
        "images": [
            {"id": i, "file_name": f"{number}.png", "width": 20, "height": 10}
            for number, i in enumerate(image_ids)
        ],
        "annotations": objects,
        "categories": [{"id": i, "name": str(i)} for i in category_ids],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    _, coco, tfrecord = both_readers(tmp_path, "x.json", tmp_path)
    for reader in (coco, tfrecord):
        examples = read(reader, 5, training=False)
        assert sorted(example.image_id for example in examples) == image_ids
        for example in examples:
            assert example.labels.tolist() == [3, 2, 1]
            np.testing.assert_allclose(example.boxes[0, 0], image_ids.index(example.image_id) / 20, atol=1e-6)


def draw_odd_image(path, kind):
    """A white image, 60 wide and 40 high as stored, with a black rectangle from (6, 8) to (30, 28)."""
    picture = PIL.Image.new("RGB", (60, 40), "white")
    PIL.ImageDraw.Draw(picture).rectangle([6, 8, 29, 27], fill="black")
    exif = PIL.Image.Exif()
    if kind == "rotated.jpg":
        exif[0x0112] = 6
    if kind.startswith("16bit"):
        PIL.Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257).save(path)
        return
    modes = {"gray.jpg": "L", "cmyk.jpg": "CMYK", "palette.png": "P", "alpha.png": "RGBA"}
    picture.convert(modes.get(kind, "RGB")).save(
        path, exif=exif, **({"quality": 95} if ".jpg" in kind else {})
    )


def test_odd_images_are_read_and_boxes_fit_the_stored_pixels(tmp_path):
    kinds = [
        "plain.jpg",
        "gray.jpg",
        "cmyk.jpg",
        "rotated.jpg",
        "rgb.png",
        "palette.png",
        "alpha.png",
        "16bit.png",
    ]
    (tmp_path / "images").mkdir()
    for kind in kinds:
        draw_odd_image(tmp_path / "images" / kind, kind)
    document = {
        "images": [{"id": i, "file_name": k, "width": 60, "height": 40} for i, k in enumerate(kinds)],
        "annotations": [{"image_id": i, "category_id": 1, "bbox": [6, 8, 24, 20]} for i in range(len(kinds))],
        "categories": [{"id": 1, "name": "a"}],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    _, coco, tfrecord = both_readers(tmp_path, "x.json", tmp_path)
    for reader in (coco, tfrecord):

        def decoded(reader=reader):
            jpegs, boxes, _, image_ids = reader(training=False)
            return fn.decoders.image(jpegs, adjust_orientation=False), boxes, image_ids

        images, boxes, image_ids = build(decoded, batch_size=len(kinds)).run()
        assert sorted(int(np.array(i)) for i in image_ids) == list(range(len(kinds)))
        for image, box, image_id in zip(images, boxes, image_ids, strict=True):
            image, kind = np.array(image), kinds[int(np.array(image_id))]
            assert image.shape == (40, 60, 3), kind
            left, top, right, bottom = np.round(np.array(box)[0] * [60, 40, 60, 40]).astype(int)
            inside = np.zeros((40, 60), bool)
            inside[top:bottom, left:right] = True
            assert np.array_equal(image.mean(axis=2) < 128, inside), kind


def test_boxes_too_thin_for_dalis_own_threshold_stay(tmp_path):
    """DALI's COCO reader drops boxes under 0.1 pixel unless told not to; its record reader cannot."""
    (tmp_path / "images").mkdir()
    PIL.Image.new("RGB", (20, 10)).save(tmp_path / "images" / "a.png")
    document = {
        "images": [{"id": 1, "file_name": "a.png", "width": 20, "height": 10}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [3, 2, 0.05, 4]}],
        "categories": [{"id": 1, "name": "a"}],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    _, coco, tfrecord = both_readers(tmp_path, "x.json", tmp_path, num_shards=1)
    for reader in (coco, tfrecord):
        (example,) = read(reader, 1, training=False)
        np.testing.assert_allclose(example.boxes, [[0.15, 0.2, 0.1525, 0.6]], atol=1e-6)


def test_bad_images_are_left_out_by_policy(tmp_path):
    """By both record readers alike."""
    bad = png()[:-20]
    file = write(
        tmp_path / "x",
        record(source_id=b"1", encoded=bad),
        record(source_id=b"2"),
        empty_record(3, encoded=bad),
        empty_record(4),
    )
    LABELS.save(tmp_path / "labels.json")
    labels = str(tmp_path / "labels.json")
    source = open_tfrecords(str(file), labels, ImagePolicy(on_bad_image="skip"))
    options = {"training": False, "shard_id": 0, "num_shards": 1, "seed": 0}
    by_dali = read(source.read, 2, **options)
    assert [(example.image_id, example.labels.tolist()) for example in by_dali] == [(2, [2]), (4, [])]
    by_tensorflow = list(tf_readers.examples(source, **options).as_numpy_iterator())
    assert [int(example["image_id"]) for example in by_tensorflow] == [2, 4]
    with pytest.raises(DataError, match=r"image that is cut off \(2\)|truncated"):
        open_tfrecords(str(file), labels)


def test_an_index_is_made_where_it_is_missing(tmp_path):
    file = write(tmp_path / "x", record())
    build(lambda: tfrecord_reader([file], LABELS, training=False))
    assert pathlib.Path(f"{file}.idx").read_text().startswith("0 ")


# --- the json that DALI gets ---


def test_the_clean_json_is_made_once(drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    annotations = load_coco(drawn / "instances.json", drawn / "images")

    def reader(annotations):
        return lambda **options: coco_reader(drawn / "images", annotations, **options)

    def made():
        return sorted((tmp_path / "dali-detection").glob("*.coco.json"))

    first = ids(reader(annotations), 12, training=False)
    (path,) = made()
    assert path.name == f"{annotations.fingerprint()[:32]}-{readers._CLEAN_JSON}.coco.json"
    before = path.stat()
    with monkeypatch.context() as patch:
        patch.setattr(readers, "_clean_json", None)
        equal = dataclasses.replace(annotations, origin="elsewhere")
        assert ids(reader(equal), 12, training=False) == first
    assert path.stat() == before
    # Other annotations, and another version of what is made of them.
    build(reader(annotations.select(annotations.image_ids != 10)), training=False)
    assert len(made()) == 2
    monkeypatch.setattr(readers, "_CLEAN_JSON", "next")
    build(reader(annotations), training=False)
    assert len(made()) == 3


def test_a_clean_json_that_cannot_be_written_is_named(drawn, monkeypatch):
    annotations = load_coco(drawn / "instances.json", drawn / "images")

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_bytes", full)
    monkeypatch.setattr(readers, "_CLEAN_JSON", "unheard of")
    with pytest.raises(UserError, match=r"cannot write .*\.coco\.json: No space left .*XDG_CACHE_HOME"):
        build(lambda **options: coco_reader(drawn / "images", annotations, **options), training=False)


# --- order ---


@pytest.mark.parametrize("kind", ["coco", "tfrecord"])
def test_shuffling(numbered, kind):
    reader = numbered(50)[kind]
    order = ids(reader, 150, training=True, seed=0)
    epochs = [order[:50], order[50:100], order[100:]]
    assert all(sorted(epoch) == list(range(100, 150)) for epoch in epochs)
    in_order = list(range(100, 150))
    distinct = {tuple(epoch) for epoch in [*epochs, in_order]}
    assert len(distinct) == 4  # the first epoch is shuffled too
    assert ids(reader, 150, training=True, seed=0, pipeline_seed=99) == order
    assert ids(reader, 150, training=True, seed=0, batch_size=5) == order
    for seed in (1, 2**31 - 1):
        other = ids(reader, 150, training=True, seed=seed)
        # Not the same epochs in another order either.
        assert not {tuple(other[i : i + 50]) for i in (0, 50, 100)} & distinct


@pytest.mark.parametrize("kind", ["coco", "tfrecord"])
def test_what_cannot_be_shared_is_refused(numbered, kind):
    reader = numbered(3)[kind]
    with pytest.raises(UserError, match="3 images cannot be shared by 4 ranks"):
        build(reader, training=True, shard_id=0, num_shards=4)


def test_files_without_annotations(drawn):
    files = sorted((drawn / "images").iterdir())
    options = {"num_shards": 5, "batch_size": 2}
    seen = {}
    for shard_id in range(5):
        for example in read(lambda **o: readers.file_reader(files, **o), 4, shard_id=shard_id, **options):
            seen[example.image_id] = example
    assert sorted(seen) == list(range(12))
    for image_id, example in seen.items():
        assert example.jpeg == files[image_id].read_bytes()
        assert example.boxes.shape == (0, 4)


# --- state ---


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["coco", "tfrecord"])
def test_a_saved_iterator_goes_on_in_the_middle_of_an_epoch(numbered, kind, training, tmp_path):
    reader = numbered(13)[kind]

    def ids_only():
        return reader(training=training, shard_id=1, num_shards=2, seed=4)[3:]

    def iterate():
        with tf.device("/cpu:0"):
            return iter(
                dali_tf.DALIDataset(
                    pipeline=build(ids_only, batch_size=2),
                    batch_size=2,
                    output_shapes=(2,),
                    output_dtypes=tf.int64,
                    device_id=None,
                )
            )

    iterator = iterate()
    begin = [next(iterator)[0].numpy().tolist() for _ in range(6)]
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "state")
    rest = [next(iterator)[0].numpy().tolist() for _ in range(12)]

    resumed = iterate()
    tf.train.Checkpoint(iterator=resumed).restore(path).assert_consumed()
    assert [next(resumed)[0].numpy().tolist() for _ in range(12)] == rest
    fresh = iterate()
    assert [next(fresh)[0].numpy().tolist() for _ in range(6)] == begin
