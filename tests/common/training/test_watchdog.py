"""The watchdog in real processes whose ranks gather by files, without Horovod or TensorFlow."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[3]
TIMEOUT = 1.5  # --step_timeout of these runs, seconds

WORKER = r"""
import json, os, pathlib, sys, time
from common import errors
from common.training.watchdog import Watchdog

assert "tensorflow" not in sys.modules
directory, rank, world_size, act, on_loss = sys.argv[1:]
directory, rank = pathlib.Path(directory), int(rank)


class FileRanks:
    def __init__(self):
        self.rank, self.world_size = rank, int(world_size)

    def gather(self, value):
        (directory / f"new{rank}").write_text(json.dumps(value))
        os.rename(directory / f"new{rank}", directory / f"{rank}")
        values = [directory / str(other) for other in range(self.world_size)]
        while not all(value.exists() for value in values):
            time.sleep(0.01)
        return [json.loads(value.read_text()) for value in values]


def endless():
    while True:
        time.sleep(0.1)


def main(*_):
    with Watchdog(FileRanks(), step_timeout=0 if act == "unlimited" else 1.5, on_loss=on_loss) as watchdog:
        watchdog.beat("training", epoch=2, step=7)
        print("begun", flush=True)
        if act == "hang":
            endless()
        if act == "user error":
            raise errors.UserError("the disk is full")
        if act == "bug":
            raise KeyError("of ours")
        if act == "lost":
            raise RuntimeError("Horovod has been shut down")
        if act == "all stop":
            raise errors.StoppedError("saved")
        if act == "allowed":
            watchdog.beat("compiling", at_least=60)
            time.sleep(4)
        elif act == "slow":
            for _ in range(4):
                watchdog.beat("training")
                time.sleep(1)
        else:
            time.sleep(2.5)


errors.run(main, positional=True)
"""


class Ranks:
    """So many processes, each with its own act; what they printed."""

    def __init__(self, directory, *acts, on_loss="exit"):
        (directory / "worker.py").write_text(WORKER)
        command = [sys.executable, directory / "worker.py", directory]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(len(acts)), act, on_loss],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, act in enumerate(acts)
        ]

    def __enter__(self):
        for process in self.processes:
            assert process.stdout.readline() == "begun\n", process.stderr.read()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()

    def end(self, rank=0):
        """Exit code and stderr of a rank."""
        process = self.processes[rank]
        return process.wait(timeout=30), process.stderr.read()


def test_a_hanging_process_ends_with_its_stack_and_one_line(tmp_path):
    with Ranks(tmp_path, "hang") as ranks:
        begun = time.monotonic()
        code, stderr = ranks.end()
        assert code == 1 and time.monotonic() - begun < TIMEOUT + 8
    assert " in endless" in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert f"rank 0 ({os.uname().nodename}, pid {ranks.processes[0].pid}), training, epoch 2, step 7" in line
    assert "has not moved for 1.5 s (--step_timeout)" in line and "run the same command" in line


@pytest.mark.parametrize("act", ["unlimited", "allowed", "slow"])
def test_nothing_ends_a_process_that_may_take_its_time(tmp_path, act):
    with Ranks(tmp_path, act) as ranks:
        assert ranks.end() == (0, "")


def test_a_suspended_process_continues(tmp_path):
    with Ranks(tmp_path, "slow") as ranks:
        ranks.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(2 * TIMEOUT)
        ranks.processes[0].send_signal(signal.SIGCONT)
        assert ranks.end() == (0, "")


@pytest.mark.parametrize("on_loss", ["exit", "report"])
def test_a_stopped_rank_is_killed_by_the_rank_that_waits_for_it(tmp_path, on_loss):
    """Under Horovod Elastic the operation of the waiting rank then fails; here it has none."""
    with Ranks(tmp_path, "hang" if on_loss == "exit" else "sleep", "hang", on_loss=on_loss) as ranks:
        ranks.processes[1].send_signal(signal.SIGSTOP)
        code, stderr = ranks.end(0)
        assert ranks.end(1) == (-signal.SIGKILL, "")
    lost = f"rank 1 ({os.uname().nodename}, pid {ranks.processes[1].pid}) is stopped or dead"
    assert code == (1 if on_loss == "exit" else 0)
    assert (lost in stderr) == (on_loss == "exit")


@pytest.mark.parametrize(
    ("act", "last", "traceback"),
    [
        ("user error", "error: the disk is full", False),
        ("bug", "KeyError: 'of ours'", True),
        ("lost", "another rank is stopped or dead; rank 0 (", False),
    ],
)
def test_a_rank_that_fails_alone_ends_at_once(tmp_path, act, last, traceback):
    with Ranks(tmp_path, act, "slow") as ranks:
        code, stderr = ranks.end(0)
        assert ranks.end(1) == (0, "")
    assert code == 1
    assert last in stderr.splitlines()[-1]
    assert ("Traceback" in stderr) == traceback


def test_errors_that_all_ranks_raise_together_propagate(tmp_path):
    with Ranks(tmp_path, "all stop", "all stop") as ranks:
        assert [ranks.end(rank) for rank in (0, 1)] == [(75, "saved\n")] * 2


def test_errors_of_a_single_process_propagate(tmp_path):
    with Ranks(tmp_path, "user error") as ranks:
        assert ranks.end() == (1, "error: the disk is full\n")
