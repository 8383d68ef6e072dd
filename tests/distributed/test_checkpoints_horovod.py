"""Two real ranks go on from one checkpoint, each where it was."""

import importlib.util

import numpy as np
import pytest

from tests.distributed import checkpoint_on_ranks, launching

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


def launch(directory, what):
    """What each rank ends with, name -> array."""
    done = launching.launch(2, [checkpoint_on_ranks.__file__, directory, what], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [dict(np.load(directory / f"{what}_{rank}.npz")) for rank in (0, 1)]


def test_a_new_launch_goes_on_bit_for_bit_on_each_rank(tmp_path):
    unbroken = launch(tmp_path, "save")
    assert len(list((tmp_path / "run" / "checkpoints" / "00000003").glob("rank_?.index"))) == 2
    resumed = launch(tmp_path, "resume")
    for was, now in zip(unbroken, resumed, strict=True):
        assert was.keys() == now.keys()
        for name, value in was.items():
            np.testing.assert_array_equal(now[name], value, err_msg=name)

    first, second = unbroken
    for name, value in first.items():
        if name.startswith(("weight", "slot", "evaluated")):  # the same on all ranks, but for the statistics
            own = "moving" in name
            assert np.array_equal(value, second[name]) != own, name
        elif name.startswith("image"):
            assert not np.array_equal(value, second[name])
    for kept in unbroken:  # an evaluation gives each rank its own statistics back
        weights = [value for name, value in kept.items() if name.startswith("weight")]
        for index, weight in enumerate(weights):
            np.testing.assert_array_equal(kept[f"after {index}"], weight)
