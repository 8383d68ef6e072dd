"""The ranks are processes that communicate by files. Each rank acts as its command line says."""

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
module.TICK, module.NAMING_SECONDS = 0.2, 20 if act == "lost rank, named late" else 0.2
errors_of_acts = {
    "user error": errors.UserError("the disk is full"),
    "bug": KeyError("a typo"),
    "lost rank": RuntimeError("Horovod has been shut down"),
    "lost rank, named late": RuntimeError("Horovod has been shut down"),
    "stop of all ranks": errors.StoppedError("saved"),
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
    limit = 0 if act == "no limit" else float(timeout)
    with module.Watchdog(FileRanks(), step_timeout=limit) as watchdog:
        watchdog.beat("training", epoch=2, step=7)
        print("begun", flush=True)
        if act in errors_of_acts:
            raise errors_of_acts[act]
        if act == "hang":
            endless()
        if act == "long work":
            watchdog.beat("compiling", at_least=60)
        for _ in range(1 if act == "short work" else 5):
            if act == "regular beats":
                watchdog.beat("training")
            time.sleep(0.4)


errors.run(main, positional=True)
"""


class RankProcesses:
    """Starts one process per rank, each with its act."""

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

    def wait(self, rank):
        """Returns the exit code and stderr."""
        process = self.processes[rank]
        return process.wait(timeout=30), process.stderr.read()

    def name(self, rank):
        return f"rank {rank} ({os.uname().nodename}, pid {self.processes[rank].pid})"


def test_hanging_process_is_ended_with_a_stack_trace_and_a_one_line_error_message(tmp_path):
    with RankProcesses(tmp_path, "hang") as ranks:
        start = time.monotonic()
        code, stderr = ranks.wait(0)
        assert code == 1 and time.monotonic() - start < TIMEOUT + 8
    assert " in endless" in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert f"{ranks.name(0)}, training, epoch 2, step 7" in line
    assert "made no progress for 1 s (--step_timeout)" in line and "run the same command" in line


@pytest.mark.parametrize("act", ["no limit", "long work"])
def test_process_within_its_time_limit_is_not_ended(tmp_path, act):
    with RankProcesses(tmp_path, act) as ranks:
        assert ranks.wait(0) == (0, "")


def test_time_in_which_a_process_is_suspended_does_not_count_towards_the_step_timeout(tmp_path):
    with RankProcesses(tmp_path, "regular beats") as ranks:
        ranks.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(2 * TIMEOUT)
        ranks.processes[0].send_signal(signal.SIGCONT)
        assert ranks.wait(0) == (0, "")


def test_rank_suspended_by_sigstop_is_killed_by_the_rank_that_waits_for_it(tmp_path):
    with RankProcesses(tmp_path, "hang", "hang") as ranks:
        ranks.processes[1].send_signal(signal.SIGSTOP)
        code, stderr = ranks.wait(0)
        assert ranks.wait(1) == (-signal.SIGKILL, "")
    assert code == 1
    assert f"{ranks.name(1)} is stopped or dead" in stderr


FAILURES = [
    ("user error", "short work", "error: the disk is full"),
    ("bug", "short work", "KeyError: 'a typo'"),
    ("lost rank", "regular beats", "error: another rank is stopped or dead; rank 0 ("),
    ("lost rank, named late", "short work", "error: rank 1 ("),
]


@pytest.mark.parametrize(("act", "act_of_rank_1", "message"), FAILURES, ids=[act for act, *_ in FAILURES])
def test_rank_0_that_fails_alone_ends_without_waiting_for_rank_1(tmp_path, act, act_of_rank_1, message):
    with RankProcesses(tmp_path, act, act_of_rank_1) as ranks:
        code, stderr = ranks.wait(0)
        assert ranks.wait(1) == (0, "")
    assert code == 1
    assert message in stderr.splitlines()[-1]
    assert ("Traceback" in stderr) == (act == "bug")


def test_stop_raised_on_all_ranks_ends_each_rank_with_its_own_message_and_exit_code(tmp_path):
    with RankProcesses(tmp_path, "stop of all ranks", "stop of all ranks") as ranks:
        assert ranks.wait(0) == ranks.wait(1) == (75, "saved\n")


def test_user_error_of_a_single_process_ends_it_with_its_own_message(tmp_path):
    with RankProcesses(tmp_path, "user error") as ranks:
        assert ranks.wait(0) == (1, "error: the disk is full\n")


# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_requests_a_stop_after_the_step_and_a_second_sigint_interrupts(number, capfd):
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


def test_signal_to_rank_1_stops_both_ranks():
    def work(ranks):
        signals = StopSignals(quiet=True)
        before = signals.agreed(ranks)
        signals.received = "SIGTERM" if ranks.rank else None
        return before, signals.agreed(ranks), signals.message(3).partition(";")[0]

    messages = ["stopped by a signal to another rank", "stopped by SIGTERM"]
    assert run_on_ranks(2, work) == [(False, True, message) for message in messages]
