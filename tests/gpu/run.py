r"""Runs the tests that need a GPU, each file in a process of its own with a time limit (`make test-gpu`).

    python tests/gpu/run.py
    python tests/gpu/run.py tests/gpu/test_host.py tests/gpu/test_dali_alone.py

Prints one line for each file, also if it crashes or hangs, and the names of the tests that failed. The whole
output of a file is in runs/test-gpu/. The exit status is 0 if all files passed; it is 1 if a file failed or
if there is no GPU. It never ran on a GPU.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from nvidia.dali import backend

from common import errors
from common.errors import UserError
from tools.processes import ended_afterwards

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGS = ROOT / "runs" / "test-gpu"
LIMIT = 3600.0  # seconds for one file
LIMITS = {"test_training.py": 4 * 3600.0}
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
# Lines of pytest that are printed: failures, skipped tests, missing packages and measured speeds.
DETAIL = re.compile(r"(FAILED|ERROR|SKIPPED) |E +ModuleNotFoundError|\S.* images/s\b")


def gpu_files() -> list[pathlib.Path]:
    """Returns the test files with the mark `gpu`; those with a longer limit come last."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [path for path in files if "pytest.mark.gpu" in path.read_text()]
    return sorted(files, key=lambda path: (path.name in LIMITS, path.parent.name != "gpu"))


def run_file(path: pathlib.Path, logs: pathlib.Path, limit: float) -> tuple[bool, str]:
    """Runs the GPU tests of a file. Returns whether they passed, and the lines to print."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{path.parent.name}-{path.stem}.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-rA", "-p", "no:cacheprovider", "-m", "gpu"]
    start = time.monotonic()
    with log.open("wb") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        options["env"] = os.environ | {"COLUMNS": "200"}  # pytest shortens the reasons of failures to this
        process = subprocess.Popen([*command, str(path)], cwd=ROOT, start_new_session=True, **options)
        with ended_afterwards(process, GRACE):
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
    lines = log.read_text(errors="replace").splitlines()
    tests = [line for line in lines if "::" in line]
    last = tests[-1].strip() if tests else "before its first test"
    if code is None:
        result = f"hangs: ended after {limit:g} s: {last}"
    elif code < 0:
        result = f"crashed with {signal.Signals(-code).name}: {last}"
    else:
        result = lines[-1].strip("= ") if lines else f"exit code {code}"
        details = [line for line in lines if DETAIL.match(line)]
        result = "\n  ".join([result, *details])
    words = f"{path.parent.name}/{path.name} in {time.monotonic() - start:.0f} s: {result}"
    passed = code == 0 and " passed" in result
    return passed, ("" if passed else "FAILED ") + words


def main(*names: str) -> int:
    if not backend.GetCUDADeviceCount():
        raise UserError("no GPU: DALI finds none; check the driver with nvidia-smi")
    files = [pathlib.Path(name).resolve() for name in names] or gpu_files()
    failed = 0
    for path in files:
        passed, words = run_file(path, LOGS, LIMITS.get(path.name, LIMIT))
        failed += not passed
        print(words, flush=True)
    print(f"{len(files) - failed} of {len(files)} files passed; their output is in {LOGS}")
    return min(failed, 1)


if __name__ == "__main__":
    errors.run(main, positional=True)
