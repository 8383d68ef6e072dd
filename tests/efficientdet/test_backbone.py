"""The backbone against keras.applications' EfficientNet, an independent implementation of the same tables."""

import keras
import numpy as np
import pytest

from common.errors import UserError
from efficientdet.backbone import extract_features

# The last layer of each level's last block, in keras.applications
KERAS_TAPS = {
    "efficientnet-b0": [
        "block1a_project_bn",
        "block2b_add",
        "block3b_add",
        "block5c_add",
        "block7a_project_bn",
    ],
    "efficientnet-b2": ["block1b_add", "block2c_add", "block3c_add", "block5d_add", "block7b_add"],
}
KERAS_MODELS = {
    "efficientnet-b0": keras.applications.EfficientNetB0,
    "efficientnet-b2": keras.applications.EfficientNetB2,
}


def build(backbone, image_size=(64, 64)):
    images = keras.Input((*image_size, 3))
    return keras.Model(images, extract_features(images, backbone))


@pytest.mark.parametrize("name", KERAS_MODELS)
def test_features_equal_keras_applications_with_the_same_weights(name):
    reference = KERAS_MODELS[name](include_top=False, weights=None, input_shape=(64, 96, 3))
    stem = reference.get_layer("stem_conv_pad").input  # behind the rescaling that it carries inside
    reference = keras.Model(stem, [reference.get_layer(tap).output for tap in KERAS_TAPS[name]])
    model = build(name, (64, 96))

    rng = np.random.default_rng(0)
    assert [weight.shape for weight in model.weights] == [weight.shape for weight in reference.weights]
    for weight, other in zip(model.weights, reference.weights, strict=True):
        value = np.asarray(weight)
        if weight.name in ("gamma", "moving_variance"):
            value = rng.uniform(0.5, 1.5, weight.shape)
        elif weight.name in ("beta", "moving_mean", "bias"):
            value = rng.normal(0, 0.1, weight.shape)
        weight.assign(value)
        other.assign(value)

    images = rng.normal(size=(2, 64, 96, 3)).astype(np.float32)
    features = model(images)
    assert sorted(features) == [1, 2, 3, 4, 5]
    for level, expected in enumerate(reference(images), start=1):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(features[level] / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("efficientnet-b3", [24, 32, 48, 136, 384]),
        ("efficientnet-nano", [8, 16, 24, 56, 160]),
    ],
)
@pytest.mark.parametrize("image_size", [(128, 128), (65, 131), (1, 33)])
def test_each_level_halves_the_size_rounding_up(name, channels, image_size):
    images = keras.Input((*image_size, 3))
    for level, feature in extract_features(images, name).items():
        expected = [-(-side // 2**level) for side in image_size]
        assert list(feature.shape[1:]) == [*expected, channels[level - 1]]


def test_stochastic_depth_grows_linearly_and_is_off_for_b0():
    assert not [layer for layer in build("efficientnet-b0").layers if isinstance(layer, keras.layers.Dropout)]
    model = build("efficientnet-b1")
    num_blocks = sum(layer.name.endswith("project.bn") for layer in model.layers)
    assert num_blocks == 23  # B1 of arXiv 1905.11946: ceil(1.1 x 1, 2, 2, 3, 3, 4, 1)
    residual = [layer.name for layer in model.layers if layer.name.endswith(".add")]
    drops = {layer.name: layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)}
    assert set(drops) == {name.replace(".add", ".drop") for name in residual}
    for name, drop in drops.items():
        index = int(name.split(".")[1].removeprefix("block_"))
        assert drop.rate == pytest.approx(0.2 * index / 23)


def test_stochastic_depth_drops_whole_images_and_keeps_the_mean():
    drop = build("efficientnet-b1").get_layer("backbone.block_22.drop")
    ones = np.ones((2000, 2, 2, 3), np.float32)
    outputs = np.asarray(drop(ones, training=True)).reshape(2000, -1)
    assert (outputs == outputs[:, :1]).all()
    kept = outputs[:, 0] > 0
    np.testing.assert_allclose(outputs[kept], 1 / (1 - drop.rate), rtol=1e-6)
    assert abs(kept.mean() - (1 - drop.rate)) < 0.04  # five standard deviations
    np.testing.assert_array_equal(drop(ones, training=False), ones)


def test_initial_kernels_are_normal_with_fan_out():
    model = build("efficientnet-b0")
    for name, fan_out in [
        ("backbone.stem.conv", 3 * 3 * 32),
        ("backbone.block_11.depthwise.conv", 5 * 5),  # of each channel alone
        ("backbone.block_12.project.conv", 192),
        ("backbone.block_12.se.expand", 1152),
    ]:
        kernel = np.asarray(model.get_layer(name).kernel)
        assert kernel.std() == pytest.approx(np.sqrt(2 / fan_out), rel=0.1)
        assert np.abs(kernel).max() > 2.3 * kernel.std()  # not truncated
    twins = [np.asarray(model.get_layer(f"backbone.block_{i}.expand.conv").kernel) for i in (12, 13)]
    assert not np.array_equal(*twins)


def test_unknown_backbone_suggests_the_nearest():
    with pytest.raises(UserError, match="efficientnet-b0"):
        extract_features(keras.Input((64, 64, 3)), "efficientnet-bo")
