"""Reads google/automl's EfficientDet checkpoints: maps the weights of our models to automl's names.

The names come from efficientdet/tf2/efficientdet_keras.py and efficientdet/backbone/efficientnet_model.py.
Class output i of automl's models belongs to category id i + 1.
"""

import math
import re
from collections.abc import Collection
from typing import NamedTuple

import keras
import numpy as np

from common.data.labels import LabelMap
from common.errors import UserError
from common.weights.fine_tuning import coco_label_map
from efficientdet.import_weights.tf_files import ForeignWeights, take

NUM_COCO_ROWS = 90  # google/automl efficientdet/hparams_config.py: num_classes
BACKBONE = "backbone"  # stands for efficientnet-b0, -b1, ... in canonical names

# our layer -> automl's layer
_LAYERS = {
    r"backbone\.stem\.conv": "backbone/stem/conv2d",
    r"backbone\.stem\.bn": "backbone/stem/tpu_batch_normalization",
    r"fpn\.level_(\d+)\.conv": r"resample_p\1/conv2d",
    r"fpn\.level_(\d+)\.bn": r"resample_p\1/bn",
    r"fpn\.cell_(\d+)\.node_(\d+)\.fuse": r"fpn_cells/cell_\1/fnode\2",
    r"fpn\.cell_(\d+)\.node_(\d+)\.input_(\d+)\.conv": r"fpn_cells/cell_\1/fnode\2/resample_\3/conv2d",
    r"fpn\.cell_(\d+)\.node_(\d+)\.input_(\d+)\.bn": r"fpn_cells/cell_\1/fnode\2/resample_\3/bn",
    r"fpn\.cell_(\d+)\.node_(\d+)\.(conv|bn)": r"fpn_cells/cell_\1/fnode\2/op_after_combine/\3",
    r"(class|box)_net\.conv_(\d+)": r"\1_net/\1-\2",
    r"(class|box)_net\.bn_(\d+)\.level_(\d+)": r"\1_net/\1-\2-bn-\3",
    r"(class|box)_net\.predict": r"\1_net/\1-predict",
}
# our layer in a backbone block -> automl's layer (in blocks with expansion, in blocks without expansion)
_BLOCK_LAYERS = {
    "expand.conv": ("conv2d", None),
    "expand.bn": ("tpu_batch_normalization", None),
    "depthwise.conv": ("depthwise_conv2d", "depthwise_conv2d"),
    "depthwise.bn": ("tpu_batch_normalization_1", "tpu_batch_normalization"),
    "se.reduce": ("se/conv2d", "se/conv2d"),
    "se.expand": ("se/conv2d_1", "se/conv2d_1"),
    "project.conv": ("conv2d_1", "conv2d"),
    "project.bn": ("tpu_batch_normalization_2", "tpu_batch_normalization_1"),
}
_BLOCK = re.compile(r"backbone\.block_(\d+)\.(\w+\.\w+)")
_PARTS = re.compile(r"(?:^|/)((?:efficientnet-[a-z0-9]+|resample_p\d+|fpn_cells|class_net|box_net)/.+)$")
_BACKBONE = re.compile(r"^efficientnet-[a-z0-9]+/(?:model/)?")
_RESAMPLE = re.compile(r"/resample_(\d+)_\d+_\d+/")
_COMBINE = re.compile(r"/op_after_combine\d+/")


def canonical(name: str) -> str | None:
    """Removes from a weight's name the parts that differ between automl's releases.

    Returns None if the name does not belong to automl's EfficientDet.

    >>> canonical("efficientnet-b0/model/blocks_0/conv2d/kernel")
    'backbone/blocks_0/conv2d/kernel'
    >>> canonical("fpn_cells/cell_0/fnode3/resample_0_0_8/conv2d/bias")
    'fpn_cells/cell_0/fnode3/resample_0/conv2d/bias'
    """
    part = _PARTS.search(name)
    if not part:
        return None
    name = _BACKBONE.sub(f"{BACKBONE}/", part[1])
    return _COMBINE.sub("/op_after_combine/", _RESAMPLE.sub(r"/resample_\1/", name))


def automl_names(model: keras.Model) -> dict[str, tuple[str, ...]]:
    """Returns a dict: path of a weight -> canonical names of automl's variables for this weight.

    Weights without a counterpart in automl's models are left out.
    """
    layers = {layer.name for layer in model.layers}
    names = {}
    for weight in model.weights:
        layer, _, variable = weight.path.rpartition("/")
        theirs = _automl_layer(layer, layers)
        if theirs is None:
            continue
        variables: tuple[str, ...] = (variable,)
        if variable == "fusion_weights":
            variables = ("WSM", "WSM_1", "WSM_2")[: weight.shape[0]]
        elif theirs.endswith("depthwise_conv2d"):
            variables = ("depthwise_kernel",)
        names[weight.path] = tuple(f"{theirs}/{variable}" for variable in variables)
    return names


def _automl_layer(layer: str, layers: Collection[str]) -> str | None:
    block = _BLOCK.fullmatch(layer)
    if block:
        expands = f"backbone.block_{block[1]}.expand.conv" in layers
        names = _BLOCK_LAYERS.get(block[2])
        return names and f"{BACKBONE}/blocks_{block[1]}/{names[0 if expands else 1]}"
    for ours, theirs in _LAYERS.items():
        match = re.fullmatch(ours, layer)
        if match:
            return match.expand(theirs)
    return None


class AutomlWeights(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        values: path of a weight in our model -> the array in the checkpoint. Arrays of the heads' last layers
            may have another shape than in our model, because the numbers of classes and anchors may differ.
        anchors: number of anchors per location in the checkpoint.
        num_classes: number of class outputs per anchor in the checkpoint.
    """

    values: dict[str, np.ndarray]
    anchors: int
    num_classes: int


def is_automl(file: ForeignWeights) -> bool:
    return "class_net/class-predict/bias" in map(canonical, file.shapes)


def count_outputs(file: ForeignWeights) -> tuple[int, int]:
    """Returns the number of classes and the number of anchors per location.

    Raises:
        UserError: the file does not contain automl's EfficientDet.
    """
    if not is_automl(file):
        raise UserError(f"{file.path} has no weights of google/automl's EfficientDet: choose another file")
    shapes = file.renamed(canonical).shapes
    rows = math.prod(shapes["class_net/class-predict/bias"])
    boxes = math.prod(shapes.get("box_net/box-predict/bias", ()))
    anchors, rest = divmod(boxes, 4)
    if rest or not anchors or not rows or rows % anchors:
        raise UserError(
            f"weights {file.path}: {rows} class outputs do not match {boxes} box outputs: choose another file"
        )
    return rows // anchors, anchors


def read_automl(file: ForeignWeights, model: keras.Model) -> AutomlWeights:
    """Reads the values of all weights of a model. The file may have another number of classes than the model.

    Raises:
        UserError: the file is damaged or belongs to another model.
    """
    num_classes, anchors = count_outputs(file)
    file, names = file.renamed(canonical), automl_names(model)
    unnamed = [weight.path for weight in model.weights if weight.path not in names]
    if unnamed:
        raise UserError(
            f"weights {file.path} do not fit {model.name}: automl's models have no {unnamed[0]}. "
            "Choose weights of this model, or one of automl's models (efficientdet-d0 .. d7x)"
        )
    lengths = {}  # length of the last axis: k * C for classes, k * 4 for boxes
    for variable in ("pointwise_kernel", "bias"):
        lengths[f"class_net.predict/{variable}"] = anchors * num_classes
        lengths[f"box_net.predict/{variable}"] = anchors * 4
    return AutomlWeights(take(file, model, names, lengths), anchors, num_classes)


def class_names(num_classes: int, label_map: LabelMap | None = None) -> tuple[str, ...]:
    """Returns the names of automl's class outputs. Output i gets the name of category id i + 1.

    Without a label map, 90 outputs get the names of COCO. Outputs without a known name get "".
    """
    if label_map is None and num_classes == NUM_COCO_ROWS:
        label_map = coco_label_map()
    known = dict(zip(label_map.category_ids, label_map.names, strict=True)) if label_map else {}
    return tuple(known.get(category_id, "") for category_id in range(1, num_classes + 1))
