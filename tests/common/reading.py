"""What a DALI graph gives, and numbered images as files and as records for it to read."""

import json
import pathlib
from typing import NamedTuple

import numpy as np
from nvidia import dali
from nvidia.dali import fn

from common.datacheck.datasets import open_coco, open_tfrecords
from common.datasets import CocoSource, ImageListSource
from tests.common.record_writing import png
from tools.conversion.coco_to_tfrecord import write_tfrecords

FIRST_ID = 100


class Example(NamedTuple):
    image_id: int
    encoded: bytes
    boxes: np.ndarray
    labels: np.ndarray


def build(nodes, batch_size=1, seed=None):
    """A pipeline that does nothing but read: `nodes()` makes its outputs."""
    pipeline = dali.Pipeline(batch_size, num_threads=1, device_id=None, seed=seed, enable_checkpointing=True)
    with pipeline:
        pipeline.set_outputs(*nodes())
    pipeline.build()
    return pipeline


def run_graph(function, *inputs, device="cpu"):
    """Calls `function` in a graph on lists of one array per sample; the outputs of each sample.

    With device="gpu" the graph may use the GPU, and the inputs are there.
    """
    device_id = 0 if device == "gpu" else None
    pipeline = dali.Pipeline(len(inputs[0]), num_threads=2, device_id=device_id, prefetch_queue_depth=1)
    with pipeline:
        nodes = [fn.external_source(source=[batch], cycle=True, batch=True) for batch in inputs]
        pipeline.set_outputs(*function(*(node.gpu() if device == "gpu" else node for node in nodes)))
    pipeline.build()
    outputs = [output.as_cpu() for output in pipeline.run()]
    return [[np.array(output.at(i)) for output in outputs] for i in range(len(inputs[0]))]


def read(reader, count, batch_size=1, pipeline_seed=None, **options):
    """The first `count` examples of a reader by DALI."""
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


def numbered_images(directory: pathlib.Path, size: int) -> CocoSource:
    """Little images with ids from FIRST_ID on, one box on each."""
    (directory / "images").mkdir()
    names = [f"{i:02d}.png" for i in range(size)]
    for name in names:
        (directory / "images" / name).write_bytes(png(8, 9))
    numbers = range(FIRST_ID, FIRST_ID + size)
    document = {
        "images": [
            {"id": i, "file_name": name, "width": 8, "height": 9}
            for i, name in zip(numbers, names, strict=True)
        ],
        "annotations": [{"image_id": i, "category_id": 5, "bbox": [1, 1, 2, 2]} for i in numbers],
        "categories": [{"id": 5, "name": "five"}],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    return open_coco(directory / "images", directory / "instances.json")


def first_images(source: CocoSource, size: int, kind: str, directory: pathlib.Path):
    """A source of some kind ("coco", "images", "tfrecord") with the first images of another one."""
    first = source.annotations.select(np.arange(source.size) < size)
    if kind == "coco":
        return CocoSource(source.images_dir, first)
    if kind == "images":
        return ImageListSource(tuple(source.files[:size]))
    prefix = directory / f"first{size}"
    write_tfrecords(first, source.images_dir, prefix, num_shards=min(size, 3), num_workers=1)
    return open_tfrecords(f"{prefix}-*.tfrecord")
