"""Reads google/automl's EfficientDet checkpoints into the models here; automl_weights.py is the command.

Class output i of its models is category id i + 1: COCO's 80 classes are spread over 90 of them.
"""

import math
from typing import NamedTuple

import keras
import numpy as np

from common.errors import UserError
from common.labels import LabelMap, coco_label_map
from common.training.fine_tuning import ClassRows, Report, transfer
from efficientdet.import_weights.automl_names import automl_names, canonical, models_of
from efficientdet.import_weights.tf_files import ForeignWeights, take, unused

NUM_COCO_ROWS = 90  # google/automl efficientdet/hparams_config.py: num_classes
# (..., k * C); a plain kernel is RetinaNet's
CLASS_WEIGHTS = ("class_net.predict/pointwise_kernel", "class_net.predict/kernel", "class_net.predict/bias")
BOX_WEIGHTS = ("box_net.predict/pointwise_kernel", "box_net.predict/bias")  # (..., k * 4)


class Contents(NamedTuple):
    """What a checkpoint holds for a model.

    Attributes:
        values: path of a weight -> array. Those of CLASS_WEIGHTS have the file's classes in their last axis,
            and where the file has another number of anchors, BOX_WEIGHTS have that, too.
        anchors: per location, of the file.
        num_classes: of the file.
        unused: what else is in it.
        averaged: whether the values are averages over the training.
    """

    values: dict[str, np.ndarray]
    anchors: int
    num_classes: int
    unused: tuple[str, ...]
    averaged: bool


def is_automl(file: ForeignWeights) -> bool:
    """Whether a file is of automl's EfficientDet, of any size."""
    return "class_net/class-predict/bias" in map(canonical, file.shapes)


def count_outputs(file: ForeignWeights) -> tuple[int, int]:
    """Classes, and anchors per location, of one of automl's models; UserError for any other file."""
    if not is_automl(file):
        raise UserError(f"weights {file.path} are not of google/automl's EfficientDet")
    shapes = file.renamed(canonical).shapes
    rows = math.prod(shapes["class_net/class-predict/bias"])
    boxes = math.prod(shapes.get("box_net/box-predict/bias", ()))
    anchors, rest = divmod(boxes, 4)
    if rest or not anchors or not rows or rows % anchors:
        raise UserError(f"weights {file.path}: {rows} class outputs do not go with {boxes} box outputs")
    return rows // anchors, anchors


def read_automl(file: ForeignWeights, model: keras.Model) -> Contents:
    """The values for every weight of a model.

    Args:
        file: of the same model, with any number of classes.
        model: what `build_model` made; it is not changed.

    Raises:
        UserError: the file is damaged, or of another model.
    """
    num_classes, anchors = count_outputs(file)
    raw_names, file = list(file.shapes), file.renamed(canonical)
    wanted = automl_names(model)
    lengths = dict.fromkeys(CLASS_WEIGHTS, anchors * num_classes) | dict.fromkeys(BOX_WEIGHTS, anchors * 4)
    try:
        without = [weight.path for weight in model.weights if weight.path not in wanted]
        if without:
            raise ValueError(f"automl's models have no {without[0]}")
        values = take(file, model, wanted, lengths=lengths)
    except ValueError as error:
        models = models_of(raw_names, file.shapes)
        if model.name in models or not models:
            raise UserError(f"weights {file.path} do not fit this {model.name}: {error}") from error
        raise UserError(
            f"weights {file.path} do not fit {model.name}: they seem to be of {' or '.join(models)} ({error})"
        ) from error
    return Contents(values, anchors, num_classes, unused(file, wanted), file.averaged)


def class_names(num_classes: int, label_map: LabelMap | None = None) -> tuple[str, ...]:
    """The names of automl's class outputs: output i is category id i + 1; "" where there is no such category.

    Args:
        num_classes: outputs.
        label_map: the categories; COCO's where there are 90 outputs and nothing else is known.
    """
    if label_map is None and num_classes == NUM_COCO_ROWS:
        label_map = coco_label_map()
    known = dict(zip(label_map.category_ids, label_map.names, strict=True)) if label_map else {}
    return tuple(known.get(category_id, "") for category_id in range(1, num_classes + 1))


def assign(
    model: keras.Model, contents: Contents, label_map: LabelMap, names: tuple[str, ...], origin: str
) -> Report:
    """Puts `contents` into a model: class rows by name (fine_tuning.py), all else as it is."""
    remarks = []
    if contents.averaged:
        remarks.append("averages over the training taken, where there are any")
    if not any(names):
        remarks.append(f"the names of its {contents.num_classes} classes are unknown")
    return transfer(
        model,
        contents.values,
        ClassRows(CLASS_WEIGHTS, anchors_of(model), contents.anchors),
        label_map,
        names,
        origin,
        unused=contents.unused,
        remark="; ".join(remarks),
    )


def anchors_of(model: keras.Model) -> int:
    """Anchors per location."""
    return model.get_layer("box_net.predict").bias.shape[0] // 4
