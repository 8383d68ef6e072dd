"""Measures how well the anchors of a network fit the boxes of a data set, before any training.

Whole images are letterboxed to one network input. Boxes are matched as in training (common/box_encoder.py),
but in NumPy. The report does not apply to efficientdet-nano, which trains with task-aligned assignment.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from common.anchors import MATCH_IOU, MAX_INSTANCES, Anchors
from common.data.annotations import Annotations
from efficientdet.anchor_templates import templates
from tools.report.network_boxes import network_boxes, sample_images
from yolov4.anchor_fit import Fit

SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_BOXES_AT_ONCE = 4096


class Level(NamedTuple):
    """The anchors of one pyramid level and the boxes that they match.

    Attributes:
        level: the level l, with stride 2**l.
        anchors: number of anchors.
        smallest, largest: square root of the smallest and of the largest area of an anchor, in pixels of the
            network input.
        reached: number of boxes that have an IoU above MATCH_IOU with an anchor of this level.
        best: number of boxes whose best anchor is on this level.
        positives: number of anchors to which a box is assigned.
    """

    level: int
    anchors: int
    smallest: float
    largest: float
    reached: int
    best: int
    positives: int


class AnchorReport(NamedTuple):
    """How the anchors match the boxes in a sample of the images.

    Each array, float (N,), contains the square roots of the areas of N boxes, in pixels of the network input.

    Attributes:
        max_instances: largest number of boxes that are kept per image.
        images: number of images in the sample.
        images_with_boxes: number of images with boxes in the data set.
        boxes: number of boxes in the sample, without crowds.
        too_small: boxes dropped because a side is below min_box_size.
        over_limit: boxes dropped because their image has more than max_instances.
        unreached: boxes that have no IoU above MATCH_IOU with any anchor.
        lost: boxes that get no anchor, because their best anchor is assigned to another box.
        fits: anchor scale -> how well anchors of this scale fit the boxes.
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
        max_instances: largest number of boxes kept per image, the largest boxes first.
        min_box_size: length in pixels of the network input; boxes with a shorter side are dropped.
        max_images: largest number of images in the sample.
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
        boxes=int(np.count_nonzero(~network.sample.is_crowd)),
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
        boxes: float32 (M, 4), ltrb normalised to the network input, with areas above 0.
        image: int (M,), index of the image of each box, ascending.
        anchors: anchors of the network input.
        iou: (M, T), the result of `template_iou` for these boxes.

    Returns:
        int (P,), the assigned anchors; int (P,), the indices of the boxes to which they are assigned.
    """
    best = np.full(len(boxes), anchors.num_anchors - 1)  # for a box that overlaps no anchor
    box, anchor, overlap = _candidates(boxes, anchors, iou)
    last = _last_of_each(box, overlap, anchor)  # of equal IoUs the last anchor
    best[box[last]] = anchor[last]
    above = overlap > MATCH_IOU
    # A box and its best anchor get the overlap 2.0. This pair wins against all pairs with an IoU.
    box = np.concatenate([box[above], np.arange(len(boxes))])
    place = image[box] * anchors.num_anchors + np.concatenate([anchor[above], best])
    chosen = _last_of_each(place, np.concatenate([overlap[above], np.full(len(boxes), 2.0)]), box)
    return place[chosen] % anchors.num_anchors, box[chosen]


def _last_of_each(group: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    order = np.lexsort([*reversed(keys), group])
    return order[np.flatnonzero(np.diff(group[order], append=-1))]


def _candidates(boxes: np.ndarray, anchors: Anchors, iou: np.ndarray) -> tuple[np.ndarray, ...]:
    """Finds the pairs of a box and an anchor that can match, without computing the IoU of all pairs.

    Returns:
        For the C pairs: int (C,), the boxes; int (C,), the anchors; float32 (C,), the IoUs.
    """
    kinds, k = templates(anchors), anchors.anchors_per_location
    found = [(np.zeros(0, int), np.zeros(0, int), np.zeros(0, np.float32))]
    # The slack allows for rounding errors of tiny boxes.
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
        low = np.clip(np.ceil(middle - reach), 0, cells - 1).astype(int)
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
    """Returns float32 (C,), rounded as by fn.box_encoder."""
    common = np.maximum(np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2]), 0).prod(axis=1)
    areas = [(of[:, 2:] - of[:, :2]).prod(axis=1) for of in (a, b)]
    return common / (areas[0] + areas[1] - common)


def template_iou(boxes: np.ndarray, anchors: Anchors) -> np.ndarray:
    """Returns float64 (M, T), the IoU of each box with the nearest anchor of each template.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, with areas above 0.
        anchors: anchors of the network input; each level, scale and ratio is a template.
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
    best = len(counts) - 1 - by_level[:, ::-1].argmax(axis=1)
    sides = np.sqrt(templates(anchors).sizes.prod(axis=1) * np.prod(anchors.image_size))
    columns = (
        np.array(anchors.levels),
        np.array(counts),
        sides.reshape(-1, k).min(axis=1),
        sides.reshape(-1, k).max(axis=1),
        (by_level > MATCH_IOU).sum(axis=0),
        np.bincount(best, minlength=len(counts)),
        np.histogram(owned, [0, *np.cumsum(counts)])[0],
    )
    return tuple(map(Level._make, zip(*(column.tolist() for column in columns), strict=True)))
