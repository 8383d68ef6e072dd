import types

import numpy as np
import pytest
import tensorflow as tf
from nvidia.dali.types import Constant

from common import dali_ops
from common.data import tf_readers
from common.data.labels import LabelMap
from common.data.open import list_images, open_source
from common.data.sources import ImageListSource
from common.data.tf_readers import Random
from common.errors import UserError
from tests.common.image_variants import HEIGHT, VARIANTS, WIDTH, exif, pillow
from tests.common.reading import Example, assert_iterator_resumes, build, ids, read
from tests.common.record_writing import empty_record, of_boxes, png, write

COLORS = [(10 * i, 0, 0) for i in range(20)]


@pytest.fixture
def source(request, drawn, drawn_records):
    return {
        "coco": lambda: open_source(images=str(drawn / "images"), annotations=str(drawn / "instances.json")),
        "tfrecord": lambda: open_source(file_pattern=f"{drawn_records}*"),
        "images": lambda: ImageListSource(list_images(str(drawn / "images"))),
    }[request.param]()


def sources(*kinds):
    return pytest.mark.parametrize("source", kinds, indirect=True)


def by_tensorflow(source, count=-1, **options):
    found = tf_readers.examples(source, **options).take(count).as_numpy_iterator()
    return [Example(int(e["image_id"]), e["encoded"], e["boxes"], e["labels"]) for e in found]


def all_ids(source):
    return sorted(source.annotations.image_ids.tolist())


@pytest.mark.parametrize(
    ("source", "num_shards", "count"),
    [("coco", 5, 3), ("tfrecord", 2, 6), ("images", 2, 6)],
    indirect=["source"],
)
def test_evaluation_examples_are_dalis_in_dalis_order(source, num_shards, count):
    seen = []
    for shard_id in range(num_shards):
        options = {"shard_id": shard_id, "num_shards": num_shards, "training": False, "seed": 0}
        examples = by_tensorflow(source, **options)
        for example, other in zip(examples, read(source.read, count, **options), strict=True):
            assert (example.image_id, example.encoded) == (other.image_id, other.encoded)
            assert example.labels.dtype == np.int32 and example.boxes.dtype == np.float32
            assert example.labels.tolist() == other.labels.tolist()
            assert example.boxes.shape == other.boxes.shape
            np.testing.assert_allclose(example.boxes, other.boxes, atol=1e-6, rtol=0)
        seen += ids(examples)
    assert sorted(set(seen)) == all_ids(source)


def test_evaluation_repeats_a_shorter_shard_to_fill_its_steps(drawn):
    """The shard has two images, and must fill two batches of two."""
    source = ImageListSource(list_images(str(drawn / "images")))
    loader = types.SimpleNamespace(opened_source=source, training=False, steps_per_epoch=2, batch_size=2)
    loader.shard_id, loader.num_shards, loader.seed = 1, 5, 0
    found = tf_readers.loader_examples(loader).map(lambda example: example["image_id"]).take(8)
    assert list(found.as_numpy_iterator()) == [2, 3, 3, 2, 2, 3, 3, 2]


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


def both_readers(source, count, **options):
    return read(source.read, count, **options), by_tensorflow(source, count, **options)


def test_records_of_googles_converter(tmp_path):
    for f in range(2):
        examples = [google_example(10 * f + i, num_objects=i, crowds=f == 0) for i in range(4)]
        write(tmp_path / f"{f}.tfrecord", *examples)
    LabelMap((1, 18), ("person", "dog")).save(tmp_path / "labels.json")
    source = open_source(file_pattern=f"{tmp_path}/*.tfrecord", label_map=str(tmp_path / "labels.json"))
    assert source.annotations.is_crowd.sum() == 2
    for examples in both_readers(source, 8, training=True, seed=0):
        assert sorted(ids(examples)) == [0, 1, 2, 3, 10, 11, 12, 13]
        for example in examples:
            file, i = divmod(example.image_id, 10)
            rows = [k for k in range(i) if file or k != 1]  # object 1 of the first file is a crowd
            boxes = np.reshape([[0.1 * k, 0.2, 0.1 * k + 0.3, 0.9] for k in rows], (-1, 4))
            np.testing.assert_allclose(example.boxes, boxes, rtol=1e-6)
            assert example.labels.tolist() == [1 + k % 2 for k in rows]
            assert example.encoded == png(64, 48, COLORS[example.image_id])


def test_boxes_of_other_writers_are_clipped_and_those_without_area_dropped(tmp_path):
    boxes = ((-0.5, 0.2, 0.3, 0.9), (0.25, 0.2, 0.25, 0.9), (1.2, 0.2, 1.5, 0.9), (0.9, 0.2, 1.1, 0.9))
    labels = {"object__class__label": [1, 18, 1, 18, 1]}
    write(tmp_path / "x.tfrecord", of_boxes(*boxes, (0.5, 0.9, 0.6, 0.9), **labels))
    LabelMap((1, 18), ("person", "dog")).save(tmp_path / "x.label_map.json")
    source = open_source(file_pattern=f"{tmp_path}/x*")
    for (found,) in both_readers(source, 1, training=False):
        np.testing.assert_allclose(found.boxes, [[0, 0.2, 0.3, 0.9], [0.9, 0.2, 1, 0.9]], rtol=1e-6)
        assert found.labels.tolist() == [1, 2]


# --- order and state ---


@sources("coco")
def test_ranks_take_turns_in_one_sequence_of_permutations(source):
    one = ids(by_tensorflow(source, 36, training=True, seed=6))
    shards = [{"shard_id": i, "num_shards": 5} for i in range(5)]
    turns = [ids(by_tensorflow(source, 7, training=True, seed=6, **shard)) for shard in shards]
    assert [image_id for turn in zip(*turns, strict=True) for image_id in turn] == one[:35]
    epochs = [one[:12], one[12:24], one[24:]]
    assert all(sorted(epoch) == all_ids(source) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@sources("coco")
def test_the_order_follows_the_seed_and_nothing_else(source):
    def order(seed, global_seed=1):
        tf.random.set_seed(global_seed)
        return tuple(ids(by_tensorflow(source, 24, shard_id=0, num_shards=2, training=True, seed=seed)))

    assert len({order(0, global_seed=2), order(0), order(1), order(2)}) == 3


@pytest.mark.parametrize(("source", "training"), [("coco", False), ("tfrecord", True)], indirect=["source"])
def test_a_saved_iterator_goes_on_where_it_was(source, training, tmp_path):
    def iterate():
        options = {"shard_id": 1, "num_shards": 2, "training": training, "seed": 2}
        return iter(tf_readers.examples(source, **options).map(lambda e: e["image_id"]).prefetch(2))

    assert_iterator_resumes(iterate, tmp_path, before=4, after=20 if training else 2)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000


@sources("coco", "tfrecord", "images")
def test_fewer_images_than_ranks_are_refused(source):
    options = {"shard_id": 0, "num_shards": 13, "training": False, "seed": 0}
    for reader in (source.read, lambda **options: tf_readers.examples(source, **options)):
        with pytest.raises(UserError, match=r"^12 images are too few for 13 ranks: use at most 12"):
            reader(**options)


# --- random numbers ---


def draws(seed, global_seed=1):
    tf.random.set_seed(global_seed)
    random = Random(*seed)
    drawn = [random.uniform(-1.0, 3.0, (500,)), random.uniform(-1.0, 3.0, (500,)), random.permutation(50)]
    return [tensor.numpy() for tensor in drawn]


def test_every_call_gives_new_numbers_and_the_seed_alone_decides_them():
    for one, same, other in zip(draws([1, 2]), draws([1, 2], 7), draws([2, 1]), strict=True):
        np.testing.assert_array_equal(one, same)
        assert (one != other).any()
    numbers, next_numbers, order = draws([3, 4])
    assert (numbers != next_numbers).all()
    assert numbers.dtype == np.float32 and order.dtype == np.int32
    assert numbers.min() >= -1 and numbers.max() < 3
    assert np.histogram(numbers, 4, (-1, 3))[0].min() > 90
    assert sorted(order) == list(range(50)) and (order != np.arange(50)).any()


# --- images ---

STORED = {name: VARIANTS[name] for name in ("jpeg", "jpeg-444", "jpeg-progressive", "jpeg-grey", "jpeg-cmyk")}
STORED |= {name: VARIANTS[name] for name in ("png", "png-grey", "png-palette", "png-alpha")}
STORED |= {"rotated jpeg": pillow("JPEG", exif=b"Exif\0\0" + exif(6))}


@pytest.mark.parametrize("name", STORED)
def test_tensorflow_decodes_bit_for_bit_as_dali_does(name):
    encoded, whole = tf.constant(STORED[name]), np.int32([0, 0, HEIGHT, WIDTH])
    np.testing.assert_array_equal(tf_readers.image_size_tf(encoded), (HEIGHT, WIDTH))

    def decoded():
        file, window = (Constant(x, device="cpu") for x in (np.frombuffer(STORED[name], np.uint8), whole))
        return [dali_ops.Decoder().crop(file, window)]

    expected = np.array(build(decoded).run()[0][0])
    for top, left, height, width in [whole, (5, 7, 20, 30), (HEIGHT - 1, WIDTH - 1, 1, 1)]:
        got = tf_readers.decode_image_tf(encoded, tf.constant([top, left, height, width]))
        assert got.dtype == tf.uint8 and got.shape == (height, width, 3)
        difference = np.asarray(got, int) - expected[top : top + height, left : left + width]
        if width < WIDTH:  # the outermost columns differ: chroma is interpolated without neighbours
            assert np.abs(difference).max() < 40
            difference = difference[:, 1:-1]
        np.testing.assert_array_equal(difference, 0)
