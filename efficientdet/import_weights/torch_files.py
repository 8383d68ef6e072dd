"""Reads the ImageNet weights of PyTorch's ResNets and MobileNetV2.

PyTorch Image Models (timm) publishes them as safetensors at huggingface.co/timm. The names are torchvision's
for ResNets (models/resnet.py), and timm's for MobileNetV2 (models/_efficientnet_blocks.py). PyTorch's own
files are refused: they are pickles, which can run code when they are read.
"""

import os
import re

import keras
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from common.errors import UserError
from common.weights import weight_files
from efficientdet import mobilenet, resnet
from efficientdet.import_weights.tf_files import ForeignWeights, take

_VARIABLES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_RESNET_STEM = {"backbone.stem.conv": "conv1", "backbone.stem.bn": "bn1"}
_RESNET_LAYER = re.compile(r"backbone\.stage_(\d)\.block_(\d+)\.(?:conv_(\d)|project)(\.bn)?")
_MOBILENET_STEM = {"backbone.stem.conv": "conv_stem", "backbone.stem.bn": "bn1"}
# Name of our layer -> names of timm's convolution and batch norm. _PLAIN is for blocks without an expansion.
_EXPANDING = {"expand": ("conv_pw", "bn1"), "depthwise": ("conv_dw", "bn2"), "project": ("conv_pwl", "bn3")}
_PLAIN = {"depthwise": ("conv_dw", "bn1"), "project": ("conv_pw", "bn2")}


def read_torch(path: str | os.PathLike, model: keras.Model, backbone: str) -> dict[str, np.ndarray]:
    """Reads the values of a model's backbone from a .safetensors file: path -> float32 array.

    Raises:
        UserError: the file is damaged or belongs to another network, or `backbone` is neither a ResNet nor
            MobileNetV2.
    """
    if backbone in resnet.RESNETS:
        name_of = _resnet_name
    elif backbone in mobilenet.MOBILENETS:
        name_of = _mobilenet_name
    else:
        raise UserError(f"weights {path}: {backbone} needs a .h5 file or a checkpoint, not .safetensors")
    names = {}
    for weight in model.weights:
        layer, _, variable = weight.path.rpartition("/")
        if layer.startswith("backbone."):
            names[weight.path] = (f"{name_of(layer)}.{_VARIABLES[variable]}",)
    return take(_open(path), model, names)


def _open(path: str | os.PathLike) -> ForeignWeights:
    try:
        arrays = {name: _keras_layout(array) for name, array in load_file(path).items()}
    except (OSError, SafetensorError, AttributeError) as error:  # AttributeError: NumPy lacks the dtype
        raise UserError(
            f"weights {path}: not a complete safetensors file ({weight_files.reason(error)})"
        ) from error
    shapes, stored = {name: array.shape for name, array in arrays.items()}, {name: name for name in arrays}
    return ForeignWeights(os.fspath(path), shapes, stored, lambda keys: [arrays[key] for key in keys])


def _keras_layout(array: np.ndarray) -> np.ndarray:
    """Converts a kernel from (output, input, h, w) to Keras' (h, w, input, output).

    A depthwise kernel becomes (h, w, output, 1). Arrays of other shapes do not change.
    """
    if array.ndim != 4:
        return array
    return array.transpose(2, 3, 0, 1) if array.shape[1] == 1 else array.transpose(2, 3, 1, 0)


def _resnet_name(layer: str) -> str:
    """Maps a layer's name to PyTorch's: `backbone.stage_1.block_0.conv_0.bn` -> `layer1.0.bn1`."""
    match = _RESNET_LAYER.fullmatch(layer)
    if not match:
        return _RESNET_STEM[layer]
    stage, block, number, bn = match.groups()
    if number is None:
        part = "downsample.1" if bn else "downsample.0"
    else:
        part = f"{'bn' if bn else 'conv'}{int(number) + 1}"
    return f"layer{stage}.{block}.{part}"


def _mobilenet_name(layer: str) -> str:
    """Maps a layer's name to PyTorch's: `backbone.block_1.expand.conv` -> `blocks.1.0.conv_pw`."""
    if layer in _MOBILENET_STEM:
        return _MOBILENET_STEM[layer]
    block, part, kind = layer.removeprefix("backbone.block_").split(".")
    places = [(i, repeat) for i, stage in enumerate(mobilenet.STAGES) for repeat in range(stage.repeats)]
    stage, repeat = places[int(block)]
    convolution, bn = (_PLAIN if mobilenet.STAGES[stage].expansion == 1 else _EXPANDING)[part]
    return f"blocks.{stage}.{repeat}.{bn if kind == 'bn' else convolution}"
