"""Tests backbone.py, resnet.py and mobilenet.py with published parameter counts and depths.

import_weights/ compares the features with those of Keras, torchvision and timm.
"""

import keras
import numpy as np
import pytest

from common.errors import UserError
from efficientdet.backbone import EFFICIENTNETS, extract_features, scaled_blocks
from efficientdet.resnet import RESNETS

# {name: (filters of the last block, features of the classifier, num_params)}, the last one from torchvision's
# documentation
TORCHVISION = {
    "efficientnet-b0": (320, 1280, 5_288_548),
    "efficientnet-b1": (320, 1280, 7_794_184),
    "efficientnet-b2": (352, 1408, 9_109_994),
    "efficientnet-b3": (384, 1536, 12_233_232),
    "efficientnet-b4": (448, 1792, 19_341_616),
    "efficientnet-b5": (512, 2048, 30_389_784),
    "efficientnet-b6": (576, 2304, 43_040_704),
    "efficientnet-b7": (640, 2560, 66_347_960),
}


def build(backbone, image_size=(64, 64)):
    images = keras.Input((*image_size, 3))
    features = extract_features(images, backbone)
    return keras.Model(images, [features[level] for level in (1, 2, 3, 4, 5)])


@pytest.fixture(scope="module")
def b1():
    return build("efficientnet-b1")


@pytest.mark.parametrize("name", TORCHVISION)
def test_blocks_of_efficientnet_have_as_many_parameters_as_torchvisions(name):
    inputs = 8 * round(32 * EFFICIENTNETS[name].width / 8 + 1e-6)
    count = 3 * 3 * 3 * inputs + 2 * inputs
    for block in scaled_blocks(EFFICIENTNETS[name]):
        inner, squeezed = inputs * block.expansion, inputs // 4
        count += inputs * inner + 2 * inner if block.expansion > 1 else 0
        count += block.kernel**2 * inner + 2 * inner + inner * squeezed * 2 + inner + squeezed
        count += inner * block.filters + 2 * block.filters
        inputs = block.filters
    last, features, num_params = TORCHVISION[name]
    count += last * features + 2 * features  # the last 1x1 convolution and its batch norm
    count += features * 1000 + 1000  # the classifier
    assert count == num_params


def test_depth_of_every_resnet_equals_the_number_in_its_name():
    """As in arXiv 1512.03385, the depth counts the stem, the classifier, and 2 or 3 convolutions in each
    block."""
    for name in ("resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152"):
        depth = RESNETS[name]
        assert name == f"resnet-{2 + sum(depth.blocks) * (3 if depth.bottleneck else 2)}"


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("efficientnet-nano", [8, 16, 24, 56, 160]),
        ("resnet-nano", [32, 32, 64, 128, 256]),
        ("mobilenet-v2", [16, 24, 32, 96, 320]),
    ],
)
def test_each_backbone_level_halves_an_odd_size_rounding_up(name, channels):
    shapes = build(name, (1, 131)).output_shape
    sides = [66, 33, 17, 9, 5]
    assert [shape[1:] for shape in shapes] == list(zip([1] * 5, sides, channels, strict=True))


def test_stochastic_depth_grows_linearly_and_is_off_for_efficientnet_nano(b1):
    nano = build("efficientnet-nano")
    assert not [layer for layer in nano.layers if isinstance(layer, keras.layers.Dropout)]
    assert sum(layer.name.endswith("project.bn") for layer in b1.layers) == 23
    residual = [layer.name for layer in b1.layers if layer.name.endswith(".add")]
    drops = {layer.name: layer for layer in b1.layers if isinstance(layer, keras.layers.Dropout)}
    assert set(drops) == {name.replace(".add", ".drop") for name in residual}
    for name, drop in drops.items():
        index = int(name.split(".")[1].removeprefix("block_"))
        assert drop.rate == pytest.approx(0.2 * index / 23)
        assert drop.noise_shape == (None, 1, 1, 1)


def test_initial_efficientnet_kernels_are_normal_with_variance_two_over_fan_out(b1):
    for name, fan_out in [
        ("backbone.stem.conv", 3 * 3 * 32),
        ("backbone.block_14.depthwise.conv", 5 * 5),
        ("backbone.block_17.project.conv", 192),
        ("backbone.block_17.se.expand", 1152),
    ]:
        kernel = np.asarray(b1.get_layer(name).kernel)
        assert kernel.std() == pytest.approx(np.sqrt(2 / fan_out), rel=0.1)
        assert np.abs(kernel).max() > 2.3 * kernel.std()
    same_shape = [np.asarray(b1.get_layer(f"backbone.block_{i}.expand.conv").kernel) for i in (17, 18)]
    assert not np.array_equal(*same_shape)


def test_unknown_backbone_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"did you mean 'efficientnet-b0'"):
        extract_features(keras.Input((64, 64, 3)), "eficientnet-b0")
