import keras
import numpy as np
import pytest
import tensorflow as tf

from common.layers import moving_statistics
from common.training import optimizers
from common.training.optimizers import AveragedWeights, FusedAdam, FusedSGD, make_optimizer
from tests.common.thread_ranks import together

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def test_options():
    plain = make_optimizer("sgd", 0.5, momentum=0.9, clip_norm=0.0, precision="float32")
    assert isinstance(plain, FusedSGD)
    assert (plain.momentum, plain.global_clipnorm, plain.gradient_accumulation_steps) == (0.9, None, None)
    options = {"clip_norm": 3.0, "precision": "mixed_float16", "accumulate_steps": 4}
    scaled = make_optimizer("adam", 0.5, momentum=0.8, **options)
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer) and scaled.initial_scale == 2**15
    inner = scaled.inner_optimizer
    assert isinstance(inner, FusedAdam)
    assert (inner.beta_1, inner.global_clipnorm, inner.gradient_accumulation_steps) == (0.8, 3.0, 4)


def test_the_last_learning_rate_counts_accumulated_batches():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2], [1.0, 0.5, 0.25, 0.125])
    options = {"momentum": 0.9, "clip_norm": 0.0, "accumulate_steps": 2}
    for precision in ("float32", "mixed_float16"):
        variable = keras.Variable([1.0])
        optimizer = make_optimizer("sgd", schedule, precision=precision, **options)
        optimizer.build([variable])
        assert optimizers.last_learning_rate(optimizer) == 1.0
        for expected in (1.0, 0.5, 0.25):
            optimizer.apply([tf.constant([1.0])], [variable])
            assert optimizers.last_learning_rate(optimizer) == expected


def make_step(optimizer, variables):
    return lambda gradients: optimizer.apply(gradients, variables)


OPTIMIZERS = [
    (FusedSGD, SGD, {"momentum": 0.9, "gradient_accumulation_steps": 3}),
    (FusedSGD, SGD, {}),
    (FusedAdam, Adam, {"beta_1": 0.8}),
    (FusedAdam, Adam, {"gradient_accumulation_steps": 3}),
    (FusedAdam, Adam, {"learning_rate": 0.1, "global_clipnorm": None}),
    (FusedSGD, SGD, {"momentum": 0.9, "global_clipnorm": None, "clipnorm": 1.0}),
    (FusedSGD, SGD, {"momentum": 0.9, "global_clipnorm": None, "clipvalue": 0.3}),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("fused", "reference", "options"), OPTIMIZERS)
def test_fused_optimizers_take_the_steps_of_keras(fused, reference, options, compiled):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    results = []
    for optimizer_class in (fused, reference):
        rng = np.random.default_rng(0)
        variables = [keras.Variable(rng.normal(size=shape).astype("f4")) for shape in [(30, 4), (7,), ()]]
        optimizer = optimizer_class(**({"learning_rate": schedule, "global_clipnorm": 3.0} | options))
        optimizer.build(variables)
        step = make_step(optimizer, variables)
        if compiled:
            step = tf.function(step)
        for _ in range(12):
            step([tf.constant(rng.normal(size=v.shape).astype("f4")) for v in variables])
        results.append([np.array(v) for v in (*variables, *optimizer.variables)])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert abs(results[0][0]).max() > 1


@pytest.mark.parametrize("fused", [FusedSGD, FusedAdam])
def test_a_constant_learning_rate_in_one_function_traced_twice(fused):
    variable = keras.Variable([1.0, 2.0])
    optimizer = fused(0.5, 0.9)
    optimizer.build([variable])
    step = tf.function(lambda gradient, twice: optimizer.apply([gradient], [variable]))
    for twice in (False, True):
        step(tf.constant([1.0, 1.0]), twice)
    assert int(optimizer.iterations) == 2
    assert np.all(np.array(variable) < [0.1, 1.1])


def test_a_norm_that_is_infinite_makes_nan_of_all_as_in_keras():
    results = []
    for optimizer_class in (FusedSGD, SGD):
        variables = [keras.Variable([1.0]), keras.Variable([1.0])]
        optimizer = optimizer_class(0.1, momentum=0.9, global_clipnorm=1.0)
        optimizer.apply([tf.constant([1.0]), tf.constant([np.inf])], variables)
        results.append([np.array(v) for v in variables])
    np.testing.assert_array_equal(*results)
    assert np.isnan(results[0]).all()


# --- AveragedWeights ---


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
def test_the_first_average_is_one_part_in_ten_of_the_old_in_float32(precision):
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

    (paths, first, inside), (_, second, inside_second) = together(2, work)
    for path, a, b, got, got_second in zip(paths, first, second, inside, inside_second, strict=True):
        np.testing.assert_array_equal(got, got_second)
        np.testing.assert_allclose(got, (a.astype(np.float64) + b) / 2, rtol=1e-6, err_msg=path)
        assert np.array_equal(a, b) != ("moving" in path)


def test_averages_of_come_in_the_order_asked_for():
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
