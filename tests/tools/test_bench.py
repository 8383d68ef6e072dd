"""Tests the comparison of two --json files of bench.py."""

import copy
import json
import sys

import pytest

from tests.commands import run
from tests.refusal import refusal
from tools import bench
from tools.benchmark import report


def candidate(rate, cpu_ms, peak_bytes):
    medians = {"images_per_second": {"median": rate}, "cpu_ms_per_image": {"median": cpu_ms}}
    return medians | {"peak_bytes": peak_bytes}


RECORD = {
    "format": report.FORMAT,
    "app": "efficientdet",
    "title": "net at 512x512",
    "when": "2026-01-01T00:00:00+00:00",
    "commit": "abc",
    "versions": {"tensorflow": "2.21.0"},
    "machine": {"cpu": "some CPU", "cores": 2.0, "memory_bytes": 8, "gpus": []},
    "data": {"fingerprint": "f", "images": 12, "summary": "12 images"},
    "settings": {"batch_size": 8, "num_threads": 2},
    "candidates": {"data dali_cpu": candidate(50.0, 30.0, 1_000_000_000), "model": {"error": "killed"}},
    "other_cores": 0.0,
    "stages": {"dali_cpu": [{"stage": "decode", "cpu_ms_per_image": {"median": 4.0}}]},
}


@pytest.fixture
def write(tmp_path):
    def write(name: str, record: object) -> str:
        (tmp_path / name).write_text(record if isinstance(record, str) else json.dumps(record))
        return str(tmp_path / name)

    return write


def test_benchmark_comparison_has_old_new_and_ratio_of_each_number(write):
    new = copy.deepcopy(RECORD)
    new["candidates"]["data dali_cpu"] = candidate(75.0, 20.0, 2_000_000_000)
    new["stages"]["dali_cpu"][0]["cpu_ms_per_image"]["median"] = 1.0
    new["versions"]["tensorflow"] = "2.22.0"
    new["machine"]["memory_bytes"] = 9  # does not forbid a comparison
    new["other_cores"] = 0.5
    text = report.compare(write("old.json", RECORD), write("new.json", new))
    assert "Other processes used 0.5 of 2 cores during the new run" in text and "during the old" not in text
    rows = [line.rsplit(maxsplit=3) for line in text.splitlines()[-4:]]
    assert rows == [
        ["data dali_cpu: images/s", "50", "75", "1.50"],
        ["data dali_cpu: CPU ms/image", "30", "20", "0.67"],
        ["data dali_cpu: peak MB", "1000", "2000", "2.00"],
        ["dali_cpu, decode: CPU ms/image", "4", "1", "0.25"],
    ]
    assert "cannot be compared" not in text and "differences under 10 % mean nothing" in text
    assert "software: tensorflow was 2.21.0, is 2.22.0" in text


CHANGES = {
    "machine": ({"machine": RECORD["machine"] | {"cpu": "another"}}, "cpu was some CPU, is another"),
    "data": ({"data": RECORD["data"] | {"fingerprint": "g"}}, "fingerprint was f, is g"),
    "settings": ({"settings": RECORD["settings"] | {"jitter": 0.3}}, "jitter was None, is 0.3"),
    "app": ({"app": "yolov4"}, "name was efficientdet, is yolov4"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_benchmark_comparison_of_runs_under_different_conditions_names_the_difference(write, part):
    change, words = CHANGES[part]
    text = report.compare(write("old.json", RECORD), write("new.json", RECORD | change))
    assert "cannot be compared" in text and f"  {part}: {words}" in text.splitlines()
    assert "10 %" not in text


FOREIGN = "not a benchmark file of this version"
INVALID = {
    "broken JSON": ("{", "is not JSON"),
    "list": ([], FOREIGN),
    "other format": ({"format": 0}, FOREIGN),
}


@pytest.mark.parametrize(("content", "message"), INVALID.values(), ids=INVALID)
def test_json_file_that_is_no_benchmark_result_is_refused_for_comparison(write, content, message):
    assert message in refusal(report.read, write("a.json", content))


def test_missing_benchmark_file_is_refused():
    assert "/no/such.json: No such file" in refusal(report.read, "/no/such.json")


def test_compare_command_prints_the_benchmark_comparison(write):
    old = write("old.json", RECORD)
    assert "data dali_cpu" in run(sys.executable, "tools/bench.py", "compare", old, old).stdout


@pytest.mark.parametrize("words", ["", "compare old.json", "show old.json new.json", "yolov5"])
def test_unknown_benchmark_command_is_refused(words):
    message = refusal(bench.main, *words.split())
    assert "give an app (efficientdet, yolov4), gpu, or: compare OLD.json" in message
