"""Tests model.py with outputs and parameter counts of google/automl's Keras model."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from efficientdet import model as model_module
from efficientdet.config import get_config
from efficientdet.model import FastFusion, build_model
from tests.efficientdet.networks import summarize_outputs

# The result of networks.summarize_outputs for google/automl's Keras model (tf_keras 2.21,
# efficientdet/tf2/efficientdet_keras.py) in training mode, with 7 classes and images of 256 x 371 pixels.
AUTOML_D0_SUM_FUSION_LEVEL_8 = [
    [0.49113, 0.44066, 0.46260, 0.45409, 0.39960, 0.30252],
    [-0.02246, -0.00758, 0.10074, -0.17028, 0.01409, 0.08498],
    [0.50254, 0.45988, 0.41039, 0.42267, 0.37141, 0.30099],
    [0.25179, -0.37320, 0.32940, -0.11407, -0.08186, -0.36962],
]
NANO = get_config("efficientdet-nano")
SMALL = {"image_size": (64, 96), "fpn_cells": 1, "head_repeats": 1}
ODD_SIZE = (65, 131)


@pytest.fixture(params=["efficientdet-nano", "retinanet-nano"])
def nano(request):
    """A new nano model at a size that is odd on several levels."""
    return build_model(request.param, 3, ODD_SIZE)


def test_outputs_with_sum_fusion_and_level_8_equal_automl():
    config = dataclasses.replace(get_config("efficientdet-d0"), fpn_fusion="sum", max_level=8)
    outputs = summarize_outputs(build_model("efficientdet-d0", 7, (256, 371), config), training=True)
    np.testing.assert_allclose(outputs, AUTOML_D0_SUM_FUSION_LEVEL_8, atol=2e-4)


@pytest.mark.slow
def test_d0_at_its_default_size_has_the_published_number_of_operations():
    d0 = build_model("efficientdet-d0")
    assert d0.input_shape == (None, 512, 512, 3)
    function = tf.function(lambda images: d0(images)).get_concrete_function(tf.TensorSpec((1, 512, 512, 3)))
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    profile = tf.compat.v1.profiler.profile(function.graph, options=options)
    # google/automl's README says 2.54 billion multiply-adds.
    assert profile.total_float_ops / 2 / 1e9 == pytest.approx(2.54, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trainable", "statistics"),
    [
        ("efficientdet-d0", 3_880_067, 47_136),
        ("efficientdet-d1", 6_625_898, 71_456),
        ("efficientdet-d7x", 77_147_166, 417_728),
    ],
)
def test_efficientdet_parameter_counts_equal_those_of_automl(name, trainable, statistics):
    model = build_model(name, 90, (128, 128))
    assert sum(np.prod(weight.shape) for weight in model.trainable_weights) == trainable
    assert sum(np.prod(weight.shape) for weight in model.non_trainable_weights) == statistics


def test_untrained_efficientdet_gives_each_class_of_each_anchor_a_score_of_one_percent(nano):
    class_logits, box_deltas = nano(np.zeros((2, *ODD_SIZE, 3), np.float32))
    config = dataclasses.replace(get_config(nano.name), image_size=ODD_SIZE)
    sizes, k = config.anchors.feature_sizes, config.anchors_per_location
    assert [tuple(x.shape) for x in class_logits] == [(2, *size, 3 * k) for size in sizes]
    assert [tuple(x.shape) for x in box_deltas] == [(2, *size, 4 * k) for size in sizes]
    for logits, deltas in zip(class_logits, box_deltas, strict=True):
        np.testing.assert_allclose(tf.sigmoid(logits), 0.01, rtol=1e-3)
        np.testing.assert_allclose(deltas, 0.0, atol=1e-3)


def test_every_trainable_efficientdet_weight_gets_a_finite_gradient(nano):
    images = np.random.default_rng(0).normal(size=(2, *ODD_SIZE, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(tf.sin(x)) for x in tf.nest.flatten(nano(images, training=True))])
    gradients = tape.gradient(loss, [weight.value for weight in nano.trainable_weights])
    unused = [weight.path for weight, g in zip(nano.trainable_weights, gradients, strict=True) if g is None]
    assert unused == []
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_efficientdet_config_with_levels_2_to_6_gives_its_output_sizes_and_head_layers():
    config = dataclasses.replace(
        NANO, image_size=(64, 32), min_level=2, max_level=6, num_scales=2, aspect_ratios=(1.0, 3.0)
    )
    model = build_model("efficientdet-nano", 3, config=config)
    sizes = [(16, 8), (8, 4), (4, 2), (2, 1), (1, 1)]
    assert [x.shape[1:] for x in model.outputs[:5]] == [(*size, 2 * 2 * 3) for size in sizes]
    names = [layer.name for layer in model.layers if layer.name.startswith("class_net.")]
    assert sorted(name for name in names if "conv" in name) == ["class_net.conv_0", "class_net.conv_1"]
    assert sorted(name for name in names if "bn" in name) == [
        f"class_net.bn_{i}.level_{level}" for i in (0, 1) for level in range(2, 7)
    ]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("efficientdet-nano", {"backbone": "mobilenet-v2"}),
        ("retinanet-nano", {"backbone": "efficientnet-nano", "max_level": 5}),
    ],
    ids=["efficientdet", "retinanet"],
)
def test_model_with_a_backbone_of_the_other_family_has_all_outputs(name, changes):
    config = dataclasses.replace(get_config(name), **SMALL, **changes)
    model, levels, k = build_model(name, config=config), config.anchors.levels, config.anchors_per_location
    assert model.input_shape == (None, 64, 96, 3)
    assert [x.shape[-1] for x in model.outputs] == [k * 90] * len(levels) + [k * 4] * len(levels)


def test_mixed_precision_model_has_float32_outputs_and_variables():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = build_model("efficientdet-nano", 3, config=dataclasses.replace(NANO, **SMALL))
    finally:
        keras.config.set_dtype_policy(policy)
    outputs = model(np.ones((2, 64, 96, 3), np.float32), training=True)
    assert {x.dtype for x in tf.nest.flatten(outputs)} == {tf.float32}
    assert {weight.dtype for weight in model.weights} == {"float32"}
    for part in ("backbone.stage_3.block_0.conv_0.bn", "fpn.cell_0.node_5.fuse", "box_net.conv_0"):
        assert model.get_layer(part).compute_dtype == "float16"
        assert model.get_layer(part).output.dtype == "float16"


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_fast_fusion_equals_the_formula_of_the_paper(dtype):
    layer = FastFusion(dtype=dtype)
    features = np.random.default_rng(0).normal(size=(3, 2, 4, 4, 8)).astype(layer.compute_dtype)
    layer.build([x.shape for x in features])
    np.testing.assert_array_equal(layer.fusion_weights, [1, 1, 1])
    layer.set_weights([np.array([0.5, -2.0, 1.5])])
    expected = (0.5 * features[0] + 1.5 * features[2]) / (0.5 + 1.5 + 1e-4)
    actual = layer(list(features))
    assert actual.dtype == layer.compute_dtype
    np.testing.assert_allclose(actual, expected, atol=1e-6 if dtype == "float32" else 4e-3)


def resample(features, size):
    inputs = keras.Input(features.shape[1:])
    config = dataclasses.replace(get_config("efficientdet-d0"), fpn_channels=features.shape[-1])
    outputs = model_module._resample(inputs, size, config, "resample")
    return keras.Model(inputs, keras.layers.Identity()(outputs))(features)


# If a side of the finer level is odd, upsampling drops a row or a column.
@pytest.mark.parametrize("size", [(5, 8), (6, 7), (9, 10), (1, 6), (1, 1)])
def test_resampled_features_equal_automls(size):
    """automl's ResampleFeatureMap uses resize_nearest_neighbor, and max pooling with padding SAME."""
    half = tuple((side + 1) // 2 for side in size)
    rng = np.random.default_rng(0)
    coarse, fine = (rng.normal(size=(2, *shape, 4)).astype(np.float32) for shape in (half, size))
    expected_up = tf.compat.v1.image.resize_nearest_neighbor(coarse, size)
    np.testing.assert_array_equal(resample(coarse, size), expected_up)
    expected_down = tf.nn.max_pool2d(fine, 3, 2, "SAME") if size != (1, 1) else fine
    np.testing.assert_array_equal(resample(fine, half), expected_down)
