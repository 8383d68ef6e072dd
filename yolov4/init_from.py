"""Implements --init_from: a model starts from weights of an earlier run, Darknet or ImageNet."""

import pathlib

import keras

from common.data.labels import LabelMap
from common.errors import UserError
from common.weights.fine_tuning import ClassRows, Report, transfer
from yolov4.config import YOLOv4Config
from yolov4.import_weights.darknet_files import read_darknet, read_label_map
from yolov4.import_weights.imagenet import download
from yolov4.predict import load_trained

BOX_ROWS = 5  # number of an anchor's outputs before its class outputs: x, y, width, height, objectness


def init_from(model: keras.Model, label_map: LabelMap, weights: str, config: YOLOv4Config) -> Report:
    """Copies the weights whose name and shape fit `model`. In the heads, classes are matched by name.

    Args:
        label_map: the classes of the model.
        weights: a weights file of this project, a run directory, a .weights file of Darknet, or a partial one
            (yolov4.conv.137, yolov4-tiny.conv.29). "imagenet" downloads the backbone's public file. Class
            names of a .weights file are read from a .names file next to it. If there is none, 80 classes get
            COCO's names.

    Raises:
        UserError: the file cannot be read, or nothing in it fits.
    """
    origin, anchors = f"--init_from={weights}", config.anchors_per_location
    if pathlib.Path(weights).is_dir() or weights.endswith(".h5"):
        trained, source, source_map, _ = load_trained(weights)
        values = {weight.path: weight.value for weight in trained.weights}
        if source.backbone != config.backbone:
            raise UserError(
                f"{origin} has weights of {source.model_name}, which do not fit: choose weights of a "
                f"model with the backbone {config.backbone}, such as {config.model_name}"
            )
        names, anchors = source_map.names, source.anchors_per_location
    else:
        path = download(config.backbone) if weights == "imagenet" else weights
        contents = read_darknet(path, model)
        values, num_classes = contents.values, contents.num_classes
        known = read_label_map(weights, num_classes) if num_classes else None
        names = known.names if known else ()
    # Only the last convolutions of the heads have a bias.
    heads = [layer.name for layer in model.layers if layer.name.endswith(".conv") and layer.use_bias]
    paths = [f"{head}/{variable}" for head in heads for variable in ("kernel", "bias")]
    rows = ClassRows(paths, config.anchors_per_location, anchors, first=BOX_ROWS)
    return transfer(model, values, rows, label_map, names, origin)
