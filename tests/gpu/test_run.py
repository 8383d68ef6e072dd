"""Tests tests/gpu/run.py with small test files. It never ran on a GPU."""

import itertools
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.gpu import run

FAILURES = {  # content of a test file -> a part of what is printed
    "crashes": ("def test_a(): import os; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
    "hangs": ("def test_a(): import time; time.sleep(600)", "hangs: ended after 6 s"),
    "fails": ("def test_a(): assert 1 + 1 == 3\ndef test_b(): pass", "::test_a - assert (1 + 1) == 3"),
    "imports": ("import no_such_module", "E   ModuleNotFoundError: No module named 'no_such_module'"),
    "skips": ("import pytest\ndef test_a(): pytest.skip('no tensorrt')", "no tensorrt"),
    "empty": ("", "no tests ran"),
}


@pytest.fixture
def write_test(tmp_path, monkeypatch):
    """Writes a test file with the mark `gpu` and returns its path."""
    monkeypatch.setattr(run.backend, "GetCUDADeviceCount", lambda: 1)
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(run, "LIMIT", 60.0)
    monkeypatch.setattr(run, "LIMITS", {"test_hangs.py": 6.0})
    monkeypatch.setattr(run, "GRACE", 1.0)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts faster
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")

    def write(name, content):
        path = tmp_path / f"test_{name}.py"
        path.write_text(content.replace("def test_", "@__import__('pytest').mark.gpu\ndef test_"))
        return str(path)

    return write


def test_gpu_test_runner_runs_the_files_after_a_crash_hang_or_failure_and_prints_each_reason(
    write_test, capsys
):
    files = [write_test(name, content) for name, (content, _) in FAILURES.items()]
    passing_file = write_test("passes", "def test_a(): print('net: 12.5 images/s')")
    assert run.main(*files, passing_file) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    assert summary.startswith("1 of 7 files passed; their output is in ")
    starts = [number for number, line in enumerate(lines) if not line.startswith("  ")] + [len(lines)]
    *parts, last_part = ["\n".join(lines[start:end]) for start, end in itertools.pairwise(starts)]
    for part, (name, (_, reason)) in zip(parts, FAILURES.items(), strict=True):
        assert part.startswith("FAILED ") and f"test_{name}.py in" in part and reason in part, part
    assert all(f"test_{name}.py::test_a" in part for name, part in zip(FAILURES, parts[:3], strict=False))
    assert "test_passes.py in" in last_part and "1 passed" in last_part and "12.5 images/s" in last_part
    assert run.main(passing_file) == 0


def test_gpu_test_runner_runs_all_files_with_gpu_tests_and_the_longest_last():
    names = [path.relative_to(ROOT).as_posix() for path in run.gpu_files()]
    in_gpu = [f"tests/gpu/test_{name}.py" for name in ("dali_alone", "graphs", "host", "loader")]
    assert names[:4] == in_gpu and names[-1] == "tests/gpu/test_training.py"
    others = {f"tests/{name}.py" for name in ("yolov4/test_pipeline", "common/training/test_step_guard")}
    assert others < set(names)


def test_gpu_test_runner_without_a_gpu_ends_with_a_one_line_error():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "tests" / "gpu" / "run.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no GPU: DALI finds none; check the driver with nvidia-smi\n"
