"""Implements --init_from: a model starts from weights of an earlier run, google/automl or ImageNet."""

import pathlib
from collections.abc import Mapping

import keras
import numpy as np

from common.data.labels import LabelMap
from common.errors import UserError
from common.weights import weight_files
from common.weights.fine_tuning import ClassRows, Report, transfer
from efficientdet.import_weights.automl import AutomlWeights, class_names, is_automl, read_automl
from efficientdet.import_weights.imagenet import download, is_backbone, read_backbone
from efficientdet.import_weights.tf_files import open_weights
from efficientdet.import_weights.torch_files import read_torch
from efficientdet.model import CLASS_WEIGHTS, anchors_of
from efficientdet.predict import load_trained


def init_from(model: keras.Model, label_map: LabelMap, weights: str, backbone: str = "") -> Report:
    """Copies the weights whose name and shape fit `model`. In the class head, classes are matched by name.

    Args:
        label_map: the classes of the model.
        weights: one of the following.
            - a .weights.h5 file of this project, or a run directory.
            - google/automl's EfficientDet of the same size: a .h5 file, a checkpoint, or a directory with one
              checkpoint.
            - for the backbone only: a .h5 file or a checkpoint of EfficientNet, or a .safetensors file of
              PyTorch's ResNet or MobileNetV2.
            - "imagenet", which downloads the backbone's public weights.
        backbone: the model's backbone, one of backbone.NAMES.

    Raises:
        UserError: the file cannot be read, belongs to another model, or nothing in it fits.
    """
    origin = f"--init_from={weights}"
    if _is_ours(pathlib.Path(weights)):
        trained, source, source_map, _ = load_trained(weights)
        values = {weight.path: weight.value for weight in trained.weights}
        rows = ClassRows(CLASS_WEIGHTS, anchors_of(model), source.anchors_per_location)
        return transfer(model, values, rows, label_map, source_map.names, origin)
    path = download(backbone) if weights == "imagenet" else weights
    if path.endswith(".safetensors"):
        return _assign_backbone(model, read_torch(path, model, backbone), label_map, origin)
    file = open_weights(path)
    if is_automl(file):
        contents = read_automl(file, model)
        return assign(model, contents, label_map, class_names(contents.num_classes), origin)
    if is_backbone(file):
        return _assign_backbone(model, read_backbone(file, model), label_map, origin)
    raise UserError(
        f"{origin} contains neither google/automl's EfficientDet nor an EfficientNet: give one of these, "
        "or weights of this project, whose names end in .weights.h5"
    )


def _is_ours(path: pathlib.Path) -> bool:
    if path.is_dir():
        return any((path / name).exists() for name in (weight_files.BEST, weight_files.LAST, "run.json"))
    return path.name.endswith(".weights.h5")


def _assign_backbone(
    model: keras.Model, values: Mapping[str, np.ndarray], label_map: LabelMap, origin: str
) -> Report:
    return transfer(model, values, ClassRows((), anchors_of(model), anchors_of(model)), label_map, (), origin)


def assign(
    model: keras.Model, contents: AutomlWeights, label_map: LabelMap, names: tuple[str, ...], origin: str
) -> Report:
    """Copies all weights of `contents` to a model. Classes are matched by their names."""
    rows = ClassRows(CLASS_WEIGHTS, anchors_of(model), contents.anchors)
    return transfer(model, contents.values, rows, label_map, names, origin)
