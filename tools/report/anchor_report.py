"""What the anchors of a network can do with a data set, before anything is trained.

Which boxes each level matches, which boxes no anchor reaches, which lose their anchors to other boxes, and
how well anchors of other scales would fit. Images are letterboxed whole to one network input, as in
evaluation. The matching is that of training (common/box_encoder.py) in NumPy, so that the data check need not
import TensorFlow. efficientdet-nano's task-aligned assignment is another one.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from common.anchors import MATCH_IOU, MAX_INSTANCES, Anchors
from common.annotations import Annotations
from efficientdet.anchor_templates import templates
from tools.report.network_boxes import network_boxes, sample_images
from yolov4.anchor_fit import Fit

SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of anchors that are tried
_BOXES_AT_ONCE = 4096


class Level(NamedTuple):
    """The anchors of one pyramid level and the boxes that they match.

    Attributes:
        level: l, of stride 2**l.
        anchors: number of anchors.
        smallest, largest: square root of their areas in pixels of the network input.
        reached: boxes that some anchor of this level overlaps by more than MATCH_IOU.
        best: boxes whose best anchor is of this level.
        positives: anchors that own a box.
    """

    level: int
    anchors: int
    smallest: float
    largest: float
    reached: int
    best: int
    positives: int


@dataclasses.dataclass(frozen=True, eq=False)
class AnchorReport:
    """What the anchors match in a sample of the images.

    Boxes are the square roots of their areas in pixels of the network input, float (N,).

    Attributes:
        anchors: the given anchors.
        max_instances: boxes that are kept per image.
        images, images_with_boxes: in the sample, and in the data set.
        boxes: true boxes of the sample without crowds; those without area are among them.
        too_small: boxes dropped because a side is below min_box_size.
        over_limit: boxes beyond max_instances.
        unreached: boxes that no anchor overlaps by more than MATCH_IOU; only their best anchor trains them.
        lost: boxes that own no anchor, because other boxes own their best one. They train nothing.
        levels: one for each.
        fits: anchor scale -> how well the best anchors fit the boxes that training keeps; the given one among
            SCALES.
    """

    anchors: Anchors
    max_instances: int
    images: int
    images_with_boxes: int
    boxes: int
    too_small: np.ndarray
    over_limit: np.ndarray
    unreached: np.ndarray
    lost: np.ndarray
    levels: tuple[Level, ...]
    fits: dict[float, Fit]


def examine(
    annotations: Annotations,
    anchors: Anchors,
    *,
    max_instances: int = MAX_INSTANCES,
    min_box_size: float = 1.0,
    max_images: int = 2000,
    seed: int = 0,
) -> AnchorReport:
    """Matches the boxes of a sample of the images to anchors.

    Args:
        annotations: the whole data set.
        anchors: those of the network at its image size.
        max_instances: boxes kept per image, the largest first.
        min_box_size: pixels of the network input; boxes with a shorter side are dropped.
        max_images: size of the sample, of images with boxes.
        seed: chooses the sample.
    """
    network = network_boxes(
        sample_images(annotations, max_images, np.random.default_rng(seed)),
        anchors.image_size,
        max_instances=max_instances,
        min_box_size=min_box_size,
    )
    kept = network.kept
    boxes = network.boxes[kept]
    iou = template_iou(boxes, anchors)
    owned, owners = match(boxes, network.image[kept], anchors, iou)
    fits = {}
    for scale in sorted({*SCALES, anchors.anchor_scale}):
        scaled = dataclasses.replace(anchors, anchor_scale=scale)
        fits[scale] = Fit.of(template_iou(boxes, scaled).max(axis=1))
    return AnchorReport(
        anchors=anchors,
        max_instances=max_instances,
        images=network.sample.num_images,
        images_with_boxes=len(np.unique(annotations.box_image[~annotations.is_crowd])),
        boxes=network.num_true,
        too_small=network.sides_px(network.too_small),
        over_limit=network.sides_px(network.over_limit),
        unreached=network.sides_px(kept[iou.max(axis=1) <= MATCH_IOU]),
        lost=network.sides_px(np.delete(kept, owners)),
        levels=_levels(anchors, iou, owned),
        fits=fits,
    )


def match(
    boxes: np.ndarray, image: np.ndarray, anchors: Anchors, iou: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns anchors to boxes as fn.box_encoder does (common/box_encoder.py), image by image.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, each with an area.
        image: int (M,), the image of each box, ascending.
        anchors: those of the network input.
        iou: (M, T), what `template_iou` returns for these boxes.

    Returns:
        int (P,), the assigned anchors; and int (P,), the index of the box of each.
    """
    best = np.full(len(boxes), anchors.num_anchors - 1)  # of a box that overlaps none
    box, anchor, overlap = _candidates(boxes, anchors, iou)
    last = _last_of_each(box, overlap, anchor)  # of equals the last anchor
    best[box[last]] = anchor[last]
    above = overlap > MATCH_IOU
    # Above any IoU: the best anchor of each box. Of equal boxes an anchor takes the last.
    box = np.concatenate([box[above], np.arange(len(boxes))])
    place = image[box] * anchors.num_anchors + np.concatenate([anchor[above], best])
    chosen = _last_of_each(place, np.concatenate([overlap[above], np.full(len(boxes), 2.0)]), box)
    return place[chosen] % anchors.num_anchors, box[chosen]


def _last_of_each(group: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """The index of the element of each group that comes last in the order of the keys."""
    order = np.lexsort([*reversed(keys), group])
    return order[np.flatnonzero(np.diff(group[order], append=-1))]


def _candidates(boxes: np.ndarray, anchors: Anchors, iou: np.ndarray) -> tuple[np.ndarray, ...]:
    """Pairs of a box and an anchor with their IoU: all that can match, without looking at all pairs.

    An intersection of a certain size bounds how far apart the two centres are, along each axis.

    Returns:
        int (C,), the box; int (C,), the anchor; float32 (C,), their IoU.
    """
    kinds, k = templates(anchors), anchors.anchors_per_location
    found = [(np.zeros(0, int), np.zeros(0, int), np.zeros(0, np.float32))]
    # The factor allows for float32, in which the coordinates of a tiny box have few digits.
    sides = (boxes[:, 2:] - boxes[:, :2]).astype(np.float64)
    slack = np.minimum(1e-3 + 2e-6 * (1 / sides).sum(axis=1), 0.9)
    least = np.minimum(MATCH_IOU, iou.max(axis=1, initial=0)) * (1 - slack)
    for start in range(0, len(boxes), _BOXES_AT_ONCE):
        box, kind = np.nonzero(
            iou[start : start + _BOXES_AT_ONCE] >= least[start : start + _BOXES_AT_ONCE, None]
        )
        box += start
        cells, prior, size = kinds.cells[kind], kinds.sizes[kind], sides[box]
        wanted = least[box] / (1 + least[box]) * (prior.prod(axis=1) + size.prod(axis=1))
        overlap = wanted[:, None] / np.minimum(prior, size)[:, ::-1]  # needed along each axis
        reach = ((prior + size) / 2 - overlap) * cells + 1e-3
        middle = (boxes[box, :2] + boxes[box, 2:]) / 2 * cells - 0.5
        low = np.clip(np.ceil(middle - reach), 0, cells - 1).astype(int)  # column, row
        spans = np.clip(np.floor(middle + reach), 0, cells - 1).astype(int) - low + 1
        counts = spans.prod(axis=1)
        pair = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
        column = low[pair, 0] + number % spans[pair, 0]
        row = low[pair, 1] + number // spans[pair, 0]
        anchor = kinds.first[kind[pair]] + k * (row * cells[pair, 0] + column)
        box = box[pair]
        found.append((box, anchor, _iou(boxes[box], anchors.boxes_normalized[anchor])))
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def _iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 (C,), with the rounding of fn.box_encoder: the last bit decides which of two boxes wins."""
    common = np.maximum(np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2]), 0).prod(axis=1)
    areas = [(of[:, 2:] - of[:, :2]).prod(axis=1) for of in (a, b)]
    return common / (areas[0] + areas[1] - common)


def template_iou(boxes: np.ndarray, anchors: Anchors) -> np.ndarray:
    """float64 (M, T): of each level, scale and ratio the IoU of the nearest anchor, which overlaps most.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, each with an area.
        anchors: those of the network input.
    """
    kinds = templates(anchors)
    iou = np.zeros((len(boxes), len(kinds.sizes)))
    for start in range(0, len(boxes), _BOXES_AT_ONCE):
        some = boxes[start : start + _BOXES_AT_ONCE, None].astype(np.float64)
        centers, sizes = (some[..., :2] + some[..., 2:]) / 2, some[..., 2:] - some[..., :2]
        cell = np.clip(np.rint(centers * kinds.cells - 0.5), 0, kinds.cells - 1)
        distance = np.abs(centers - (cell + 0.5) / kinds.cells)
        common = np.minimum(np.minimum(sizes, kinds.sizes), (sizes + kinds.sizes) / 2 - distance)
        intersection = np.maximum(common, 0.0).prod(axis=2)
        union = sizes.prod(axis=2) + kinds.sizes.prod(axis=1) - intersection
        iou[start : start + _BOXES_AT_ONCE] = intersection / union
    return iou


def _levels(anchors: Anchors, iou: np.ndarray, owned: np.ndarray) -> tuple[Level, ...]:
    k = anchors.anchors_per_location
    counts = [height * width * k for height, width in anchors.feature_sizes]
    by_level = iou.reshape(len(iou), len(counts), k).max(axis=2)
    best = len(counts) - 1 - by_level[:, ::-1].argmax(axis=1)  # the last of equals, as in matching
    sides = np.sqrt(templates(anchors).sizes.prod(axis=1) * np.prod(anchors.image_size))
    columns = {
        "level": np.array(anchors.levels),
        "anchors": np.array(counts),
        "smallest": sides.reshape(-1, k).min(axis=1),
        "largest": sides.reshape(-1, k).max(axis=1),
        "reached": (by_level > MATCH_IOU).sum(axis=0),
        "best": np.bincount(best, minlength=len(counts)),
        "positives": np.histogram(owned, [0, *np.cumsum(counts)])[0],
    }
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return tuple(Level(**dict(zip(columns, row, strict=True))) for row in rows)
