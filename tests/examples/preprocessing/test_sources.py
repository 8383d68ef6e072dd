"""Tests sources.py: images and labels of each source, in both APIs."""

import numpy as np
import pytest
from nvidia.dali import Pipeline

from examples.preprocessing import checks, sources
from tests.examples.preprocessing.source_writing import COUNT, IMAGES, LABELS, WRITERS, pixels, write_case

EXPECTED_LABELS = dict.fromkeys(WRITERS, LABELS) | {
    "files": [0, 0, 0, 1, 1, 1, 1],
    "coco": [[1], [], [], [], [], [], []],  # of objects; the only category is the first
    "external": None,
    "numpy": None,
}


@pytest.fixture(params=WRITERS)
def case(request, tmp_path):
    """Returns the name, its kind and the arguments of the functions."""
    kind, path, _ = write_case(request.param, tmp_path / "in")
    arguments = checks.open_source(kind, path, None, str(tmp_path)).arguments
    if kind == "tfrecord":
        arguments["features"] = sources.FEATURES
    if kind == "webdataset":
        arguments["extensions"] = sources.EXTENSIONS
    if kind == "lmdb":
        arguments["has_labels"] = True
    return request.param, kind, arguments


def by_pipeline(kind, arguments, batches=3, **options):
    pipeline = Pipeline(3, 1, None, seed=1)
    with pipeline:
        nodes = getattr(sources, f"{kind}_pipeline")(**arguments, **options)
        pipeline.set_outputs(*nodes)
    runs = [pipeline.run() for _ in range(batches)]
    return [tuple(map(np.array, sample)) for run in runs for sample in zip(*run, strict=True)]


def by_dynamic(kind, arguments, **options):
    batches = getattr(sources, f"{kind}_dynamic")(**arguments, batch_size=3, **options)
    return [
        tuple(map(np.array, sample))
        for batch in batches
        for sample in zip(*(output.tensors for output in batch), strict=True)
    ]


def image_of(name, number):
    return pixels(number) if name == "numpy" else np.frombuffer(IMAGES[number], np.uint8)


def label_of(name, sample):
    label = sample[-1]
    if name == "webdataset":
        return int(label.tobytes())
    return label.tolist() if name == "coco" else int(label.item())


@pytest.mark.parametrize("read", [by_pipeline, by_dynamic])
def test_images_and_labels_of_each_data_source_are_in_input_order(case, read):
    name, kind, arguments = case
    samples = read(kind, arguments)[:COUNT]
    assert len(samples) == COUNT
    for number, sample in enumerate(samples):
        np.testing.assert_array_equal(sample[0], image_of(name, number))
        if EXPECTED_LABELS[name]:
            assert label_of(name, sample) == EXPECTED_LABELS[name][number]


@pytest.mark.parametrize("case", [name for name in WRITERS if name != "external"], indirect=True)
def test_two_shards_of_a_reader_share_out_all_images_and_shuffling_changes_their_order(case):
    """A source "external" has no reader, and so no shards."""
    name, kind, arguments = case
    images = [image_of(name, number).tobytes() for number in range(COUNT)]
    parts = []
    for shard_id in range(2):
        shard = {"shard_id": shard_id, "num_shards": 2, "stick_to_shard": True, "pad_last_batch": True}
        parts.append({sample[0].tobytes() for sample in by_pipeline(kind, arguments, 2, **shard)})
        assert parts[-1] == {sample[0].tobytes() for sample in by_dynamic(kind, arguments, **shard)}
    assert parts[0] | parts[1] == set(images) and not parts[0] & parts[1]
    shuffle = {"random_shuffle": True, "initial_fill": COUNT, "seed": 1}
    shuffled = [sample[0].tobytes() for sample in by_pipeline(kind, arguments, 3, **shuffle)][:COUNT]
    assert set(shuffled) == set(images) and shuffled != images
