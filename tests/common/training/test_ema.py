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


def test_averages_equal_the_recurrence_in_numpy():
    model, decay = small_model(), 0.5
    averaged = AveragedWeights(model, decay)
    update = tf.function(averaged.update)
    expected = [w.astype(np.float64) for w in values(model)]
    start = expected
    for n in range(12):
        for weight in model.weights:
            weight.assign(weight + tf.random.normal(weight.shape, seed=n))
        update()
        d = min(decay, (1 + n) / (10 + n))
        expected = [d * a + (1 - d) * w for a, w in zip(expected, values(model), strict=True)]
    averaged.update(moved=tf.constant(False))  # a step that moved no weight does not change averages
    with averaged.swapped_in():
        for got, want, weight in zip(values(model), expected, model.weights, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=weight.path)
    moved = [np.abs(a - b).max() for a, b in zip(start, expected, strict=True)]
    assert min(moved) > 1e-4


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_first_update_moves_the_average_by_nine_tenths_in_float32(precision):
    keras.mixed_precision.set_global_policy(precision)
    try:
        model = small_model()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    averaged = AveragedWeights(model, 0.9998)
    start = model.weights[0].numpy()
    model.weights[0].assign(start + 1e-5)  # float16 would lose this
    averaged.update()
    with averaged.swapped_in():
        np.testing.assert_allclose(model.weights[0].numpy() - start, 0.9e-5, atol=2e-7)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_statistics_are_averaged_over_the_ranks_while_swapped_in(decay):
    def work(ranks):
        model = small_model()
        for number in (0, 50):
            for index, weight in enumerate(model.weights):
                of_rank = 100 * ranks.rank if "moving" in weight.path else 0
                random = np.random.default_rng(number + index + of_rank)
                weight.assign(random.uniform(0.5, 2.0, weight.shape))
            if number == 0:
                averaged = AveragedWeights(model, decay)
        averaged.update()
        own = values(model)
        averages = [v.numpy() for v in averaged.averages_of([w.value for w in model.weights])]
        with pytest.raises(RuntimeError, match="evaluation"), averaged.swapped_in(ranks):
            inside = values(model)
            raise RuntimeError("evaluation failed")
        for after, before in zip(values(model), own, strict=True):
            np.testing.assert_array_equal(after, before)
        return [weight.path for weight in model.weights], averages or own, inside

    (paths, first, inside), (_, second, inside_second) = run_on_ranks(2, work)
    for path, a, b, got, got_second in zip(paths, first, second, inside, inside_second, strict=True):
        np.testing.assert_array_equal(got, got_second)
        np.testing.assert_allclose(got, (a.astype(np.float64) + b) / 2, rtol=1e-6, err_msg=path)
        assert np.array_equal(a, b) != ("moving" in path)


def test_averages_of_returns_averages_in_the_order_of_its_argument():
    model = small_model()
    averaged = AveragedWeights(model, 0.9)
    assert len(averaged.variables) == len(model.weights) + 1
    for index, weight in enumerate(model.weights):
        weight.assign(tf.fill(weight.shape, float(index)))
    averaged.update()
    mean, variance = moving_statistics(model)
    swapped = averaged.averages_of([variance, mean])
    assert [id(v) for v in swapped] == [id(v) for v in reversed(averaged.averages_of([mean, variance]))]
    place = next(i for i, weight in enumerate(model.weights) if weight.value is mean)
    np.testing.assert_allclose(swapped[1], 0.9 * place)
    assert AveragedWeights(model, 0.0).averages_of([mean]) == []
