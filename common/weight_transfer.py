"""`--init_from`: the weights of one model as a starting point for another, whatever their classes are."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import keras
import numpy as np
from numpy.typing import ArrayLike

from common.errors import UserError
from common.labels import LabelMap

# Of the model's weights. A backbone alone has more; what has less is of another model, and a few layers of it
# amid random ones are a worse start than none.
LEAST_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class ClassRows:
    """Where the numbers of the classes lie: in the last axis of some weights, for each anchor side by side.

    Attributes:
        paths: of these weights.
        anchors: per location, of the model to start.
        source_anchors: per location, of the model that was trained.
        first: how many other numbers each anchor has before those of its classes; they are always taken.
    """

    paths: Collection[str]
    anchors: int
    source_anchors: int
    first: int = 0


def transfer(
    model: keras.Model,
    source: Mapping[str, ArrayLike],
    rows: ClassRows,
    label_map: LabelMap,
    source_names: Sequence[str],
    origin: str,
) -> str:
    """Copies every weight whose path and shape agree; the others keep their initial values.

    The weights of `rows` are taken class by class: the rows of classes with the same name are copied,
    wherever they stand in either model; those of new classes keep their initial values.

    Args:
        model: the model to start.
        source: path of a weight -> its values.
        rows: which weights have a row for each class.
        label_map: the model's classes.
        source_names: the classes of `source` in their order.
        origin: where `source` comes from, for messages.

    Returns:
        One line: how many weights were taken, which were made anew, which classes are new.

    Raises:
        UserError: less than LEAST_SHARE of the model's weights are in `source`; none is assigned then.
    """
    taken, made_anew = [], []
    for weight in model.weights:
        values = source.get(weight.path)
        if values is not None and weight.path in rows.paths:
            values = _copy_rows(np.array(weight), np.array(values), rows, label_map.names, source_names)
        if values is None or tuple(values.shape) != tuple(weight.shape):
            made_anew.append(weight.path)
        else:
            taken.append((weight, values))
    if len(taken) < len(model.weights) * LEAST_SHARE:
        raise UserError(
            f"--init_from={origin}: only {len(taken)} of the {len(model.weights)} weights of {model.name} "
            "are in it: give weights of the same model"
        )
    for weight, values in taken:
        weight.assign(values)
    report = f"--init_from={origin}: {len(taken)} of {len(model.weights)} weights taken"
    if made_anew:
        report += f", made anew: {_list(sorted({path.rpartition('/')[0] for path in made_anew}))}"
    new = [name for name in label_map.names if name not in source_names]
    if new:
        report += f", {len(new)} of {label_map.num_classes} classes are new: {_list(new)}"
    return report


def _copy_rows(
    own: np.ndarray, source: np.ndarray, rows: ClassRows, names: Sequence[str], source_names: Sequence[str]
) -> np.ndarray | None:
    """`own` with `source`'s numbers in place of those that both have; None where the two do not fit."""
    if own.shape[:-1] != source.shape[:-1] or rows.anchors != rows.source_anchors:
        return None
    shape = (*own.shape[:-1], rows.anchors)
    values = own.reshape(*shape, -1).copy()  # (..., anchors, first + C)
    source = source.reshape(*shape, -1)
    values[..., : rows.first] = source[..., : rows.first]
    for index, name in enumerate(names):
        if name in source_names:
            values[..., rows.first + index] = source[..., rows.first + source_names.index(name)]
    return values.reshape(own.shape)


def _list(names: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
