import dataclasses
import math

import keras
import numpy as np
import pytest

from efficientdet.config import get_config
from efficientdet.optimization import Warmup, make_optimizer, make_schedule, num_epochs
from tests.common.training.optimizer_steps import updates

CONFIG = get_config("efficientdet-d0")
RETINANET = get_config("retinanet-rn50fpn")


def test_efficientdet_schedule_has_the_published_learning_rates():
    schedule = make_schedule(CONFIG, effective_batch=128, steps_per_epoch=100)
    rates = {0: 0.016, 50: (0.016 + 0.16) / 2, 100: 0.16, 100 + 29900 // 2: 0.08, 30000: 0, 99999: 0}
    for step, expected in rates.items():
        assert float(schedule(step)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("warmup_epochs, learning_rate", [(1.0, 0.08), (3.0, 0.0008), (0.0, 0.08)])
def test_learning_rates_are_finite_with_a_warmup_of_all_or_no_steps(warmup_epochs, learning_rate):
    config = dataclasses.replace(CONFIG, epochs=1, warmup_epochs=warmup_epochs, learning_rate=learning_rate)
    schedule = make_schedule(config, 64, 10)
    assert schedule.warmup_steps == 10 * min(warmup_epochs, 1)
    rates = [float(schedule(step)) for step in range(12)]
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)
    assert rates[0] == pytest.approx(min(0.008 if warmup_epochs else 0.08, learning_rate))


def odtk_rate(iteration: int) -> float:
    """Returns the learning rate of odtk/train.py (`schedule`) with the defaults of odtk/main.py."""
    if iteration <= 1000:
        return 0.01 * (0.9 * iteration / 1000 + 0.1)
    return 0.01 * 0.1 ** len([m for m in (60_000, 80_000) if m <= iteration])


@pytest.mark.parametrize("batch, accumulate", [(16, 1), (8, 1), (64, 1), (64, 4)])
def test_retinanet_schedule_has_odtks_rates_scaled_to_the_batch(batch, accumulate):
    steps_per_epoch = 1000 * 16 * accumulate // batch
    assert num_epochs(RETINANET, batch, steps_per_epoch, accumulate) == 90
    schedule = make_schedule(dataclasses.replace(RETINANET, epochs=90), batch, steps_per_epoch)
    for iteration in (0, 500, 1004, 59_996, 60_000, 79_996, 80_000, 89_996):
        step = iteration * 16 * accumulate // batch
        assert float(schedule(step)) == pytest.approx(odtk_rate(iteration) * batch / 16, rel=1e-5), iteration


def test_shorter_run_scales_warmup_and_milestones_of_the_learning_rate():
    schedule = make_schedule(dataclasses.replace(RETINANET, epochs=9), 16, 1000)
    for iteration in (0, 500, 1000, 59_990, 60_000, 79_990, 80_000):
        assert float(schedule(iteration // 10)) == pytest.approx(odtk_rate(iteration), rel=1e-5)


def test_run_of_fewer_iterations_than_an_epoch_has_one_epoch():
    config = dataclasses.replace(RETINANET, iterations=10, milestones=(6, 8), warmup_iterations=0)
    assert num_epochs(config, 16, 1000) == 1
    assert math.isfinite(float(make_schedule(config, 16, 1000)(999)))


@pytest.mark.parametrize("config", [CONFIG, RETINANET], ids=lambda config: config.model_name)
def test_schedule_restored_from_its_keras_config_has_the_same_learning_rates(config):
    schedule = make_schedule(config, 16, 7)
    restored = Warmup.from_config(schedule.get_config())
    steps = range(0, 90_000, 9000)
    assert [float(restored(step)) for step in steps] == [float(schedule(step)) for step in steps]


def test_efficientdet_optimizer_is_sgd_with_momentum_or_adam():
    optimizer = make_optimizer(dataclasses.replace(CONFIG, momentum=0.7), 0.1, precision="float32")
    assert isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum == 0.7
    adam = make_optimizer(dataclasses.replace(CONFIG, optimizer="adam"), 0.1, precision="float32")
    assert isinstance(adam, keras.optimizers.Adam) and adam.beta_1 == 0.9


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_global_norm_of_unscaled_gradients_is_clipped(precision):
    config = dataclasses.replace(CONFIG, clip_norm=10.0, momentum=0.0)
    for gradient, expected in (([300.0, 400.0], [-6, -8]), ([3.0, 4.0], [-3, -4])):
        (after,) = updates(make_optimizer(config, 1.0, precision=precision), [gradient])
        np.testing.assert_allclose(after, expected, rtol=1e-4)
