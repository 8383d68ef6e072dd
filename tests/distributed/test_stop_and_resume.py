import pytest

from tests.soak import soak_kills

RUNS = [
    ("efficientdet", 1, ("--accumulate_steps=3", "--eval_every=1")),
    ("yolov4", 2, ()),
]  # `make soak` runs all pairs of app and number of ranks


@pytest.mark.slow
@pytest.mark.timeout(2 * soak_kills.HANG)
@pytest.mark.parametrize(("app", "ranks", "flags"), RUNS)
def test_run_stopped_three_times_equals_the_uninterrupted_run_bit_for_bit(app, ranks, flags, tmp_path):
    (line,) = soak_kills.stop_and_resume(app, ranks, rounds=1, directory=tmp_path, seed=ranks, flags=flags)
    assert line.count("SIGKILL to rank") == 2
    assert "bit-equal" in line
