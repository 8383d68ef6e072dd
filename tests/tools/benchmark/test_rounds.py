"""Tests rounds.py and tools/processes.py with small programs."""

import itertools
import os
import subprocess
import sys

import pytest

from tools.benchmark import rounds
from tools.benchmark.rounds import Command

# A candidate that logs the time of each of its steps.
LOGGING = """
import sys, time
print("some library's chatter"); print("ready", flush=True)
with open(sys.argv[1], "a") as log:
    while True:
        time.sleep(0.002)
        print(time.monotonic(), file=log, flush=True)
        print("step 4", flush=True)
"""


def python(code, *arguments):
    return [sys.executable, "-u", "-c", code, *map(str, arguments)]


def measure(tmp_path, commands, **options):
    return rounds.measure(commands, **{"rounds": 2, "seconds": 0.1, "logs": tmp_path} | options)


def window_of(tmp_path, arguments, settle=1, **options):
    """Measures one round. Returns its window and the peak memory."""
    result = measure(tmp_path, [Command("a", arguments, settle)], rounds=1, **options)["a"]
    return result["windows"][0], result["peak_bytes"]


def test_benchmark_candidates_run_one_at_a_time_and_in_reverse_order_every_second_round(tmp_path):
    logs = [tmp_path / name for name in ("a", "b", "c")]
    results = measure(tmp_path, [Command(log.name, python(LOGGING, log)) for log in logs], rounds=3)
    assert list(results) == ["a", "b", "c"]
    steps = sorted((float(line), log.name) for log in logs for line in log.read_text().splitlines()[:-1])
    turns = [name for name, _ in itertools.groupby(name for _, name in steps)]
    assert "".join(turns) == "abcbabc"  # rounds abc, cba, abc: adjacent turns of c, and of a, count as one
    for name, log in zip("abc", logs, strict=True):
        windows = results[name]["windows"]
        assert len(windows) == 3
        assert all(window["images"] % 4 == 0 and window["images"] > 0 for window in windows)
        assert sum(window["images"] for window in windows) <= 4 * len(log.read_text().splitlines())
        assert all(window["seconds"] >= 0.1 for window in windows)


def test_benchmark_steps_before_ready_and_during_settling_are_not_counted(tmp_path):
    code = """
import time
for _ in range(9): print("step 1000000")
print("ready")
for _ in range(3): print("step 1000000")
while True: time.sleep(0.001); print("step 1")
"""
    window, _ = window_of(tmp_path, python(code), settle=4)
    assert 0 < window["images"] < 1000000


def test_benchmark_counts_cpu_time_and_memory_of_child_processes(tmp_path):
    code = """
import os, time
read, write = os.pipe()
if os.fork() == 0:  # the child does the work
    ballast = b"x" * 100_000_000
    while True:
        start = time.process_time()
        while time.process_time() - start < 0.02: pass
        os.write(write, b".")
os.read(read, 1)
print("ready")
while True: os.read(read, 1); print("step 2")
"""
    window, peak_bytes = window_of(tmp_path, python(code), seconds=0.5)
    assert window["cpu_seconds"] / window["images"] == pytest.approx(0.01, rel=0.5)
    assert peak_bytes > 100_000_000
    assert 0 <= window["other_cpu_seconds"] <= os.cpu_count() * (window["seconds"] + 1)


def test_benchmark_reports_the_cpu_time_of_an_unrelated_busy_process(tmp_path):
    with subprocess.Popen(python("while True: pass")) as busy:
        window, _ = window_of(tmp_path, python(LOGGING, tmp_path / "log"), seconds=0.7)
        busy.kill()
    assert window["other_cpu_seconds"] > 0.2


FAILURES = {
    "one line on stderr": (
        "import sys; print('nonsense', file=sys.stderr); sys.exit('error: no data')",
        "exit code 1: no data",
    ),
    "traceback": ("raise KeyError('boxes')", "exit code 1: KeyError: 'boxes'"),
    "SIGKILL": ("import os; os.kill(os.getpid(), 9)", "killed (SIGKILL): the system does this when"),
    "SIGSEGV": ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV: its stderr is empty"),
    "exit after some steps": (
        "print('ready')\nfor _ in range(20): print('step 1')",
        "exit code 0: its stderr is empty",
    ),
    "closed output": ("import os, time; os.close(1); time.sleep(100)", "closed its output but still runs"),
    "no output": ("import time; print('ready'); time.sleep(100)", "it printed no line within 0 s"),
}


@pytest.mark.parametrize(("code", "reason"), FAILURES.values(), ids=FAILURES)
def test_failed_benchmark_candidate_gets_a_one_line_error_and_the_others_still_run(
    tmp_path, monkeypatch, code, reason
):
    monkeypatch.setattr(rounds, "STEP_TIMEOUT", 0.4)
    monkeypatch.setattr(rounds, "_END_TIMEOUT", 0.2)
    commands = [Command("bad", python(code)), Command("good", python(LOGGING, tmp_path / "log"))]
    results = measure(tmp_path, commands)
    assert list(results["bad"]) == ["error"]
    assert reason in results["bad"]["error"] and "\n" not in results["bad"]["error"]
    assert len(results["good"]["windows"]) == 2


def test_missing_program_of_a_benchmark_candidate_is_reported(tmp_path):
    results = measure(tmp_path, [Command("a", ["/no/such/program"])])
    assert results["a"] == {"error": "cannot be started: No such file or directory: /no/such/program"}


def test_result_of_a_benchmark_process_is_the_json_of_its_result_line_or_its_error(tmp_path):
    command = Command("stages", python("import time; print('[3]'); print('result [1, 2]'); time.sleep(100)"))
    assert rounds.result(command, tmp_path) == [1, 2]
    command = Command("stages", python("import sys; sys.exit('error: no data')"))
    assert rounds.result(command, tmp_path) == {"error": "exit code 1: no data"}


def test_benchmark_candidate_and_its_child_process_end_after_an_interrupt(tmp_path, monkeypatch):
    """The output ends only when the candidate and its child process have ended."""
    outputs = []

    def interrupted(candidate, *_):
        outputs.append(candidate._lines)
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds.Candidate, "window", interrupted)
    code = "import os, time\nif os.fork(): print('ready')\ntime.sleep(100)"
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, [Command("a", python(code))])
    assert outputs[0].get(timeout=9) is None
