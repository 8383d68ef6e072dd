"""ResNet (arXiv 1512.03385) as a detector's backbone: features of strides 2 to 32.

The network is torchvision's (models/resnet.py): the stride of a bottleneck is in its 3x3 convolution.
Convolutions pad opposite sides of an image equally, as in PyTorch.
"""

from typing import NamedTuple

import keras

from common.layers import BatchNormalization
from efficientdet.depthwise import DepthwiseConv2D


class Depth(NamedTuple):
    """The number of blocks in each of the four stages, and the type and the width of the blocks."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    filters: int = 64  # of the first stage; each later stage has twice as many
    widest: int = 512  # limit of the filters of a stage
    is_stem_pooled: bool = True  # False: a smaller stem without pooling, and stride 2 in the first stage


RESNETS = {  # arXiv 1512.03385 table 1
    "resnet-nano": Depth((1, 1, 1, 1), False, 32),  # not published: for tests and laptops
    "resnet-pico": Depth((1, 1, 1, 1), False, 32, 96, False),  # not published: for efficientdet-nano
    "resnet-18": Depth((2, 2, 2, 2), False),
    "resnet-34": Depth((3, 4, 6, 3), False),
    "resnet-50": Depth((3, 4, 6, 3), True),
    "resnet-101": Depth((3, 4, 23, 3), True),
    "resnet-152": Depth((3, 8, 36, 3), True),
}
_WIDENING = 4  # a bottleneck's output channels divided by its inner channels
_BN_EPSILON = 1e-5  # PyTorch's


def extract_features(
    images: keras.KerasTensor, backbone: str, bn_momentum: float
) -> dict[int, keras.KerasTensor]:
    """Applies a ResNet to normalised `images` (B, H, W, 3); see backbone.extract_features."""
    depth = RESNETS[backbone]
    filters, kernel = (depth.filters, 7) if depth.is_stem_pooled else (depth.filters // 2, 3)
    x = convolution(images, filters, kernel, 2, "backbone.stem.conv")
    x = batch_norm(x, bn_momentum, "backbone.stem.bn")
    x = keras.layers.Activation("relu", name="backbone.stem.relu")(x)
    features = {1: x}

    if depth.is_stem_pooled:
        x = keras.layers.ZeroPadding2D(1, name="backbone.stem.pad")(x)
        x = keras.layers.MaxPooling2D(3, 2, name="backbone.stem.pool")(x)
    for stage, blocks in enumerate(depth.blocks, 1):
        filters = min(depth.filters * 2 ** (stage - 1), depth.widest)
        for block in range(blocks):
            stride = 2 if block == 0 and (stage > 1 or not depth.is_stem_pooled) else 1
            name = f"backbone.stage_{stage}.block_{block}"
            x = _block(x, filters, stride, depth.bottleneck, bn_momentum, name)
        features[stage + 1] = x
    return features


def convolution(
    x: keras.KerasTensor, filters: int, kernel: int, stride: int, name: str, groups: int = 1
) -> keras.KerasTensor:
    """Applies a convolution without bias, with equal padding on both sides. Sides become ceil(side / stride).

    `groups` is 1, or the number of channels for a depthwise convolution.
    """
    if stride > 1 and kernel > 1:
        x = pad_for_stride(x, kernel, name)
    padding = "same" if stride == 1 else "valid"
    initializer = keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
    common = {"strides": stride, "padding": padding, "use_bias": False, "name": name}
    if groups == 1:
        return keras.layers.Conv2D(filters, kernel, kernel_initializer=initializer, **common)(x)
    return DepthwiseConv2D(kernel, depthwise_initializer=initializer, **common)(x)


def pad_for_stride(x: keras.KerasTensor, kernel: int, name: str) -> keras.KerasTensor:
    """Pads the input of a strided "valid" convolution with the same number of zeros on both sides."""
    return keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}.pad")(x)


def batch_norm(x: keras.KerasTensor, momentum: float, name: str) -> keras.KerasTensor:
    return BatchNormalization(momentum=momentum, epsilon=_BN_EPSILON, name=name)(x)


def _block(
    x: keras.KerasTensor, filters: int, stride: int, bottleneck: bool, bn_momentum: float, name: str
) -> keras.KerasTensor:
    """Applies a residual block (arXiv 1512.03385).

    The shortcut has a projection if the shapes of input and output differ (option B of the paper).
    """
    convolutions = [(filters, 3, stride), (filters, 3, 1)]  # channels, kernel, stride
    if bottleneck:
        convolutions = [(filters, 1, 1), (filters, 3, stride), (_WIDENING * filters, 1, 1)]
    shortcut, outputs = x, convolutions[-1][0]
    if stride > 1 or x.shape[-1] != outputs:
        shortcut = _normed_convolution(x, outputs, 1, stride, bn_momentum, f"{name}.project")
    for number, shape in enumerate(convolutions):
        if number > 0:
            x = keras.layers.Activation("relu", name=f"{name}.relu_{number - 1}")(x)
        x = _normed_convolution(x, *shape, bn_momentum, f"{name}.conv_{number}")
    x = keras.layers.Add(name=f"{name}.add")([x, shortcut])
    return keras.layers.Activation("relu", name=f"{name}.relu")(x)


def _normed_convolution(
    x: keras.KerasTensor, filters: int, kernel: int, stride: int, bn_momentum: float, name: str
) -> keras.KerasTensor:
    x = convolution(x, filters, kernel, stride, name)
    return batch_norm(x, bn_momentum, f"{name}.bn")
