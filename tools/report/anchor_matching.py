"""Which anchors own which boxes, for the boxes of thousands of images at once, in NumPy.

Every anchor gets the very box that `box_encoder` gives it: an anchor takes the box that it overlaps most if
their IoU exceeds 0.5, and every box gets its best anchor whatever the IoU; the last of equals. But only the
anchors are looked at that can matter to a box: on a regular grid of equal anchors the overlap with a box
falls with the distance from it, so they lie in a rectangle of cells around its centre.
"""

from typing import NamedTuple

import numpy as np

from common import grid_matching
from common.anchors import Anchors
from common.box_encoder import MATCH_IOU
from common.grid_matching import Templates

_CHUNK = 2048  # boxes at a time: some hundred candidates each


class Matches(NamedTuple):
    """What the anchors of I images make of their M boxes.

    Attributes:
        best_iou: float32 (M,), the IoU of each box with its best anchor.
        best_anchor: int64 (M,), which that is.
        reached: bool (M, L), whether an anchor of this level has an IoU above MATCH_IOU with the box.
        owned_box: int64 (P,), the box of every positive anchor.
        owned_anchor: int64 (P,), that anchor. Ordered by image, then anchor.
    """

    best_iou: np.ndarray
    best_anchor: np.ndarray
    reached: np.ndarray
    owned_box: np.ndarray
    owned_anchor: np.ndarray


def match(boxes: np.ndarray, box_image: np.ndarray, anchors: Anchors) -> Matches:
    """Matches boxes to anchors as `box_encoder.encode_boxes` does.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, each with an area.
        box_image: int (M,), ascending, the image of each; boxes compete within their image only.
        anchors: those of the network input.
    """
    templates = grid_matching.templates(anchors)
    num_boxes = len(boxes)
    best_iou = np.zeros(num_boxes, np.float32)
    best_anchor = np.full(num_boxes, -1)
    reached = np.zeros((num_boxes, len(anchors.levels)), bool)
    competing = []  # (box, anchor, IoU) of everything above MATCH_IOU
    for start in range(0, num_boxes, _CHUNK):
        box, template, anchor = _candidates(boxes[start : start + _CHUNK], templates, anchors)
        box += start
        overlap = _iou_like_dali(boxes[box], anchors.boxes_normalized[anchor])
        np.maximum.at(best_iou, box, overlap)
        is_best = (overlap == best_iou[box]) & (overlap > 0)
        np.maximum.at(best_anchor, box[is_best], anchor[is_best])
        above = overlap > MATCH_IOU
        reached[box[above], templates.level[template[above]]] = True
        competing.append((box[above], anchor[above], overlap[above]))
    best_anchor[best_anchor < 0] = anchors.num_anchors - 1  # nothing overlaps it: all anchors are equal

    # A box that has an anchor as its best one goes before all others, hence the 2.
    competing.append((np.arange(num_boxes), best_anchor, np.full(num_boxes, 2.0, np.float32)))
    box, anchor, overlap = (np.concatenate(parts) for parts in zip(*competing, strict=True))
    order = np.lexsort((box, overlap, anchor, box_image[box]))  # the last of equals wins
    box, anchor = box[order], anchor[order]
    wins = np.ones(len(order), bool)
    wins[:-1] = (anchor[1:] != anchor[:-1]) | (box_image[box[1:]] != box_image[box[:-1]])
    return Matches(best_iou, best_anchor, reached, box[wins], anchor[wins])


def best_overlap(boxes: np.ndarray, anchors: Anchors) -> np.ndarray:
    """`Matches.best_iou` alone, up to rounding, much faster: float64 (M,)."""
    templates = grid_matching.templates(anchors)
    parts = [
        _nearest(boxes[start : start + _CHUNK].astype(np.float64), templates)[0].max(axis=1)
        for start in range(0, len(boxes), _CHUNK)
    ]
    return np.concatenate([np.zeros(0), *parts])


def encode_offsets(boxes: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Boxes relative to single anchors, as `box_encoder` encodes them: (dy, dx, dh, dw).

    Args:
        boxes, prior: float32 (P, 4), ltrb normalised, each with an area.

    Returns:
        float32 (P, 4).
    """
    centers, sizes = (prior[:, :2] + prior[:, 2:]) * 0.5, prior[:, 2:] - prior[:, :2]
    box_centers, box_sizes = (boxes[:, :2] + boxes[:, 2:]) * 0.5, boxes[:, 2:] - boxes[:, :2]
    shifts, scales = (box_centers - centers) / sizes, np.log(box_sizes / sizes)
    return np.concatenate([shifts[:, ::-1], scales[:, ::-1]], axis=1).astype(np.float32)


def _nearest(boxes: np.ndarray, templates: Templates) -> tuple[np.ndarray, np.ndarray]:
    """Of each template the anchor nearest to each box, which overlaps it most.

    Returns:
        float64 (n, T) their IoU, and (n, T, 2) how much they overlap along x and y.
    """
    centers, sizes = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2, boxes[:, None, 2:] - boxes[:, None, :2]
    cell = np.clip(np.rint(centers * templates.cells - 0.5), 0, templates.cells - 1)
    distance = np.abs(centers - (cell + 0.5) / templates.cells)
    common = np.minimum(np.minimum(sizes, templates.sizes), (sizes + templates.sizes) / 2 - distance)
    common = np.maximum(common, 0.0)
    intersection = common.prod(axis=2)
    return intersection / (sizes.prod(axis=2) + templates.sizes.prod(axis=1) - intersection), common


def _candidates(
    boxes: np.ndarray, templates: Templates, anchors: Anchors
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every anchor that may be the best of a box or overlap it by more than MATCH_IOU, and some more.

    Returns:
        int64 (C,) each: box (ascending), template, anchor. A box that overlaps none has no candidate.
    """
    boxes = boxes.astype(np.float64)
    centers, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    overlap, common = _nearest(boxes, templates)
    # float32 knows coordinates to about 1e-7: of the overlap with a tiny box that is a large share.
    slack = np.minimum(1e-5 + 1e-6 * (1 / sizes).sum(axis=1), 0.9)
    least = np.minimum(overlap.max(axis=1), MATCH_IOU) * (1 - slack)  # (n,)

    box, template = np.nonzero((overlap >= least[:, None]) & (least > 0)[:, None])  # (R,)
    areas = sizes[box].prod(axis=1) + templates.sizes[template].prod(axis=1)
    intersection = least[box] * areas / (1 + least[box])
    # The farthest that an anchor may be along one axis is where it still overlaps enough of the box if it
    # overlaps along the other axis as much as the nearest one does.
    enough = intersection[:, None] / common[box, template][:, ::-1]
    reach = (sizes[box] + templates.sizes[template]) / 2 - enough + 1e-6
    cells = templates.cells[template]
    low = np.clip(np.ceil((centers[box] - reach) * cells - 0.5), 0, cells - 1).astype(np.int64)
    high = np.clip(np.floor((centers[box] + reach) * cells - 0.5), 0, cells - 1).astype(np.int64)
    spans = high - low + 1  # (R, 2): columns, rows of the rectangle

    counts = spans.prod(axis=1)
    pair = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    row, column = low[pair, 1] + position // spans[pair, 0], low[pair, 0] + position % spans[pair, 0]
    step = anchors.anchors_per_location
    anchor = templates.first[template[pair]] + (row * cells[pair, 0] + column) * step
    return box[pair], template[pair], anchor


def _iou_like_dali(boxes: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """IoU pair by pair, (C, 4) ltrb each -> float32 (C,), operation by operation as in `box_encoder`."""
    left_top, right_bottom = np.maximum(boxes[:, :2], prior[:, :2]), np.minimum(boxes[:, 2:], prior[:, 2:])
    common = np.maximum(right_bottom - left_top, np.float32(0))
    intersection = common[:, 0] * common[:, 1]
    sizes_a, sizes_b = boxes[:, 2:] - boxes[:, :2], prior[:, 2:] - prior[:, :2]
    union = sizes_a[:, 0] * sizes_a[:, 1] + sizes_b[:, 0] * sizes_b[:, 1] - intersection
    return np.divide(intersection, union, out=np.zeros_like(union), where=union != 0)
