import re
import time

import pytest

from common.distributed import tf_distribute
from tests.distributed import launching, watched_steps

SCRIPT = watched_steps.__file__
STEP_TIMEOUT = 120


def seconds_since_failure(stderr: str) -> float:
    """Returns the time since rank 1 stopped to take steps."""
    return time.time() - float(re.search(r"FAILURE (\S+)", stderr)[1])


DEAD = r"error: rank 1 \(.*, pid \d+\) is stopped or dead; rank 0 .*, training, epoch 1"
HANGS = "error: rank 0 .*made no progress for 3 s"
STOPPED = rf"{HANGS} .*: rank 1 \(.*\) is stopped or dead"
FAILURES = [
    pytest.param("kill", STEP_TIMEOUT, DEAD, id="killed"),
    pytest.param("stop", 3, STOPPED, id="stopped", marks=pytest.mark.slow),
    pytest.param("sleep", 3, f"{HANGS}|is stopped or dead; rank 0", id="hanging", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("act", "step_timeout", "message"), FAILURES)
def test_killed_or_stopped_or_hanging_rank_ends_horovodrun_within_a_minute(act, step_timeout, message):
    result = launching.launch(2, [SCRIPT, act, "horovod", str(step_timeout)], timeout=200)
    assert seconds_since_failure(result.stderr) < 60
    assert result.returncode != 0
    assert re.search(message, result.stderr_of(0))
    for rank in (0, 1):
        assert not re.search(r"^Traceback", result.stderr_of(rank), re.MULTILINE)
    assert (" in endless" in result.stderr_of(1)) == (act == "sleep")


def test_killed_worker_of_tf_distribute_ends_worker_0_within_half_a_minute():
    assert tf_distribute.HEARTBEAT_SECONDS <= 30
    with launching.start_workers([SCRIPT, "kill", "multi_worker", str(STEP_TIMEOUT)]) as (first, second):
        result = first.finish(200)
        seconds = seconds_since_failure(second.finish(200).stderr)
    assert result.returncode == 1 and seconds < 30
    message = r"^error: rank 1 \(.*\) is stopped or dead; rank 0 .* step [56]: run"
    assert re.search(message, result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr


def test_worker_0_ends_if_worker_1_does_not_start():
    with launching.start_workers([SCRIPT, "missing", "multi_worker", "120"], [0]) as (job,):
        result = job.finish(150)
    assert result.returncode == 1
    message = r"waiting for all workers, at most 2 s: .*Timeout \(0:00:02\)"
    assert re.search(message, result.stderr, re.DOTALL)
    assert "Traceback" not in result.stderr
