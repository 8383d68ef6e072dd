"""preprocess_bench.py: its numbers; its candidates make the same pixels."""

import itertools
import re
import types

import numpy as np
import PIL.Image
import pytest

from common.dali_ops import IMAGENET_STD
from tests.distributed.small_apps import flag_values
from tests.tools.preprocessing.pictures_on_disk import picture
from tools import preprocess_bench
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor

SIZES = ((400, 561), (628, 480), (512, 683), (384, 387))  # one comes out 256.2 high, one 258 wide


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    directory = tmp_path_factory.mktemp("photos")
    for seed, size in enumerate(SIZES):
        noise = np.random.default_rng(seed).normal(0, 20, (*size, 3))
        image = np.clip(picture(*size, seed) + noise, 0, 255).astype(np.uint8)
        PIL.Image.fromarray(image).save(directory / f"{seed}.jpg", quality=95)
    return directory


def bench(*arguments):
    """The lines of the table, without the first."""
    few = ["--rounds=2", "--seconds=0.02", "--batch_size=3"]
    _, values = flag_values("tools.preprocess_bench", *few, *arguments)
    return preprocess_bench.bench(types.SimpleNamespace(**values)).splitlines()[1:]


def test_it_measures_and_compares_pixels(photos):
    rates = r"(\w+) +([\d.]+) images/s \(\d.* to \d.*\), +([\d.]+) CPU ms/image, ([\d.]+) levels off"
    found = [re.fullmatch(rates, line).groups() for line in bench(f"--input={photos}")]
    assert [name for name, *_ in found] == ["pipeline", "dynamic", "opencv", "tfdata"]
    assert all(float(rate) > 0 and float(cpu_ms) > 0 for _, rate, cpu_ms, _ in found)
    assert float(found[1][3]) < 0.1 and 0 < float(found[2][3]) < 3


def test_another_chain_is_measured_by_dali_alone(photos):
    """Of images that are not equally large."""
    lines = bench(f"--input={photos}", "--ops=resize:short=48 | flip:p=0.5")
    assert [line.split()[0] for line in lines] == ["pipeline", "dynamic"]


def test_a_measurement_counts_what_comes_after_the_ready_batches(monkeypatch):
    batches = iter([[0]] * 5 + [[0, 0, 0]] * 9)
    clock = {"perf_counter": itertools.count().__next__, "process_time": iter([10.0, 10.6]).__next__}
    monkeypatch.setattr(preprocess_bench, "time", types.SimpleNamespace(**clock))
    # The clock is read once before, after each of three batches, and at the end.
    found = preprocess_bench.measure(batches, settle=5, seconds=4)
    assert found == pytest.approx((3 * 3 / 5, 1000 * 0.6 / 9))


def test_all_do_the_same_work(photos):
    """Where the middle is halfway between two pixels, too; twice around, so in the same order for ever."""
    a = types.SimpleNamespace(batch_size=3, num_threads=2, prefetch=2)
    source = open_image_source("files", str(photos))
    work = Preprocessor(source=source, ops=preprocess_bench.OPS, batch_size=3)
    expected = np.stack([sample.image for sample in work.samples()])
    for candidate in (preprocess_bench.opencv, preprocess_bench.tfdata):
        batches = candidate(a, work)
        images = np.concatenate([next(batches), next(batches)])  # of 0 1 2, 3 0 1
        assert images.dtype == np.float32 and images.shape == (6, 224, 224, 3)
        np.testing.assert_array_equal(images[4:], images[:2])
        assert np.abs((images[:4] - expected) * np.float32(IMAGENET_STD)).mean() < 2.5
