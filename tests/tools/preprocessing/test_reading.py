import collections
import functools

import numpy as np
import pytest
from nvidia import dali

from tests.refusal import refusal
from tests.tools.preprocessing.reading import build, by_dynamic, by_pipeline, flat, keys, opened, run
from tests.tools.preprocessing.source_writing import COUNT, IMAGES, WRITERS, labels_of, pixels, write_case
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.reading import Part


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(case) returns a source of seven images and their names."""

    @functools.cache
    def of(case):
        kind, path, options, names = write_case(case, tmp_path_factory.mktemp(case))
        return opened(kind, path, **options), names

    return of


def expected(case):
    images = [np.frombuffer(image, np.uint8) for image in IMAGES]
    if case == "numpy":
        images = [pixels(number) for number in range(COUNT)]
    return keys(zip(images, labels_of(case), strict=True))


@pytest.mark.parametrize("case", WRITERS)
def test_what_is_said_of_the_images(written, case):
    source, names = written(case)
    assert source.kind == WRITERS[case][0]
    assert source.size == COUNT and [image.name for image in source.images] == names
    assert source.labels.dtype == np.int32 and source.labels.tolist() == labels_of(case)
    assert source.label_names == ({0: "a", 1: "b ü"} if case == "files" else {})
    assert source.is_decoded == (case == "numpy")
    assert (source.reader is None) == case.startswith("external")
    loaded = zip(map(source.load, range(COUNT)), source.labels, strict=True)
    assert keys(loaded) == expected(case)


@pytest.mark.parametrize("case", WRITERS)
def test_every_image_once_in_order_by_both_apis(written, case):
    for shard_id, (begin, end) in enumerate([(0, 3), (3, 7)]):
        call = Part(written(case)[0], shard_id=shard_id, num_shards=2)
        assert (call.begin, call.size) == (begin, end - begin)
        own = expected(case)[begin:end]
        padded = own + [own[-1]] * (6 - len(own))
        assert keys(flat(by_pipeline(call, 4))) == padded * 2
        dynamic = by_dynamic(call)
        assert keys(flat(dynamic)) == own
        assert [len(batch) for batch in dynamic] == [[3], [3, 1]][shard_id]


@pytest.mark.parametrize("case", [case for case in WRITERS if case != "external-generator"])
def test_training_goes_through_all_images_in_a_new_order_each_epoch(written, case):
    source, _ = written(case)
    passed_on = case.startswith("lmdb")  # DALI's LMDB readers go to the next shard in each epoch
    epochs = [[] for _ in range(3)]
    for shard_id in range(2):
        call = Part(source, shard_id=shard_id, num_shards=2, training=True, seed=5)
        samples = keys(flat(by_pipeline(call, 4)))
        assert keys(flat(by_pipeline(call, 4))) == samples
        other = Part(source, shard_id=shard_id, num_shards=2, training=True, seed=6)
        assert keys(flat(by_pipeline(other, 4))) != samples
        begin = 0
        for number, epoch in enumerate(epochs):
            end = begin + (3, 4)[(shard_id + number * passed_on) % 2]
            epoch += samples[begin:end]
            begin = end
        dynamic = keys(flat(by_dynamic(call, epochs=3)))
        parts = [tuple(dynamic[begin : begin + call.size]) for begin in range(0, len(dynamic), call.size)]
        assert [len(set(part)) for part in parts] == [call.size] * 3 and len(set(parts)) > 1
    assert all(collections.Counter(epoch) == collections.Counter(expected(case)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, expected(case)]}) == 4


def test_an_iterable_is_not_shuffled(written):
    source, _ = written("external-generator")
    assert "cannot shuffle the iterable of --input: give a sequence" in refusal(Part, source, training=True)


RESUMED = [
    *((case, True) for case in ("files", "tfrecord", "lmdb-caffe", "numpy", "external-function")),
    *((case, False) for case in ("files", "external-generator")),
]


@pytest.mark.parametrize(("case", "training"), RESUMED)
def test_a_pipeline_goes_on_where_it_was_and_a_graph_reads_the_same(written, tmp_path, case, training):
    part = {"shard_id": 1, "num_shards": 2, "training": training, "seed": 2}
    pipeline = build(Part(written(case)[0], **part))
    begun = [keys(run(pipeline)) for _ in range(3)]
    resumed = build(Part(written(case)[0], **part), checkpoint=pipeline.checkpoint())
    rest = [keys(run(pipeline)) for _ in range(4)]
    assert [keys(run(resumed)) for _ in range(4)] == rest

    kind, path, _, _ = write_case(case, tmp_path)
    # The order of DALI 2.4 depends on enable_checkpointing.
    graph = dali.Pipeline(3, 1, None, enable_checkpointing=True)
    with graph:
        graph.set_outputs(*Part(open_image_source(kind, path), **part).in_graph("mine"))
    graph.build()
    assert [keys(run(graph)) for _ in range(7)] == begun + rest
    if training and case != "external-function":
        assert graph.epoch_size("mine") == COUNT
