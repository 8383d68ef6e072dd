import os
import re

import numpy as np
from nvidia import dali

from common.errors import UserError
from tests.refusal import refusal
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.reading import Part


def opened(kind, path, on_report=lambda issues: None, **options):
    return open_image_source(kind, os.fspath(path), on_report=on_report, **options)


def refused(kind, path, said, error=UserError, **options):
    """`said` matches the error, which has one line."""
    found = refusal(opened, kind, path, error=error, **options)
    assert re.search(said, found) and "\n" not in found, found


def check(source, images, labels, *, by_python=False):
    """Asserts that a pipeline, the dynamic API and `source.load` read these images and labels.

    With `by_python`, the source must not use a DALI reader.
    """
    assert (source.reader is None) == by_python
    want = list(zip(images, labels, strict=True))
    steps = -(-len(want) // 3)
    for read in (flat(by_pipeline(Part(source), steps))[: len(want)], flat(by_dynamic(Part(source)))):
        assert [(image.tobytes(), label) for image, label in read] == want
    assert [(source.load(i).tobytes(), int(source.labels[i])) for i in range(source.size)] == want


def by_pipeline(call, batches, batch_size=3):
    pipeline = build(call, batch_size)
    return [run(pipeline) for _ in range(batches)]


def build(call, batch_size=3, checkpoint=None):
    options = {"prefetch_queue_depth": 1, "enable_checkpointing": True, "checkpoint": checkpoint}
    pipeline = dali.Pipeline(batch_size, 1, None, **options)
    with pipeline:
        pipeline.set_outputs(*call.in_graph())
    pipeline.build()
    return pipeline


def run(pipeline):
    images, labels = pipeline.run()
    assert all(np.array(label).dtype == np.int32 and np.array(label).shape == () for label in labels)
    return _pairs(images, labels)


def _pairs(images, labels):
    return [(np.array(image), int(np.array(label))) for image, label in zip(images, labels, strict=True)]


def by_dynamic(call, batch_size=3, **options):
    batches = call.in_dynamic(batch_size, **options)
    return [_pairs(images.tensors, labels.tensors) for images, labels in batches]


def flat(batches):
    return [sample for batch in batches for sample in batch]


def keys(samples):
    return [(image.shape, image.tobytes(), int(label)) for image, label in samples]


def names_of(source):
    return [image.name for image in source.images]
