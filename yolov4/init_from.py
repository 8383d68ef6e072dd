"""`--init_from`: weights of an earlier run or of Darknet as a starting point, of any classes."""

import pathlib

import keras

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
        weights: a weights file of this project, a run directory, or a file of Darknet's: .weights, or one
            that ends early (yolov4.conv.137, yolov4-tiny.conv.29). The classes of a .weights file stand in
            the .names file beside it; without one, 80 classes are COCO's, and others are not known.
        config: the model's.

    Returns:
        What became of every weight.

    Raises:
        UserError: the file cannot be read, or nothing in it fits.
    """
    origin = f"--init_from={weights}"
    if pathlib.Path(weights).is_dir() or weights.endswith(".h5"):
        return _from_own(model, label_map, weights, config, origin)
    contents = read_darknet(weights, model)
    names, remark = (), ""
    if contents.num_classes:
        known = read_label_map(weights, contents.num_classes)
        if known:
            names = known.names
        else:
            remark = f"the names of its {contents.num_classes} classes are unknown: there is no .names file"
    rows = _class_rows(config, config.anchors_per_location)
    return transfer(model, contents.values, rows, label_map, names, origin, remark=remark)


def _from_own(
    model: keras.Model, label_map: LabelMap, weights: str, config: YOLOv4Config, origin: str
) -> Report:
    source_model, source_config, source_map, _ = load_trained(weights)
    if source_config.backbone != config.backbone:
        raise UserError(
            f"{origin} is a {source_config.model_name}: start a {config.model_name} from weights of the same "
            "backbone"
        )
    source = {weight.path: weight.value for weight in source_model.weights}
    same = (source_config.anchors, source_config.masks) == (config.anchors, config.masks)
    remark = "" if same else "its anchors are others, so boxes start at other sizes"
    rows = _class_rows(config, source_config.anchors_per_location)
    return transfer(model, source, rows, label_map, source_map.names, origin, remark=remark)


def _class_rows(config: YOLOv4Config, source_anchors: int) -> ClassRows:
    """The last convolutions of the heads, the only ones without batch norm."""
    heads = [x for x in describe(config, num_classes=1) if isinstance(x, Conv) and not x.batch_norm]
    paths = [f"{head.part}.layer_{head.index}.conv/{name}" for head in heads for name in ("kernel", "bias")]
    return ClassRows(paths, config.anchors_per_location, source_anchors, first=BOX_ROWS)
