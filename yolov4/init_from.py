"""`--init_from`: weights of an earlier run or of Darknet as a starting point, whatever their classes were."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import keras
from numpy.typing import ArrayLike

from common.errors import UserError
from common.labels import LabelMap
from common.training.fine_tuning import ClassRows, Report, transfer
from yolov4.config import YOLOv4Config
from yolov4.darknet_weights import read_darknet
from yolov4.import_weights.darknet_classes import read_label_map
from yolov4.network import Conv, describe
from yolov4.predict import load_trained

BOX_ROWS = 5  # x, y, width, height and objectness come before the classes and do not depend on them


def init_from(model: keras.Model, label_map: LabelMap, weights: str, config: YOLOv4Config) -> Report:
    """Copies every weight whose name and shape agree; of the heads, the rows of classes of equal names.

    The rows of the boxes and of objectness are always taken.

    Args:
        model: the model to start.
        label_map: its classes.
        weights: a weights file of ours, a run directory, or a file of Darknet's: .weights, or one that ends
            early (yolov4.conv.137, yolov4-tiny.conv.29). The classes of a .weights file stand in the .names
            file beside it; without one, 80 classes are COCO's, and others are not known.
        config: the model's.

    Returns:
        What became of every weight.

    Raises:
        UserError: the file cannot be read, or nothing in it fits.
    """
    if pathlib.Path(weights).is_dir() or weights.endswith(".h5"):
        source = _read_own(weights, config)
    else:
        source = _read_darknet(weights, model, config)
    layers = describe(config, num_classes=label_map.num_classes)
    heads = [layer for layer in layers if isinstance(layer, Conv) and not layer.batch_norm]
    paths = [f"{head.part}.layer_{head.index}.conv/{name}" for head in heads for name in ("kernel", "bias")]
    rows = ClassRows(paths, config.anchors_per_location, source.anchors, first=BOX_ROWS)
    origin = f"--init_from={weights}"
    return transfer(model, source.values, rows, label_map, source.names, origin, remark=source.remark)


class _Source(NamedTuple):
    values: Mapping[str, ArrayLike]  # path of a variable -> array
    anchors: int  # per location
    names: tuple[str, ...]  # of the classes
    remark: str = ""


def _read_own(weights: str, config: YOLOv4Config) -> _Source:
    model, own_config, label_map, _ = load_trained(weights)
    if own_config.backbone != config.backbone:
        raise UserError(
            f"--init_from={weights} is a {own_config.model_name}: start a {config.model_name} from weights of"
            " its own kind"
        )
    values = {weight.path: weight.value for weight in model.weights}
    same = (own_config.anchors, own_config.masks) == (config.anchors, config.masks)
    remark = "" if same else "its anchors are others, so boxes start at other sizes"
    return _Source(values, own_config.anchors_per_location, label_map.names, remark)


def _read_darknet(weights: str, model: keras.Model, config: YOLOv4Config) -> _Source:
    contents = read_darknet(weights, model)
    names, remark = (), ""
    if contents.num_classes:
        label_map = read_label_map(weights, contents.num_classes)
        if label_map:
            names = label_map.names
        else:
            remark = f"the names of its {contents.num_classes} classes are unknown: there is no .names file"
    return _Source(contents.values, config.anchors_per_location, names, remark)
