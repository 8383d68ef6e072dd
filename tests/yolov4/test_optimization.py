"""Tests optimization.py against Darknet's published schedule and momentum."""

import dataclasses

import keras
import numpy as np
import pytest

from tests.common.training.optimizer_steps import updates
from yolov4.config import get_config
from yolov4.optimization import BurnIn, make_optimizer, make_schedule

# 500,000 updates: the rate drops at 400,000 and 450,000.
CONFIG = dataclasses.replace(get_config("yolov4"), epochs=250)
STEPS_PER_EPOCH = 2000


def rate(schedule, number):
    """The first update has number 1, as in Darknet."""
    return float(schedule(number - 1))


# {update: rate}. In the burn-in, update n has 0.0013 * (n / 1000)**4.
PUBLISHED = {1: 0.0013e-12, 500: 0.0013 / 16, 1000: 0.0013, 399_999: 0.0013}
PUBLISHED |= {400_000: 0.00013, 449_999: 0.00013, 450_000: 0.000013}
COSINE = {500: 0.0013 / 2, 1000: 0.0013, 250_500: 0.0013 / 2, 500_000: 0.0, 600_000: 0.0}
RATES = [({}, PUBLISHED), ({"lr_schedule": "cosine", "burn_in_power": 1.0}, COSINE)]


@pytest.mark.parametrize(("changes", "rates"), RATES, ids=["published", "cosine"])
def test_yolov4_learning_rates_equal_hand_computed_values(changes, rates):
    schedule = make_schedule(dataclasses.replace(CONFIG, **changes), 64, STEPS_PER_EPOCH)
    for number, expected in rates.items():
        assert rate(schedule, number) == pytest.approx(expected, rel=1e-5, abs=1e-18), number


def test_learning_rate_is_proportional_to_the_batch_size():
    assert make_schedule(CONFIG, 16, STEPS_PER_EPOCH).peak == pytest.approx(0.0013 / 4)
    schedule = make_schedule(CONFIG, 256, STEPS_PER_EPOCH)
    assert schedule.peak == pytest.approx(0.0052)
    assert rate(schedule, 500) == pytest.approx(0.0052 / 16)


def test_burn_in_of_a_short_run_is_a_tenth_of_the_run():
    schedule = make_schedule(dataclasses.replace(CONFIG, epochs=2), 64, 50)
    assert schedule.burn_in == 10
    assert rate(schedule, 5) == pytest.approx(0.0013 / 16)
    assert rate(schedule, 10) == pytest.approx(0.0013)
    assert rate(schedule, 80) == pytest.approx(0.00013)


def test_yolov4_learning_rate_stays_the_same_over_all_accumulated_batches_of_one_update():
    """Four batches of 16 are one update."""
    plain = make_schedule(CONFIG, 64, 20)
    accumulated = make_schedule(CONFIG, 64, 80, accumulate_steps=4)
    for update in (0, 1, 30, 499, 500, 3999, 4000, 4999):
        rates = {float(accumulated(4 * update + i)) for i in range(4)}
        assert rates == {float(plain(update))}


def test_yolov4_learning_rates_of_a_run_of_one_step_are_finite_and_not_negative():
    config = dataclasses.replace(CONFIG, epochs=1)
    for changes in ({}, {"lr_schedule": "cosine"}, {"burn_in_steps": 0}, {"burn_in_power": 0.0}):
        schedule = make_schedule(dataclasses.replace(config, **changes), 64, 1, accumulate_steps=2)
        assert schedule.total == 1
        rates = [float(schedule(step)) for step in range(5)]
        assert np.isfinite(rates).all() and min(rates) >= 0
    assert float(make_schedule(config, 64, 3)(0)) > 0


@pytest.mark.parametrize("lr_schedule", ["steps", "cosine"])
def test_schedule_restored_from_its_keras_config_has_the_same_learning_rates(lr_schedule):
    schedule = make_schedule(dataclasses.replace(CONFIG, lr_schedule=lr_schedule), 64, 7, 3)
    restored, steps = BurnIn.from_config(schedule.get_config()), range(0, 1750, 50)
    assert [float(restored(step)) for step in steps] == [float(schedule(step)) for step in steps]


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_optimizer_has_the_momentum_of_the_recipe(precision):
    for model_name, momentum in [("yolov4", 0.949), ("yolov4-tiny", 0.9)]:
        optimizer = make_optimizer(get_config(model_name), 1.0, precision=precision)
        first, second = updates(optimizer, [[1.0, -2.0]] * 2)
        np.testing.assert_allclose(first, [-1.0, 2.0], rtol=1e-4)
        np.testing.assert_allclose(second - first, np.array([-1.0, 2.0]) * (1 + momentum), rtol=1e-4)


def test_optimizer_advances_the_schedule_once_per_update_of_accumulated_batches():
    """The burn-in has 10 updates: update 1 has 1/10 of the rate, update 2 has 2/10."""
    config = dataclasses.replace(CONFIG, burn_in_power=1.0, momentum=0.0, learning_rate=1.0, epochs=1)
    schedule = make_schedule(config, 64, 200, accumulate_steps=2)
    optimizer = make_optimizer(config, schedule, precision="float32", accumulate_steps=2)
    values = updates(optimizer, [[1.0, 0.0]] * 4)
    np.testing.assert_allclose([value[0] for value in values], [0.0, -0.1, -0.1, -0.3], atol=1e-6)


def test_yolov4_optimizer_has_the_type_momentum_and_clip_norm_of_the_config():
    config = get_config("yolov4-nano")
    assert config.optimizer == "adam"
    optimizer = make_optimizer(config, 1.0, precision="float32")
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert optimizer.beta_1 == config.momentum
    assert optimizer.global_clipnorm == config.clip_norm
    assert make_optimizer(CONFIG, 1.0, precision="float32").global_clipnorm is None
