"""Fine-tuning: --init_from starts a model from the weights of another one, which may have other classes."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from common.args import Args
from common.data.labels import LabelMap
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.progress import counted, log

# A file must have at least this share of the model's weights. A backbone alone has enough: 44 % of the
# weights of efficientdet-d0.
LEAST_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class ClassRows:
    """Tells which weights have one value per class. Their last axis has anchors * (first + classes) values.

    Attributes:
        paths: the paths of these weights.
        anchors: number of anchors per location in the model to initialise.
        source_anchors: number of anchors per location in the source model.
        first: number of values per anchor that precede the class values. These values are always copied.
    """

    paths: Collection[str]
    anchors: int
    source_anchors: int
    first: int = 0


class Report(NamedTuple):
    """Tells which weights were copied. `str` gives a short paragraph for the log.

    Attributes:
        origin: the name of the source in this paragraph.
        copied: paths of the model's weights that were copied from the source, wholly or for some classes.
        initial: paths of the other weights, which keep their initial values.
        new_classes: names of the model's classes that the source does not have.
    """

    origin: str
    copied: tuple[str, ...]
    initial: tuple[str, ...]
    new_classes: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.origin}: {len(self.copied)} of {len(self.copied) + len(self.initial)} weights taken"
        layers = sorted({path.rpartition("/")[0] for path in self.initial})
        for title, names in (("made anew", layers), ("new classes", self.new_classes)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                text += f", {title}: {', '.join(names[:5])}{more}"
        return text


def transfer(
    model: keras.Model,
    source: Mapping[str, ArrayLike],
    rows: ClassRows,
    label_map: LabelMap,
    source_names: Sequence[str],
    origin: str,
) -> Report:
    """Copies every weight with the same path and shape in `source`; other weights keep their initial values.

    The weights in `rows` are copied class by class. Classes are matched by name. COCO's and Pascal VOC's
    names of the same class match, for example couch and sofa.

    Args:
        source: path of a weight -> its values.
        rows: the weights that have a value for each class.
        source_names: the class names of `source` by class index; "" for an unused index.
        origin: name of the source with which messages begin, for example "--init_from=runs/mine".

    Raises:
        UserError: `source` holds less than LEAST_SHARE of the model's weights; the model is unchanged.
    """
    places = [find_class(name, source_names) for name in label_map.names]
    copied = {}
    for weight in model.weights:
        values = source.get(weight.path)
        if values is not None and weight.path in rows.paths:
            values = _copy_rows(np.array(weight), np.array(values), rows, places)
        if values is not None and tuple(np.shape(values)) == tuple(weight.shape):
            copied[weight.path] = values
    if len(copied) < len(model.weights) * LEAST_SHARE:
        raise UserError(
            f"{origin}: only {len(copied)} of the {len(model.weights)} weights of {model.name} "
            "are in this file: give weights of the same model"
        )
    for weight in model.weights:
        if weight.path in copied:
            weight.assign(copied[weight.path])
    return Report(
        origin,
        copied=tuple(copied),
        initial=tuple(weight.path for weight in model.weights if weight.path not in copied),
        new_classes=tuple(n for n, place in zip(label_map.names, places, strict=True) if place is None),
    )


def set_initial_weights(
    a: Args, ranks: Ranks, resumed: bool, model: keras.Model, init_from: Callable[[str], Report]
) -> None:
    """Loads --init_from on rank 0 of a new run, and freezes layers. `synchronize` then sends the weights.

    Args:
        model: the model, with all layers trainable.
        init_from: called with the path of a file. Loads its weights into the model and returns a report.

    Raises:
        UserError: on every rank: the file or the pattern of --freeze cannot be used, or --freeze_batch_norm
            is given without weights to start from.
    """
    with ranks.raise_on_any_rank():
        if a.freeze_batch_norm and not (a.init_from or resumed):
            raise UserError("--freeze_batch_norm needs trained weights: add --init_from")
        if a.init_from and resumed:
            log(f"--init_from={a.init_from} is not read again: this run continues from its checkpoint")
        elif a.init_from and ranks.rank == 0:
            log(str(init_from(a.init_from)))
        if a.freeze_batch_norm:
            freeze_batch_norms(model)
        if a.freeze:
            log(freeze(model, a.freeze))


def freeze_batch_norms(model: keras.Model) -> None:
    """Freezes all batch norms: they keep their statistics, and their weights do not train.

    NVIDIA/retinanet-examples does the same (odtk/backbones/layers.py, FixedBatchNorm2d).
    """
    for layer in model.layers:
        layer.trainable &= not isinstance(layer, keras.layers.BatchNormalization)
    log("frozen: all batch norms")


def freeze(model: keras.Model, pattern: str) -> str:
    """Freezes the layers whose names match. Their weights do not train; batch norms keep their statistics.

    Args:
        pattern: a regular expression that is searched for in the names of the layers.

    Returns:
        One line for the log that names the frozen layers.

    Raises:
        UserError: the pattern is not a regular expression, matches no layer, or leaves nothing to train.
    """
    try:
        frozen = [layer for layer in model.layers if layer.weights and re.search(pattern, layer.name)]
    except re.error as error:
        raise UserError(f"--freeze={pattern!r} is not a regular expression: {error}") from error
    if not frozen:
        names = sorted({layer.name.split(".")[0] for layer in model.layers if layer.weights})
        raise UserError(f"--freeze={pattern!r} matches no layer: layer names start with {', '.join(names)}")
    for layer in frozen:
        layer.trainable = False
    if not model.trainable_variables:
        raise UserError(f"--freeze={pattern!r} leaves nothing to train")
    return f"frozen: {counted(len(frozen), 'layer')}, {frozen[0].name} to {frozen[-1].name}"


def _copy_rows(
    target: np.ndarray, source: np.ndarray, rows: ClassRows, places: Sequence[int | None]
) -> np.ndarray | None:
    """Returns `target` with the values of `source` for the shared classes, or None if no value can be copied.

    Args:
        target, source: arrays (..., anchors x (first + C)); the number of classes C may differ.
        places: the index in `source` of each class of `target`; None for a new class.
    """
    nothing_fits = not rows.first and all(place is None for place in places)
    if target.shape[:-1] != source.shape[:-1] or rows.anchors != rows.source_anchors or nothing_fits:
        return None
    shape = (*target.shape[:-1], rows.anchors, -1)
    values, source = target.reshape(shape).copy(), source.reshape(shape)  # (..., anchors, first + C)
    values[..., : rows.first] = source[..., : rows.first]
    for index, place in enumerate(places):
        if place is not None:
            values[..., rows.first + index] = source[..., rows.first + place]
    return values.reshape(target.shape)


# --- the 80 class names of COCO, and the names that Pascal VOC spells differently ---

# The categories of instances_val2017.json.
_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # ids from 1 to 90 without a category
_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop
sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack,
umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball
glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana,
apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed,
dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
"""
_IDS = tuple(i for i in range(1, 91) if i not in _UNUSED)


def coco_label_map() -> LabelMap:
    """Returns the map of COCO's classes 0..79."""
    return LabelMap(_IDS, tuple(" ".join(_NAMES.split()).split(", ")))


NUM_COCO_CLASSES = len(_IDS)

# COCO's name: Pascal VOC's name (host.robots.ox.ac.uk/pascal/VOC/voc2012, section 2).
VOC_SPELLINGS = {
    "motorcycle": "motorbike",
    "airplane": "aeroplane",
    "couch": "sofa",
    "potted plant": "pottedplant",
    "dining table": "diningtable",
    "tv": "tvmonitor",
}
_OTHER_SPELLINGS = VOC_SPELLINGS | {voc: coco for coco, voc in VOC_SPELLINGS.items()}


def find_class(name: str, names: Sequence[str]) -> int | None:
    """Returns the index of `name`, or of its other spelling in COCO or Pascal VOC, in `names`; else None.

    >>> find_class("sofa", ["cat", "couch"]), find_class("couch", ["sofa", "couch"]), find_class("cow", [])
    (1, 1, None)
    """
    for spelling in (name, _OTHER_SPELLINGS.get(name)):
        if spelling in names:
            return names.index(spelling)
    return None
