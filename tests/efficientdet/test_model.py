"""The model against google/automl's: outputs for the same weights, parameters, operations, resampling."""

import dataclasses
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.errors import UserError
from efficientdet import model as model_module
from efficientdet.config import get_config
from efficientdet.model import FastFusion, build_model

# Mean absolute value, and the value [1, -1, -1, 5], of each output of google/automl's Keras model
# (efficientdet/tf2/efficientdet_keras.py under tf_keras 2.21) in training mode, with 7 classes, 256 x 371
# pixels and the numbers of `pseudo_random` as weights and images: class levels, then box levels.
AUTOML_D0 = [
    (0.48478, 0.09553),
    (0.43679, 0.02215),
    (0.46468, 0.12577),
    (0.46415, -0.13919),
    (0.41556, 0.14855),
    (0.50641, 0.30305),
    (0.45966, -0.52646),
    (0.41462, -0.18558),
    (0.42901, 0.08716),
    (0.38671, -0.01372),
]
AUTOML_D0_SUM_FUSION_LEVEL_8 = [
    (0.49113, -0.02246),
    (0.44066, -0.00758),
    (0.46260, 0.10074),
    (0.45409, -0.17028),
    (0.39960, 0.01409),
    (0.30252, 0.08498),
    (0.50254, 0.25179),
    (0.45988, -0.37320),
    (0.41039, 0.32940),
    (0.42267, -0.11407),
    (0.37141, -0.08186),
    (0.30099, -0.36962),
]

D0 = get_config("efficientdet-d0")
NANO = get_config("efficientdet-nano")


def pseudo_random(shape, seed):
    """float64 in (-0.5, 0.5), the same on every machine and for every version of NumPy."""
    index = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + seed
    return np.modf(np.abs(np.sin(index)) * 43758.5453)[0] - 0.5


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(D0, AUTOML_D0, id="d0"),
        pytest.param(
            dataclasses.replace(D0, fpn_fusion="sum", max_level=8),
            AUTOML_D0_SUM_FUSION_LEVEL_8,
            id="sum-level-8",
        ),
    ],
)
def test_outputs_equal_automl(config, expected):
    model = build_model("efficientdet-d0", 7, (256, 371), config)
    for weight in model.weights:
        value = pseudo_random(weight.shape, zlib.crc32(weight.path.encode()))
        if "kernel" in weight.name:
            is_depthwise = weight.shape[-1] == 1
            value *= 3 / np.sqrt(9 if is_depthwise else np.prod(weight.shape[:-1]))
        elif weight.name in ("gamma", "fusion_weights"):
            value += 1
        weight.assign(value)
    class_logits, box_deltas = model(4 * pseudo_random((2, 256, 371, 3), 0), training=True)
    outputs = [np.asarray(output) for output in class_logits + box_deltas]
    actual = [(np.abs(output).mean(), output[1, -1, -1, 5]) for output in outputs]
    np.testing.assert_allclose(actual, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "trainable", "statistics"),
    [
        ("efficientdet-d0", 3_880_067, 47_136),
        ("efficientdet-d1", 6_625_898, 71_456),
        ("efficientdet-d7x", 77_147_166, 417_728),
    ],
)
def test_parameters_equal_automl(name, trainable, statistics):
    model = build_model(name, 90, (128, 128))
    counts = [
        sum(int(np.prod(weight.shape)) for weight in weights)
        for weights in (model.trainable_weights, model.non_trainable_weights)
    ]
    assert counts == [trainable, statistics]


def test_operations_of_d0_as_published():
    model = build_model("efficientdet-d0", 90)
    function = tf.function(lambda images: model(images)).get_concrete_function(
        tf.TensorSpec((1, 512, 512, 3))
    )
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    profile = tf.compat.v1.profiler.profile(function.graph, options=options)
    # automl counts multiply-adds; its README says 2.54, and its Keras model gives 2.549 by the same profiler
    assert profile.total_float_ops / 2 / 1e9 == pytest.approx(2.54, abs=0.01)


@pytest.mark.parametrize("image_size", [(256, 256), (96, 160), (65, 131), (64, 513), (40, 33)])
def test_outputs_fit_the_anchors_at_any_image_size(image_size):
    config = dataclasses.replace(NANO, image_size=image_size)
    model = build_model("efficientdet-nano", 3, image_size)
    class_logits, box_deltas = model(np.zeros((2, *image_size, 3), np.float32))
    assert [tuple(x.shape) for x in class_logits] == [(2, *size, 27) for size in config.anchors.feature_sizes]
    assert [tuple(x.shape) for x in box_deltas] == [(2, *size, 36) for size in config.anchors.feature_sizes]


def test_image_size_defaults_to_the_config():
    assert build_model("efficientdet-nano", 3).input_shape == (None, 256, 256, 3)
    config = dataclasses.replace(NANO, image_size=(128, 64))
    assert build_model("efficientdet-nano", 3, config=config).input_shape == (None, 128, 64, 3)


def test_config_decides_levels_and_anchors():
    config = dataclasses.replace(NANO, min_level=2, max_level=6, num_scales=2, aspect_ratios=(1.0, 3.0))
    model = build_model("efficientdet-nano", 3, (64, 64), config)
    assert [x.shape[1:] for x in model.outputs[:5]] == [(s, s, 2 * 2 * 3) for s in (16, 8, 4, 2, 1)]


def test_unknown_model_suggests_the_nearest():
    with pytest.raises(UserError, match=r"efficientdet-do.*did you mean"):
        build_model("efficientdet-do")


def test_fresh_model_gives_every_class_one_percent():
    class_logits, box_deltas = build_model("efficientdet-nano", 3)(np.zeros((1, 256, 256, 3), np.float32))
    for logits in class_logits:
        np.testing.assert_allclose(tf.sigmoid(logits), 0.01, rtol=1e-3)
    for deltas in box_deltas:
        np.testing.assert_allclose(deltas, 0.0, atol=1e-3)


def test_heads_share_convolutions_but_not_batch_norm():
    model = build_model("efficientdet-nano", 3)
    names = [layer.name for layer in model.layers if layer.name.startswith("class_net.")]
    assert sorted(name for name in names if "conv" in name) == ["class_net.conv_0", "class_net.conv_1"]
    assert sorted(name for name in names if "bn" in name) == sorted(
        f"class_net.bn_{i}.level_{level}" for i in (0, 1) for level in range(3, 8)
    )


@pytest.mark.parametrize(
    ("policy", "compute_dtype"),
    [("float32", "float32"), ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")],
)
def test_outputs_and_variables_are_float32_under_mixed_precision(policy, compute_dtype):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = build_model("efficientdet-nano", 3, (64, 64))
    finally:
        keras.config.set_dtype_policy(before)
    outputs = model(np.ones((2, 64, 64, 3), np.float32), training=True)
    assert {x.dtype for x in tf.nest.flatten(outputs)} == {tf.float32}
    assert {weight.dtype for weight in model.weights} == {"float32"}
    for part in ("backbone.block_3.project.bn", "fpn.cell_1.node_5.fuse", "box_net.conv_1"):
        assert model.get_layer(part).compute_dtype == compute_dtype
        assert model.get_layer(part).output.dtype == compute_dtype


def test_every_weight_gets_a_gradient():
    model = build_model("efficientdet-nano", 3, (128, 128))
    images = np.random.default_rng(0).normal(size=(2, 128, 128, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(tf.sin(x)) for x in tf.nest.flatten(model(images, training=True))])
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    idle = [weight.path for weight, g in zip(model.trainable_weights, gradients, strict=True) if g is None]
    assert idle == []
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_fast_fusion_is_the_formula_of_the_paper(dtype):
    layer = FastFusion(dtype=dtype)
    features = np.random.default_rng(0).normal(size=(3, 2, 4, 4, 8)).astype(layer.compute_dtype)
    layer.build([x.shape for x in features])
    layer.set_weights([np.array([0.5, -2.0, 1.5])])
    expected = (0.5 * features[0] + 1.5 * features[2]) / (0.5 + 1.5 + 1e-4)
    actual = layer(list(features))
    assert actual.dtype == layer.compute_dtype
    np.testing.assert_allclose(actual, expected, atol=1e-6 if dtype == "float32" else 4e-3)


@pytest.mark.parametrize("size", [(5, 8), (6, 7), (9, 10)])  # odd ones lose a row or a column on the way up
def test_resampling_is_that_of_automl(size):
    """ResampleFeatureMap: resize_nearest_neighbor, and max pooling with a window of stride + 1, SAME."""
    half = tuple((side + 1) // 2 for side in size)
    rng = np.random.default_rng(0)
    coarse, fine = rng.normal(size=(2, *half, 4)), rng.normal(size=(2, *size, 4))

    expected_up = tf.compat.v1.image.resize_nearest_neighbor(coarse, size)
    np.testing.assert_array_equal(resample(coarse, size), tf.cast(expected_up, tf.float32))
    expected_down = tf.nn.max_pool2d(fine, 3, 2, "SAME")
    np.testing.assert_array_equal(resample(fine, half), tf.cast(expected_down, tf.float32))


@pytest.mark.parametrize(("size", "target"), [((1, 6), (1, 3)), ((1, 3), (1, 6)), ((1, 1), (1, 1))])
def test_resampling_keeps_a_side_of_one_pixel(size, target):
    features = np.random.default_rng(0).normal(size=(2, *size, 4)).astype(np.float32)
    outputs = np.asarray(resample(features, target))
    assert outputs.shape == (2, *target, 4)
    if target[1] < size[1]:
        padded = np.pad(features, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=-np.inf)
        features = np.maximum(np.maximum(padded[:, :, 0:6:2], padded[:, :, 1:6:2]), padded[:, :, 2:7:2])
    elif target[1] > size[1]:
        features = np.repeat(features, 2, axis=2)
    np.testing.assert_array_equal(outputs, features)


def resample(features, size):
    inputs = keras.Input(features.shape[1:])
    config = dataclasses.replace(get_config("efficientdet-d0"), fpn_channels=features.shape[-1])
    outputs = model_module._resample(inputs, size, config, "resample")
    return keras.Model(inputs, keras.layers.Identity()(outputs))(features)
