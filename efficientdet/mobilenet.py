"""MobileNetV2 (arXiv 1801.04381) as a detector's backbone: features of strides 2 to 32.

The network is torchvision's (models/mobilenetv2.py) of width 1. A feature is the output of a level's last
block, as in NVIDIA/retinanet-examples (odtk/backbones/fpn.py MobileNetV2FPN).
"""

from typing import NamedTuple

import keras

from efficientdet.resnet import batch_norm, convolution

MOBILENETS = ("mobilenet-v2",)


class _ResidualStage(NamedTuple):
    """A sequence of equal blocks. Blocks after the first have stride 1."""

    expansion: int
    filters: int
    repeats: int
    stride: int


_STEM_FILTERS = 32
STAGES = (  # arXiv 1801.04381 table 2
    _ResidualStage(1, 16, 1, 1),
    _ResidualStage(6, 24, 2, 2),
    _ResidualStage(6, 32, 3, 2),
    _ResidualStage(6, 64, 4, 2),
    _ResidualStage(6, 96, 3, 1),
    _ResidualStage(6, 160, 3, 2),
    _ResidualStage(6, 320, 1, 1),
)


def extract_features(
    images: keras.KerasTensor, backbone: str, bn_momentum: float
) -> dict[int, keras.KerasTensor]:
    """Applies MobileNetV2 to normalised `images` (B, H, W, 3); see backbone.extract_features."""
    x = _activated(images, _STEM_FILTERS, 3, 2, bn_momentum, "backbone.stem")
    features, level, block = {}, 1, 0
    for stage in STAGES:
        for repeat in range(stage.repeats):
            stride = stage.stride if repeat == 0 else 1
            level += stride == 2
            x = _inverted_residual(x, stage, stride, bn_momentum, f"backbone.block_{block}")
            features[level] = x  # the level's last block remains
            block += 1
    return features


def _inverted_residual(
    x: keras.KerasTensor, stage: _ResidualStage, stride: int, bn_momentum: float, name: str
) -> keras.KerasTensor:
    inputs, channels = x, x.shape[-1] * stage.expansion
    if stage.expansion != 1:
        x = _activated(x, channels, 1, 1, bn_momentum, f"{name}.expand")
    x = _activated(x, channels, 3, stride, bn_momentum, f"{name}.depthwise", groups=channels)
    x = convolution(x, stage.filters, 1, 1, f"{name}.project.conv")
    x = batch_norm(x, bn_momentum, f"{name}.project.bn")
    if stride == 1 and inputs.shape[-1] == stage.filters:
        x = keras.layers.Add(name=f"{name}.add")([x, inputs])
    return x


def _activated(
    x: keras.KerasTensor,
    filters: int,
    kernel: int,
    stride: int,
    bn_momentum: float,
    name: str,
    groups: int = 1,
) -> keras.KerasTensor:
    x = convolution(x, filters, kernel, stride, f"{name}.conv", groups)
    x = batch_norm(x, bn_momentum, f"{name}.bn")
    return keras.layers.ReLU(6.0, name=f"{name}.relu6")(x)
