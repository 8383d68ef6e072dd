"""The plain tf.data examples are DALI's, in an order of their own that every rank can compute."""

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali

from common.datacheck.datasets import list_images, open_source
from common.datasets import ImageListSource
from common.errors import UserError
from common.labels import LabelMap
from common.tf_readers import Random, examples
from tests.common.record_writing import png

COLORS = [(10 * i, 0, 0) for i in range(20)]  # of the images, by their ids
KINDS = ["coco", "tfrecord", "images"]


@pytest.fixture
def source(request, drawn, drawn_records):
    return {
        "coco": lambda: open_source(images=str(drawn / "images"), annotations=str(drawn / "instances.json")),
        "tfrecord": lambda: open_source(file_pattern=f"{drawn_records}*"),
        "images": lambda: ImageListSource(list_images(str(drawn / "images"))),
    }[request.param]()


def by_dali(source, count, **options):
    pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*source.read(**options))
    pipeline.build()
    examples = []
    for _ in range(count):
        encoded, boxes, labels, image_id = (np.array(output[0]) for output in pipeline.run())
        examples.append(
            {"encoded": encoded.tobytes(), "boxes": boxes, "labels": labels, "image_id": int(image_id)}
        )
    return examples


def by_tensorflow(source, count=None, **options):
    dataset = examples(source, **options)
    return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def ids(examples):
    return [int(example["image_id"]) for example in examples]


def all_ids(source):
    return sorted(source.annotations.image_ids.tolist())


def assert_same(example, other):
    assert example["image_id"] == other["image_id"]
    assert example["encoded"] == other["encoded"]
    assert example["labels"].dtype == other["labels"].dtype == np.int32
    assert example["labels"].tolist() == other["labels"].tolist()
    assert example["boxes"].dtype == other["boxes"].dtype == np.float32
    assert example["boxes"].shape == other["boxes"].shape
    np.testing.assert_allclose(example["boxes"], other["boxes"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("source", KINDS, indirect=True)
@pytest.mark.parametrize("num_shards", [1, 5])
def test_evaluation_examples_are_dalis_in_dalis_order(source, num_shards):
    seen = []
    for shard_id in range(num_shards):
        options = {"shard_id": shard_id, "num_shards": num_shards, "training": False, "seed": 0}
        examples = by_tensorflow(source, **options)
        assert len(examples) == -(-12 // num_shards)  # on every rank
        for example, other in zip(examples, by_dali(source, len(examples), **options), strict=True):
            assert_same(example, other)
        seen += ids(examples)
    assert sorted(set(seen)) == all_ids(source)


@pytest.mark.parametrize("source", ["coco", "tfrecord"], indirect=True)
def test_training_examples_are_dalis_in_another_order(source):
    options = {"shard_id": 0, "num_shards": 1, "training": True, "seed": 3}
    examples = {int(example["image_id"]): example for example in by_tensorflow(source, 12, **options)}
    others = {example["image_id"]: example for example in by_dali(source, 12, **options)}
    assert sorted(examples) == sorted(others) == all_ids(source)
    for image_id, example in examples.items():
        assert_same(example, others[image_id])


@pytest.mark.parametrize("training", [False, True])
def test_records_of_googles_converter(tmp_path, training):
    """Without objects there are no keys of objects, at which DALI alone dies; crowds may be unmentioned."""
    for f in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"{f}.tfrecord")) as writer:
            for i in range(4):
                writer.write(google_example(10 * f + i, num_objects=i, crowds=f == 0))
    LabelMap((1, 18), ("person", "dog")).save(tmp_path / "labels.json")
    source = open_source(file_pattern=f"{tmp_path}/*.tfrecord", label_map=str(tmp_path / "labels.json"))
    for read in (by_dali, by_tensorflow):
        examples = read(source, 8, shard_id=0, num_shards=1, training=training, seed=0)
        assert sorted(ids(examples)) == [0, 1, 2, 3, 10, 11, 12, 13]
        for example in examples:
            file, i = divmod(int(example["image_id"]), 10)
            rows = [k for k in range(i) if file or k != 1]  # object 1 of the first file is a crowd
            boxes = np.reshape([[0.1 * k, 0.2, 0.1 * k + 0.3, 0.9] for k in rows], (-1, 4))
            np.testing.assert_allclose(example["boxes"], boxes, rtol=1e-6)
            assert example["labels"].tolist() == [1 + k % 2 for k in rows]
            assert example["encoded"] == png(64, 48, COLORS[int(example["image_id"])])
    assert source.annotations.is_crowd.sum() == 2


def test_boxes_of_other_writers_are_clipped_and_those_without_area_dropped(tmp_path):
    example = tf.train.Example.FromString(google_example(5, num_objects=4, crowds=False))
    left, right = (
        example.features.feature[f"image/object/bbox/x{side}"].float_list for side in ("min", "max")
    )
    left.value[:] = [-0.5, 0.25, 1.2, 0.9]
    right.value[:] = [0.3, 0.25, 1.5, 1.1]
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        writer.write(example.SerializeToString())
    LabelMap((1, 18), ("person", "dog")).save(tmp_path / "x.label_map.json")
    source = open_source(file_pattern=f"{tmp_path}/x*")
    for read in (by_dali, by_tensorflow):
        (found,) = read(source, 1, shard_id=0, num_shards=1, training=False, seed=0)
        np.testing.assert_allclose(found["boxes"], [[0, 0.2, 0.3, 0.9], [0.9, 0.2, 1, 0.9]], rtol=1e-6)
        assert found["labels"].tolist() == [1, 2]


def google_example(image_id, num_objects, crowds):
    """The keys of google/automl efficientdet/dataset/create_coco_tfrecord.py."""

    def list_of(kind, values):
        lists = {
            "bytes_list": tf.train.BytesList,
            "int64_list": tf.train.Int64List,
            "float_list": tf.train.FloatList,
        }
        return tf.train.Feature(**{kind: lists[kind](value=values)})

    features = {
        "image/height": list_of("int64_list", [48]),
        "image/width": list_of("int64_list", [64]),
        "image/filename": list_of("bytes_list", [b"x.png"]),
        "image/source_id": list_of("bytes_list", [b"%d" % image_id]),
        "image/key/sha256": list_of("bytes_list", [b"0" * 64]),
        "image/encoded": list_of("bytes_list", [png(64, 48, COLORS[image_id])]),
        "image/format": list_of("bytes_list", [b"png"]),
    }
    if num_objects:
        rows = range(num_objects)
        features |= {
            "image/object/bbox/xmin": list_of("float_list", [0.1 * k for k in rows]),
            "image/object/bbox/xmax": list_of("float_list", [0.1 * k + 0.3 for k in rows]),
            "image/object/bbox/ymin": list_of("float_list", [0.2 for _ in rows]),
            "image/object/bbox/ymax": list_of("float_list", [0.9 for _ in rows]),
            "image/object/class/text": list_of("bytes_list", [b"person" for _ in rows]),
            "image/object/class/label": list_of("int64_list", [(1, 18)[k % 2] for k in rows]),
            "image/object/area": list_of("float_list", [1000.0 for _ in rows]),
        }
        if crowds:
            features["image/object/is_crowd"] = list_of("int64_list", [int(k == 1) for k in rows])
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@pytest.mark.parametrize("source", ["coco", "tfrecord"], indirect=True)
@pytest.mark.parametrize("num_shards", [1, 3, 5, 8])
def test_ranks_take_turns_in_one_sequence_of_permutations(source, num_shards):
    count = 3 * 12
    one = ids(by_tensorflow(source, count, shard_id=0, num_shards=1, training=True, seed=6))
    turns = [
        ids(
            by_tensorflow(
                source, count // num_shards, shard_id=i, num_shards=num_shards, training=True, seed=6
            )
        )
        for i in range(num_shards)
    ]
    together = [image_id for turn in zip(*turns, strict=True) for image_id in turn]
    assert together == one[: len(together)]
    epochs = [one[:12], one[12:24], one[24:]]
    assert all(sorted(epoch) == all_ids(source) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("source", ["coco", "tfrecord"], indirect=True)
def test_the_order_follows_the_seed_and_nothing_else(source):
    def order(seed, global_seed):
        tf.random.set_seed(global_seed)
        return ids(by_tensorflow(source, 24, shard_id=0, num_shards=2, training=True, seed=seed))

    assert order(0, 1) == order(0, 2)
    assert len({tuple(order(seed, 1)) for seed in range(4)}) == 4


@pytest.mark.parametrize("source", ["coco", "tfrecord"], indirect=True)
@pytest.mark.parametrize("training", [True, False])
def test_a_saved_iterator_goes_on_where_it_was(source, training, tmp_path):
    def iterate():
        options = {"shard_id": 1, "num_shards": 2, "training": training, "seed": 2}
        return iter(examples(source, **options).map(lambda example: example["image_id"]).prefetch(2))

    iterator = iterate()
    for _ in range(4):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "state")
    count = 20 if training else 2
    rest = [int(next(iterator)) for _ in range(count)]
    resumed = iterate()
    tf.train.Checkpoint(iterator=resumed).restore(path).assert_consumed()
    assert [int(next(resumed)) for _ in range(count)] == rest
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000  # no images in there


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_fewer_images_than_ranks_are_refused(source):
    options = {"shard_id": 0, "num_shards": 13, "training": False, "seed": 0}
    for read in (lambda **o: examples(source, **o), lambda **o: by_dali(source, 1, **o)):
        with pytest.raises(UserError, match="12 images cannot be shared by 13 ranks"):
            read(**options)


# --- random numbers ---


def draws(seed: list[int]) -> list[np.ndarray]:
    random = Random(tf.constant(seed))
    drawn = [random.uniform(-1.0, 3.0, (500,)), random.uniform(-1.0, 3.0, (500,)), random.permutation(50)]
    return [tensor.numpy() for tensor in drawn]


def test_every_call_gives_new_numbers_and_the_seed_decides_them():
    first, again, other = draws([1, 2]), draws([1, 2]), draws([2, 1])
    for one, same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one, same)
        assert (one != different).any()
    assert (first[0] != first[1]).all()


def test_the_global_seed_has_no_say():
    tf.random.set_seed(1)
    one = draws([1, 2])
    tf.random.set_seed(2)
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(draws([1, 2])))


def test_what_the_numbers_are():
    numbers, _, order = draws([3, 4])
    assert numbers.dtype == np.float32 and order.dtype == np.int32
    assert numbers.min() >= -1 and numbers.max() < 3
    assert np.histogram(numbers, 4, (-1, 3))[0].min() > 90
    assert sorted(order) == list(range(50)) and (order != np.arange(50)).any()
