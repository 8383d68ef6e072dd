"""The tf.data readers and decoder against DALI's."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
from nvidia.dali.types import Constant

from common import dali_ops
from common.data import tf_readers
from common.data.check.issues import Issues
from common.data.labels import LabelMap
from common.data.open import list_images, open_source
from common.data.sources import ImageListSource
from common.data.tf_readers import Random
from common.errors import UserError
from tests.common.image_variants import HEIGHT, VARIANTS, WIDTH, exif, pillow
from tests.common.reading import Example, assert_iterator_resumes, build, ids, read
from tests.common.record_writing import empty_record, of_boxes, png, write
from tests.common.shard_writing import write_shards

COLORS = [(10 * i, 0, 0) for i in range(20)]


@pytest.fixture
def source(request, drawn, drawn_records, tmp_path):
    coco = {"images": str(drawn / "images"), "annotations": str(drawn / "instances.json")}

    def open_shards():
        annotations = open_source(**coco).annotations
        write_shards(annotations, drawn / "images", tmp_path / "drawn", num_shards=2)
        return open_source(file_pattern=f"{tmp_path}/drawn-*.tar")

    return {
        "coco": lambda: open_source(**coco),
        "tfrecord": lambda: open_source(file_pattern=f"{drawn_records}*"),
        "webdataset": open_shards,
        "images": lambda: ImageListSource(list_images(str(drawn / "images"), Issues(""))),
    }[request.param]()


def read_by_tensorflow(source, count=-1, **options):
    examples = tf_readers.examples(source, **options).take(count).as_numpy_iterator()
    return [Example(int(e["image_id"]), e["encoded"], e["boxes"], e["labels"]) for e in examples]


def all_ids(source):
    return sorted(source.annotations.image_ids.tolist())


@pytest.mark.parametrize(
    ("source", "num_shards", "count"),
    [("coco", 5, 3), ("tfrecord", 2, 6), ("webdataset", 3, 4), ("images", 2, 6)],
    indirect=["source"],
)
def test_tf_data_evaluation_examples_of_each_shard_equal_those_of_dali_in_content_and_order(
    source, num_shards, count
):
    image_ids = []
    for shard_id in range(num_shards):
        options = {"shard_id": shard_id, "num_shards": num_shards, "training": False, "seed": 0}
        examples = read_by_tensorflow(source, **options)
        for example, expected in zip(examples, read(source.read, count, **options), strict=True):
            assert (example.image_id, example.encoded) == (expected.image_id, expected.encoded)
            assert example.labels.dtype == np.int32 and example.boxes.dtype == np.float32
            assert example.labels.tolist() == expected.labels.tolist()
            assert example.boxes.shape == expected.boxes.shape
            np.testing.assert_allclose(example.boxes, expected.boxes, atol=1e-6, rtol=0)
        image_ids += ids(examples)
    assert sorted(set(image_ids)) == all_ids(source)


def test_evaluation_of_a_shard_with_too_few_images_repeats_them_to_fill_its_steps(drawn):
    """The shard has two images, and must fill two batches of two."""
    source = ImageListSource(list_images(str(drawn / "images"), Issues("")))
    loader = types.SimpleNamespace(opened_source=source, training=False, steps_per_epoch=2, batch_size=2)
    loader.shard_id, loader.num_shards, loader.seed = 1, 5, 0
    image_ids = tf_readers.loader_examples(loader).map(lambda example: example["image_id"]).take(8)
    assert list(image_ids.as_numpy_iterator()) == [2, 3, 3, 2, 2, 3, 3, 2]


# --- records that other programs wrote ---


def google_example(image_id, num_objects, crowds=False):
    """Makes a record in the format of google/automl's efficientdet/dataset/create_coco_tfrecord.py."""
    image = {"encoded": png(64, 48, COLORS[image_id]), "height": 48, "width": 64}
    if not num_objects:
        return empty_record(image_id, **image)
    boxes = [(0.1 * k, 0.2, 0.1 * k + 0.3, 0.9) for k in range(num_objects)]
    labels = [(1, 18)[k % 2] for k in range(num_objects)]
    is_crowd = [int(k == 1) for k in range(num_objects)] if crowds else None
    changes = {"object__class__label": labels, "object__is_crowd": is_crowd}
    return of_boxes(*boxes, source_id=b"%d" % image_id, **image, **changes)


def read_by_dali_and_tensorflow(source, count, **options):
    return read(source.read, count, **options), read_by_tensorflow(source, count, **options)


def test_records_in_the_format_of_google_automl_give_their_boxes_without_crowds(tmp_path):
    for f in range(2):
        examples = [google_example(10 * f + i, num_objects=i, crowds=f == 0) for i in range(4)]
        write(tmp_path / f"{f}.tfrecord", *examples)
    LabelMap((1, 18), ("person", "dog")).save(tmp_path / "labels.json")
    source = open_source(file_pattern=f"{tmp_path}/*.tfrecord", label_map=str(tmp_path / "labels.json"))
    assert source.annotations.is_crowd.sum() == 2
    for examples in read_by_dali_and_tensorflow(source, 8, training=True, seed=0):
        assert sorted(ids(examples)) == [0, 1, 2, 3, 10, 11, 12, 13]
        for example in examples:
            file, i = divmod(example.image_id, 10)
            rows = [k for k in range(i) if file or k != 1]  # object 1 of the first file is a crowd
            boxes = np.reshape([[0.1 * k, 0.2, 0.1 * k + 0.3, 0.9] for k in rows], (-1, 4))
            np.testing.assert_allclose(example.boxes, boxes, rtol=1e-6)
            assert example.labels.tolist() == [1 + k % 2 for k in rows]
            assert example.encoded == png(64, 48, COLORS[example.image_id])


def test_record_boxes_outside_the_image_are_clipped_or_dropped(tmp_path):
    boxes = ((-0.5, 0.2, 0.3, 0.9), (0.25, 0.2, 0.25, 0.9), (1.2, 0.2, 1.5, 0.9), (0.9, 0.2, 1.1, 0.9))
    labels = {"object__class__label": [1, 18, 1, 18, 1]}
    write(tmp_path / "x.tfrecord", of_boxes(*boxes, (0.5, 0.9, 0.6, 0.9), **labels))
    LabelMap((1, 18), ("person", "dog")).save(tmp_path / "x.label_map.json")
    source = open_source(file_pattern=f"{tmp_path}/x*")
    for (example,) in read_by_dali_and_tensorflow(source, 1, training=False):
        np.testing.assert_allclose(example.boxes, [[0, 0.2, 0.3, 0.9], [0.9, 0.2, 1, 0.9]], rtol=1e-6)
        assert example.labels.tolist() == [1, 2]


# --- order and state ---


@pytest.mark.parametrize("source", ["coco"], indirect=True)
def test_tf_data_training_shards_read_in_turns_give_the_image_order_of_one_unsharded_reader(source):
    unsharded = ids(read_by_tensorflow(source, 36, training=True, seed=6))
    shards = [{"shard_id": i, "num_shards": 5} for i in range(5)]
    turns = [ids(read_by_tensorflow(source, 7, training=True, seed=6, **shard)) for shard in shards]
    assert [image_id for turn in zip(*turns, strict=True) for image_id in turn] == unsharded[:35]
    epochs = [unsharded[:12], unsharded[12:24], unsharded[24:]]
    assert all(sorted(epoch) == all_ids(source) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("source", ["coco"], indirect=True)
def test_order_of_tf_data_training_depends_on_the_seed_argument_alone(source):
    def order(seed, global_seed=1):
        tf.random.set_seed(global_seed)
        return tuple(ids(read_by_tensorflow(source, 24, shard_id=0, num_shards=2, training=True, seed=seed)))

    assert len({order(0, global_seed=2), order(0), order(1), order(2)}) == 3


@pytest.mark.parametrize(
    ("source", "training"), [("coco", False), ("tfrecord", True), ("webdataset", True)], indirect=["source"]
)
def test_restored_tf_data_iterator_continues_and_its_state_is_small(source, training, tmp_path):
    def iterate():
        options = {"shard_id": 1, "num_shards": 2, "training": training, "seed": 2}
        dataset_options = tf.data.Options()
        dataset_options.experimental_symbolic_checkpoint = True  # as the loaders of both apps
        dataset = tf_readers.examples(source, **options).map(lambda e: e["image_id"]).prefetch(2)
        return iter(dataset.with_options(dataset_options))

    directory = tmp_path / "saved"
    assert_iterator_resumes(iterate, directory, before=4, after=20 if training else 2)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 100_000


@pytest.mark.parametrize("source", ["coco", "tfrecord", "webdataset", "images"], indirect=True)
def test_fewer_images_than_shards_are_refused_by_the_dali_and_tf_data_readers(source):
    options = {"shard_id": 0, "num_shards": 13, "training": False, "seed": 0}
    for reader in (source.read, functools.partial(tf_readers.examples, source)):
        with pytest.raises(UserError, match=r"^12 images are too few for 13 ranks: use at most 12"):
            reader(**options)


# --- random numbers ---


def draws(seed, global_seed=1):
    tf.random.set_seed(global_seed)
    random = Random(*seed)
    numbers = [random.uniform(-1.0, 3.0, (500,)) for _ in range(2)]
    return [tensor.numpy() for tensor in (*numbers, random.permutation(50))]


def test_tf_data_random_numbers_differ_in_each_call_are_uniform_and_depend_on_the_seed_alone():
    for first, same, different in zip(draws([1, 2]), draws([1, 2], 7), draws([2, 1]), strict=True):
        np.testing.assert_array_equal(first, same)
        assert (first != different).any()
    numbers, next_numbers, order = draws([3, 4])
    assert (numbers != next_numbers).all()
    assert numbers.dtype == np.float32 and order.dtype == np.int32
    assert numbers.min() >= -1 and numbers.max() < 3
    assert np.histogram(numbers, 4, (-1, 3))[0].min() > 90
    assert sorted(order) == list(range(50)) and (order != np.arange(50)).any()


# --- images ---

ENCODED = {
    name: VARIANTS[name] for name in ("jpeg", "jpeg-444", "jpeg-progressive", "jpeg-grey", "jpeg-cmyk")
}
ENCODED |= {name: VARIANTS[name] for name in ("png", "png-grey", "png-palette", "png-alpha")}
ENCODED |= {"rotated jpeg": pillow("JPEG", exif=b"Exif\0\0" + exif(6))}


@pytest.mark.parametrize("name", ENCODED)
def test_tensorflow_decodes_an_image_and_its_crops_to_the_pixels_of_dali(name):
    encoded, full_window = tf.constant(ENCODED[name]), np.int32([0, 0, HEIGHT, WIDTH])
    np.testing.assert_array_equal(tf_readers.image_size_tf(encoded), (HEIGHT, WIDTH))

    def decoded():
        inputs = (np.frombuffer(ENCODED[name], np.uint8), full_window)
        file, window = (Constant(values, device="cpu") for values in inputs)
        return [dali_ops.Decoder().crop(file, window)]

    expected = np.array(build(decoded).run()[0][0])
    for top, left, height, width in [full_window, (5, 7, 20, 30), (HEIGHT - 1, WIDTH - 1, 1, 1)]:
        actual = tf_readers.decode_image_tf(encoded, tf.constant([top, left, height, width]))
        assert actual.dtype == tf.uint8 and actual.shape == (height, width, 3)
        difference = np.asarray(actual, int) - expected[top : top + height, left : left + width]
        if width < WIDTH:  # the outermost columns differ: chroma is interpolated without neighbours
            assert np.abs(difference).max() < 40
            difference = difference[:, 1:-1]
        np.testing.assert_array_equal(difference, 0)
