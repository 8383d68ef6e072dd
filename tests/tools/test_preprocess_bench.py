"""preprocess_bench.py: once for real, and its pieces."""

import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import PIL.Image
import pytest
from absl import flags

from common import args as shared_flags
from common.errors import UserError
from tests.tools.preprocessing.pictures_on_disk import picture
from tools import preprocess_bench
from tools.benchmark import preprocess_worker, summary
from tools.benchmark.preprocess_worker import CANDIDATES, OTHERS, SHORTCUTS, Standard, Task
from tools.benchmark.summary import Window
from tools.preprocessing import chain

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPS = "resize:short=48 | crop:40x44 | crop_mirror_normalize:mean=imagenet"
SIZES = ((100, 141), (157, 120), (128, 171), (96, 97))  # one comes out 64.1 wide, one 48.5


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("photos")
    for seed, size in enumerate(SIZES):
        noise = np.random.default_rng(seed).normal(0, 20, (*size, 3))
        image = np.clip(picture(*size, seed) + noise, 0, 255).astype(np.uint8)
        PIL.Image.fromarray(image).save(directory / f"{seed}.jpg", quality=95)
    return directory


@pytest.fixture(scope="module")
def task(photos, tmp_path_factory) -> Task:
    """Batches of three of four images: each candidate has to wrap, and the Dynamic API's last is short."""
    files = sorted(map(str, photos.iterdir()))
    standard = preprocess_bench.standard_of(chain.parse(OPS))
    pixels = str(tmp_path_factory.mktemp("pixels"))
    return Task(str(photos), files, ("stop", 10.0), OPS, standard, 3, 2, 2, 4, pixels)


def test_the_command_compares_pixels_and_measures(photos, tmp_path):
    names = ["pipeline", "opencv", "pillow-draft"]
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "tools" / "preprocess_bench.py", f"--input={photos}", f"--ops={OPS}"),
            *(f"--candidates={','.join(names)}", "--rounds=2", "--seconds=0.1", "--batch_size=64"),
            f"--json={tmp_path}/new/bench.json",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert list(record["candidates"]) == list(record["pixels"]) == names
    for name, found in record["candidates"].items():
        assert len(found["windows"]) == 2, (name, found)
        assert all(window["images"] % 4 == 0 and window["images"] > 0 for window in found["windows"])
    assert record["pixels"]["pipeline"] == {"mean": 0.0, "max": 0.0}
    assert 0 < record["pixels"]["opencv"]["mean"] < 3 < record["pixels"]["pillow-draft"]["max"]
    assert record["data"]["images"] == record["settings"]["batch_size"] == 4
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert all(f"{record['pixels'][name]['mean']:.2f}" == lines[name].split()[-1] for name in names)
    assert record["verdict"][-1] in done.stdout


def test_all_do_the_same_work(task):
    """Where the middle is halfway between two pixels, too; twice around, so in the same order for ever."""
    images = {}
    for name, start in CANDIDATES.items():
        batches = iter(start(task))
        images[name] = preprocess_worker.first_images(batches, 4)
        assert all(image.shape == (40, 44, 3) and image.dtype == np.float32 for image in images[name])
        if name in OTHERS:
            again = preprocess_worker.first_images(batches, 3)  # of 0 1 2, 3 0 1: the next are 2, 3, 0
            np.testing.assert_array_equal(again[1:2], images[name][3:])
    std = np.array(task.standard.std)
    off = {
        name: np.mean([np.abs(a - b) * std for a, b in zip(each, images["pipeline"], strict=True)])
        for name, each in images.items()
    }
    assert off["dynamic"] < 0.01 and off["dataset"] == 0
    assert off["pillow"] < 1.1  # the same decoder and filter
    assert all(off[name] < preprocess_bench.SAME for name in OTHERS), off
    assert all(off[name] > 4 for name in SHORTCUTS), off  # where it is not averaged, noise stays


def test_chains_that_the_other_libraries_can_do():
    standard_of = preprocess_bench.standard_of
    expected = Standard(48, (40, 44), (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), True)
    found = standard_of(chain.parse(OPS))
    assert found[:2] == expected[:2] and found[4] is True
    np.testing.assert_allclose(found[2:4], expected[2:4])
    same = "decode:use_fast_idct=1 | resize:short=48 | crop_mirror_normalize:40x44,mean=imagenet"
    assert standard_of(chain.parse(same)) == found
    plain = standard_of(chain.parse(OPS.replace("48", "48,antialias=0")))
    assert plain == found._replace(antialias=False)
    for ops in (
        "",
        "resize:short=48 | crop:40x44",
        OPS.replace("short=48", "short=48..50"),
        OPS.replace("short=48", "48x48"),
        OPS.replace("short=48", "short=48,interp=cubic"),
        OPS.replace("short=48", "short=42"),
        OPS.replace("40x44", "40x44,x=0"),
        OPS.replace("mean=imagenet", "mean=1/2/3"),
        OPS.replace("mean=imagenet", "mean=imagenet,p=0.5"),
        OPS.replace("mean=imagenet", "mean=imagenet,layout=CHW"),
        f"decode:bgr | {OPS}",
        f"{OPS} | layout:CHW",
    ):
        assert standard_of(chain.parse(ops)) is None, ops


def measure(**options):
    """The command with its default flags and some others."""
    fv = flags.FlagValues()
    preprocess_bench.define_flags(fv)
    fv(["preprocess_bench"])
    values = shared_flags.values(fv, preprocess_bench.define_flags)
    preprocess_bench.bench(types.SimpleNamespace(**values | options))


def test_flags_that_cannot_be(photos):
    for options, message in (
        ({"candidates": "opencw"}, "unknown candidate 'opencw': did you mean 'opencv'"),
        ({"candidates": ""}, "nothing to measure"),
        ({"candidates": "tfdata", "ops": "resize:short=48"}, "cannot do these --ops: of these, pipeline"),
        (
            {"candidates": "pillow", "ops": OPS.replace("48", "48,antialias=0")},
            "--candidates=pillow cannot do",
        ),
        ({"ops": "resize:shirt=48"}, "did you mean 'short'"),
        ({"input": f"{photos}/none"}, "none"),
    ):
        with pytest.raises(UserError, match=message):
            measure(**{"input": str(photos)} | options)


def test_pixels_are_compared_in_levels(tmp_path):
    ones = [np.zeros((2, 3, 3), np.float32), np.ones((2, 3, 3), np.float32)]
    names = ["pipeline", "other", "smaller"]
    others = [ones[0], ones[1] + np.float32([0.1, 0, 0])]
    for name, images in (("pipeline", ones), ("other", others), ("smaller", [image[1:] for image in ones])):
        np.savez(tmp_path / f"{name}.npz", *images)

    def compare(ops: str) -> dict:
        return preprocess_bench.compare_pixels(names, chain.parse(ops), tmp_path)

    pixels = compare("crop_mirror_normalize:std=60/50/40,mean=0")
    assert set(pixels) == {"pipeline", "other"}
    assert pixels["other"] == pytest.approx({"mean": 1.0, "max": 6.0})
    assert compare("resize:20x20")["other"]["max"] == pytest.approx(0.1)


def candidate(*rates: float, cpu_ms: float) -> dict:
    windows = [Window(round(10 * rate), 10.0, 10 * rate * cpu_ms / 1000) for rate in rates]
    return summary.candidate(windows, 500_000_000)


def test_the_verdict():
    candidates = {
        "pipeline": candidate(90, 100, 110, cpu_ms=10),
        "dynamic": candidate(45, 50, 55, cpu_ms=15),
        "tfdata": candidate(72, 80, 88, cpu_ms=12),
        "opencv-no-antialias": candidate(180, 200, 220, cpu_ms=5),
        "pillow": {"error": "exit code 1: no memory"},
    }
    pixels = {"pipeline": 0.0, "dynamic": 0.0, "tfdata": 0.4, "opencv-no-antialias": 7.0}
    record = {
        "title": "resize",
        "machine": {"cpu": "some CPU", "cores": 2.0, "gpus": []},
        "data": {"summary": "4 images"},
        "candidates": candidates,
        "pixels": {name: {"mean": off, "max": 9.0} for name, off in pixels.items()},
        "other_cores": 0.0,
    }
    said = record["verdict"] = preprocess_bench.verdict(record)
    assert said == [
        "The fastest of all: opencv-no-antialias. The pipeline reaches 0.50x of it.",
        "The fastest with its pixels: pipeline.",
        "Other pixels than the pipeline's, in levels on average: opencv-no-antialias by 7.0.",
    ]
    text = preprocess_bench.text(record)
    assert "x opencv-no-antialias" in text and "pillow: failed: exit code 1: no memory" in text
    row = next(line for line in text.splitlines() if line.startswith("tfdata"))
    assert row.split() == ["tfdata", "80", "(72..88)", "12", "(12..12)", "0.96", "500", "0.4", "0.40"]
    busy = preprocess_bench.verdict(record | {"other_cores": 1.0})
    assert busy[0].startswith("Other work took 1 of 2 cores") and busy[1:] == said
    del candidates["pipeline"]
    assert preprocess_bench.verdict(record) == []
