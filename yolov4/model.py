"""YOLOv4 (arXiv 2004.10934): CSPDarknet53 with SPP, PANet and three heads; also YOLOv4-tiny and yolov4-nano.

    model = build_model("yolov4", num_classes=80)
    raw_heads = model(images)  # images: RGB in [0, 1], (B, 608, 608, 3)

network.py lists the layers. Layer names show the part of the network and Darknet's layer number:
`backbone.layer_0.conv`, `backbone.layer_0.bn`, `neck.layer_105.conv`, `head.layer_138.conv`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from common.layers import BatchNormalization, Mish
from yolov4.config import YOLOv4Config, get_config
from yolov4.network import IMAGE_CHANNELS, describe

BN_EPSILON = 1e-5  # AlexeyAB/darknet src/blas.c, normalize_cpu
LEAKY_SLOPE = 0.1  # src/activations.h, leaky_activate


def build_model(
    model_name: str,
    num_classes: int = 80,
    image_size: tuple[int, int] | None = None,
    *,
    config: YOLOv4Config | None = None,
    any_size: bool = False,
) -> keras.Model:
    """Builds one model of the family with new weights, under the current Keras dtype policy.

    Args:
        model_name: one of config.MODEL_NAMES.
        num_classes: C.
        image_size: (height, width) of the images, multiples of 32; None: the size in the config.
        config: the model's configuration; None: the configuration of `model_name`.
        any_size: leave the images' height and width open, for training at several sizes.

    Returns:
        A model from images (B, height, width, 3) in [0, 1] to a list of raw float32 heads, finest stride
        first. The head of stride s is (B, height / s, width / s, K, 5 + C): x, y, width, height, objectness
        and C class logits of K anchors per cell, without activation.

    Raises:
        UserError: `model_name` is unknown.
        ValueError: `image_size` is not a multiple of 32.
    """
    config = config or get_config(model_name)
    config = dataclasses.replace(config, image_size=image_size or config.image_size)

    sides = (None, None) if any_size else config.image_size
    images = keras.Input((*sides, IMAGE_CHANNELS), name="images")
    tensors: list[keras.KerasTensor] = []  # the output of each layer
    heads: dict[int, keras.KerasTensor] = {}
    for layer in describe(config, num_classes):
        name = f"{layer.part}.layer_{layer.index}"
        x, *others = [tensors[index] for index in layer.inputs] or [images]
        match layer.kind:
            case "convolutional":
                x = _convolution(x, layer.options, config, name)
            case "route" if others:
                x = keras.layers.Concatenate(name=f"{name}.concat")([x, *others])
            case "route" if layer.options:
                x = x[..., -layer.channels :]  # the last group of channels
            case "shortcut":
                x = keras.layers.Add(name=f"{name}.add")([x, *others])
            case "maxpool":
                size, stride = layer.options["size"], layer.options["stride"]
                x = keras.layers.MaxPooling2D(size, stride, "same", name=f"{name}.pool")(x)
            case "upsample":
                x = keras.layers.UpSampling2D(2, name=f"{name}.upsample")(x)
            case "yolo":
                split = SplitAnchors(config.anchors_per_location, dtype="float32", name=f"{name}.raw")
                heads[layer.options["head"]] = split(x)
        tensors.append(x)
    return keras.Model(images, [heads[head] for head in sorted(heads)], name=model_name)


def _convolution(
    x: keras.KerasTensor, options: Mapping[str, Any], config: YOLOv4Config, name: str
) -> keras.KerasTensor:
    size, stride, activation = options["size"], options["stride"], options["activation"]
    is_head = activation == "linear"  # only these convolutions have no batch norm
    padding = "same"
    if stride == 2:
        # Darknet pads all sides. Keras' "same" would pad only bottom and right, and shift the output by a
        # pixel. The height and width of `x` are even, so padding at top and left gives the same result as
        # Darknet.
        pad = size // 2
        x = keras.layers.ZeroPadding2D(((pad, 0), (pad, 0)), name=f"{name}.pad")(x)
        padding = "valid"
    x = keras.layers.Conv2D(
        options["filters"],
        size,
        strides=stride,
        padding=padding,
        use_bias=is_head,
        # Uniform in +-sqrt(2 / fan_in), as in src/convolutional_layer.c, make_convolutional_layer
        kernel_initializer=keras.initializers.VarianceScaling(2 / 3, "fan_in", "uniform"),
        bias_initializer=_head_bias(options["filters"], config) if is_head else keras.initializers.Zeros(),
        # Heads are float32 even under mixed precision, because boxes and losses take exponentials of them.
        dtype="float32" if is_head else None,
        name=f"{name}.conv",
    )(x)
    if not is_head:
        x = BatchNormalization(momentum=config.bn_momentum, epsilon=BN_EPSILON, name=f"{name}.bn")(x)
    if activation == "mish":
        return Mish(name=f"{name}.mish")(x)
    if activation == "leaky":
        return keras.layers.LeakyReLU(LEAKY_SLOPE, name=f"{name}.leaky")(x)
    return x


def _head_bias(outputs: int, config: YOLOv4Config) -> keras.initializers.Initializer:
    biases = np.zeros((config.anchors_per_location, outputs // config.anchors_per_location))
    biases[:, 4] = config.objectness_bias
    num_classes = biases.shape[1] - 5
    if config.class_prior and num_classes > 1:
        biases[:, 5:] = -math.log(num_classes - 1)  # the sigmoid of this is 1 / num_classes
    return keras.initializers.Constant(biases.ravel().tolist())


@keras.saving.register_keras_serializable("dali_detection")
class SplitAnchors(keras.layers.Layer):
    """Reshapes (B, h, w, K * n) to (B, h, w, K, n). h and w may be unknown when the model is built."""

    def __init__(self, anchors_per_location: int, **options: Any):
        super().__init__(**options)
        self.anchors_per_location = anchors_per_location

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        batch, height, width, channels = keras.ops.shape(inputs)
        numbers = channels // self.anchors_per_location
        return keras.ops.reshape(inputs, (batch, height, width, self.anchors_per_location, numbers))

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        *places, channels = input_shape
        return (*places, self.anchors_per_location, channels // self.anchors_per_location)

    def get_config(self) -> dict:
        return super().get_config() | {"anchors_per_location": self.anchors_per_location}
