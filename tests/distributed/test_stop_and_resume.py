import re
import shutil
import signal
import time

import pytest

from tests.distributed import launching
from tests.small_apps import training_flags
from tests.soak import soak_kills

RUNS = [
    ("efficientdet", 1, ("--accumulate_steps=3", "--eval_every=1")),
    ("yolov4", 2, ()),
]  # `make soak` runs all pairs of app and number of ranks


@pytest.mark.slow
@pytest.mark.timeout(2 * soak_kills.HANG)
@pytest.mark.parametrize(("app", "ranks", "flags"), RUNS)
def test_run_killed_and_then_stopped_equals_the_uninterrupted_run_bit_for_bit(app, ranks, flags, tmp_path):
    """`make soak` also kills the run that resumed from a stop."""
    options = {"directory": tmp_path, "seed": ranks, "flags": flags, "stops_per_round": 2}
    (line,) = soak_kills.stop_and_resume(app, ranks, rounds=1, **options)
    assert re.search(r"SIGKILL to rank .*; SIG(TERM|INT) to rank .*: bit-equal", line)


def words_of(strategy, data, output_dir):
    flags = training_flags("efficientdet", data, output_dir, strategy, batch_size=2)
    flags += ["--epochs=2", "--steps_per_epoch=4", "--save_every=2", "--ema_decay=0.9"]
    return [launching.ROOT / "efficientdet/train.py", *flags]


@pytest.mark.slow
@pytest.mark.timeout(2 * soak_kills.HANG)
def test_mirrored_run_continued_within_an_epoch_equals_the_uninterrupted_run_bit_for_bit(drawn, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    launching.run_two_replicas("mirrored", words_of("mirrored", drawn, unbroken), timeout=soak_kills.HANG)
    shutil.copytree(unbroken, broken)
    shutil.rmtree(broken / "checkpoints/00000008")  # as if the run had been killed after step 6
    words = words_of("mirrored", drawn, broken)
    (result,) = launching.run_two_replicas("mirrored", words, timeout=soak_kills.HANG)
    assert "(step 6)" in result.stderr
    assert soak_kills.final_state(broken) == soak_kills.final_state(unbroken)


@pytest.mark.slow
@pytest.mark.timeout(2 * soak_kills.HANG)
def test_multi_worker_run_whose_second_worker_got_sigterm_continues_bit_for_bit(drawn, tmp_path):
    """All workers save and exit with code 75."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    words = words_of("multi_worker", drawn, unbroken)
    launching.run_two_replicas("multi_worker", words, timeout=soak_kills.HANG)
    words = words_of("multi_worker", drawn, broken)
    with launching.start_workers(words) as jobs:
        while not soak_kills.saved_steps(broken) and jobs[0].poll() is None:
            time.sleep(0.001)
        jobs[1].send_signal(signal.SIGTERM)
        results = [job.finish(soak_kills.HANG) for job in jobs]
    assert [result.returncode for result in results] == [75, 75], results
    assert "saved after step" in results[0].stderr
    stopped = soak_kills.saved_steps(broken)[-1]
    assert 2 <= stopped < 8
    (result, _) = launching.run_two_replicas("multi_worker", words, timeout=soak_kills.HANG)
    assert f"(step {stopped})" in result.stderr
    assert soak_kills.final_state(broken) == soak_kills.final_state(unbroken)
