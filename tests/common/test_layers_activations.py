"""The formulas in NumPy's float64 as oracle, on both ways to compute them; and when which way is taken."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from common import layers
from common.layers import Mish, Swish


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


FORMULAS = {Swish: lambda z: z * sigmoid(z), Mish: lambda z: z * np.tanh(np.log1p(np.exp(z)))}
# of float16 and bfloat16: Swish computes in them, Mish its gate in float32
TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1.5e-1}


def built(kind, shape, dtype="float32"):
    layer = kind(dtype=dtype)
    layer.build(shape)
    return layer


def with_gradient(layer):
    def compute(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x, upstream)

    return compute


def value_and_gradient(layer, x, upstream, compiled=True):
    compute = tf.function(with_gradient(layer)) if compiled else with_gradient(layer)
    return [value.numpy() for value in compute(tf.constant(x), tf.constant(upstream))]


def is_compiled(functions):
    """Whether XLA has to compile one of a graph's functions."""
    return any(function.attr["_XlaMustCompile"].b for function in functions)


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def either_way(request, monkeypatch):
    monkeypatch.setattr(layers, "FUSE_FROM", 1 if request.param else 2**62)
    monkeypatch.setattr(layers, "is_cpu_only", lambda: True)
    return request.param


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", FORMULAS)
def test_values_and_gradients(either_way, kind, dtype, compiled):
    dtype = tf.as_dtype(dtype).as_numpy_dtype
    x = np.linspace(-12, 12, 480).astype(dtype).reshape(4, 5, 6, 4)
    upstream = np.random.default_rng(0).normal(size=x.shape).astype(dtype)
    y, gradient = value_and_gradient(built(kind, x.shape, dtype), x, upstream, compiled)
    exact, step = x.astype(np.float64), 1e-5
    upstream = upstream.astype(np.float64)
    slope = (FORMULAS[kind](exact + step) - FORMULAS[kind](exact - step)) / (2 * step)
    assert (y.dtype, gradient.dtype) == (x.dtype, x.dtype)
    tolerance = TOLERANCES[np.dtype(dtype).name]
    np.testing.assert_allclose(y.astype("f8"), FORMULAS[kind](exact), atol=tolerance)
    np.testing.assert_allclose(gradient.astype("f8"), slope * upstream, atol=tolerance)


def test_swish_is_that_of_keras(either_way):
    x = np.random.default_rng(1).normal(0, 4, (2, 9, 7, 5)).astype(np.float32)
    upstream = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    expected = value_and_gradient(keras.layers.Activation("swish"), x, upstream)
    for own, theirs in zip(value_and_gradient(built(Swish, x.shape), x, upstream), expected, strict=True):
        np.testing.assert_allclose(own, theirs, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_they_are_finite_far_out(either_way, kind, dtype):
    x = np.array([[-np.finfo(dtype).max, -1000, -100, 100, 1000, np.finfo(dtype).max]], dtype)
    y, gradient = value_and_gradient(built(kind, x.shape, dtype), x, np.ones_like(x))
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(gradient, x > 0)


@pytest.mark.parametrize("kind", FORMULAS)
def test_what_is_fused_is_settled_by_the_size_of_an_image(monkeypatch, kind):
    monkeypatch.setattr(layers, "is_cpu_only", lambda: True)
    side = int(layers.FUSE_FROM**0.5)
    assert built(kind, (None, side, side + 1, 1)).fuse
    assert not built(kind, (None, side - 1, side, 1)).fuse
    assert not built(kind, (64, side - 1, side, 1)).fuse  # however many images
    assert built(kind, (None, None, None, 8)).fuse  # training at several sizes
    monkeypatch.setattr(layers, "is_cpu_only", lambda: False)
    assert not built(kind, (None, side, side + 1, 1)).fuse


@pytest.mark.parametrize("kind", FORMULAS)
def test_xla_compiles_what_is_fused(either_way, kind):
    image = tf.TensorSpec((2, 6, 4, 3))
    graph = tf.function(with_gradient(built(kind, image.shape))).get_concrete_function(image, image).graph
    assert is_compiled(graph.as_graph_def().library.function) == either_way


@pytest.mark.parametrize("kind", FORMULAS)
def test_images_of_any_size(either_way, kind):
    layer = built(kind, (None, None, None, 3))
    assert layer.fuse
    anything = tf.TensorSpec((None, None, None, 3))
    compute = tf.function(with_gradient(layer), input_signature=[anything, anything])
    for shape in ((1, 4, 7, 3), (2, 9, 2, 3)):
        x = np.random.default_rng(4).normal(0, 3, shape).astype(np.float32)
        expected = value_and_gradient(built(kind, shape), x, np.ones_like(x), compiled=False)
        for own, other in zip(compute(x, np.ones_like(x)), expected, strict=True):
            np.testing.assert_allclose(own, other, atol=5e-6)


@pytest.mark.parametrize("kind", FORMULAS)
def test_a_saved_model_is_free_of_xla(monkeypatch, tmp_path, kind):
    """No other runtime knows XLA's functions."""
    monkeypatch.setattr(layers, "FUSE_FROM", 1)
    images = keras.Input((6, 4, 3))
    model = keras.Model(images, kind()(images))
    module = tf.Module()
    module.model = model
    module.detect = tf.function(
        lambda x: model(x, training=False), input_signature=[tf.TensorSpec((None, 6, 4, 3))]
    )
    tf.saved_model.save(module, str(tmp_path))
    saved = saved_model_pb2.SavedModel.FromString((tmp_path / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    assert functions
    assert not is_compiled(functions)


@pytest.mark.parametrize("kind", FORMULAS)
def test_they_are_saved_and_loaded(tmp_path, kind):
    images = keras.Input((6, 4, 3))
    keras.Model(images, kind(name="activation")(images)).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(3).normal(size=(1, 6, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(loaded(x), FORMULAS[kind](x.astype(np.float64)), atol=1e-6)
