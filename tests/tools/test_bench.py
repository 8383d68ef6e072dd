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


def test_ratios_of_new_to_old(write):
    new = copy.deepcopy(RECORD)
    new["candidates"]["data dali_cpu"] = candidate(75.0, 20.0, 2_000_000_000)
    new["stages"]["dali_cpu"][0]["cpu_ms_per_image"]["median"] = 1.0
    new["versions"]["tensorflow"] = "2.22.0"
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


CHANGES = [
    ({"machine": RECORD["machine"] | {"cpu": "another"}}, "machine: cpu was some CPU, is another"),
    ({"data": RECORD["data"] | {"fingerprint": "g"}}, "data: fingerprint was f, is g"),
    ({"settings": RECORD["settings"] | {"batch_size": 4}}, "settings: batch_size was 8, is 4"),
    ({"settings": RECORD["settings"] | {"jitter": 0.3}}, "settings: jitter was None, is 0.3"),
    ({"app": "yolov4"}, "app: name was efficientdet, is yolov4"),
]


@pytest.mark.parametrize(("change", "line"), CHANGES)
def test_what_was_not_the_same_is_said(write, change, line):
    text = report.compare(write("old.json", RECORD), write("new.json", RECORD | change))
    assert "cannot be compared" in text and f"  {line}" in text.splitlines()
    assert "10 %" not in text


def test_files_that_are_none(write):
    none = "not a benchmark file of this version"
    for content, said in (("{", "is not JSON"), ("[]", none), ({"format": 0}, none)):
        assert said in refusal(report.read, write("a.json", content))
    assert "/no/such.json: No such file" in refusal(report.read, "/no/such.json")


def test_the_command(write):
    old = write("old.json", RECORD)
    assert "data dali_cpu" in run(sys.executable, "tools/bench.py", "compare", old, old).stdout
    for words in ([], ["compare", "old.json"], ["show", "old.json", "new.json"], ["yolov5"]):
        assert "give an app (efficientdet, yolov4), gpu, or: compare OLD.json" in refusal(bench.main, *words)
