"""Runs DALI graphs and readers, and compares iterators."""

import json
import pathlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common.data.coco import CocoSource
from common.data.open import open_coco, open_tfrecords, open_webdataset
from common.data.sources import ImageListSource
from common.data.tf_readers import Random
from tests.common.record_writing import png, write_tfrecords
from tests.common.shard_writing import write_shards


class Example(NamedTuple):
    image_id: int
    encoded: bytes
    boxes: np.ndarray
    labels: np.ndarray


def build(nodes, batch_size=1, seed=None):
    """Builds a DALI pipeline whose outputs are `nodes()`."""
    pipeline = dali.Pipeline(batch_size, num_threads=1, device_id=None, seed=seed, enable_checkpointing=True)
    with pipeline:
        pipeline.set_outputs(*nodes())
    pipeline.build()
    return pipeline


def run_graph(function, *inputs, device_id=None):
    """Runs a DALI graph once. Each input is a list with one array per sample.

    Returns a list of the outputs of each sample.
    """
    pipeline = dali.Pipeline(len(inputs[0]), num_threads=2, device_id=device_id, prefetch_queue_depth=1)
    with pipeline:
        nodes = [fn.external_source(source=[batch], cycle=True, batch=True) for batch in inputs]
        pipeline.set_outputs(*function(*nodes))
    pipeline.build()
    outputs = [output.as_cpu() for output in pipeline.run()]
    return [[np.array(output.at(i)) for output in outputs] for i in range(len(inputs[0]))]


def read(reader, count, batch_size=1, pipeline_seed=None, **options):
    """Returns the first `count` examples of a DALI reader."""
    pipeline = build(lambda: reader(**options), batch_size, pipeline_seed)
    examples = []
    while len(examples) < count:
        for encoded, boxes, labels, image_id in zip(*pipeline.run(), strict=True):
            boxes, labels, image_id = map(np.array, (boxes, labels, image_id))
            assert (boxes.dtype, labels.dtype, image_id.dtype) == (np.float32, np.int32, np.int64)
            assert boxes.shape == (len(labels), 4) and image_id.shape == ()
            examples.append(Example(int(image_id), np.array(encoded).tobytes(), boxes, labels))
    return examples[:count]


def ids(examples):
    return [example.image_id for example in examples]


def numbered_images(directory: pathlib.Path, image_ids, category_ids=(5,), box=(1, 1, 2, 2)) -> CocoSource:
    """Each image has one box, `box`, per category."""
    images = [
        {"id": image_id, "file_name": f"{number:02d}.png", "width": 8, "height": 9}
        for number, image_id in enumerate(image_ids)
    ]
    objects = [{"image_id": i, "category_id": k, "bbox": box} for i in image_ids for k in category_ids]
    categories = [{"id": i, "name": str(i)} for i in category_ids]
    document = {"images": images, "annotations": objects, "categories": categories}
    (directory / "images").mkdir()
    for image in images:
        (directory / "images" / image["file_name"]).write_bytes(png(8, 9))
    (directory / "instances.json").write_text(json.dumps(document))
    return open_coco(directory / "images", directory / "instances.json")


def first_images(source: CocoSource, size: int, kind: str, directory: pathlib.Path):
    """`kind` is "coco", "images", "tfrecord" or "webdataset"."""
    first = source.annotations.select(np.arange(source.size) < size)
    if kind == "coco":
        return CocoSource(source.images_dir, first)
    if kind == "images":
        return ImageListSource(tuple(source.files[:size]))
    prefix = directory / f"first{size}-{kind}"
    if kind == "webdataset":
        write_shards(first, source.images_dir, prefix, num_shards=min(size, 3))
        return open_webdataset(f"{prefix}-*.tar")
    write_tfrecords(first, source.images_dir, prefix, num_shards=min(size, 3))
    return open_tfrecords(f"{prefix}-*.tfrecord")


def assert_iterator_resumes(iterate, directory, before: int, after: int) -> None:
    """Asserts that a restored iterator gives the same elements as the saved one.

    The iterator is saved after `before` steps. The next `after` steps are compared.
    """
    iterator = iterate()
    for _ in range(before):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(directory / "state")
    expected = [next(iterator) for _ in range(after)]
    resumed = iterate()
    tf.train.Checkpoint(iterator=resumed).restore(path).assert_consumed()
    elements = [next(resumed) for _ in range(after)]
    for actual, desired in zip(tf.nest.flatten(elements), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(actual, desired)


class Scripted(Random):
    """Returns prepared numbers instead of random ones.

    Each draw is (low, high, shape, numbers): the arguments that `uniform` must get, and its result.
    """

    def __init__(self, *draws) -> None:
        self._draws = list(draws)

    def uniform(self, low, high, shape=()):
        *arguments, numbers = self._draws.pop(0)
        assert (low, high, shape) == tuple(arguments)
        return tf.constant(numbers, tf.float32)
