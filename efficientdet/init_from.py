"""`--init_from`: weights of an earlier run as a starting point, whatever its classes and image size were."""

import keras
import numpy as np

from common.errors import UserError
from common.labels import LabelMap
from efficientdet.predict import load_trained

CLASS_WEIGHTS = ("class_net.predict/pointwise_kernel", "class_net.predict/bias")  # (..., k * C)


def init_from(model: keras.Model, label_map: LabelMap, weights: str) -> str:
    """Copies every weight whose name and shape agree; the others keep their initial values.

    The last layer of the class head is taken class by class: the rows of classes with the same name are
    copied, wherever they stand in either model; those of new classes are made anew.

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
    source = {weight.path: weight for weight in source_model.weights}
    made_anew = []
    for weight in model.weights:
        other = source.get(weight.path)
        if other is not None and weight.path in CLASS_WEIGHTS:
            rows = _copy_rows(weight, other, source_config.anchors_per_location, label_map, source_map)
            if rows is not None:
                weight.assign(rows)
                continue
        elif other is not None and other.shape == weight.shape:
            weight.assign(other)
            continue
        made_anew.append(weight.path)
    taken = len(model.weights) - len(made_anew)
    if not taken:
        raise UserError(f"--init_from={weights}: none of its {len(source)} weights fits {model.name}")
    report = f"--init_from={weights}: {taken} of {len(model.weights)} weights taken"
    if made_anew:
        report += f", made anew: {', '.join(sorted({path.rpartition('/')[0] for path in made_anew}))}"
    new = [name for name in label_map.names if name not in source_map.names]
    if new:
        report += f", {len(new)} of {label_map.num_classes} classes are new: {', '.join(new[:5])}"
    return report


def _copy_rows(
    weight: keras.Variable,
    other: keras.Variable,
    anchors_per_location: int,
    label_map: LabelMap,
    source_map: LabelMap,
) -> np.ndarray | None:
    """`weight`'s own values with those of `other` in place of the classes that both know; None: no fit."""
    if other.shape[:-1] != weight.shape[:-1] or weight.shape[-1] % anchors_per_location:
        return None
    shape = (*weight.shape[:-1], anchors_per_location)
    values = np.array(weight).reshape(*shape, -1)  # (..., k, C)
    theirs = np.array(other).reshape(*shape, -1)
    for index, name in enumerate(label_map.names):
        if name in source_map.names:
            values[..., index] = theirs[..., source_map.names.index(name)]
    return values.reshape(weight.shape)
