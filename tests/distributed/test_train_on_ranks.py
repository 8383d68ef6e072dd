"""Compares runs of two replicas with a run of one process that has the same global batch.

Each batch is the complete data set, so the order of the images does not matter. Batch norms are frozen,
because their statistics would differ between ranks.
"""

import dataclasses
import shutil

import numpy as np
import pytest

from tests.common.training.small_model import rows_of, weights_of
from tests.distributed import launching
from tests.small_apps import IMAGES, TINY, parsed, training_flags

pytestmark = pytest.mark.slow
TIMEOUT = 300
EPOCHS, STEPS = 2, 4
PLAIN = {
    "efficientdet": "augmentation=none,flip_prob=0,warmup_epochs=0,learning_rate=0.6",
    "yolov4": "jitter=0,flip_prob=0,hue=0,saturation=1,exposure=1,mosaic_prob=0,burn_in_steps=0,"
    "class_prior=false,learning_rate=0.2",  # without the prior, the loss falls within a few steps
}


@pytest.fixture(scope="module")
def app(request):
    return request.param


@pytest.fixture(scope="module")
def flags(app, drawn):
    """A function flags(output_dir, strategy, replicas)."""

    def flags_of(output_dir, strategy, replicas):
        plain = [f"--hparams={TINY[app]},{PLAIN[app]}", r"--freeze=\bbn", "--ema_decay=0.9"]
        words = training_flags(app, drawn, output_dir, strategy, IMAGES // replicas)
        return [*words, *plain, f"--epochs={EPOCHS}", f"--steps_per_epoch={STEPS}"]

    return flags_of


@pytest.fixture(scope="module")
def single_run(app, flags, tmp_path_factory):
    """The directory of a run of one process."""
    run = tmp_path_factory.mktemp("single") / "run"
    module, a = parsed(app, *flags(run, "none", 1))
    module.train(a)
    return run


def train_on_two_replicas(app, flags, run, strategy):
    words = [launching.ROOT / app / "train.py", *flags(run, strategy, 2)]
    launching.run_two_replicas(strategy, words, timeout=TIMEOUT)
    return run


@pytest.fixture(scope="module")
def horovod_run(app, flags, tmp_path_factory):
    """The directory of a run of two ranks."""
    return train_on_two_replicas(app, flags, tmp_path_factory.mktemp("horovod") / "run", "horovod")


def assert_same_training(run, reference):
    rows, expected_rows = rows_of(run), rows_of(reference)
    losses, expected_losses = ([float(row["loss"]) for row in each] for each in (rows, expected_rows))
    assert expected_losses[-1] < 0.97 * expected_losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for name in ("epoch", "step", "learning_rate", "boxes_dropped", "boxes_over_limit"):
            assert row[name] == expected_row[name]
    weights, expected = (weights_of(directory / "last.weights.h5") for directory in (run, reference))
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-5, err_msg=name)


# EfficientDet's loss needs the positives of all replicas, YOLOv4's needs nothing of others. Otherwise, both
# apps call the same functions of common/distributed, which test_ranks.py compares for each strategy.
efficientdet = pytest.mark.parametrize("app", ["efficientdet"], indirect=True, scope="module")


@efficientdet
def test_two_horovod_ranks_train_like_one_process_with_twice_the_batch(horovod_run, single_run):
    assert_same_training(horovod_run, single_run)


@pytest.mark.parametrize(
    ("app", "strategy"),
    [("efficientdet", "mirrored"), ("yolov4", "multi_worker")],
    indirect=["app"],
    scope="module",
)
def test_two_tf_distribute_replicas_train_like_one_process_with_twice_the_batch(
    app, flags, single_run, tmp_path, strategy
):
    assert_same_training(train_on_two_replicas(app, flags, tmp_path / "run", strategy), single_run)


@efficientdet
def test_run_resumes_with_fewer_and_with_more_ranks_from_its_last_complete_epoch(
    app, horovod_run, flags, tmp_path, capsys
):
    run = shutil.copytree(horovod_run, tmp_path / "run")
    module, a = parsed(app, *flags(run, "none", 2))
    # The single rank has two steps in an epoch.
    module.train(dataclasses.replace(a, epochs=EPOCHS + 1, steps_per_epoch=None))
    log = capsys.readouterr().err
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
