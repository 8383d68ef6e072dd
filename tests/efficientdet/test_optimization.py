"""The learning rate at chosen steps, clipping, accumulation and loss scaling, against hand arithmetic."""

import dataclasses
import math

import keras
import numpy as np
import pytest

from efficientdet.config import get_config
from efficientdet.optimization import Warmup, make_optimizer, make_schedule, num_epochs

CONFIG = get_config("efficientdet-d0")
RETINANET = get_config("retinanet-rn50fpn")


def test_published_recipe_at_five_points():
    """Batch 128 doubles the rate of batch 64: 0.016 at first, 0.16 after one epoch, then a cosine to 0."""
    schedule = make_schedule(CONFIG, effective_batch=128, steps_per_epoch=100)
    for step, expected in [
        (0, 0.016),
        (50, (0.016 + 0.16) / 2),
        (100, 0.16),
        (100 + 29900 // 2, 0.08),
        (30000, 0.0),
    ]:
        assert float(schedule(step)) == pytest.approx(expected, abs=1e-7)


def test_no_jump_where_the_warm_up_ends_and_none_after_the_end():
    schedule = Warmup(peak=1.0, start=0.1, warmup_steps=100, total_steps=1000)
    assert abs(float(schedule(99)) - float(schedule(100))) < 0.02
    assert float(schedule(5000)) == 0.0


def test_one_epoch_run_is_finite():
    """automl divides by zero here: its warm-up is the whole run."""
    schedule = make_schedule(dataclasses.replace(CONFIG, epochs=1), 64, 10)
    values = [float(schedule(step)) for step in range(12)]
    assert all(math.isfinite(v) and v >= 0 for v in values)


def test_schedule_survives_serialisation():
    schedule = make_schedule(CONFIG, 64, 7)
    again = Warmup.from_config(schedule.get_config())
    assert [float(again(s)) for s in range(0, 2100, 300)] == [float(schedule(s)) for s in range(0, 2100, 300)]


def odtk_rate(iteration: int) -> float:
    """odtk/train.py, schedule, with its defaults (odtk/main.py)."""
    if iteration <= 1000:
        return 0.01 * (0.9 * iteration / 1000 + 0.1)
    return 0.01 * 0.1 ** len([m for m in (60_000, 80_000) if m <= iteration])


def test_retinanet_has_odtks_rates():
    schedule = make_schedule(RETINANET, effective_batch=16, steps_per_epoch=1000)
    assert num_epochs(RETINANET, 16, 1000) == 90
    for iteration in (0, 500, 1000, 1001, 59_999, 60_000, 79_999, 80_000, 89_999):
        assert float(schedule(iteration)) == pytest.approx(odtk_rate(iteration), rel=1e-5), iteration


@pytest.mark.parametrize("batch, accumulate", [(8, 1), (64, 1), (64, 4)])
def test_iterations_are_of_the_reference_batch(batch, accumulate):
    """Four times the images an update: a quarter of the updates, at four times the rate."""
    steps_per_epoch = 1000 * 16 * accumulate // batch
    assert num_epochs(RETINANET, batch, steps_per_epoch, accumulate) == 90
    schedule = make_schedule(RETINANET, batch, steps_per_epoch, accumulate)
    for iteration in (500, 1004, 59_996, 60_000, 80_000):
        step = iteration * 16 * accumulate // batch
        assert float(schedule(step)) == pytest.approx(odtk_rate(iteration) * batch / 16, rel=1e-5)


def test_a_shorter_run_keeps_the_shares_of_its_warm_up_and_milestones():
    config = dataclasses.replace(RETINANET, epochs=9)
    schedule = make_schedule(config, 16, 1000)  # a tenth of the iterations
    for iteration in (0, 500, 1000, 59_990, 60_000, 79_990, 80_000):
        assert float(schedule(iteration // 10)) == pytest.approx(odtk_rate(iteration), rel=1e-5)


def test_a_run_has_one_epoch_at_least():
    config = dataclasses.replace(RETINANET, iterations=10, milestones=(6, 8), warmup_iterations=0)
    assert num_epochs(config, 16, 1000) == 1
    assert math.isfinite(float(make_schedule(config, 16, 1000)(999)))


def test_milestones_survive_serialisation():
    schedule = make_schedule(RETINANET, 16, 7)
    again = Warmup.from_config(schedule.get_config())
    steps = range(0, 90_000, 9000)
    assert [float(again(step)) for step in steps] == [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0, "iterations": 0, "milestones": ()}, "need epochs or iterations of at least 1"),
        ({"milestones": (80_000, 60_000)}, "in order"),
        ({"milestones": (60_000, 90_001)}, "from 1 to iterations"),
        ({"warmup_iterations": 90_001}, "need warmup_iterations <= iterations"),
        ({"lr_schedule": "steps"}, "one of cosine, milestones"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RETINANET, **fields)


def updates(optimizer, gradients):
    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer.build([variable])
    seen = []
    for gradient in gradients:
        optimizer.apply([optimizer.scale_loss(np.array(gradient, np.float32))], [variable])
        seen.append(np.array(variable))
    return seen


def test_global_norm_is_clipped():
    config = dataclasses.replace(CONFIG, clip_norm=10.0, momentum=0.0)
    (after,) = updates(make_optimizer(config, 1.0, precision="float32"), [[300.0, 400.0]])
    np.testing.assert_allclose(after, [-6.0, -8.0], rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_clipping_sees_unscaled_gradients(precision):
    config = dataclasses.replace(CONFIG, clip_norm=10.0, momentum=0.0)
    (after,) = updates(make_optimizer(config, 1.0, precision=precision), [[3.0, 4.0]])
    np.testing.assert_allclose(after, [-3.0, -4.0], rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_accumulated_batches_equal_their_mean(precision):
    config = dataclasses.replace(CONFIG, clip_norm=0.0, momentum=0.0)
    optimizer = make_optimizer(config, 1.0, precision=precision, accumulate_steps=2)
    seen = updates(optimizer, [[1.0, 0.0], [3.0, 2.0], [1.0, 1.0]])
    np.testing.assert_allclose(seen[0], [0.0, 0.0])
    np.testing.assert_allclose(seen[1], [-2.0, -1.0], rtol=1e-4)
    np.testing.assert_allclose(seen[2], seen[1])


def test_float16_overflow_skips_the_step_and_halves_the_scale():
    optimizer = make_optimizer(CONFIG, 1.0, precision="mixed_float16")
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer.build([variable])
    before = float(optimizer.dynamic_scale)
    optimizer.apply([np.array([np.inf], np.float32)], [variable])
    assert float(variable[0]) == 0.0
    assert float(optimizer.dynamic_scale) == before / 2
