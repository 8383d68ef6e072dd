"""Tests bench.py gpu with stand-ins for its candidates. The candidates never ran on a GPU."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.refusal import refusal
from tools.benchmark import gpu, measuring, report, rounds
from tools.benchmark.gpu import BOTH, LOADER, STEP, Row
from tools.benchmark.options import BenchArgs
from tools.benchmark.rounds import Command

GOOD = "print('ready')\nwhile True: time.sleep(0.001); print('step 4')"
CODES = {  # value of hw_decoder_load of a row -> program that stands in for the candidate
    0.0: GOOD,
    0.1: "sys.exit('error: no such data')",
    0.2: "os.kill(os.getpid(), 11)",
    0.3: "print('ready'); time.sleep(100)",
    0.4: "import no_such_module",
    1.0: GOOD,
}
FAILURES = {
    0.1: "exit code 1: no such data",
    0.2: "killed by SIGSEGV: its stderr is empty",
    0.3: "it printed no line within 0 s: its stderr is empty",
    0.4: "exit code 1: ModuleNotFoundError: No module named 'no_such_module'",
}
ROWS = [Row("yolov4", LOADER, {"hw_decoder_load": load}) for load in CODES]


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Gives a function that measures ROWS, and returns the programs that it started and the json's rows."""
    monkeypatch.setattr(gpu, "gpu_visible", lambda: True)
    monkeypatch.setattr(gpu, "_checked", lambda app, a: a)
    monkeypatch.setattr(gpu, "all_rows", lambda cores: ROWS)
    monkeypatch.setattr(rounds, "STEP_TIMEOUT", 0.4)
    started = []

    def command(app, role, a) -> Command:
        started.append(a.hw_decoder_load)
        return Command("", [sys.executable, "-uc", f"import os, sys, time\n{CODES[a.hw_decoder_load]}"])

    monkeypatch.setattr(measuring, "command", command)

    def run(path: pathlib.Path = tmp_path / "gpu.json", **flags) -> tuple[list[float], dict]:
        started.clear()
        gpu.measure(BenchArgs(json=str(path), rounds=1, seconds=0.05, **flags))
        return list(started), json.loads(path.read_text())["candidates"]

    return run


def test_failures_of_rows_are_lines_and_the_other_rows_are_measured(measure, capsys):
    started, results = measure()
    assert started == list(CODES) and list(results) == [row.name for row in ROWS]
    errors = {row.flags["hw_decoder_load"]: results[row.name].get("error") for row in ROWS}
    assert errors == {0.0: None, **FAILURES, 1.0: None}
    lines = capsys.readouterr().out.splitlines()
    for load, reason in FAILURES.items():
        assert f"yolov4 data:dali_gpu --hw_decoder_load={load}: failed: {reason}" in lines
    assert sum(line.startswith("yolov4 data:dali_gpu --hw_decoder_load=") for line in lines) == len(ROWS)


def test_rows_of_the_json_are_kept_and_failed_rows_are_repeated(measure, tmp_path, monkeypatch):
    measure()
    monkeypatch.setitem(CODES, 0.2, GOOD)
    started, results = measure()
    assert started == list(FAILURES) and "error" not in results[ROWS[2].name]
    assert report.compare(str(tmp_path / "gpu.json"), str(tmp_path / "gpu.json")).count(": images/s") == 3
    assert "was written with other flags" in refusal(measure, seed=1)
    (tmp_path / "gpu.json").write_text("{")
    assert "is not JSON" in refusal(measure)


def test_nothing_measured_is_an_error(measure, monkeypatch):
    monkeypatch.setattr(gpu, "all_rows", lambda cores: ROWS[1:2])
    assert "nothing could be measured" in refusal(measure)


def test_flags_that_rows_set_are_refused(measure):
    assert "omit --batch_size: the measurement itself sets it" in refusal(measure, batch_size=4)
    assert "omit --xla" in refusal(measure, xla=True)
    assert "--json=FILE is missing" in refusal(gpu.measure, BenchArgs(baseline=[]))


INTERRUPTED = """
import sys
from common import errors
from tools.benchmark import gpu, measuring
from tools.benchmark.options import BenchArgs
from tools.benchmark.rounds import Command

def command(app, role, a):
    end = "print('step 1')" if a.hw_decoder_load < 0.5 else "print('waits', file=sys.stderr); time.sleep(600)"
    loop = f"print('ready')\\nwhile True: time.sleep(0.01); {end}"
    return Command("", [sys.executable, "-uc", f"import sys, time\\n{loop}"])

gpu.gpu_visible, gpu._checked, measuring.command = (lambda: True), (lambda app, a: a), command
gpu.all_rows = lambda cores: [gpu.Row("yolov4", gpu.LOADER, {"hw_decoder_load": load}) for load in (0.0, 1.0)]
errors.run(lambda path: gpu.measure(BenchArgs(json=path, rounds=1, seconds=0.05)), positional=True)
"""


def test_interrupt_keeps_the_rows_measured_before(tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-c", INTERRUPTED, path]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert list(json.loads(path.read_text())["candidates"]) == [ROWS[0].name]


def test_command_without_a_gpu_ends_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "tools" / "bench.py", "gpu", f"--json={tmp_path}/gpu.json"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "") and not (tmp_path / "gpu.json").exists()
    assert done.stderr.startswith("error: no GPU: ") and len(done.stderr.splitlines()) == 1


def test_rows_cover_the_flags_of_loader_and_step():
    rows = gpu.all_rows(cores=16)
    assert len({row.name for row in rows}) == len(rows) > 40
    for app in gpu.BATCH_SIZES:
        flags = {
            role: [row.flags for row in rows if (row.app, row.role) == (app, role)]
            for role in (LOADER, STEP, BOTH)
        }
        assert flags[LOADER][0] == {}
        assert {name for each in flags[LOADER] for name in each} >= {
            *("num_threads", "hw_decoder_load", "batch_size", "roi_decoding")
        }
        assert len(flags[STEP]) == 7 and flags[BOTH] == flags[STEP][2:4]
    for row in rows:
        BenchArgs(**row.flags)


# --- the verdict ---


def results_of(*rates: tuple[Row, float | str]) -> list[str]:
    results = {
        row.name: {"error": rate} if isinstance(rate, str) else {"images_per_second": {"median": rate}}
        for row, rate in rates
    }
    return gpu.verdict([row for row, _ in rates], results)


def loader(rate: float | str, **flags) -> tuple[Row, float | str]:
    return Row("yolov4", LOADER, flags), rate


def step(rate: float | str, precision: str = "float32", role: str = STEP, **flags) -> tuple[Row, float | str]:
    return Row("yolov4", role, {"precision": precision, **flags}), rate


WORDS = [
    ([loader(1000.0)], ["the loader makes 1000 images/s with its default flags.", "faster loaders: none."]),
    (
        [
            loader(1000.0),
            loader(1040.0, num_threads=2),
            loader(1100.0, num_threads=4),
            loader(1500.0, batch_size=8),
        ],
        [
            "the loader makes 1000 images/s with its default flags.",
            "faster loaders: --batch_size=8 (1.50 times), --num_threads=4 (1.10 times).",
        ],
    ),
    ([step(100.0), step(104.0, xla=True)], ["train with --precision=float32: the step makes 100 images/s."]),
    (
        [step(100.0), step(104.0, xla=True), step(180.0, "mixed_bfloat16")],
        ["train with --precision=mixed_bfloat16: the step makes 180 images/s."],
    ),
    (
        [loader(900.0), step(1000.0), step(630.0, role=BOTH)],
        [
            "the loader makes 900 images/s with its default flags.",
            "faster loaders: none.",
            "train with --precision=float32: the step makes 1000 images/s.",
            "with --precision=float32, loader and step together make 630 images/s, 70% of the slower, "
            "which is the loader.",
        ],
    ),
]


@pytest.mark.parametrize(("rates", "words"), WORDS)
def test_verdict_names_flags_that_pay(rates, words):
    assert results_of(*rates) == [f"yolov4: {line}" for line in words]


def test_verdict_without_the_default_row_names_its_failure():
    lines = results_of(loader("killed"), loader(1000.0, num_threads=4), step(9.0, role=BOTH))
    assert lines == ["yolov4 data:dali_gpu: failed: killed"]
