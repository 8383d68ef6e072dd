"""Tests the moving averages of the weights against a recurrence in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.layers import moving_statistics
from common.training.ema import AveragedWeights
from tests.common.thread_ranks import run_on_ranks


def small_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def values(model):
    return [weight.numpy() for weight in model.weights]


def test_ema_weights_equal_the_recurrence_in_numpy():
    model, decay = small_model(), 0.5
    averaged = AveragedWeights(model, decay)
    update = tf.function(averaged.update)
    start = expected = [weight.astype(np.float64) for weight in values(model)]
    for n in range(12):
        for weight in model.weights:
            weight.assign(weight + tf.random.normal(weight.shape, seed=n))
        update()
        d = min(decay, (1 + n) / (10 + n))
        expected = [d * a + (1 - d) * w for a, w in zip(expected, values(model), strict=True)]
    averaged.update(moved=tf.constant(False))  # a step that moved no weight does not change averages
    with averaged.swapped_in():
        for average, reference, weight in zip(values(model), expected, model.weights, strict=True):
            np.testing.assert_allclose(average, reference, rtol=2e-5, atol=1e-6, err_msg=weight.path)
    assert min(np.abs(a - b).max() for a, b in zip(start, expected, strict=True)) > 1e-4


def test_ema_weights_of_a_mixed_float16_model_are_float32():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = small_model()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    averaged = AveragedWeights(model, 0.9998)
    start = model.weights[0].numpy()
    model.weights[0].assign(start + 1e-5)  # float16 would lose this
    averaged.update()
    with averaged.swapped_in():  # the first update moves an average by 9 / 10
        np.testing.assert_allclose(model.weights[0].numpy() - start, 0.9e-5, atol=2e-7)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_batch_norm_statistics_are_averaged_over_the_ranks_while_ema_weights_are_swapped_in(decay):
    def assign_random(model, rank, seed):
        """Only the moving statistics differ between the ranks."""
        for index, weight in enumerate(model.weights):
            seed_of_rank = 100 * rank if "moving" in weight.path else 0
            random = np.random.default_rng(seed + index + seed_of_rank)
            weight.assign(random.uniform(0.5, 2.0, weight.shape))

    def work(ranks):
        model = small_model()
        assign_random(model, ranks.rank, seed=0)
        averaged = AveragedWeights(model, decay)
        assign_random(model, ranks.rank, seed=50)
        averaged.update()
        before = values(model)
        averages = [v.numpy() for v in averaged.averages_of([w.value for w in model.weights])]
        with pytest.raises(RuntimeError, match="evaluation"), averaged.swapped_in(ranks):
            inside = values(model)
            raise RuntimeError("evaluation failed")
        for weight, old in zip(values(model), before, strict=True):
            np.testing.assert_array_equal(weight, old)
        return averages or before, inside

    results = run_on_ranks(2, work)
    paths = [weight.path for weight in small_model().weights]
    averages, swapped_in = (zip(*values, strict=True) for values in zip(*results, strict=True))
    for path, (a, b), (first, second) in zip(paths, averages, swapped_in, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, (a.astype(np.float64) + b) / 2, rtol=1e-6, err_msg=path)
        assert np.array_equal(a, b) != ("moving" in path)


def test_ema_values_are_returned_in_the_order_of_the_requested_variables():
    model = small_model()
    averaged = AveragedWeights(model, 0.9)
    assert len(averaged.variables) == len(model.weights) + 1
    for index, weight in enumerate(model.weights):
        weight.assign(tf.fill(weight.shape, float(index)))
    averaged.update()
    mean, variance = moving_statistics(model)
    _, average_of_mean = averaged.averages_of([variance, mean])
    assert average_of_mean is averaged.averages_of([mean, variance])[0]
    index = next(i for i, weight in enumerate(model.weights) if weight.value is mean)
    np.testing.assert_allclose(average_of_mean, 0.9 * index)


def test_ema_values_are_an_empty_list_if_the_ema_decay_is_0():
    model = small_model()
    assert AveragedWeights(model, 0.0).averages_of(moving_statistics(model)) == []
