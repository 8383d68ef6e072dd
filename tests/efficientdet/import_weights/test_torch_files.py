"""Tests import_weights/torch_files.py against outputs of torchvision and timm (torch_networks.txt)."""

import pathlib
import zlib

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

from common.dali_ops import IMAGENET_MEAN, IMAGENET_STD
from common.errors import UserError
from efficientdet.backbone import extract_features
from efficientdet.import_weights.torch_files import read_torch
from tests.efficientdet.automl_files import parse_shape
from tests.efficientdet.networks import pseudo_random

NETWORKS = (pathlib.Path(__file__).parent / "torch_networks.txt").read_text().splitlines()


def torch_values(name, shape):
    values = pseudo_random(shape, zlib.crc32(name.encode()))
    if len(shape) == 4:
        return values * 4 / np.sqrt(np.prod(shape[1:]))
    return values + 1 if name.endswith(("weight", "var")) else values


def write_torch_file(path, backbone):
    """Writes a file of weights like timm's. Returns its path and the expected outputs."""
    tensors, outputs = {"fc.bias": np.zeros(1000, np.float32)}, []
    for line in NETWORKS:
        of, layer, *rest = line.split()
        if of == backbone and layer == "output":
            outputs.append([float(number) for number in rest[1:]])
        elif of == backbone:
            for variable, _, shape in (item.partition("=") for item in rest):
                name = f"{layer}.{variable}"
                tensors[name] = np.float32(torch_values(name, parse_shape(shape)))
    save_file(tensors, path)
    return path, outputs


@pytest.mark.parametrize("backbone", ["resnet-18", "resnet-50", "mobilenet-v2"])
def test_resnet_and_mobilenet_features_with_torch_weights_equal_those_of_torchvision_and_timm(
    backbone, tmp_path
):
    path, expected = write_torch_file(tmp_path / "model.safetensors", backbone)
    inputs = keras.Input((96, 96, 3))
    features = extract_features(inputs, backbone)
    model = keras.Model(inputs, [features[level] for level in range(1, 6)])
    values = read_torch(path, model, backbone)
    for weight in model.weights:
        weight.assign(values.pop(weight.path))
    assert not values
    image = np.uint8(256 * pseudo_random((1, 96, 96, 3), 0) + 128)
    outputs = model((image - np.float32(IMAGENET_MEAN)) / np.float32(IMAGENET_STD), training=False)
    for output, (mean, greatest, value) in zip(map(np.asarray, outputs), expected, strict=True):
        summary = [np.abs(output).mean(), np.abs(output).max(), output[0, 1, -1, 5]]
        np.testing.assert_allclose(summary, [mean, greatest, value], rtol=0, atol=1e-5 * greatest)


def test_truncated_torch_file_or_file_of_another_network_is_refused(tmp_path):
    path, _ = write_torch_file(tmp_path / "model.safetensors", "resnet-18")
    model = keras.Model(inputs := keras.Input((64, 64, 3)), extract_features(inputs, "resnet-50"))
    with pytest.raises(UserError, match=r"do not fit .*: layer1\.0\.conv1\.weight is \(3, 3, 64, 64\) in"):
        read_torch(path, model, "resnet-50")
    with pytest.raises(UserError, match=r"^weights .* efficientnet-b0 needs a .h5 file .* not .safetensors$"):
        read_torch(path, model, "efficientnet-b0")
    for content in (path.read_bytes()[:-1], b"\x80\x02}q\x00.", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"^weights .*: not a complete safetensors file \([^\n]*\)$"):
            read_torch(path, model, "resnet-50")
