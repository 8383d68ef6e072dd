"""EfficientNet (arXiv 1905.11946) as EfficientDet's backbone: features of strides 2 to 32.

Structure, initialisation and drop rates follow google/automl efficientdet/backbone/efficientnet_model.py and
efficientnet_builder.py.
"""

import math
import types
from typing import NamedTuple

import keras

from common.errors import unknown
from common.layers import BatchNormalization, Swish
from efficientdet import mobilenet, resnet
from efficientdet.depthwise import DepthwiseConv2D


class Scaling(NamedTuple):
    """The factors that scale EfficientNet-B0 to another size."""

    width: float
    depth: float
    survival: float | None  # probability that the last block is kept; None: no stochastic depth


# From google/automl: width and depth from efficientnet_builder.py, survival from tf2/efficientdet_keras.py.
EFFICIENTNETS = {
    "efficientnet-nano": Scaling(0.5, 0.5, None),  # not published: for tests and laptops
    "efficientnet-b0": Scaling(1.0, 1.0, None),
    "efficientnet-b1": Scaling(1.0, 1.1, 0.8),
    "efficientnet-b2": Scaling(1.1, 1.2, 0.8),
    "efficientnet-b3": Scaling(1.2, 1.4, 0.8),
    "efficientnet-b4": Scaling(1.4, 1.8, 0.8),
    "efficientnet-b5": Scaling(1.6, 2.2, 0.8),
    "efficientnet-b6": Scaling(1.8, 2.6, 0.8),
    "efficientnet-b7": Scaling(2.0, 3.1, 0.8),
}
# name -> module whose extract_features(images, backbone, bn_momentum) applies the backbone
OTHERS: dict[str, types.ModuleType] = {
    **dict.fromkeys(resnet.RESNETS, resnet),
    **dict.fromkeys(mobilenet.MOBILENETS, mobilenet),
}
NAMES = (*EFFICIENTNETS, *OTHERS)


class _Stage(NamedTuple):
    """A sequence of equal blocks. Blocks after the first have stride 1."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    filters: int


_STEM_FILTERS = 32
_STAGES = (  # arXiv 1905.11946 table 1
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)
_SQUEEZE_RATIO = 0.25  # squeezed channels / the block's input channels


def extract_features(
    images: keras.KerasTensor, backbone: str, bn_momentum: float = 0.99
) -> dict[int, keras.KerasTensor]:
    """Applies a new backbone to `images`: an EfficientNet, or one of OTHERS.

    Args:
        images: (B, H, W, 3), normalised.
        backbone: one of NAMES.

    Returns:
        A dict: level l (1 to 5) -> output of the level's last block.
        Its shape is (B, ceil(H / 2**l), ceil(W / 2**l), C_l).

    Raises:
        UserError: `backbone` is unknown.
    """
    if backbone not in NAMES:
        raise unknown("backbone", backbone, NAMES)
    if backbone in OTHERS:
        return OTHERS[backbone].extract_features(images, backbone, bn_momentum)
    scaling = EFFICIENTNETS[backbone]
    blocks = scaled_blocks(scaling)

    x = _convolution(_round_filters(_STEM_FILTERS, scaling.width), 3, 2, "backbone.stem.conv")(images)
    x = batch_norm("backbone.stem.bn", bn_momentum)(x)
    x = Swish(name="backbone.stem.swish")(x)

    features, level = {}, 1
    for index, block in enumerate(blocks):
        # Stochastic depth (arXiv 1603.09382): the drop rate grows linearly with the block's index, from 0.
        drop_rate = 0.0 if scaling.survival is None else (1 - scaling.survival) * index / len(blocks)
        level += block.stride == 2
        x = _mbconv(x, block, drop_rate, bn_momentum, f"backbone.block_{index}")
        features[level] = x  # the level's last block remains
    return features


def batch_norm(name: str, momentum: float) -> keras.layers.Layer:
    """Returns a batch norm with EfficientDet's epsilon (google/automl efficientdet/tf2/util_keras.py)."""
    return BatchNormalization(momentum=momentum, epsilon=1e-3, name=name)


def _mbconv(
    x: keras.KerasTensor, block: _Stage, drop_rate: float, bn_momentum: float, name: str
) -> keras.KerasTensor:
    layers = keras.layers
    inputs, input_filters = x, x.shape[-1]
    expanded_filters = input_filters * block.expansion

    if block.expansion != 1:
        x = _convolution(expanded_filters, 1, 1, f"{name}.expand.conv")(x)
        x = batch_norm(f"{name}.expand.bn", bn_momentum)(x)
        x = Swish(name=f"{name}.expand.swish")(x)

    x = DepthwiseConv2D(
        block.kernel,
        strides=block.stride,
        padding="same",
        use_bias=False,
        depthwise_initializer=_initializer(),
        name=f"{name}.depthwise.conv",
    )(x)
    x = batch_norm(f"{name}.depthwise.bn", bn_momentum)(x)
    x = Swish(name=f"{name}.depthwise.swish")(x)

    # Squeeze and excitation (arXiv 1709.01507)
    gates = layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}.se.pool")(x)  # (B, 1, 1, C)
    squeezed_filters = max(1, int(input_filters * _SQUEEZE_RATIO))
    gates = _convolution(squeezed_filters, 1, 1, f"{name}.se.reduce", use_bias=True)(gates)
    gates = Swish(name=f"{name}.se.swish")(gates)
    gates = _convolution(expanded_filters, 1, 1, f"{name}.se.expand", use_bias=True)(gates)
    gates = layers.Activation("sigmoid", name=f"{name}.se.sigmoid")(gates)
    x = layers.Multiply(name=f"{name}.se.scale")([x, gates])

    x = _convolution(block.filters, 1, 1, f"{name}.project.conv")(x)
    x = batch_norm(f"{name}.project.bn", bn_momentum)(x)
    if block.stride == 1 and block.filters == input_filters:
        if drop_rate > 0:
            x = layers.Dropout(drop_rate, noise_shape=(None, 1, 1, 1), name=f"{name}.drop")(x)
        x = layers.Add(name=f"{name}.add")([x, inputs])
    return x


def _convolution(
    filters: int, kernel: int, stride: int, name: str, use_bias: bool = False
) -> keras.layers.Layer:
    return keras.layers.Conv2D(
        filters,
        kernel,
        strides=stride,
        padding="same",
        use_bias=use_bias,
        kernel_initializer=_initializer(),
        name=name,
    )


def _initializer() -> keras.initializers.Initializer:
    """Returns a new initializer. Layers that share an initializer would start with the same values."""
    return keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")


def scaled_blocks(scaling: Scaling) -> list[_Stage]:
    """Returns all blocks of the network. `scaling` changes their number and their filters."""
    blocks = []
    for stage in _STAGES:
        block = stage._replace(repeats=1, filters=_round_filters(stage.filters, scaling.width))
        repeats = math.ceil(scaling.depth * stage.repeats)
        blocks += [block] + [block._replace(stride=1)] * (repeats - 1)
    return blocks


def _round_filters(filters: int, width: float) -> int:
    """Rounds `width * filters` to the nearest multiple of 8 that is at least 90 % of this product."""
    scaled = filters * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded
