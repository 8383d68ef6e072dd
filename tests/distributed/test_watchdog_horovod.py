"""The watchdog under horovodrun: how long the launcher takes to come back when a rank is lost."""

import re
import time

import pytest

from tests.distributed import launching

TIMEOUT = 3.0  # seconds that a step may take here

WORKER = r"""
import os, signal, sys, time
import tensorflow as tf
from common import errors
from common.distributed.horovod import HorovodRanks
from common.training.watchdog import Watchdog


def endless():
    while True:
        time.sleep(0.1)


def misbehave():
    print("MARKER", time.time(), file=sys.stderr, flush=True)
    if act == "sleep":
        endless()
    os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)


signal.signal(signal.SIGTERM, lambda *_: None)  # as in the apps, which save first; horovodrun sends it
act, ranks = sys.argv[1], HorovodRanks()
step_of_all = tf.function(lambda x: ranks.mean({"x": x})["x"], jit_compile=False)
try:
    with Watchdog(ranks, step_timeout=float(sys.argv[2])) as watchdog:
        with watchdog.allow(60):
            step_of_all(tf.constant(1.0))
        for step in range(8):
            watchdog.beat("training", epoch=1, step=step)
            time.sleep(0.3)
            if step == 6 and ranks.rank == 1 and act != "none":
                misbehave()
            step_of_all(tf.constant(1.0))
except errors.UserError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(1)
"""


def run(tmp_path, act):
    """Runs two ranks. Returns how they ended, and the seconds from the misdeed to the launcher's end."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with launching.start(2, [script, act, str(TIMEOUT)]) as job:
        job.wait(120)
        ended = time.time()
        result = job.finish(1)
    marker = re.search(r"MARKER (\S+)", result.stderr)
    seconds = ended - float(marker[1]) if marker else 0.0
    print(f"{act}: horovodrun came back after {seconds:.1f} s\n{result.stderr}")
    return result, seconds


@pytest.mark.parametrize(
    ("act", "said", "limit"),
    [
        ("kill", "has died", 5 + 3),  # other tests share the cores: alone it takes 0.4 to 0.7 s
        ("stop", "is frozen, silent for", TIMEOUT + 5),
        ("sleep", "has not moved for ", TIMEOUT + 5),
    ],
)
def test_a_lost_rank_ends_horovodrun_in_time_and_is_named(tmp_path, act, said, limit):
    result, seconds = run(tmp_path, act)
    assert result.returncode != 0
    # Once; or twice, where the end of the frozen rank reaches the main thread as an error meanwhile.
    line = next(line for line in result.stderr_of(0).splitlines() if "error: rank 1 (" in line)
    assert said in line and "training, epoch 1, step " in line
    said_by_both = result.stderr_of(0) + result.stderr_of(1)
    assert not re.search(r"^Traceback", said_by_both, re.MULTILINE)  # horovodrun has one of its own
    assert seconds < limit
    assert (" in endless" in result.stderr_of(1)) == (act == "sleep")


def test_nothing_is_said_of_ranks_that_finish(tmp_path):
    result, _ = run(tmp_path, "none")
    assert result.returncode == 0
    for rank in (0, 1):
        assert not re.search(r"\brank\b|^(error|warning)", result.stderr_of(rank), re.MULTILINE)
