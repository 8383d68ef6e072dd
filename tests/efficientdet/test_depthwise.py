import keras
import numpy as np
import pytest
import tensorflow as tf

from common.layers import is_cpu_only
from efficientdet import depthwise


def _gradients(layer, images, upstream, **options):
    @tf.function(**options)
    def compute(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = layer(images, training=True)
        sources = [images, *(variable.value for variable in layer.trainable_variables)]
        return outputs, *tape.gradient(outputs, sources, upstream)

    return [array.numpy() for array in compute(images)], compute


def _layers(name, *args, **options):
    pair = [getattr(module, name)(*args, **options) for module in (keras.layers, depthwise)]
    for layer in pair:
        layer.build((None, *SHAPE))
    pair[1].set_weights(pair[0].get_weights())
    return pair


SHAPE = (13, 18, 6)
IMAGES = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("name", "filters"), [("DepthwiseConv2D", []), ("SeparableConv2D", [4])])
def test_outputs_and_gradients_of_depthwise_layers_equal_keras(name, filters, size, stride, padding):
    options = {"bias_initializer": "normal", "activation": "tanh"}
    reference, layer = _layers(name, *filters, size, stride, padding, **options)
    upstream = np.random.default_rng(1).normal(size=layer(IMAGES).shape).astype(np.float32)
    expected, _ = _gradients(reference, tf.constant(IMAGES), upstream)
    actual, _ = _gradients(layer, tf.constant(IMAGES), upstream)
    compiled, _ = _gradients(layer, tf.constant(IMAGES), upstream, jit_compile=True)
    for one, other, third in zip(expected, actual, compiled, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(third, one, rtol=1e-5, atol=1e-4)


def test_kernel_gradient_of_stride_2_equals_sums_in_numpy():
    _, layer = _layers("DepthwiseConv2D", 3, 2, "same", use_bias=False)
    upstream = np.random.default_rng(1).normal(size=(2, 7, 9, 6)).astype(np.float32)
    (_, _, kernel), _ = _gradients(layer, tf.constant(IMAGES), upstream)
    padded = np.pad(IMAGES, ((0, 0), (1, 1), (0, 1), (0, 0)))  # 13 rows need 2 zeros, 18 columns need 1
    for row, column in np.ndindex(3, 3):
        window = padded[:, row : row + 13 : 2, column : column + 17 : 2]
        np.testing.assert_allclose(
            kernel[row, column, :, 0], (window * upstream).sum((0, 1, 2)), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_kernel_gradient_in_float32_on_a_cpu_alone_has_explicit_padding(dtype):
    layer = depthwise.DepthwiseConv2D(3, padding="same", dtype=dtype)
    upstream = tf.ones((2, *SHAPE), layer.compute_dtype)
    _, compute = _gradients(layer, tf.constant(IMAGES), upstream)
    operations = compute.get_concrete_function(tf.constant(IMAGES)).graph.get_operations()
    (backprop,) = (each for each in operations if each.type == "DepthwiseConv2dNativeBackpropFilter")
    assert (backprop.get_attr("padding") == b"EXPLICIT") == (dtype == "float32" and is_cpu_only())


def test_inference_of_depthwise_layers_has_no_operations_of_custom_gradients():
    layer = depthwise.SeparableConv2D(4, 3, padding="same")
    graph = tf.function(lambda images: layer(images, training=False)).get_concrete_function(IMAGES).graph
    assert "IdentityN" not in {operation.type for operation in graph.get_operations()}
