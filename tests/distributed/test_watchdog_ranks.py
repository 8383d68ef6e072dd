"""A lost rank under horovodrun and under multi_worker: how soon the others end, and what they print."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from tests.distributed import launching

TIMEOUT = 3.0  # seconds that a step may take under Horovod here

WORKER = r"""
import os, signal, sys, time
import tensorflow as tf
from common import errors
from common.distributed import ranks as distributed, tf_distribute
from common.training.watchdog import Watchdog


def endless():
    while True:
        time.sleep(0.1)


def misbehave():
    print("MARKER", time.time(), file=sys.stderr, flush=True)
    if act == "sleep":
        endless()
    os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)


def main(*_):
    ranks = distributed.start(strategy)
    step_of_all = tf.function(lambda x: ranks.run(lambda y: ranks.mean({"x": y})["x"], x), jit_compile=False)
    with Watchdog(ranks, step_timeout=float(timeout)) as watchdog:
        watchdog.beat("compiling", at_least=60)
        step_of_all(tf.constant(1.0))
        for step in range(8):
            watchdog.beat("training", epoch=1, step=step)
            time.sleep(0.3)
            if step == 6 and ranks.rank == 1 and act != "none":
                misbehave()
            step_of_all(tf.constant(1.0))


signal.signal(signal.SIGTERM, lambda *_: None)  # as in the apps, which save first; horovodrun sends it
act, strategy, timeout = sys.argv[1:]
if act == "missing":
    tf_distribute.START_SECONDS = 3.0
errors.run(main, positional=True)
"""
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


def run_horovod(tmp_path, act):
    """Two ranks. How they ended, and the seconds from the misdeed to the launcher's end."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with launching.start(2, [script, act, "horovod", str(TIMEOUT)]) as job:
        job.wait(120)
        ended = time.time()
        result = job.finish(1)
    marker = re.search(r"MARKER (\S+)", result.stderr)
    seconds = ended - float(marker[1]) if marker else 0.0
    print(f"{act}: horovodrun came back after {seconds:.1f} s\n{result.stderr}")
    return result, seconds


@needs_horovod
@pytest.mark.parametrize(
    ("act", "message", "limit"),
    [
        ("kill", r"error: rank 1 \(.*, pid \d+\) is stopped or dead; rank 0 \(.*\), training, epoch 1", 10),
        ("stop", r"error: rank 0 .*has not moved for 3 s .*: rank 1 \(.*\) is stopped or dead", TIMEOUT + 10),
        ("sleep", r"error: rank 0 .*has not moved for 3 s|is stopped or dead; rank 0", TIMEOUT + 10),
    ],
)
def test_a_lost_rank_ends_horovodrun_in_time(tmp_path, act, message, limit):
    result, seconds = run_horovod(tmp_path, act)
    assert result.returncode != 0
    assert re.search(message, result.stderr_of(0))
    for rank in (0, 1):
        assert not re.search(r"^Traceback", result.stderr_of(rank), re.MULTILINE)  # horovodrun has its own
    assert seconds < limit
    assert (" in endless" in result.stderr_of(1)) == (act == "sleep")


@needs_horovod
def test_nothing_is_printed_of_ranks_that_finish(tmp_path):
    result, _ = run_horovod(tmp_path, "none")
    assert result.returncode == 0
    for rank in (0, 1):
        assert not re.search(r"\brank\b|^(error|warning)", result.stderr_of(rank), re.MULTILINE)


def run_workers(tmp_path, act, ranks):
    """The workers of these ranks out of two: exit code and stderr of each, and when each ended."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        cluster = {"worker": [f"127.0.0.1:{s.getsockname()[1]}" for s in (one, two)]}
    settings = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(launching.ROOT)}
    processes = []
    for rank in ranks:
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        command = [sys.executable, script, act, "multi_worker", "120"]
        environment = os.environ | settings | {"TF_CONFIG": config}
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        results = []
        for process in processes:
            stderr = process.communicate(timeout=150)[1]
            results.append((process.returncode, stderr, time.time()))
        return results
    finally:
        for process in processes:
            process.kill()


def test_a_killed_worker_ends_the_others_within_a_minute(tmp_path):
    (code, stderr, ended), (_, killed, _) = run_workers(tmp_path, "kill", (0, 1))
    seconds = ended - float(re.search(r"MARKER (\S+)", killed)[1])
    print(f"worker 0 ended after {seconds:.1f} s")
    assert code == 1 and seconds < 60
    assert re.search(r"^error: rank 1 \(.*\) is stopped or dead; rank 0 .* step 6: run", stderr, re.MULTILINE)
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"waiting for all workers, at most 3 s: .*Timeout \(0:00:03\)"),
        (1, "error: TF_CONFIG: worker 0 does not answer at 127.0.0.1"),
    ],
)
def test_a_worker_that_does_not_come(tmp_path, rank, message):
    ((code, stderr, _),) = run_workers(tmp_path, "missing", (rank,))
    assert code == 1
    assert re.search(message, stderr, re.DOTALL)
    assert "Traceback" not in stderr
