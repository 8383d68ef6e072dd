"""The watchdog among real processes; their ranks talk through files, without Horovod or TensorFlow."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from common.training.rank_places import Place, stragglers

ROOT = pathlib.Path(__file__).parents[3]
TIMEOUT = 2.0  # --step_timeout of these runs, seconds

COLLECTIVE = r"""
import time


def wait(path, marker, fail_after):
    while not path.exists():
        if fail_after and marker.exists() and time.time() - float(marker.read_text()) > fail_after:
            raise RuntimeError("Horovod has been shut down")
        time.sleep(0.01)
"""
WORKER = r"""
import json, os, pathlib, signal, sys, time
from common import errors, watchdog
from horovod import collective

directory = pathlib.Path(sys.argv[1])
rank, world_size, culprit = map(int, sys.argv[2:5])
act, options = sys.argv[5], json.loads(sys.argv[6])
watchdog.TELL = 0.2
watchdog.CONNECT = options.pop("connect", watchdog.CONNECT)


class FileRanks:
    local_rank, calls = rank, 0

    def __init__(self):
        self.rank, self.world_size = rank, world_size

    def gather(self, value):
        self.calls += 1
        self.put(f"{self.calls}-{rank}.json", value)
        return [self.get(f"{self.calls}-{other}.json") for other in range(world_size)]

    def broadcast_object(self, value):
        if value and "port" in value and act == "unreachable":
            value = value | {"port": 9}
        return self.gather(value)[0]

    def put(self, name, value):
        (directory / f"{name}.tmp").write_text(json.dumps(value))
        os.replace(directory / f"{name}.tmp", directory / name)

    def get(self, name):
        collective.wait(directory / name, directory / "marker", options.get("fail_after"))
        return json.loads((directory / name).read_text())


def endless():
    while True:
        time.sleep(0.1)


def misbehave(dog):
    ranks.put("marker", time.time())
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif act == "sleep":
        endless()
    elif act == "evaluate":
        while True:
            dog.beat("evaluating", epoch=1, step=3)
            time.sleep(0.1)
    elif act == "leave":
        with dog.allow(options["leave"]):
            time.sleep(options["sleep"])
    elif act == "raise":
        raise ValueError("our bug")
    elif act == "user":
        raise errors.UserError("image 7 is damaged")


ranks = FileRanks()
try:
    with watchdog.Watchdog(ranks, step_timeout=options["timeout"], on_loss=options["on_loss"]) as dog:
        for step in range(options.get("steps", 6)):
            dog.beat("training", epoch=1, step=step)
            if step == 3 and rank == culprit:
                misbehave(dog)
            time.sleep(options.get("pace", 0.2))
            if act != "close":
                ranks.gather(step)
            elif rank == culprit:
                break
except errors.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
print("done")
"""


class Run:
    """Processes of one run, and how they ended."""

    def __init__(self, directory, world_size=2, culprit=-1, act="", timeout=TIMEOUT, **options):
        self.directory, self.world_size = directory, world_size
        directory.mkdir(exist_ok=True)
        script = directory / "worker.py"
        script.write_text(WORKER)
        (directory / "horovod").mkdir()
        (directory / "horovod" / "__init__.py").touch()
        (directory / "horovod" / "collective.py").write_text(COLLECTIVE)
        options = json.dumps({"on_loss": "exit", "timeout": timeout} | options)
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(directory)]
                + [str(number) for number in (rank, world_size, culprit)]
                + [act, options],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=(directory / f"{rank}.out").open("w"),
                stderr=(directory / f"{rank}.err").open("w"),
            )
            for rank in range(world_size)
        ]
        self.ended: dict[int, float] = {}  # by rank: time.time()

    def wait_for(self, name, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)
        return json.loads((self.directory / name).read_text())

    def finish(self, seconds=30.0, ranks=None):
        """Waits for the processes of `ranks` (all); those that are left are killed."""
        waited = set(range(self.world_size) if ranks is None else ranks)
        deadline = time.monotonic() + seconds
        while waited - set(self.ended) and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if rank not in self.ended and process.poll() is not None:
                    self.ended[rank] = time.time()
            time.sleep(0.02)
        for process in self.processes:
            process.kill()
            process.wait()
        return self

    def codes(self):
        return [process.returncode for process in self.processes]

    def said(self, rank):
        return (self.directory / f"{rank}.err").read_text()

    def done(self):
        return [
            (self.directory / f"{rank}.out").read_text().strip() == "done" for rank in range(self.world_size)
        ]

    def seconds(self):
        """From the culprit's misdeed to the end of the last process."""
        return max(self.ended.values()) - self.wait_for("marker")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_ends_the_others_with_its_number(tmp_path, culprit):
    run = Run(tmp_path, 3, culprit, "kill", timeout=0).finish()
    pid = run.processes[culprit].pid
    assert run.codes() == [-signal.SIGKILL if rank == culprit else 1 for rank in range(3)]
    assert run.seconds() < 5
    for rank in {0, 1, 2} - {culprit}:
        (line,) = run.said(rank).splitlines()
        assert line.startswith(f"error: rank {culprit} ({socket.gethostname()}, pid {pid}) has died")
        assert "training, epoch 1, step " in line
        assert line.endswith("the same command goes on from the last checkpoint")


def test_a_frozen_rank_ends_all_and_is_killed(tmp_path):
    runs = [Run(tmp_path / str(culprit), 3, culprit, "stop") for culprit in (0, 1)]
    for culprit, run in enumerate(runs):
        run.finish()
        assert run.codes() == [-signal.SIGKILL if rank == culprit else 1 for rank in range(3)]
        assert TIMEOUT < run.seconds() < TIMEOUT + 5
        others = sorted({0, 1, 2} - {culprit})
        last = [run.said(rank).splitlines()[-1] for rank in others]
        assert any(f"rank {culprit} (" in line and "is frozen, silent for" in line for line in last)
        assert all(f"rank {culprit} (" in line and "training, epoch 1, step " in line for line in last)
    assert "rank  host" in run.said(0) and "\n*  1" in run.said(0)


def test_a_rank_elsewhere_ends_all_and_shows_its_stack(tmp_path):
    run = Run(tmp_path, 3, 1, "sleep").finish()
    assert run.codes() == [1, 1, 1]
    assert TIMEOUT < run.seconds() < TIMEOUT + 5
    for rank in range(3):
        line = run.said(rank).splitlines()[-1]
        assert line.startswith("error: rank 1 (") and "has not moved for " in line
        assert "training, epoch 1, step 3, at worker.py:" in line and " endless" in line
    assert "in endless\n" in run.said(1) and "in misbehave\n" in run.said(1)
    assert "in endless\n" not in run.said(0) and "File" not in run.said(2)
    (row,) = [line for line in run.said(0).splitlines() if line.startswith("*")]
    assert row.split()[1] == "1" and row.split()[3] == str(run.processes[1].pid)
    assert run.said(0).count("\n") == 5 and run.said(2).count("\n") == 1


def test_an_endless_evaluation_is_elsewhere_although_it_beats(tmp_path):
    run = Run(tmp_path, 2, 1, "evaluate").finish()
    assert run.codes() == [1, 1]
    assert TIMEOUT < run.seconds() < TIMEOUT + 5
    line = run.said(0).splitlines()[-1]
    assert line.startswith("error: rank 1 (") and re.search(
        "has kept the others waiting for . s: evaluating", line
    )


def test_one_process_on_its_own(tmp_path):
    run = Run(tmp_path, 1, 0, "sleep").finish()
    assert run.codes() == [1]
    assert TIMEOUT < run.seconds() < TIMEOUT + 5
    assert "in endless\n" in run.said(0)
    assert re.search("has not moved for . s: training, epoch 1, step 3", run.said(0).splitlines()[-1])


def test_steps_that_are_slow_but_beat_and_a_timeout_of_0_end_nothing(tmp_path):
    slow = Run(tmp_path / "slow", 2, pace=0.7)
    off = Run(tmp_path / "off", 2, 1, "leave", timeout=0, leave=1, sleep=3)
    for run in (slow.finish(), off.finish()):
        assert run.codes() == [0, 0] and all(run.done())
        assert run.said(0) == run.said(1) == ""


def test_leave_holds_for_those_who_wait_and_it_ends(tmp_path):
    within = Run(tmp_path / "in", 2, 1, "leave", timeout=1.5, leave=None, sleep=3.5)
    over = Run(tmp_path / "over", 2, 1, "leave", timeout=1.5, leave=3, sleep=1000)
    within.finish(), over.finish()
    assert within.codes() == [0, 0] and within.said(0) == within.said(1) == ""
    assert over.codes() == [1, 1]
    assert 3 < over.seconds() < 3 + 5
    assert "error: rank 1 (" in over.said(0)


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_closes_first_is_not_dead(tmp_path, culprit):
    run = Run(tmp_path, 3, culprit, "close", steps=10, pace=0.2).finish()
    assert run.codes() == [0, 0, 0] and all(run.done())
    assert [run.said(rank) for rank in range(3)] == ["", "", ""]
    assert min(run.ended, key=run.ended.get) == culprit


@pytest.mark.parametrize(("act", "said"), [("raise", "ValueError: our bug"), ("user", "image 7 is damaged")])
def test_an_error_of_one_rank_ends_the_others_with_its_text(tmp_path, act, said):
    run = Run(tmp_path, 2, 1, act, timeout=0).finish()
    assert run.codes() == [1, 1] and run.seconds() < 5
    (line,) = run.said(0).splitlines()
    assert line.startswith("error: rank 1 (") and "training, epoch 1, step 3" in line and said in line
    own = run.said(1).splitlines()
    assert own[-1] == (said if act == "raise" else f"error: {said}")
    assert ("Traceback" in run.said(1)) == (act == "raise")


def test_the_error_of_a_collective_becomes_the_line(tmp_path):
    run = Run(tmp_path, 3, 1, "kill", timeout=0, fail_after=0.3).finish()
    assert run.codes() == [1, -signal.SIGKILL, 1] and run.seconds() < 5
    for rank in (0, 2):
        (line,) = run.said(rank).splitlines()
        assert line.startswith("error: rank 1 (") and "has died" in line


def test_the_error_of_a_collective_makes_a_silent_rank_a_frozen_one(tmp_path):
    """As after Gloo's 30 s; no step timeout is set."""
    run = Run(tmp_path, 2, 1, "stop", timeout=0, fail_after=3.5).finish()
    assert run.codes() == [1, -signal.SIGKILL] and run.seconds() < 3.5 + 5
    line = run.said(0).splitlines()[-1]
    assert line.startswith("error: rank 1 (") and "is frozen, silent for" in line


def test_a_suspended_job_goes_on(tmp_path):
    run = Run(tmp_path, 2, steps=30, pace=0.05)
    run.wait_for("5-1.json")
    for process in run.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * TIMEOUT)  # that time passes is what is tested
    for process in run.processes:
        process.send_signal(signal.SIGCONT)
    run.finish()
    assert run.codes() == [0, 0] and run.said(0) == run.said(1) == ""


def test_without_a_connection_each_watches_over_itself(tmp_path):
    run = Run(tmp_path, 2, act="unreachable", connect=0.5, pace=0.5, timeout=20).finish()
    assert run.codes() == [0, 0] and all(run.done())
    (line,) = run.said(1).splitlines()
    assert line.startswith("warning: rank 1 watches only over itself: rank 0 cannot be reached")
    (line,) = run.said(0).splitlines()
    assert line.startswith("warning: no connection from rank 1 (")


def test_reporting_ends_nothing(tmp_path):
    run = Run(tmp_path, 2, 1, "kill", on_loss="report")
    run.wait_for("marker")
    run.finish(4, ranks=[0])
    assert 0 not in run.ended  # it was still waiting for rank 1
    dead = [line for line in run.said(0).splitlines() if "has died" in line]
    assert len(dead) == 1 and dead[0].startswith("rank 1 (") and "same command" not in dead[0]


def test_strangers_at_the_port_are_ignored(tmp_path):
    run = Run(tmp_path, 2, steps=80, pace=0.05)
    address = run.wait_for("2-0.json")
    assert address["hosts"] == ["127.0.0.1"]  # all ranks are here: nobody elsewhere can reach the port
    token = address["token"]
    garbage = [
        b"\x00\xff\x17" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 5000 + b"\n",
        b"1" * 5000 + b"\n",
        b'{"token": "\\ud800", "rank": 1}\n',
        b'{"token": null, "rank": 1}\n{"bye": true}\n',
        json.dumps({"token": token[::-1], "rank": 1}).encode() + b'\n{"bye": true}\n',
        json.dumps({"token": token, "rank": 0}).encode() + b'\n{"failed": "x"}\n',
        json.dumps({"token": token, "rank": "1"}).encode() + b'\n{"failed": "x"}\n',
        json.dumps({"token": token, "rank": 2}).encode() + b'\n{"failed": "x"}\n',
    ]
    run.wait_for("9-1.json")
    sockets = [socket.create_connection(("127.0.0.1", address["port"])) for _ in range(50)]  # silent
    for bytes_sent in garbage:
        with socket.create_connection(("127.0.0.1", address["port"])) as stranger:
            stranger.settimeout(5)
            try:
                stranger.sendall(bytes_sent)
                answer = stranger.recv(100)
            except OSError:
                answer = b""
            assert answer == b"", bytes_sent[:40]
    run.wait_for("50-1.json")
    for stranger in sockets:
        stranger.close()
    run.processes[1].kill()
    run.finish()
    assert run.codes() == [1, -signal.SIGKILL]
    (line,) = run.said(0).splitlines()
    assert "rank 1 (" in line and "has died" in line


@pytest.mark.parametrize(
    ("places", "behind"),
    [
        ({0: ("training", 1, 4), 1: ("training", 1, 3), 2: ("training", 1, 4)}, [1]),
        ({0: ("training", 2, 4), 1: ("evaluating", 1, 9), 2: ("training", 2, 4)}, [1]),
        ({0: ("training", 1, 4), 1: ("evaluating", 1, 4)}, [1]),
        ({0: ("saving", 1, 4), 1: ("evaluating", 1, 4), 2: ("evaluating", 1, 4)}, [0]),
        ({0: ("training", 1, 4, True), 1: ("training", 1, 4, False)}, [1]),
        ({0: ("training", 1, 4, True), 1: ("training", 1, 4, True)}, []),
        ({0: ("training", 1, 4)}, [0]),
    ],
)
def test_who_is_behind(places, behind):
    made = {
        rank: Place(doing, epoch, step, waiting=bool(waiting))
        for rank, (doing, epoch, step, *waiting) in places.items()
        for waiting in [bool(waiting and waiting[0])]
    }
    assert stragglers(made) == behind


def test_the_watchdog_needs_neither_tensorflow_nor_horovod():
    script = (
        "import common.training.watchdog, sys; print(*{'tensorflow', 'horovod', 'keras'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
