"""`--init_from`: weights of an earlier run as a starting point, whatever its classes and image size were."""

import keras

from common.labels import LabelMap
from common.weight_transfer import ClassRows, transfer
from efficientdet.predict import load_trained

CLASS_WEIGHTS = ("class_net.predict/pointwise_kernel", "class_net.predict/bias")  # (..., k * C)


def init_from(model: keras.Model, label_map: LabelMap, weights: str) -> str:
    """Copies every weight whose name and shape agree; of the class head, the rows of classes of equal names.

    Args:
        model: the model to start.
        label_map: its classes.
        weights: a weights file of ours, or a run directory.

    Returns:
        One line: how many weights were taken, which were made anew, which classes are new.

    Raises:
        UserError: the file cannot be read, or nothing in it fits.
    """
    source_model, source_config, source_map, _ = load_trained(weights)
    rows = ClassRows(CLASS_WEIGHTS, _anchors_per_location(model), source_config.anchors_per_location)
    source = {weight.path: weight.value for weight in source_model.weights}
    return transfer(model, source, rows, label_map, source_map.names, weights)


def _anchors_per_location(model: keras.Model) -> int:
    return model.get_layer("box_net.predict").bias.shape[0] // 4
