"""`--init_from`: weights of an earlier run, of Darknet or of ImageNet as a starting point, of any classes."""

import pathlib

import keras

from common.errors import UserError
from common.labels import LabelMap
from common.training.fine_tuning import ClassRows, Report, transfer
from yolov4.config import YOLOv4Config
from yolov4.import_weights.darknet_files import read_darknet, read_label_map
from yolov4.import_weights.imagenet import download
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
            "imagenet": the backbone's public file, downloaded.
        config: the model's.

    Returns:
        What became of every weight.

    Raises:
        UserError: the file cannot be read, or nothing in it fits.
    """
    origin, anchors = f"--init_from={weights}", config.anchors_per_location
    if pathlib.Path(weights).is_dir() or weights.endswith(".h5"):
        trained, source, source_map, _ = load_trained(weights)
        values = {weight.path: weight.value for weight in trained.weights}
        if source.backbone != config.backbone:
            raise UserError(
                f"{origin} is a {source.model_name}: start a {config.model_name} from weights of the same "
                f"backbone, {config.backbone}"
            )
        names, anchors = source_map.names, source.anchors_per_location
    else:
        path = download(config.backbone) if weights == "imagenet" else weights
        contents = read_darknet(path, model)
        values, num_classes = contents.values, contents.num_classes
        known = read_label_map(weights, num_classes) if num_classes else None
        names = known.names if known else ()
    # the last convolutions of the heads, the only ones without batch norm
    heads = [layer.name for layer in model.layers if layer.name.endswith(".conv") and layer.use_bias]
    paths = [f"{head}/{variable}" for head in heads for variable in ("kernel", "bias")]
    rows = ClassRows(paths, config.anchors_per_location, anchors, first=BOX_ROWS)
    return transfer(model, values, rows, label_map, names, origin)
