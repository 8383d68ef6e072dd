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
def computes_at_once():
    with ndd.EvalMode.sync_cpu:
        yield


def arrays(read, draws) -> dict[str, np.ndarray]:
    batch = example.training_batch(read, draws, SIZE) | {"image_ids": read.image_ids}
    return {name: example.to_numpy(values) for name, values in batch.items()}


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(got) == set(expected)
    for name, values in got.items():
        assert values.dtype == expected[name].dtype and values.shape == expected[name].shape, name
        assert values.tobytes() == expected[name].tobytes(), name


def test_the_same_numbers_give_the_batches_of_the_pipeline_api(fuzzed, tmp_path):
    checked = tmp_path / "checked.json"
    checked.write_bytes(readers.clean_json(fuzzed.source.annotations))
    config = dataclasses.replace(get_config("efficientdet-d0"), image_size=SIZE, **COLOR)
    options = {"source": fuzzed.source, "config": config, "batch_size": BATCH, "seed": 7}
    graph, rows = Watched(EfficientDetPipeline(training=True, **options)), list(fuzzed.images)
    stream = example.Stream(fuzzed.source.images_dir, checked, BATCH, seed=7)
    for read, _ in itertools.islice(stream, len(rows) // BATCH):
        expected = graph.run()
        drawn, shares = expected.draws, [(0.0, 1.0)] * 2
        jitter, top, left = (drawn.uniform(*limits) for limits in (example.JITTER, *shares))
        coin = drawn.coin(example.FLIP_PROB)
        color = [drawn.uniform(1 - x, 1 + x) for x in example.COLOR]
        color.append(drawn.uniform(-example.HUE, example.HUE))
        drawn.finish()
        got = arrays(read, example.Draws(jitter, np.stack([top, left], 1), coin, np.stack(color, 1)))
        assert [rows[row] for row in got.pop("image_ids")[:, 0]] == expected.image_ids
        assert_same_bits(got, expected.outputs)


def test_a_stream_stopped_anywhere_continues_bit_for_bit(fuzzed, tmp_path):
    data = (fuzzed.source.images_dir, f"{fuzzed.source.images_dir}/instances.json")
    whole = [arrays(*batch) for batch in itertools.islice(example.Stream(*data, 30), 11)]
    pattern, made = str(tmp_path / "at-{seq}.json"), 0
    for stop in (1, 3, 4, 7, 10, 11):
        stream = example.Stream(*data, 30)
        if made:
            stream.restore(pattern)
        for batch in itertools.islice(stream, stop - made):
            assert_same_bits(arrays(*batch), whole[stream.step - 1])
        stream.save(pattern)
        assert stream.step == stop
        made = stop
    assert len({batch["images"].tobytes() for batch in whole}) == 11
    image_ids = np.concatenate([batch["image_ids"] for batch in whole]).reshape(-1)[:300].reshape(3, 100)
    assert (np.sort(image_ids) == list(fuzzed.images)).all()
    with pytest.raises(ValueError, match=r"batch size 30, seed 0, not for .* batch size 30, seed 1"):
        example.Stream(*data, 30, seed=1).restore(pattern)


@pytest.mark.slow
def test_the_file_runs_alone_and_a_new_process_continues(tmp_path):
    def batches(name: str, steps: int, output_dir: str) -> list[str]:
        (tmp_path / name).mkdir()
        options = [f"--steps={steps}", f"--output_dir={tmp_path / output_dir}"]
        said = run_alone("dynamic_detection.py", tmp_path / name, *options)
        return [line for line in said.splitlines() if line.startswith("batch ")]

    stopped = batches("first", 4, "stopped") + batches("second", 2, "stopped")
    assert stopped == batches("third", 6, "whole") and len(stopped) == 6
    assert (tmp_path / "whole" / "steps.png").read_bytes() == (
        tmp_path / "stopped" / "steps.png"
    ).read_bytes()
