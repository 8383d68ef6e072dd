"""Tests the fused optimizers against those of Keras."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.training import optimizers
from common.training.optimizers import FusedAdam, FusedSGD, apply_if, make_optimizer

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def test_make_optimizer_in_float32_without_options_returns_plain_sgd():
    optimizer = make_optimizer("sgd", 0.5, momentum=0.9, clip_norm=0.0, precision="float32")
    assert isinstance(optimizer, FusedSGD)
    assert (optimizer.momentum, optimizer.global_clipnorm) == (0.9, None)
    assert optimizer.gradient_accumulation_steps is None


def test_make_optimizer_in_float16_wraps_adam_in_a_loss_scale_optimizer():
    options = {"clip_norm": 3.0, "precision": "mixed_float16", "accumulate_steps": 4}
    optimizer = make_optimizer("adam", 0.5, momentum=0.8, **options)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.initial_scale == 2**15
    inner = optimizer.inner_optimizer
    assert isinstance(inner, FusedAdam)
    assert (inner.beta_1, inner.global_clipnorm, inner.gradient_accumulation_steps) == (0.8, 3.0, 4)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_reported_learning_rate_advances_with_every_batch_under_gradient_accumulation(precision):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2], [1.0, 0.5, 0.25, 0.125])
    options = {"momentum": 0.9, "clip_norm": 0.0, "accumulate_steps": 2, "precision": precision}
    variable = keras.Variable([1.0])
    optimizer = make_optimizer("sgd", schedule, **options)
    optimizer.build([variable])
    assert optimizers.last_learning_rate(optimizer) == 1.0
    for expected in (1.0, 0.5, 0.25):
        optimizer.apply([tf.constant([1.0])], [variable])
        assert optimizers.last_learning_rate(optimizer) == expected


def make_step(optimizer, variables):
    return lambda gradients: optimizer.apply(gradients, variables)


OPTIMIZERS = {
    "sgd, accumulated": (FusedSGD, SGD, {"momentum": 0.9, "gradient_accumulation_steps": 3}),
    "sgd without momentum": (FusedSGD, SGD, {}),
    "sgd, clipnorm": (FusedSGD, SGD, {"momentum": 0.9, "global_clipnorm": None, "clipnorm": 1.0}),
    "sgd, clipvalue": (FusedSGD, SGD, {"momentum": 0.9, "global_clipnorm": None, "clipvalue": 0.3}),
    "adam": (FusedAdam, Adam, {"beta_1": 0.8}),
    "adam, accumulated": (FusedAdam, Adam, {"gradient_accumulation_steps": 3}),
    "adam, constant rate": (FusedAdam, Adam, {"learning_rate": 0.1, "global_clipnorm": None}),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("fused", "reference", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_optimizer_updates_equal_those_of_the_keras_optimizer(fused, reference, options, compiled):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    results = []
    for optimizer_class in (fused, reference):
        rng = np.random.default_rng(0)
        variables = [keras.Variable(rng.normal(size=shape).astype("f4")) for shape in [(30, 4), (7,), ()]]
        optimizer = optimizer_class(**({"learning_rate": schedule, "global_clipnorm": 3.0} | options))
        optimizer.build(variables)
        step = make_step(optimizer, variables)
        step = tf.function(step) if compiled else step
        for _ in range(12):
            step([tf.constant(rng.normal(size=v.shape).astype("f4")) for v in variables])
        results.append([np.array(v) for v in (*variables, *optimizer.variables)])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert abs(results[0][0]).max() > 1


@pytest.mark.parametrize("fused", [FusedSGD, FusedAdam])
def test_fused_optimizer_in_a_tf_function_traced_twice_makes_one_update_per_call(fused):
    variable = keras.Variable([1.0, 2.0])
    optimizer = fused(0.5, 0.9)
    optimizer.build([variable])
    step = tf.function(lambda gradient, trace: optimizer.apply([gradient], [variable]))
    for trace in (1, 2):
        step(tf.constant([1.0, 1.0]), trace)
    assert int(optimizer.iterations) == 2
    assert np.all(np.array(variable) < [0.1, 1.1])


def test_infinite_gradient_norm_makes_all_weights_nan_as_in_keras():
    results = []
    for optimizer_class in (FusedSGD, SGD):
        variables = [keras.Variable([1.0]), keras.Variable([1.0])]
        optimizer = optimizer_class(0.1, momentum=0.9, global_clipnorm=1.0)
        optimizer.apply([tf.constant([1.0]), tf.constant([np.inf])], variables)
        results.append([np.array(v) for v in variables])
    np.testing.assert_array_equal(*results)
    assert np.isnan(results[0]).all()


WITHOUT_BRANCH = {
    "sgd": lambda: FusedSGD(0.1, momentum=0.9, global_clipnorm=3.0),
    "adam, accumulated": lambda: FusedAdam(0.1, gradient_accumulation_steps=3),
    "adamw of Keras, constant loss scale": lambda: keras.optimizers.AdamW(
        0.1, loss_scale_factor=8.0, clipnorm=1.0
    ),
    "sgd, accumulated, float16": lambda: keras.optimizers.LossScaleOptimizer(
        FusedSGD(0.1, momentum=0.9, weight_decay=0.1, gradient_accumulation_steps=2), 4.0, 3
    ),
}


@pytest.mark.parametrize("make", WITHOUT_BRANCH.values(), ids=WITHOUT_BRANCH)
def test_updates_under_a_condition_have_no_branch_and_equal_updates_of_only_the_steps_where_it_is_true(make):
    rng = np.random.default_rng(0)
    gradients = [[tf.constant(rng.normal(size=n).astype("f4")) for n in (30, 7)] for _ in range(16)]
    gradients[9][1] *= np.inf  # only float16 expects it
    results = []
    for with_branch in (False, True):
        variables = [keras.Variable(np.ones(n, np.float32)) for n in (30, 7)]
        variables[1].constraint = keras.constraints.MaxNorm(2.0)
        optimizer = make()
        optimizer.build(variables)
        if with_branch:
            step = make_step(optimizer, variables)
        else:
            update = functools.partial(apply_if, optimizer=optimizer, variables=variables)
            step = tf.function(lambda condition, each, update=update: update(condition, gradients=each))
            graph = step.get_concrete_function(tf.constant(True), gradients[0]).graph
            assert not {"If", "StatelessIf"} & {operation.type for operation in graph.get_operations()}
        for number, each in enumerate(gradients):
            if number == 9 and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                continue
            if not with_branch:
                step(tf.constant(False), [gradient * np.nan for gradient in each])
                step(tf.constant(True), each)
            else:
                step(each)
        results.append([np.array(v) for v in (*variables, *optimizer.variables)])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert np.isfinite(results[0][0]).all() and abs(results[0][0] - 1).max() > 0.1
