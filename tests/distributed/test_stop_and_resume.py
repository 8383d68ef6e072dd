import h5py
import pytest
import tensorflow as tf

from tests.soak import soak_kills

FLAGS = {1: ("--accumulate_steps=3", "--eval_every=1"), 2: ()}


@pytest.mark.slow
@pytest.mark.parametrize(("app", "ranks"), [("efficientdet", 1), ("yolov4", 2)])  # `make soak` runs all pairs
def test_run_stopped_three_times_equals_the_unbroken_run_bit_for_bit(app, ranks, tmp_path):
    (line,) = soak_kills.stop_and_resume(
        app, ranks, rounds=1, directory=tmp_path, seed=ranks, flags=FLAGS[ranks]
    )
    assert line.count("SIGKILL to rank") == 2
    assert "bit-equal" in line


def test_comparison_of_runs_detects_a_difference_of_one_bit(tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0000001)):
        run = tmp_path / name
        (run / "checkpoints" / "00000002").mkdir(parents=True)
        tf.train.Checkpoint(v=tf.Variable(value)).write(str(run / "checkpoints" / "00000002" / "state"))
        (run / "checkpoints" / "00000002" / "manifest.json").write_text('{"serial": 1}')
        for file in ("last.weights.h5", "best.weights.h5"):
            h5py.File(run / file, "w").close()
        (run / "results.csv").write_text(f"epoch,images_per_second\n1,{value}\n")
    first, second = (soak_kills.final_state(tmp_path / name) for name in "ab")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == ["state:v/.ATTRIBUTES/VARIABLE_VALUE"]
