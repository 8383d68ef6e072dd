"""Tests layers.py against formulas in NumPy and against Keras' batch norm."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.eager import context

from common import layers
from common.layers import BatchNormalization, Mish, Swish

# --- activations ---


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


FORMULAS = {Swish: lambda z: z * sigmoid(z), Mish: lambda z: z * np.tanh(np.log1p(np.exp(z)))}
ACTIVATION_TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1.5e-1}
ACTIVATIONS = pytest.mark.parametrize("activation", FORMULAS)


def built(activation, shape, dtype="float32"):
    layer = activation(dtype=dtype)
    layer.build(shape)
    return layer


def with_gradient(layer):
    """Returns a function that computes the output of a layer and the gradient with respect to its input."""

    def compute(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x, upstream)

    return compute


def uses_xla(functions):
    return any(function.attr["_XlaMustCompile"].b for function in functions)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("dtype", ACTIVATION_TOLERANCES)
@ACTIVATIONS
def test_swish_and_mish_and_their_gradients_equal_their_formulas(monkeypatch, activation, dtype, mode):
    monkeypatch.setattr(layers, "FUSE_FROM", 1 if mode == "xla" else 2**62)
    monkeypatch.setattr(layers, "is_cpu_only", lambda: True)
    far = [100, 1000, float(tf.as_dtype(dtype).max)]
    x = np.array([*np.linspace(-12, 12, 474), *far, *np.negative(far)]).reshape(4, 5, 6, 4)
    x, upstream = (tf.cast(values, dtype) for values in (x, np.random.default_rng(0).normal(size=x.shape)))
    compute = with_gradient(built(activation, x.shape, dtype))
    y, gradient = (compute if mode == "eager" else tf.function(compute))(x, upstream)
    assert y.dtype == gradient.dtype == x.dtype
    x, upstream, y, gradient = (tf.cast(values, tf.float64).numpy() for values in (x, upstream, y, gradient))
    formula, step, near = FORMULAS[activation], 1e-5, np.abs(x) < 50
    tolerance = ACTIVATION_TOLERANCES[dtype]
    slope = (formula(x[near] + step) - formula(x[near] - step)) / (2 * step)
    np.testing.assert_allclose(y[near], formula(x[near]), atol=tolerance)
    np.testing.assert_allclose(gradient[near], slope * upstream[near], atol=tolerance)
    np.testing.assert_array_equal(y[~near], np.maximum(x, 0)[~near])
    np.testing.assert_array_equal(gradient[~near], (upstream * (x > 0))[~near])


@ACTIVATIONS
def test_swish_and_mish_are_compiled_by_xla_only_for_large_images_on_a_cpu(monkeypatch, activation):
    monkeypatch.setattr(layers, "is_cpu_only", lambda: True)
    assert built(activation, (None, 256, 512, 1)).fuse
    assert not built(activation, (64, 256, 511, 1)).fuse
    assert built(activation, (None, None, None, 8)).fuse
    monkeypatch.setattr(layers, "is_cpu_only", lambda: False)
    assert not built(activation, (None, 256, 512, 1)).fuse


@pytest.mark.parametrize("fuse", [False, True])
@ACTIVATIONS
def test_swish_and_mish_built_for_any_image_size_equal_those_built_for_one_size(
    monkeypatch, activation, fuse
):
    monkeypatch.setattr(layers, "FUSE_FROM", 1 if fuse else 2**62)
    monkeypatch.setattr(layers, "is_cpu_only", lambda: True)
    any_size = tf.TensorSpec((None, None, None, 3))
    compute = tf.function(with_gradient(built(activation, any_size.shape)), input_signature=[any_size] * 2)
    for shape in ((1, 4, 7, 3), (2, 9, 2, 3)):
        x = np.random.default_rng(4).normal(0, 3, shape).astype(np.float32)
        compute_known = tf.function(with_gradient(built(activation, shape)))
        results, expected = (function(x, np.ones_like(x)) for function in (compute, compute_known))
        np.testing.assert_allclose(results, expected, atol=5e-6)
    graph = compute_known.get_concrete_function(x, np.ones_like(x)).graph
    assert uses_xla(graph.as_graph_def().library.function) == fuse


@ACTIVATIONS
def test_saved_model_with_swish_or_mish_contains_no_xla_and_can_be_loaded(monkeypatch, tmp_path, activation):
    monkeypatch.setattr(layers, "FUSE_FROM", 1)
    images = keras.Input((6, 4, 3))
    model = keras.Model(images, activation()(images))
    signature = [tf.TensorSpec((None, 6, 4, 3))]
    model.detect = tf.function(lambda x: model(x, training=False), input_signature=signature)
    tf.saved_model.save(model, str(tmp_path))
    saved = saved_model_pb2.SavedModel.FromString((tmp_path / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    assert functions and not uses_xla(functions)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(3).normal(size=(1, 6, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(loaded(x), FORMULAS[activation](x.astype(np.float64)), atol=1e-6)


# --- batch norm ---

CHANNELS = 5
NORM_TOLERANCES = {"float32": 2e-6, "mixed_float16": 2**-9, "mixed_bfloat16": 2**-6}


def make_pair(dtype=None):
    """Returns Keras' layer and ours with equal variables."""
    rng = np.random.default_rng(0)
    pair = keras.layers.BatchNormalization(dtype=dtype, name="bn"), BatchNormalization(dtype=dtype, name="bn")
    weights = rng.uniform(0.5, 1.5, (4, CHANNELS))
    for layer in pair:
        layer.build((None, None, None, CHANNELS))
        layer.set_weights(weights)
    return pair


def make_images(shape=(2, 3, 4, CHANNELS), dtype="float32"):
    return tf.cast(np.random.default_rng(1).normal(3, 2, shape), dtype)


def run_step(layer, images, training, jit_compile=False):
    """Returns outputs, gradients with respect to input and variables, and moving statistics."""

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


@pytest.mark.parametrize(("training", "jit_compile"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", NORM_TOLERANCES)
def test_batch_norm_outputs_gradients_and_statistics_equal_keras(dtype, training, jit_compile):
    reference, ours = make_pair(dtype)
    images = make_images(dtype=ours.compute_dtype)
    expected = run_step(reference, images, training)
    actual = run_step(ours, images, training, jit_compile)

    assert actual[0].dtype == expected[0].dtype == ours.compute_dtype
    tolerance = NORM_TOLERANCES[dtype]
    outputs = [tf.cast(result[0], tf.float32) for result in (actual, expected)]
    np.testing.assert_allclose(*outputs, atol=tolerance)
    for ours_gradient, keras_gradient in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(ours_gradient, keras_gradient, rtol=tolerance, atol=20 * tolerance)
    for ours_average, keras_average in zip(actual[2], expected[2], strict=True):
        assert ours_average.dtype == np.float32
        np.testing.assert_allclose(ours_average, keras_average, rtol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_frozen_batch_norm_is_in_inference_mode(training):
    reference, ours = make_pair()
    ours.trainable = False
    expected = reference(make_images(), training=False)
    np.testing.assert_allclose(ours(make_images(), training=training), expected, atol=2e-6)
    for weight, unchanged in zip(ours.weights, reference.weights, strict=True):
        np.testing.assert_array_equal(weight, unchanged)


@pytest.mark.parametrize("options", [{"axis": 1}, {"scale": False}, {"center": False}, {"renorm": True}])
def test_batch_norm_with_an_option_that_the_fused_kernel_lacks_equals_keras(options):
    images = make_images((2, CHANNELS, 3, 4) if "axis" in options else (2, 3, 4, CHANNELS))
    norms = keras.layers.BatchNormalization(**options), BatchNormalization(**options)
    expected, actual = (norm(images, training=True) for norm in norms)
    np.testing.assert_array_equal(actual, expected)


def test_weights_of_keras_batch_norm_load_into_the_project_batch_norm_layer(tmp_path):
    images = keras.Input((4, 4, CHANNELS))
    reference, _ = make_pair()
    keras.Model(images, reference(images)).save_weights(tmp_path / "keras.weights.h5")
    ours = BatchNormalization(name="bn")
    keras.Model(images, ours(images)).load_weights(tmp_path / "keras.weights.h5")
    for weight, expected in zip(ours.weights, reference.weights, strict=True):
        assert weight.name == expected.name
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(
    ("momentum", "num_steps", "limited"),
    [(0.99, 10_000, 0.99), (0.99, 400, 0.95), (0.99, 3, 0.9), (0.8, 3, 0.8)],
)
def test_momentum_of_batch_norm_is_limited_in_short_runs(momentum, num_steps, limited):
    norm, images = BatchNormalization(momentum=momentum), keras.Input((4, 4, 2))
    layers.limit_bn_momentum(keras.Model(images, norm(images)), num_steps)
    assert norm.momentum == limited


@pytest.fixture
def optimized_operations():
    """Returns a function that runs a function and returns the types of its optimized operations."""

    def operations(function, *inputs) -> set[str]:
        context.context().enable_graph_collection()
        function(*inputs)
        metadata = context.context().export_run_metadata()
        context.context().disable_graph_collection()
        graphs = [each.post_optimization_graph for each in metadata.function_graphs]
        return {node.op for graph in graphs for node in graph.node}

    return operations


@pytest.mark.parametrize("avx512", [True, False])
@pytest.mark.skipif(not layers.is_cpu_only(), reason="a GPU keeps the remapper")
def test_unfused_function_runs_convolution_and_batch_norm_separately_on_a_cpu_without_avx512(
    monkeypatch, optimized_operations, avx512
):
    monkeypatch.setattr(layers, "has_avx512", lambda: avx512)
    images = keras.Input([8, 8, 3])
    outputs = layers.BatchNormalization()(keras.layers.Conv2D(4, 3, use_bias=False)(images))
    model = keras.Model(images, outputs)

    def network(images):
        return model(images, training=False)

    x = tf.random.normal([1, 8, 8, 3], seed=1)
    function, joined = layers.unfused(tf.function(network)), tf.function(network)
    operations = optimized_operations(function, x)  # TensorFlow optimizes a function once
    is_joined, has_batch_norm = (
        any(kind in operation for operation in operations) for kind in ("FusedConv2D", "FusedBatchNormV3")
    )
    assert (is_joined, has_batch_norm) == (avx512, not avx512)
    assert any("FusedConv2D" in operation for operation in optimized_operations(joined, x))
    np.testing.assert_allclose(function(x), joined(x), atol=1e-6)
