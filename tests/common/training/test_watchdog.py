"""The ranks are processes that communicate by files."""

import os
import signal
import subprocess
import sys
import time

import pytest

from common.training.watchdog import StopSignals
from tests.common.thread_ranks import run_on_ranks
from tests.conftest import ROOT

TIMEOUT = 1.0

WORKER = r"""
import json, pathlib, sys, time
from common import errors
from common.training import watchdog as module

assert "tensorflow" not in sys.modules
directory, rank, world_size, act, timeout = sys.argv[1:]
module.TICK, module.NAMING_SECONDS = 0.2, 20 if act == "lost, named late" else 0.2
raised = {
    "user error": errors.UserError("the disk is full"),
    "bug": KeyError("a typo"),
    "lost": RuntimeError("Horovod has been shut down"),
    "lost, named late": RuntimeError("Horovod has been shut down"),
    "all stop": errors.StoppedError("saved"),
}


class FileRanks:
    rank = int(rank)

    def gather(self, value):
        new = pathlib.Path(directory, f"new{rank}")
        new.write_text(json.dumps(value))
        new.rename(new.with_name(rank))
        files = [new.with_name(str(other)) for other in range(int(world_size))]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [json.loads(file.read_text()) for file in files]


def endless():
    while True:
        time.sleep(0.1)


def main(*_):
    limit = 0 if act == "unlimited" else float(timeout)
    with module.Watchdog(FileRanks(), step_timeout=limit) as watchdog:
        watchdog.beat("training", epoch=2, step=7)
        print("begun", flush=True)
        if act in raised:
            raise raised[act]
        if act == "hang":
            endless()
        if act == "allowed":
            watchdog.beat("compiling", at_least=60)
        for _ in range(1 if act == "brief" else 5):
            if act == "slow":
                watchdog.beat("training")
            time.sleep(0.4)


errors.run(main, positional=True)
"""


class Ranks:
    """One process per rank. Each of `acts` says what a process does."""

    def __init__(self, directory, *acts):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        self.processes = []
        for rank, act in enumerate(acts):
            arguments = [directory, str(rank), str(len(acts)), act, str(TIMEOUT)]
            self.processes.append(subprocess.Popen([sys.executable, "-c", WORKER, *arguments], **pipes))

    def __enter__(self):
        for process in self.processes:
            assert process.stdout.readline() == "begun\n", process.stderr.read()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()

    def end(self, rank=0):
        process = self.processes[rank]
        return process.wait(timeout=30), process.stderr.read()

    def name(self, rank):
        return f"rank {rank} ({os.uname().nodename}, pid {self.processes[rank].pid})"


def test_hanging_process_ends_with_its_stack_and_one_line(tmp_path):
    with Ranks(tmp_path, "hang") as ranks:
        begun = time.monotonic()
        code, stderr = ranks.end()
        assert code == 1 and time.monotonic() - begun < TIMEOUT + 8
    assert " in endless" in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert f"{ranks.name(0)}, training, epoch 2, step 7" in line
    assert "made no progress for 1 s (--step_timeout)" in line and "run the same command" in line


@pytest.mark.parametrize("act", ["unlimited", "allowed", "slow"])
def test_process_within_its_time_limit_is_not_ended(tmp_path, act):
    with Ranks(tmp_path, act) as ranks:
        if act == "slow":
            ranks.processes[0].send_signal(signal.SIGSTOP)
            time.sleep(2 * TIMEOUT)
            ranks.processes[0].send_signal(signal.SIGCONT)
        assert ranks.end() == (0, "")


def test_stopped_rank_is_killed_by_the_rank_that_waits_for_it(tmp_path):
    with Ranks(tmp_path, "hang", "hang") as ranks:
        ranks.processes[1].send_signal(signal.SIGSTOP)
        code, stderr = ranks.end(0)
        assert ranks.end(1) == (-signal.SIGKILL, "")
    assert code == 1
    assert f"{ranks.name(1)} is stopped or dead" in stderr


FAILURES = [
    ("user error", "brief", "error: the disk is full", False),
    ("bug", "brief", "KeyError: 'a typo'", True),
    ("lost", "slow", "error: another rank is stopped or dead; rank 0 (", False),
    ("lost, named late", "brief", "error: rank 1 (", False),
]


@pytest.mark.parametrize(("act", "other", "last", "traceback"), FAILURES)
def test_rank_that_fails_alone_ends_without_waiting_for_the_others(tmp_path, act, other, last, traceback):
    with Ranks(tmp_path, act, other) as ranks:
        code, stderr = ranks.end(0)
        assert ranks.end(1) == (0, "")
    assert code == 1
    assert last in stderr.splitlines()[-1]
    assert ("Traceback" in stderr) == traceback


@pytest.mark.parametrize(
    ("acts", "end"),
    [(["all stop", "all stop"], (75, "saved\n")), (["user error"], (1, "error: the disk is full\n"))],
)
def test_errors_of_all_ranks_and_of_a_single_process_propagate(tmp_path, acts, end):
    with Ranks(tmp_path, *acts) as ranks:
        assert [ranks.end(rank) for rank in range(len(acts))] == [end] * len(acts)


# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_requests_a_stop_and_handlers_are_put_back(number, capfd):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        name = signal.Signals(number).name
        assert signals.received == name
        assert capfd.readouterr().err == f"\n{name}: stopping after this step\n"
        assert signals.message(9) == f"stopped by {name}; saved after step 9: run the same command to go on"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signals.received  # noqa: B018  the handler runs between two instructions
    assert signal.getsignal(number) is before


def test_signal_to_any_rank_stops_all_ranks():
    def work(ranks):
        signals = StopSignals(quiet=True)
        first = signals.agreed(ranks)
        signals.received = "SIGTERM" if ranks.rank else None
        return first, signals.agreed(ranks), signals.message(3).partition(";")[0]

    by = ["stopped by a signal to another rank", "stopped by SIGTERM"]
    assert run_on_ranks(2, work) == [(False, True, by[0]), (False, True, by[1])]
