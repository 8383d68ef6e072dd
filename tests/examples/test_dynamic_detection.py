"""Tests dynamic_detection.py: batches equal those of EfficientDet's pipeline, bit for bit."""

import dataclasses
import itertools

import numpy as np
import nvidia.dali.experimental.dynamic as ndd
import pytest

from common.data import readers
from efficientdet.config import get_config
from efficientdet.pipeline import EfficientDetPipeline
from examples import dynamic_detection as example
from tests.examples.standalone import run_alone
from tests.oracle.watched import BATCH, Watched

SIZE = (128, 192)
COLOR = dict(zip(("brightness", "contrast", "saturation", "hue"), (*example.COLOR, example.HUE), strict=True))


@pytest.fixture(autouse=True)
def synchronous_operators():
    with ndd.EvalMode.sync_cpu:
        yield


def arrays(read, draws) -> dict[str, np.ndarray]:
    batch = example.training_batch(read, draws, SIZE) | {"image_ids": read.image_ids}
    return {name: example.to_numpy(values) for name, values in batch.items()}


def assert_same_bits(batch: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(batch) == set(expected)
    for name, values in batch.items():
        assert values.dtype == expected[name].dtype and values.shape == expected[name].shape, name
        assert values.tobytes() == expected[name].tobytes(), name


def test_batches_of_dalis_dynamic_api_equal_its_pipeline_api_for_equal_random_numbers(fuzzed, tmp_path):
    annotations = tmp_path / "clean.json"
    annotations.write_bytes(readers.clean_json(fuzzed.source.annotations))
    config = dataclasses.replace(get_config("efficientdet-d0"), image_size=SIZE, **COLOR)
    options = {"source": fuzzed.source, "config": config, "batch_size": BATCH, "seed": 7}
    graph, image_ids = Watched(EfficientDetPipeline(training=True, **options)), list(fuzzed.images)
    stream = example.Stream(fuzzed.source.images_dir, annotations, BATCH, seed=7)
    for read, _ in itertools.islice(stream, len(image_ids) // BATCH):
        expected = graph.run()
        draws, shares = expected.draws, [(0.0, 1.0)] * 2
        jitter, top, left = (draws.uniform(*limits) for limits in (example.JITTER, *shares))
        coin = draws.coin(example.FLIP_PROB)
        color = [draws.uniform(1 - x, 1 + x) for x in example.COLOR]
        color.append(draws.uniform(-example.HUE, example.HUE))
        draws.finish()
        batch = arrays(read, example.Draws(jitter, np.stack([top, left], 1), coin, np.stack(color, 1)))
        assert [image_ids[row] for row in batch.pop("image_ids")[:, 0]] == expected.image_ids
        assert_same_bits(batch, expected.outputs)


def test_restored_dynamic_stream_continues_with_the_batches_of_an_uninterrupted_stream(fuzzed, tmp_path):
    data = (fuzzed.source.images_dir, f"{fuzzed.source.images_dir}/instances.json")
    expected = [arrays(*batch) for batch in itertools.islice(example.Stream(*data, 30), 11)]
    pattern, step = str(tmp_path / "at-{seq}.json"), 0
    for stop in (1, 3, 4, 7, 10, 11):
        stream = example.Stream(*data, 30)
        if step:
            stream.restore(pattern)
        for batch in itertools.islice(stream, stop - step):
            assert_same_bits(arrays(*batch), expected[stream.step - 1])
        stream.save(pattern)
        assert stream.step == stop
        step = stop
    assert len({batch["images"].tobytes() for batch in expected}) == 11
    image_ids = np.concatenate([batch["image_ids"] for batch in expected]).reshape(-1)[:300].reshape(3, 100)
    assert (np.sort(image_ids) == list(fuzzed.images)).all()
    with pytest.raises(ValueError, match=r"batch size 30, seed 0, not for .* batch size 30, seed 1"):
        example.Stream(*data, 30, seed=1).restore(pattern)


@pytest.mark.slow
def test_copied_dynamic_detection_example_runs_alone_and_continues_in_a_new_process(tmp_path):
    def batches(name: str, steps: int, output_dir: str) -> list[str]:
        (tmp_path / name).mkdir()
        options = [f"--steps={steps}", f"--output_dir={tmp_path / output_dir}"]
        output = run_alone("dynamic_detection.py", tmp_path / name, *options)
        return [line for line in output.splitlines() if line.startswith("batch ")]

    continued = batches("first", 4, "continued") + batches("second", 2, "continued")
    assert continued == batches("third", 6, "uninterrupted") and len(continued) == 6
    pictures = [(tmp_path / name / "steps.png").read_bytes() for name in ("continued", "uninterrupted")]
    assert pictures[0] == pictures[1]
