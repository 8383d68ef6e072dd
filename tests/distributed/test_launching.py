"""Two real processes under horovodrun: what HorovodRanks promises; launching.py leaves nothing behind."""

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from common.distributed import ranks
from common.errors import UserError
from tests.distributed import launching, ranks_at_work

SCRIPT = ranks_at_work.__file__


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> launching.Result:
    return launching.launch(2, [SCRIPT], timeout=180, cwd=tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def facts(result) -> list[dict]:
    said = [result.stdout_of(rank) for rank in (0, 1)]
    assert all(said), result.stderr
    return [json.loads(text) for text in said]


def test_each_rank_knows_its_place(facts):
    for rank, fact in enumerate(facts):
        place = [fact[name] for name in ("strategy", "rank", "local_rank", "local_replicas")]
        assert place == ["horovod", rank, rank, [rank]]
        assert fact["world_size"] == fact["num_replicas"] == 2


def test_scalars_and_gradients_are_averaged(facts):
    third = np.float32(1 / 3)
    for fact in facts:
        assert fact["mean"] == {"loss": pytest.approx(third / 2, rel=1e-7), "a_count": 0.5}
        np.testing.assert_allclose(fact["average"][0], np.full((2, 3), third * 2.5), rtol=1e-7)
        np.testing.assert_allclose(fact["average"][1], [0.5, -0.5, 1e-3], rtol=1e-7)


def test_compressed_gradients_come_back_as_float32_with_the_precision_of_float16(facts):
    for fact in facts:
        assert fact["dtypes"] == ["float32", "float32"]
        for half, full in zip(fact["average_fp16"], fact["average"], strict=True):
            np.testing.assert_allclose(half, full, rtol=2**-10)
        assert fact["average_fp16"][0] != fact["average"][0]  # it did travel as float16
        assert np.float16(fact["average_fp16"][0][0][0]) == fact["average_fp16"][0][0][0]


def test_variables_get_the_values_of_rank_0(facts):
    first, second = facts
    assert len(first["variables_before"]) > 10
    assert first["variables_before"] != second["variables_before"]
    assert first["variables_before"] == first["variables_after"] == second["variables_after"]
    assert 1 in first["variables_after"] and 2 in second["variables_before"]  # the optimizer's counter


def test_means_over_ranks_leave_the_variables_alone(facts):
    for rank, fact in enumerate(facts):
        assert fact["means"] == [[0.5, 2.0], 5.0]
        assert fact["statistics"] == [[rank, 2.0], 10.0 * rank]
        assert fact["means_of_nothing"] == []


def test_objects_of_other_types_and_sizes_on_each_rank(facts):
    for fact in facts:
        assert fact["broadcast_object"] == {"from": 0, "b": [None, 1.5]}
        assert fact["gather"] == [None, {"rank": 1, "blue": "\N{WHALE}"}]
        digests = [other["own_large"] for other in facts]
        assert fact["large"] == [[ranks_at_work.LARGE + rank, digests[rank]] for rank in (0, 1)]
    assert digests[0] == hashlib.sha256(np.random.default_rng(0).bytes(ranks_at_work.LARGE)).hexdigest()


def test_the_first_of_a_host_is_done_before_the_others_begin(facts):
    assert [fact["first_on_host"] for fact in facts] == [[], ["trace0"]]


def test_a_problem_of_one_rank_ends_all_with_one_line(result, facts):
    assert result.returncode == 1
    said_by_both = result.stderr_of(0) + result.stderr_of(1)
    assert not re.search(r"^Traceback", said_by_both, re.MULTILINE)  # horovodrun has one of its own
    lines = re.findall(r"^.*error: .*$", result.stderr, re.MULTILINE)
    assert lines == ["[1]<stderr>:error: --batch_size=0 is none: give at least 1"]
    # Both exit with 1. Whoever does so first makes horovodrun end the other, perhaps before it has.
    codes = [result.exit_code_of(rank) for rank in (0, 1)]
    assert 1 in codes
    assert set(codes) <= {1, 128 + signal.SIGTERM}


def test_without_a_launcher_a_rank_is_alone(tmp_path):
    env = os.environ | {"PYTHONPATH": str(launching.ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fact = json.loads(done.stdout)
    assert (fact["rank"], fact["world_size"], fact["local_replicas"]) == (0, 1, [0])
    assert fact["mean"]["a_count"] == 0.0 and fact["gather"] == [None]
    assert fact["variables_after"] == fact["variables_before"]


def test_without_horovod_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with pytest.raises(UserError, match=r"^--strategy=horovod needs Horovod, .*run `make horovod`$"):
        ranks.start("horovod")


STUBBORN = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whatever the launcher does
signal.signal(signal.SIGUSR1, lambda *_: (child.kill(), os._exit(75)))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def stubborn(tmp_path) -> pathlib.Path:
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    return path


def test_ranks_can_be_signalled_and_their_codes_read(stubborn):
    with launching.start(2, [stubborn]) as job:
        job.wait_for("ready", times=2)
        pids = launching.rank_pids(job)
        assert list(pids) == [0, 1]
        for rank, pid in pids.items():  # the ranks themselves, neither a helper nor a child of theirs
            assert psutil.Process(pid).cmdline()[1:] == [str(stubborn)]
            assert psutil.Process(pid).environ()["HOROVOD_RANK"] == str(rank)
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        result = job.finish(timeout=60)
    assert result.returncode == 1  # horovodrun's own
    assert {result.exit_code_of(rank) for rank in (0, 1)} <= {75, 128 + signal.SIGKILL, 128 + signal.SIGTERM}
    assert 75 in (result.exit_code_of(0), result.exit_code_of(1))


def test_nothing_outlives_a_job_that_takes_too_long(stubborn):
    with launching.start(2, [stubborn]) as job:
        job.wait_for("ready", times=2)
        members = launching._processes(job)
        assert len(members) >= 1 + 2 + 2 + 2  # horovodrun, its helpers, ranks, their children
        with pytest.raises(AssertionError, match=r"not done after 0\.1 s"):
            job.finish(timeout=0.1)
    assert not any(process.is_running() and process.status() != "zombie" for process in members)
