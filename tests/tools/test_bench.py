"""Two files of --json side by side."""

import copy
import json
import pathlib
import subprocess
import sys

import pytest

from common.errors import UserError
from tools import bench
from tools.benchmark.summary import FORMAT

ROOT = pathlib.Path(__file__).resolve().parents[2]
CANDIDATE = {
    "images_per_second": {"median": 50.0},
    "cpu_ms_per_image": {"median": 30.0},
    "peak_bytes": 1_000_000_000,
}
RECORD = {
    "format": FORMAT,
    "app": "efficientdet",
    "title": "net at 512x512",
    "when": "2026-01-01T00:00:00+00:00",
    "commit": "abc",
    "versions": {"tensorflow": "2.21.0"},
    "machine": {"cpu": "some CPU", "cores": 2.0, "memory_bytes": 8, "gpus": []},
    "data": {"fingerprint": "f", "images": 12, "summary": "12 images"},
    "settings": {"batch_size": 8, "num_threads": 2},
    "candidates": {"data dali_cpu": CANDIDATE, "model": {"error": "killed"}},
    "other_cores": 0.0,
    "stages": {"dali_cpu": [{"stage": "decode", "cpu_ms_per_image": {"median": 4.0}}]},
}


@pytest.fixture
def write(tmp_path):
    def write(name: str, record: object) -> str:
        (tmp_path / name).write_text(record if isinstance(record, str) else json.dumps(record))
        return str(tmp_path / name)

    return write


def test_ratios_of_new_to_old(write):
    new = copy.deepcopy(RECORD)
    new["candidates"]["data dali_cpu"] = {
        "images_per_second": {"median": 75.0},
        "cpu_ms_per_image": {"median": 20.0},
        "peak_bytes": 2_000_000_000,
    }
    new["stages"]["dali_cpu"][0]["cpu_ms_per_image"]["median"] = 1.0
    new["versions"]["tensorflow"] = "2.22.0"
    new["other_cores"] = 0.5
    text = bench.compare(write("old.json", RECORD), write("new.json", new))
    assert "Other work took 0.5 of 2 cores during the new run" in text and "during the old" not in text
    rows = [line.rsplit(maxsplit=3) for line in text.splitlines()[-4:]]
    assert rows == [
        ["data dali_cpu: images/s", "50", "75", "1.50"],
        ["data dali_cpu: CPU ms/image", "30", "20", "0.67"],
        ["data dali_cpu: peak MB", "1000", "2000", "2.00"],
        ["dali_cpu, decode: CPU ms/image", "4", "1", "0.25"],
    ]
    assert "cannot be compared" not in text and "differences under 10 % mean nothing" in text
    assert "software: tensorflow was 2.21.0, is 2.22.0" in text


@pytest.mark.parametrize(
    "part, key, value, line",
    [
        ("machine", "cpu", "another", "machine: cpu was some CPU, is another"),
        ("machine", "gpus", ["H100"], "machine: gpus was [], is ['H100']"),
        ("data", "fingerprint", "g", "data: fingerprint was f, is g"),
        ("settings", "batch_size", 4, "settings: batch_size was 8, is 4"),
        ("settings", "jitter", 0.3, "settings: jitter was None, is 0.3"),
    ],
)
def test_what_was_not_the_same_is_said(write, part, key, value, line):
    new = copy.deepcopy(RECORD)
    new[part][key] = value
    text = bench.compare(write("old.json", RECORD), write("new.json", new))
    assert "cannot be compared" in text and f"  {line}" in text.splitlines()
    assert "10 %" not in text


def test_files_that_are_none(write):
    for name, content, message in (
        ("a.json", "{", "is not JSON"),
        ("b.json", "[]", "not a benchmark of this version"),
        ("c.json", {"format": 0}, "not a benchmark of this version"),
    ):
        with pytest.raises(UserError, match=message):
            bench.read(write(name, content))
    with pytest.raises(UserError, match="No such file"):
        bench.read("/no/such.json")


def test_the_command(write):
    program = [sys.executable, ROOT / "tools" / "bench.py"]
    old = write("old.json", RECORD)
    done = subprocess.run([*program, "compare", old, old], capture_output=True, text=True)
    assert done.returncode == 0 and "data dali_cpu" in done.stdout, done.stderr
    done = subprocess.run([*program, "compare", old], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "error: give two files: python tools/bench.py compare OLD.json NEW.json"
    )
