"""preprocess_bench.py: once for real; its candidates make the same pixels."""

import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import PIL.Image
import pytest

from common.dali_ops import IMAGENET_STD
from tests.tools.preprocessing.pictures_on_disk import picture
from tools import preprocess_bench
from tools.preprocessing.image_source import open_image_source
from tools.preprocessing.preprocessor import Preprocessor

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = ((400, 561), (628, 480), (512, 683), (384, 387))  # one comes out 256.2 high, one 258 wide


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("photos")
    for seed, size in enumerate(SIZES):
        noise = np.random.default_rng(seed).normal(0, 20, (*size, 3))
        image = np.clip(picture(*size, seed) + noise, 0, 255).astype(np.uint8)
        PIL.Image.fromarray(image).save(directory / f"{seed}.jpg", quality=95)
    return directory


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "preprocess_bench.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_measures_and_compares_pixels(photos):
    done = run(f"--input={photos}", "--rounds=2", "--seconds=0.1", "--batch_size=3")
    assert done.returncode == 0, done.stderr[-3000:]
    line = re.compile(
        r"(\w+) +([\d.]+) images/s \(\d.* to \d.*\), +([\d.]+) CPU ms/image, ([\d.]+) levels off"
    )
    found = {match[1]: match for match in map(line.fullmatch, done.stdout.splitlines()[1:])}
    assert list(found) == ["pipeline", "dynamic", "opencv", "tfdata"]
    assert all(float(match[2]) > 0 and float(match[3]) > 0 for match in found.values())
    assert float(found["dynamic"][4]) < 0.1 and 0 < float(found["opencv"][4]) < 3


def test_another_chain_is_measured_by_dali_alone(photos):
    ops = "resize:short=48 | flip:p=0.5"  # of images that are not equally large
    done = run(f"--input={photos}", "--rounds=1", "--seconds=0.1", "--batch_size=3", f"--ops={ops}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["pipeline", "dynamic"]


def test_all_do_the_same_work(photos):
    """Where the middle is halfway between two pixels, too; twice around, so in the same order for ever."""
    a = types.SimpleNamespace(batch_size=3, num_threads=2, prefetch=2)
    work = Preprocessor(
        source=open_image_source("files", str(photos)), ops=preprocess_bench.OPS, batch_size=3
    )
    expected = np.stack([sample.image for sample in work.samples()])
    for candidate in (preprocess_bench.opencv, preprocess_bench.tfdata):
        batches = candidate(a, work)
        images = np.concatenate([next(batches), next(batches)])  # of 0 1 2, 3 0 1
        assert images.dtype == np.float32 and images.shape == (6, 224, 224, 3)
        np.testing.assert_array_equal(images[4:], images[:2])
        assert np.abs((images[:4] - expected) * np.float32(IMAGENET_STD)).mean() < 2.5
