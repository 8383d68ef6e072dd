"""Tests tests/gpu/run.py with small test files. It never ran on a GPU."""

import itertools
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.gpu import run
from tools import processes

FILES = {  # content of a test file -> whether it passes, a part of what is printed
    "passes": ("def test_a(): print('net: 12.5 images/s')", True, "1 passed"),
    "fails": (
        "def test_a(): assert 1 + 1 == 3\ndef test_b(): pass",
        False,
        "test_fails.py::test_a - assert (1 + 1) == 3",
    ),
    "crashes": ("def test_a(): import os; os.kill(os.getpid(), 11)", False, "crashed with SIGSEGV"),
    "hangs": ("def test_a(): import time; time.sleep(600)", False, "hangs: ended after 6 s"),
    "imports": ("import no_such_module", False, "E   ModuleNotFoundError: No module named 'no_such_module'"),
    "skips": ("import pytest\ndef test_a(): pytest.skip('no tensorrt')", False, "no tensorrt"),
    "empty": ("", False, "no tests ran"),
    "last": ("def test_a(): pass", True, "1 passed"),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(run.backend, "GetCUDADeviceCount", lambda: 1)
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(run, "LIMIT", 20.0)
    monkeypatch.setattr(run, "LIMITS", {"test_hangs.py": 6.0})
    monkeypatch.setattr(run, "GRACE", 1.0)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:xdist\nmarkers = gpu\n")
    for name, (content, _, _) in FILES.items():
        text = content.replace("def test_", "@__import__('pytest').mark.gpu\ndef test_")
        (tmp_path / f"test_{name}.py").write_text(text)
    return [str(tmp_path / f"test_{name}.py") for name in FILES]


def test_crashes_hangs_and_failures_are_reported_and_the_other_files_run(files, capsys):
    assert run.main(*files) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("2 of 8 files passed; their output is in ")
    starts = [number for number, line in enumerate(lines) if not line.startswith("  ")] + [len(lines)]
    parts = ["\n".join(lines[start:end]) for start, end in itertools.pairwise(starts)]
    assert len(parts) == len(FILES)
    for part, name in zip(parts, FILES, strict=True):
        _, passes, words = FILES[name]
        assert part.startswith("FAILED ") != passes and f"test_{name}.py in" in part and words in part, part
    assert "test_crashes.py::test_a" in parts[2] and "test_hangs.py::test_a" in parts[3]
    assert "net: 12.5 images/s" in parts[0]
    assert run.main(files[0], files[-1]) == 0


END = "signal.signal(15, lambda *_: (child.terminate(), child.wait(), sys.exit(1)))"
STUBBORN = "signal.signal(15, signal.SIG_IGN)"


@pytest.mark.parametrize(("on_term", "own_session"), [(END, True), (STUBBORN, False)])
def test_children_of_a_process_end_with_it(tmp_path, on_term, own_session):
    write = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    start = f"{on_term}; child = subprocess.Popen(['sleep', '600'], start_new_session={own_session})"
    code = f"import signal, subprocess, sys; {start}; {write}; child.wait()"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with processes.ended_afterwards(process, grace=1.0):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
    stat = pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    time.sleep(0.2)
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_files_with_gpu_tests_are_all_run_and_the_longest_last():
    names = [path.relative_to(ROOT).as_posix() for path in run.gpu_files()]
    in_gpu = [f"tests/gpu/test_{name}.py" for name in ("dali_alone", "graphs", "host", "loader")]
    assert names[:4] == in_gpu and names[-1] == "tests/gpu/test_training.py"
    assert {"tests/yolov4/test_pipeline.py", "tests/common/test_box_encoder.py"} < set(names)


def test_without_a_gpu_the_command_ends_in_one_line():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "tests" / "gpu" / "run.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no GPU: DALI finds none; check the driver with nvidia-smi\n"
