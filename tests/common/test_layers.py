import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from common import layers
from common.layers import BatchNormalization, Mish, Swish

CHANNELS = 5
# tolerances of batch norms
UNIT = {"float32": 2e-6, "mixed_float16": 2**-9, "mixed_bfloat16": 2**-6}


# --- activations ---


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


FORMULAS = {Swish: lambda z: z * sigmoid(z), Mish: lambda z: z * np.tanh(np.log1p(np.exp(z)))}
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


def is_compiled(functions):
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
    far = [100, 1000, float(tf.as_dtype(dtype).max)]
    x = np.array([*np.linspace(-12, 12, 474), *far, *np.negative(far)]).reshape(4, 5, 6, 4)
    x, upstream = (tf.cast(values, dtype) for values in (x, np.random.default_rng(0).normal(size=x.shape)))
    compute = with_gradient(built(kind, x.shape, dtype))
    y, gradient = (tf.function(compute) if compiled else compute)(x, upstream)
    assert y.dtype == gradient.dtype == x.dtype
    x, upstream, y, gradient = (tf.cast(values, tf.float64).numpy() for values in (x, upstream, y, gradient))
    formula, step, near = FORMULAS[kind], 1e-5, np.abs(x) < 50
    slope = (formula(x[near] + step) - formula(x[near] - step)) / (2 * step)
    np.testing.assert_allclose(y[near], formula(x[near]), atol=TOLERANCES[dtype])
    np.testing.assert_allclose(gradient[near], slope * upstream[near], atol=TOLERANCES[dtype])
    np.testing.assert_array_equal(y[~near], np.maximum(x, 0)[~near])
    np.testing.assert_array_equal(gradient[~near], (upstream * (x > 0))[~near])


@pytest.mark.parametrize("kind", FORMULAS)
def test_what_is_fused_is_settled_by_the_size_of_an_image(monkeypatch, kind):
    monkeypatch.setattr(layers, "is_cpu_only", lambda: True)
    assert built(kind, (None, 256, 512, 1)).fuse
    assert not built(kind, (64, 256, 511, 1)).fuse
    assert built(kind, (None, None, None, 8)).fuse
    monkeypatch.setattr(layers, "is_cpu_only", lambda: False)
    assert not built(kind, (None, 256, 512, 1)).fuse


@pytest.mark.parametrize("kind", FORMULAS)
def test_images_of_any_size_and_what_xla_compiles(either_way, kind):
    layer = built(kind, (None, None, None, 3))
    assert layer.fuse
    anything = tf.TensorSpec((None, None, None, 3))
    compute = tf.function(with_gradient(layer), input_signature=[anything, anything])
    for shape in ((1, 4, 7, 3), (2, 9, 2, 3)):
        x = np.random.default_rng(4).normal(0, 3, shape).astype(np.float32)
        fixed = tf.function(with_gradient(built(kind, shape)))
        for own, other in zip(compute(x, np.ones_like(x)), fixed(x, np.ones_like(x)), strict=True):
            np.testing.assert_allclose(own, other, atol=5e-6)
    graph = fixed.get_concrete_function(x, np.ones_like(x)).graph
    assert is_compiled(graph.as_graph_def().library.function) == either_way


@pytest.mark.parametrize("kind", FORMULAS)
def test_models_are_saved_without_xla_and_loaded(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(layers, "FUSE_FROM", 1)
    images = keras.Input((6, 4, 3))
    model = keras.Model(images, kind()(images))
    signature = [tf.TensorSpec((None, 6, 4, 3))]
    model.detect = tf.function(lambda x: model(x, training=False), input_signature=signature)
    tf.saved_model.save(model, str(tmp_path))
    saved = saved_model_pb2.SavedModel.FromString((tmp_path / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    assert functions and not is_compiled(functions)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(3).normal(size=(1, 6, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(loaded(x), FORMULAS[kind](x.astype(np.float64)), atol=1e-6)


# --- batch norm ---


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
@pytest.mark.parametrize("dtype", UNIT)
def test_equals_keras(dtype, training, jit_compile):
    reference, ours = make_pair(dtype)
    images = make_images(dtype=ours.compute_dtype)
    expected = run_step(reference, images, training)
    actual = run_step(ours, images, training, jit_compile)

    assert actual[0].dtype == expected[0].dtype == ours.compute_dtype
    tolerance = UNIT[dtype]
    outputs = [tf.cast(result[0], tf.float32) for result in (actual, expected)]
    np.testing.assert_allclose(*outputs, atol=tolerance)
    for ours_gradient, keras_gradient in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(ours_gradient, keras_gradient, rtol=tolerance, atol=20 * tolerance)
    for ours_average, keras_average in zip(actual[2], expected[2], strict=True):
        assert ours_average.dtype == np.float32
        np.testing.assert_allclose(ours_average, keras_average, rtol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_frozen_layer_is_in_inference_mode(training):
    reference, ours = make_pair()
    ours.trainable = False
    expected = reference(make_images(), training=False)
    np.testing.assert_allclose(ours(make_images(), training=training), expected, atol=2e-6)
    for weight, untouched in zip(ours.weights, reference.weights, strict=True):
        np.testing.assert_array_equal(weight, untouched)


@pytest.mark.parametrize("arguments", [{"axis": 1}, {"scale": False}, {"center": False}, {"renorm": True}])
def test_what_the_kernel_cannot_do_goes_to_keras(arguments):
    channels_last = "axis" not in arguments
    images = make_images() if channels_last else make_images((2, CHANNELS, 3, 4))
    layers = keras.layers.BatchNormalization(**arguments), BatchNormalization(**arguments)
    expected, actual = (layer(images, training=True) for layer in layers)
    np.testing.assert_array_equal(actual, expected)


def test_variables_have_keras_names_so_weights_load_either_way(tmp_path):
    images = keras.Input((4, 4, CHANNELS))
    reference, _ = make_pair()
    keras.Model(images, reference(images)).save_weights(tmp_path / "keras.weights.h5")
    other = BatchNormalization(name="bn")
    keras.Model(images, other(images)).load_weights(tmp_path / "keras.weights.h5")
    for weight, expected in zip(other.weights, reference.weights, strict=True):
        assert weight.name == expected.name
        np.testing.assert_array_equal(weight, expected)


def test_a_short_run_forgets_the_statistics_it_starts_with():
    def momentum(of_recipe, num_steps):
        norm = BatchNormalization(momentum=of_recipe)
        inputs = keras.Input((4, 4, 2))
        model = layers.limit_bn_momentum(keras.Model(inputs, norm(inputs)), num_steps)
        return norm.momentum, model, norm

    assert momentum(0.99, 10_000)[0] == 0.99 and momentum(0.99, 3)[0] == 0.9 and momentum(0.8, 3)[0] == 0.8
    limited, model, norm = momentum(0.99, 400)
    assert limited == 0.95
    images = np.random.default_rng(0).normal(3.0, 0.01, (8, 4, 4, 2)).astype(np.float32)
    for _ in range(400):
        model(images, training=True)
    np.testing.assert_allclose(norm.moving_variance, images.var((0, 1, 2)), rtol=0.05)
