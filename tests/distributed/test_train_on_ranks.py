"""Each batch is the whole data set, so the order of the images does not matter.

Batch norms are frozen, because their statistics would differ between ranks.
"""

import dataclasses

import numpy as np
import pytest

from common.distributed.ranks import Hooks
from common.errors import UserError
from tests.common.training.small_model import rows_of
from tests.distributed import launching
from tests.distributed.small_apps import IMAGES, TINY, parsed, training_flags
from tests.fixtures.calculations import weights_of

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
        given = training_flags(app, drawn, output_dir, strategy, IMAGES // replicas)
        return [*given, *plain, f"--epochs={EPOCHS}", f"--steps_per_epoch={STEPS}"]

    return of


@pytest.fixture(scope="module")
def alone(app, flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    module, a = parsed(app, *flags(run, "none", 1))
    module.start(a)
    return run


def train_by_two(app, flags, run, strategy):
    words = [launching.ROOT / app / "train.py", *flags(run, strategy, 2)]
    launching.run_two_replicas(strategy, words, timeout=TIMEOUT)
    return run


@pytest.fixture(scope="module")
def by_two(app, flags, tmp_path_factory):
    return train_by_two(app, flags, tmp_path_factory.mktemp("by-two") / "run", "horovod")


def assert_same_training(run, alone):
    losses, wanted = ([float(row["loss"]) for row in rows_of(directory)] for directory in (run, alone))
    assert wanted[-1] < 0.97 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    for row, other in zip(rows_of(run), rows_of(alone), strict=True):
        for name in ("epoch", "step", "learning_rate", "boxes_dropped", "boxes_over_limit"):
            assert row[name] == other[name]
    expected, found = (weights_of(directory / "last.weights.h5") for directory in (alone, run))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_two_ranks_of_horovod_train_as_one_does_with_twice_the_batch(by_two, alone):
    assert_same_training(by_two, alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_two_replicas_of_tf_distribute_train_as_one_does(app, flags, alone, tmp_path, strategy):
    assert_same_training(train_by_two(app, flags, tmp_path / "run", strategy), alone)


@pytest.mark.slow
def test_only_an_elastic_run_goes_on_with_another_number_of_ranks(app, by_two, flags, capsys):
    module, a = parsed(app, *flags(by_two, "horovod", 2))
    with pytest.raises(UserError, match="num_replicas was 2 and is now 1"):
        module.start(a)
    a = dataclasses.replace(a, elastic=True, epochs=EPOCHS + 1, steps_per_epoch=None)
    capsys.readouterr()
    with pytest.raises(UserError, match=f"has {EPOCHS} of the {EPOCHS + 1} epochs that were trained"):
        module.train(a, Hooks(expected_epochs=EPOCHS + 1))
    said = capsys.readouterr().err
    # The single rank has two steps in an epoch.
    assert f"resumed after epoch {EPOCHS} (step {2 * EPOCHS})" in said
    assert "changed: num_ranks, num_replicas, steps_per_epoch" in said
    nothing_left = dataclasses.replace(a, epochs=EPOCHS)
    assert module.train(nothing_left, Hooks(expected_epochs=EPOCHS)) is None


def test_elastic_training_needs_horovod(app, flags, tmp_path):
    module, a = parsed(app, *flags(tmp_path / "run", "none", 2), "--elastic")
    with pytest.raises(UserError, match="--elastic works only with Horovod: add --strategy=horovod"):
        module.start(a)
