"""--init_from: weights of one model as the start of another, with any classes.

--freeze and --freeze_batch_norm: layers that do not train.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from common.args import Args
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.labels import LabelMap
from common.progress import log

# Of the model's weights. A backbone alone has more (efficientdet-d0's 44 %); what has less is of another
# model, and a few layers of it amid random ones are a worse start than none.
LEAST_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class ClassRows:
    """Which weights have numbers of single classes: their last axis holds those of each anchor side by side.

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


class Report(NamedTuple):
    """What became of every weight. Its text is one short paragraph.

    Attributes:
        origin: where the weights come from, as the paragraph names it.
        taken: paths of the model's weights that have the source's values. Those with rows of classes are
            among them when any row was taken.
        made_anew: paths of the model's other weights.
        new_classes: names of the model's classes that the source does not have.
    """

    origin: str
    taken: tuple[str, ...]
    made_anew: tuple[str, ...]
    new_classes: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.origin}: {len(self.taken)} of {len(self.taken) + len(self.made_anew)} weights taken"
        layers = sorted({path.rpartition("/")[0] for path in self.made_anew})
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
    """Copies every weight whose path and shape agree; the others keep their initial values.

    The weights of `rows` are taken class by class: the rows of classes with the same name (in COCO's or in
    Pascal VOC's spelling) are copied, at any place in either model; those of new classes keep their
    initial values.

    Args:
        model: the model to start.
        source: path of a weight -> its values.
        rows: which weights have a row for each class.
        label_map: the model's classes.
        source_names: the classes of `source` in their order; "" for a row without one.
        origin: where `source` comes from, as messages begin: "--init_from=runs/mine".

    Raises:
        UserError: less than LEAST_SHARE of the model's weights are in `source`; none is assigned then.
    """
    places = [find_class(name, source_names) for name in label_map.names]
    taken = {}
    for weight in model.weights:
        values = source.get(weight.path)
        if values is not None and weight.path in rows.paths:
            values = _copy_rows(np.array(weight), np.array(values), rows, places)
        if values is not None and tuple(np.shape(values)) == tuple(weight.shape):
            taken[weight.path] = values
    if len(taken) < len(model.weights) * LEAST_SHARE:
        raise UserError(
            f"{origin}: only {len(taken)} of the {len(model.weights)} weights of {model.name} "
            "are in it: give weights of the same model"
        )
    for weight in model.weights:
        if weight.path in taken:
            weight.assign(taken[weight.path])
    return Report(
        origin,
        taken=tuple(taken),
        made_anew=tuple(weight.path for weight in model.weights if weight.path not in taken),
        new_classes=tuple(n for n, place in zip(label_map.names, places, strict=True) if place is None),
    )


def set_initial_weights(
    a: Args, ranks: Ranks, resumed: bool, model: keras.Model, init_from: Callable[[str], Report]
) -> None:
    """Loads --init_from on rank 0 of a new run, whose weights `Run` broadcasts, and freezes layers.

    Args:
        a: the flags.
        ranks: of the run.
        resumed: whether it continues from a checkpoint.
        model: with all layers trainable.
        init_from: loads a file into the model.

    Raises:
        UserError: on every rank: the file cannot be used; the pattern of --freeze matches no layer, or all;
            --freeze_batch_norm without weights to start from.
    """
    with ranks.raise_on_any_rank():
        if a.freeze_batch_norm and not (a.init_from or resumed):
            raise UserError("--freeze_batch_norm keeps the statistics of trained weights: name --init_from")
        if a.init_from and resumed:
            log(f"--init_from={a.init_from} is not read again: this run continues from its checkpoint")
        elif a.init_from and ranks.rank == 0:
            log(str(init_from(a.init_from)))
        if a.freeze_batch_norm:
            freeze_batch_norms(model)
        if a.freeze:
            log(freeze(model, a.freeze))


def freeze_batch_norms(model: keras.Model) -> None:
    """Stops all batch norms: they normalise with the statistics that they have, and nothing of them trains.

    NVIDIA/retinanet-examples trains so, from ImageNet weights and with small batches
    (odtk/backbones/layers.py, FixedBatchNorm2d).
    """
    for layer in model.layers:
        layer.trainable &= not isinstance(layer, keras.layers.BatchNormalization)
    log("frozen: all batch norms")


def freeze(model: keras.Model, pattern: str) -> str:
    """Stops the layers whose name matches from training, their batch norms from updating.

    Args:
        model: a built model.
        pattern: a regular expression that is searched for in the names of the layers.

    Returns:
        One line that names them.

    Raises:
        UserError: the pattern is none, matches no layer, or leaves nothing to train.
    """
    try:
        frozen = [layer for layer in model.layers if layer.weights and re.search(pattern, layer.name)]
    except re.error as error:
        raise UserError(f"--freeze={pattern!r} is not a regular expression: {error}") from error
    if not frozen:
        names = sorted({layer.name.split(".")[0] for layer in model.layers if layer.weights})
        raise UserError(f"--freeze={pattern!r} matches no layer; names start with {', '.join(names)}")
    for layer in frozen:
        layer.trainable = False
    if not model.trainable_variables:
        raise UserError(f"--freeze={pattern!r} leaves nothing to train")
    return f"frozen: {len(frozen)} layers, {frozen[0].name} to {frozen[-1].name}"


def _copy_rows(
    own: np.ndarray, source: np.ndarray, rows: ClassRows, places: Sequence[int | None]
) -> np.ndarray | None:
    """`own` with `source`'s numbers in place of those that both have; None where there are none.

    Args:
        own, source: (..., anchors x (first + C)), C of each its own.
        rows: how the last axis is made.
        places: for each class of `own` its index among those of `source`.
    """
    nothing_fits = not rows.first and all(place is None for place in places)
    if own.shape[:-1] != source.shape[:-1] or rows.anchors != rows.source_anchors or nothing_fits:
        return None
    shape = (*own.shape[:-1], rows.anchors, -1)
    values, source = own.reshape(shape).copy(), source.reshape(shape)  # (..., anchors, first + C)
    values[..., : rows.first] = source[..., : rows.first]
    for index, place in enumerate(places):
        if place is not None:
            values[..., rows.first + index] = source[..., rows.first + place]
    return values.reshape(own.shape)


# --- the 80 classes of COCO, and the other spellings of Pascal VOC ---

# The categories of instances_val2017.json.
_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of the ids 1 to 90
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
    """Class 0..79 <-> COCO's category id 1..90 <-> COCO's name."""
    return LabelMap(_IDS, tuple(" ".join(_NAMES.split()).split(", ")))


NUM_COCO_CLASSES = len(_IDS)

# COCO: Pascal VOC (host.robots.ox.ac.uk/pascal/VOC/voc2012, section 2). VOC's other 14 names are COCO's, too.
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
    """Where `name` stands in `names`: as it is, else in the other of COCO's and Pascal VOC's spellings.

    >>> find_class("sofa", ["cat", "couch"]), find_class("couch", ["sofa", "couch"]), find_class("cow", [])
    (1, 1, None)
    """
    for spelling in (name, _OTHER_SPELLINGS.get(name)):
        if spelling in names:
            return names.index(spelling)
    return None
