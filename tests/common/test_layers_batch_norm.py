"""The fused layer against Keras' own, which computes in elementary operations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.layers import BatchNormalization

CHANNELS = 5
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]
# One unit in the last place of the activations, for values up to 4.
TOLERANCE = {"float32": 2e-6, "mixed_float16": 2**-9, "mixed_bfloat16": 2**-6}


def make_pair(dtype=None, **arguments):
    """Keras' layer and ours, with the same variables."""
    rng = np.random.default_rng(0)
    pair = (
        keras.layers.BatchNormalization(dtype=dtype, **arguments),
        BatchNormalization(dtype=dtype, **arguments),
    )
    for layer in pair:
        layer.build((None, None, None, CHANNELS))
    weights = [rng.uniform(0.5, 1.5, weight.shape) for weight in pair[0].weights]
    for layer in pair:
        layer.set_weights(weights)
    return pair


def make_images(shape=(2, 3, 4, CHANNELS), dtype="float32"):
    return tf.cast(np.random.default_rng(1).normal(3, 2, shape), dtype)


def run(layer, images, training, jit_compile=False):
    """Output, gradients of a loss by the input and the variables, and moving statistics after the step."""

    @tf.function(jit_compile=jit_compile)
    def step(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = layer(images, training=training)
            loss = tf.reduce_sum(tf.sin(tf.cast(outputs, tf.float32)))
        variables = [variable.value for variable in layer.trainable_variables]
        return outputs, tape.gradient(loss, [images, *variables])

    outputs, gradients = step(images)
    gradients = [tf.cast(gradient, tf.float32).numpy() for gradient in gradients]
    return outputs, gradients, [np.array(variable) for variable in layer.non_trainable_variables]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", POLICIES)
def test_equals_keras(dtype, training, jit_compile):
    reference, ours = make_pair(dtype)
    images = make_images(dtype=ours.compute_dtype)
    expected = run(reference, images, training)
    actual = run(ours, images, training, jit_compile)

    assert actual[0].dtype == expected[0].dtype == ours.compute_dtype
    tolerance = TOLERANCE[dtype]
    outputs = [tf.cast(result[0], tf.float32) for result in (actual, expected)]
    np.testing.assert_allclose(*outputs, atol=tolerance)
    for ours_gradient, keras_gradient in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(ours_gradient, keras_gradient, rtol=tolerance, atol=20 * tolerance)
    for ours_average, keras_average in zip(actual[2], expected[2], strict=True):
        assert ours_average.dtype == np.float32
        np.testing.assert_allclose(ours_average, keras_average, rtol=1e-6)


def test_averages_the_variance_without_bessels_correction():
    images = make_images((1, 2, 2, CHANNELS))  # n = 4: the correction would be a third
    layer = BatchNormalization(momentum=0.0)
    layer(images, training=True)
    np.testing.assert_allclose(layer.moving_variance, np.var(images, axis=(0, 1, 2)), rtol=1e-5)


def test_one_value_per_channel_has_variance_zero():
    layer = BatchNormalization(momentum=0.0)
    outputs = layer(make_images((1, 1, 1, CHANNELS)), training=True)
    np.testing.assert_array_equal(layer.moving_variance, np.zeros(CHANNELS))
    np.testing.assert_array_equal(outputs, np.zeros((1, 1, 1, CHANNELS)))


@pytest.mark.parametrize("training", [False, True])
def test_frozen_layer_is_in_inference_mode(training):
    reference, ours = make_pair()
    before = [np.array(weight) for weight in ours.weights]
    expected = reference(make_images(), training=False)
    ours.trainable = False
    np.testing.assert_allclose(ours(make_images(), training=training), expected, atol=2e-6)
    for weight, value in zip(ours.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


@pytest.mark.parametrize("arguments", [{"axis": 1}, {"scale": False}, {"center": False}, {"renorm": True}])
def test_what_the_kernel_cannot_do_goes_to_keras(arguments):
    channels_last = "axis" not in arguments
    images = make_images() if channels_last else make_images((2, CHANNELS, 3, 4))
    layers = keras.layers.BatchNormalization(**arguments), BatchNormalization(**arguments)
    expected, actual = (layer(images, training=True) for layer in layers)
    np.testing.assert_array_equal(actual, expected)


def test_variables_have_keras_names_so_weights_load_either_way(tmp_path):
    images = keras.Input((4, 4, CHANNELS))
    reference, ours = make_pair()
    for layer in (reference, ours):
        layer.name = "bn"
    keras.Model(images, reference(images)).save_weights(tmp_path / "keras.weights.h5")
    other = BatchNormalization(name="bn")
    model = keras.Model(images, other(images))
    model.load_weights(tmp_path / "keras.weights.h5")
    for weight, expected in zip(other.weights, reference.weights, strict=True):
        assert weight.name == expected.name
        np.testing.assert_array_equal(weight, expected)


def test_trains_inside_a_distribution_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        layer = BatchNormalization(momentum=0.0)
        layer.build((None, None, None, CHANNELS))
    images = make_images()
    strategy.run(tf.function(lambda: layer(images, training=True)))
    np.testing.assert_allclose(layer.moving_mean, np.mean(images, axis=(0, 1, 2)), rtol=1e-5)
