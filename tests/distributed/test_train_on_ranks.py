"""Each batch is the whole data set, so the order of the images does not matter.

Batch norms are frozen, because their statistics would differ between ranks.
"""

import dataclasses
import shutil

import numpy as np
import pytest

from common.errors import UserError
from tests.common.training.small_model import rows_of, weights_of
from tests.distributed import launching
from tests.small_apps import IMAGES, TINY, parsed, training_flags

TIMEOUT = 300
EPOCHS, STEPS = 2, 4
PLAIN = {
    "efficientdet": "augmentation=none,flip_prob=0,warmup_epochs=0,learning_rate=0.6",
    "yolov4": "jitter=0,flip_prob=0,hue=0,saturation=1,exposure=1,mosaic_prob=0,burn_in_steps=0,"
    "learning_rate=0.2",
}


@pytest.fixture(scope="module", params=["efficientdet", "yolov4"])
def app(request):
    return request.param


@pytest.fixture(scope="module")
def flags(app, drawn):
    """Gives flags(output_dir, strategy, replicas)."""

    def of(output_dir, strategy, replicas):
        plain = [f"--hparams={TINY[app]},{PLAIN[app]}", r"--freeze=\bbn", "--ema_decay=0.9"]
        words = training_flags(app, drawn, output_dir, strategy, IMAGES // replicas)
        return [*words, *plain, f"--epochs={EPOCHS}", f"--steps_per_epoch={STEPS}"]

    return of


@pytest.fixture(scope="module")
def alone(app, flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    module, a = parsed(app, *flags(run, "none", 1))
    module.train(a)
    return run


def train_by_two(app, flags, run, strategy):
    words = [launching.ROOT / app / "train.py", *flags(run, strategy, 2)]
    launching.run_two_replicas(strategy, words, timeout=TIMEOUT)
    return run


@pytest.fixture(scope="module")
def by_two(app, flags, tmp_path_factory):
    return train_by_two(app, flags, tmp_path_factory.mktemp("by-two") / "run", "horovod")


def assert_same_training(run, alone):
    losses, expected_losses = (
        [float(row["loss"]) for row in rows_of(directory)] for directory in (run, alone)
    )
    assert expected_losses[-1] < 0.97 * expected_losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for row, other in zip(rows_of(run), rows_of(alone), strict=True):
        for name in ("epoch", "step", "learning_rate", "boxes_dropped", "boxes_over_limit"):
            assert row[name] == other[name]
    expected, weights = (weights_of(directory / "last.weights.h5") for directory in (alone, run))
    assert expected.keys() == weights.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_two_horovod_ranks_train_like_one_process_with_twice_the_batch(by_two, alone):
    assert_same_training(by_two, alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_two_tf_distribute_replicas_train_like_one_with_twice_the_batch(
    app, flags, alone, tmp_path, strategy
):
    assert_same_training(train_by_two(app, flags, tmp_path / "run", strategy), alone)


@pytest.mark.slow
def test_run_resumes_with_fewer_and_with_more_ranks_from_its_last_whole_epoch(
    app, by_two, flags, tmp_path, capsys
):
    run = shutil.copytree(by_two, tmp_path / "run")
    module, a = parsed(app, *flags(run, "none", 2))
    with pytest.raises(UserError, match="holds another run: seed was 0 and is now 1"):
        module.train(dataclasses.replace(a, seed=1))
    module.train(dataclasses.replace(a, epochs=EPOCHS + 1, steps_per_epoch=None))
    log = capsys.readouterr().err
    # The single rank has two steps in an epoch.
    assert f"resumed after epoch {EPOCHS} (step {2 * EPOCHS})" in log
    assert "changed: num_ranks, num_replicas, steps_per_epoch; the run continues from an epoch's end" in log
    assert f" x {IMAGES // 2} images per update" in log
    words = [launching.ROOT / app / "train.py", *flags(run, "horovod", 2), f"--epochs={EPOCHS + 2}"]
    (result,) = launching.run_two_replicas("horovod", words, timeout=TIMEOUT)
    assert f"resumed after epoch {EPOCHS + 1} (step {STEPS * (EPOCHS + 1)})" in result.stderr
    assert f" x {IMAGES} images per update" in result.stderr
    steps = [STEPS, 2 * STEPS, 2 * (EPOCHS + 1), STEPS * (EPOCHS + 2)]
    rows = rows_of(run)
    assert [(int(row["epoch"]), int(row["step"])) for row in rows] == list(enumerate(steps, 1))
    assert all(np.isfinite(float(row["loss"])) for row in rows)  # test_checkpoints.py compares all variables
