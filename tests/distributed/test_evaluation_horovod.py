"""Two real ranks find what one process finds."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from common.distributed.ranks import Ranks
from tests.distributed import evaluate_on_ranks, exchange
from tests.distributed.evaluate_on_ranks import APPS, BATCH_SIZE, Evaluation, Outcome

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 300

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


def horovodrun(count: int, *command: str) -> None:
    """Runs a Python script on so many ranks of this machine; nothing of it outlives this call."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    process = subprocess.Popen(
        [launcher, "--gloo", "-np", str(count), sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said


@pytest.fixture(scope="module")
def ranks(drawn, tmp_path_factory):
    """The outcomes of each of two ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    horovodrun(2, evaluate_on_ranks.__file__, str(drawn), str(directory))
    written = [exchange.read(directory / f"{rank}.msgpack") for rank in (0, 1)]
    return [{name: Outcome(*values) for name, values in outcomes.items()} for outcomes in written]


@pytest.fixture(scope="module", params=APPS)
def alone(request, drawn):
    """The app's name, and its outcomes on one rank with several batch sizes."""
    app = Evaluation(request.param, str(drawn))
    return request.param, [app.run(Ranks(), batch_size) for batch_size in (1, BATCH_SIZE, 12)]


def assert_same_detections(found, other):
    """To 1e-5 of the image's sides: the same boxes with the same scores."""
    assert sorted(found) == sorted(other)
    for image_id, (boxes, scores, classes) in found.items():
        np.testing.assert_array_equal(classes, other[image_id][2])
        np.testing.assert_allclose(boxes, other[image_id][0], atol=1e-5, rtol=0)
        np.testing.assert_allclose(scores, other[image_id][1], atol=1e-5, rtol=0)


def test_two_ranks_detect_what_one_detects(ranks, alone):
    name, by_one = alone
    first, second = (outcomes[name] for outcomes in ranks)
    assert len(first.found) == len(second.found) == 6 and not first.found.keys() & second.found.keys()
    together = first.found | second.found
    assert sum((classes >= 0).sum() for _, _, classes in together.values()) > 100
    assert len({score for _, scores, _ in together.values() for score in scores.round(3)}) > 20
    for outcome in by_one:
        assert_same_detections(together, outcome.found)


def test_two_ranks_end_with_the_numbers_of_one(ranks, alone):
    name, by_one = alone
    first, second = (outcomes[name] for outcomes in ranks)
    assert (first.metrics, first.results) == (second.metrics, second.results)
    assert len({result["image_id"] for result in first.results}) == 12
    for outcome in by_one:
        assert [r["image_id"] for r in first.results] == [r["image_id"] for r in outcome.results]
        for key, value in outcome.metrics.items():
            if key != "per_class":
                assert first.metrics[key] == pytest.approx(value, abs=1e-4), key


def test_a_problem_of_one_rank_ends_both(ranks, alone):
    name, _ = alone
    first, second = (outcomes[f"{name}, rank 1 broken"] for outcomes in ranks)
    assert second.problem.startswith("the network's output for image ")
    assert first.problem == f"rank 1: {second.problem}"
