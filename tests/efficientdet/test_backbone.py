"""Tests backbone.py and mobilenet.py against keras.applications and torchvision's parameter counts."""

import keras
import numpy as np
import pytest

from common.errors import UserError
from efficientdet.backbone import EFFICIENTNETS, extract_features, scaled_blocks
from efficientdet.resnet import RESNETS

# Parameter counts of torchvision's documentation (num_params), minus the parameters of the classifier, of
# the last 1x1 convolution and of its batch norm.
TORCHVISION = {
    name: count - (features * 1000 + 1000) - (last * features + 2 * features)
    for name, last, features, count in [
        ("efficientnet-b0", 320, 1280, 5_288_548),
        ("efficientnet-b1", 320, 1280, 7_794_184),
        ("efficientnet-b2", 352, 1408, 9_109_994),
        ("efficientnet-b3", 384, 1536, 12_233_232),
        ("efficientnet-b4", 448, 1792, 19_341_616),
        ("efficientnet-b5", 512, 2048, 30_389_784),
        ("efficientnet-b6", 576, 2304, 43_040_704),
        ("efficientnet-b7", 640, 2560, 66_347_960),
        ("mobilenet-v2", 320, 1280, 3_504_872),
    ]
}


def build(backbone, image_size=(64, 64), levels=(1, 2, 3, 4, 5)):
    images = keras.Input((*image_size, 3))
    features = extract_features(images, backbone)
    assert sorted(features) == [1, 2, 3, 4, 5]
    return keras.Model(images, [features[level] for level in levels])


@pytest.fixture(scope="module")
def b1():
    return build("efficientnet-b1")


def test_mobilenet_equals_keras_applications_with_the_same_weights():
    reference = keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=(65, 97, 3))
    taps = ["block_5_add", "block_12_add", "block_16_project_BN"]
    reference = keras.Model(reference.input, [reference.get_layer(tap).output for tap in taps])
    model = build("mobilenet-v2", (65, 97), (3, 4, 5))
    assert sum(int(np.prod(w.shape)) for w in model.trainable_weights) == TORCHVISION["mobilenet-v2"]
    rng = np.random.default_rng(0)
    assert [weight.shape for weight in model.weights] == [weight.shape for weight in reference.weights]
    for weight, other in zip(model.weights, reference.weights, strict=True):
        value = rng.normal(0, np.sqrt(2 / np.prod(weight.shape[:-1])), weight.shape)
        if weight.name in ("gamma", "moving_variance"):
            value = rng.uniform(0.5, 1.5, weight.shape)
        elif weight.name in ("beta", "moving_mean"):
            value = rng.normal(0, 0.1, weight.shape)
        weight.assign(value)
        other.assign(value - (1e-3 - 1e-5) if weight.name == "moving_variance" else value)
    images = rng.normal(size=(2, 65, 97, 3)).astype(np.float32)
    for found, expected in zip(model(images), reference(images), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in EFFICIENTNETS if name in TORCHVISION])
def test_blocks_of_every_efficientnet_have_torchvisions_parameters(name):
    blocks = scaled_blocks(EFFICIENTNETS[name])
    inputs = 8 * round(32 * EFFICIENTNETS[name].width / 8 + 1e-6)
    counted = 3 * 3 * 3 * inputs + 2 * inputs
    for block in blocks:
        inner, squeezed = inputs * block.expansion, inputs // 4
        counted += inputs * inner + 2 * inner if block.expansion > 1 else 0
        counted += block.kernel**2 * inner + 2 * inner + inner * squeezed * 2 + inner + squeezed
        counted += inner * block.filters + 2 * block.filters
        inputs = block.filters
    assert counted == TORCHVISION[name]


def test_resnets_are_as_deep_as_their_names_say():
    """As in arXiv 1512.03385, the depth counts the stem, the classifier, and 2 or 3 convolutions in each
    block."""
    for name in ("resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152"):
        depth = RESNETS[name]
        assert name == f"resnet-{2 + sum(depth.blocks) * (3 if depth.bottleneck else 2)}"


@pytest.mark.parametrize(
    ("name", "channels"),
    [("efficientnet-nano", [8, 16, 24, 56, 160]), ("resnet-nano", [32, 32, 64, 128, 256])],
)
def test_each_level_halves_the_size_rounding_up(name, channels):
    shapes = build(name, (1, 131)).output_shape
    sides = [66, 33, 17, 9, 5]
    assert [shape[1:] for shape in shapes] == list(zip([1] * 5, sides, channels, strict=True))


def test_stochastic_depth_grows_linearly_and_is_off_for_the_smallest(b1):
    nano = build("efficientnet-nano")
    assert not [layer for layer in nano.layers if isinstance(layer, keras.layers.Dropout)]
    num_blocks = sum(layer.name.endswith("project.bn") for layer in b1.layers)
    assert num_blocks == 23
    residual = [layer.name for layer in b1.layers if layer.name.endswith(".add")]
    drops = {layer.name: layer for layer in b1.layers if isinstance(layer, keras.layers.Dropout)}
    assert set(drops) == {name.replace(".add", ".drop") for name in residual}
    for name, drop in drops.items():
        index = int(name.split(".")[1].removeprefix("block_"))
        assert drop.rate == pytest.approx(0.2 * index / 23)
        assert drop.noise_shape == (None, 1, 1, 1)


def test_initial_kernels_are_normal_with_fan_out(b1):
    for name, fan_out in [
        ("backbone.stem.conv", 3 * 3 * 32),
        ("backbone.block_14.depthwise.conv", 5 * 5),
        ("backbone.block_17.project.conv", 192),
        ("backbone.block_17.se.expand", 1152),
    ]:
        kernel = np.asarray(b1.get_layer(name).kernel)
        assert kernel.std() == pytest.approx(np.sqrt(2 / fan_out), rel=0.1)
        assert np.abs(kernel).max() > 2.3 * kernel.std()
    twins = [np.asarray(b1.get_layer(f"backbone.block_{i}.expand.conv").kernel) for i in (17, 18)]
    assert not np.array_equal(*twins)


def test_unknown_backbone_suggests_the_nearest():
    with pytest.raises(UserError, match=r"did you mean 'efficientnet-b0'"):
        extract_features(keras.Input((64, 64, 3)), "eficientnet-b0")
