"""What the anchors of a network can make of a data set, before anything is trained.

Which boxes each level matches, which boxes no anchor reaches, which lose their anchors to other boxes, what
AP perfect outputs would get, and whether other anchors would fit better. Images are seen as in evaluation:
whole, letterboxed to one network input; boxes are matched as `box_encoder` matches them.
"""

import dataclasses
from typing import Any

import numpy as np
from keras import ops

from common.anchors import Anchors
from common.annotations import Annotations
from common.box_encoder import MATCH_IOU, MAX_INSTANCES, decode_boxes
from tools.report import anchor_fit, ap_ceiling, shown_boxes
from tools.report.anchor_matching import Matches, best_overlap, encode_offsets, match
from tools.report.shown_boxes import Group, ShownBoxes

SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of anchors that are tried
MAX_TRIED_BOXES = 20_000  # of the sample: more would not change the choice


@dataclasses.dataclass(frozen=True)
class Level:
    """The anchors of one pyramid level and the boxes that they match.

    Attributes:
        level: l, of stride 2**l.
        anchors: how many.
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


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Other anchors, with how well they fit boxes that they were not fitted to.

    Attributes:
        hparams: for --hparams.
        own, new: how well the given and the suggested anchors fit the same held-out boxes.
        lost: boxes of the whole sample that would own no anchor.
    """

    hparams: str
    own: anchor_fit.Fit
    new: anchor_fit.Fit
    lost: int


@dataclasses.dataclass(frozen=True)
class AnchorReport:
    """What the anchors make of a sample of the images. `to_json` gives what JSON can hold.

    Attributes:
        anchors: the settings of the `Anchors`.
        num_anchors: how many.
        max_instances: boxes that are kept per image.
        images, images_with_boxes: in the sample, and in the data set.
        boxes: true boxes of the sample, no crowds; those without area are among them.
        too_small: boxes dropped because a side of theirs is below min_box_size.
        truncated: boxes beyond max_instances.
        unreached: boxes that no anchor overlaps by more than MATCH_IOU: the best one has to do.
        lost: boxes that own no anchor: other boxes own their best one. They train nothing.
        levels: one each.
        fit: of the best anchors of all boxes that training keeps.
        ceiling: ap_ceiling.NAMES -> value; None where there is no box.
        reasons: in words, why it is below 1.
        suggestion: other anchors, if they are really better.
    """

    anchors: dict[str, Any]
    num_anchors: int
    max_instances: int
    images: int
    images_with_boxes: int
    boxes: int
    too_small: Group
    truncated: Group
    unreached: Group
    lost: Group
    levels: tuple[Level, ...]
    fit: anchor_fit.Fit
    ceiling: dict[str, float] | None
    reasons: tuple[str, ...]
    suggestion: Suggestion | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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
        max_images: images with boxes beyond these are left out, at random.
        seed: of the choice of images, and of what new anchors are fitted to.
    """
    random = np.random.default_rng(seed)
    shown = shown_boxes.show(
        shown_boxes.sample_images(annotations, max_images, random),
        anchors.image_size,
        keep_aspect=True,
        centered=False,
        max_instances=max_instances,
        min_box_size=min_box_size,
    )
    kept = shown.kept
    boxes, image = shown.boxes[kept], shown.image[kept]
    matches = match(boxes, image, anchors)
    lost = np.setdiff1d(np.arange(len(kept)), matches.owned_box)
    ceiling = _ceiling(shown, matches, anchors) if shown.num_true else None
    reasons: tuple[str, ...] = ()
    if ceiling and ceiling["AP"] < ap_ceiling.PERFECT:
        reasons = ap_ceiling.reasons(shown, {"without an anchor": len(lost)})
    return AnchorReport(
        anchors=dataclasses.asdict(anchors),
        num_anchors=anchors.num_anchors,
        max_instances=max_instances,
        images=shown.sample.num_images,
        images_with_boxes=len(np.unique(annotations.box_image[~annotations.is_crowd])),
        boxes=shown.num_true,
        too_small=shown.group(np.flatnonzero(shown.too_small)),
        truncated=shown.group(np.flatnonzero(shown.truncated)),
        unreached=shown.group(kept[matches.best_iou <= MATCH_IOU]),
        lost=shown.group(kept[lost]),
        levels=_levels(anchors, matches),
        fit=anchor_fit.Fit.of(matches.best_iou),
        ceiling=ceiling,
        reasons=reasons,
        suggestion=suggest(boxes, image, anchors, random),
    )


def suggest(
    boxes: np.ndarray, image: np.ndarray, anchors: Anchors, random: np.random.Generator
) -> Suggestion | None:
    """Another anchor_scale, and other aspect_ratios (as many as there are), if they fit really better.

    They are searched on one half of the images and compared on the other by `anchor_fit.beats`: first the
    scale alone, then ratios too, which have to beat that.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input.
        image: int (M,), ascending.
        anchors: the given ones.
        random: chooses the halves.
    """
    some = np.arange(len(boxes))
    if len(boxes) > MAX_TRIED_BOXES:
        some = np.sort(random.choice(some, MAX_TRIED_BOXES, replace=False))
    is_fitted = anchor_fit.split(image[some], random)
    fitted, held_out = boxes[some[is_fitted]], boxes[some[~is_fitted]]
    own_iou = best_iou = best_overlap(held_out, anchors)
    best = anchors
    for ratios in (anchors.aspect_ratios, _fit_ratios(fitted, anchors, random)):
        tried = [
            dataclasses.replace(anchors, anchor_scale=scale, aspect_ratios=ratios)
            for scale in sorted({*SCALES, anchors.anchor_scale})
        ]
        candidate = max(tried, key=lambda these: anchor_fit.Fit.of(best_overlap(fitted, these)).merit)
        candidate_iou = best_overlap(held_out, candidate)
        if anchor_fit.beats(candidate_iou, best_iou, by_reach=True):
            best, best_iou = candidate, candidate_iou
    if best == anchors:
        return None
    ratios_text = ",".join(f"{ratio:g}" for ratio in best.aspect_ratios)
    return Suggestion(
        hparams=f"anchor_scale={best.anchor_scale:g},aspect_ratios={ratios_text}",
        own=anchor_fit.Fit.of(own_iou),
        new=anchor_fit.Fit.of(best_iou),
        lost=len(boxes) - len(np.unique(match(boxes, image, best).owned_box)),
    )


def _fit_ratios(boxes: np.ndarray, anchors: Anchors, random: np.random.Generator) -> tuple[float, ...]:
    """As many ratios as there are, by k-means on the shapes of the boxes whatever their sizes."""
    sides = (boxes[:, 2:] - boxes[:, :2]) * np.array(anchors.image_size[::-1], np.float64)
    shapes = sides / np.sqrt(sides.prod(axis=1, keepdims=True))
    count = len(anchors.aspect_ratios)
    if len(np.unique(shapes, axis=0)) < count:
        return anchors.aspect_ratios
    fitted = anchor_fit.fit_anchors(shapes, count, int(random.integers(2**31)))
    ratios = sorted({float(f"{width / height:.2g}") for width, height in fitted})
    return tuple(ratios) if len(ratios) == count else anchors.aspect_ratios


def _ceiling(shown: ShownBoxes, matches: Matches, anchors: Anchors) -> dict[str, float]:
    """One detection of every box that owns an anchor, from the offsets that this anchor should learn."""
    box, first = np.unique(matches.owned_box, return_index=True)
    number = shown.kept[box]
    image = shown.image[number]
    decoded = _encode_and_decode(shown.boxes[number], matches.owned_anchor[first], anchors)
    classes = shown.sample.target_boxes.classes[number]
    return ap_ceiling.score(shown.sample, image, shown.in_original(decoded, image), classes)


def _encode_and_decode(boxes: np.ndarray, anchor: np.ndarray, anchors: Anchors) -> np.ndarray:
    """What `decode_boxes` makes of boxes (P, 4) that are encoded for the anchors (P,): float32 (P, 4)."""
    offsets = encode_offsets(boxes, anchors.boxes_normalized[anchor])
    order = np.argsort(anchor, kind="stable")
    turn = np.empty(len(anchor), np.int64)  # which of the boxes that want this anchor, in different images
    turn[order] = np.arange(len(anchor)) - np.searchsorted(anchor[order], anchor[order])
    decoded = np.empty_like(offsets)
    for number in range(turn.max(initial=-1) + 1):  # as few dense tensors as hold them all
        mine = np.flatnonzero(turn == number)
        dense = np.zeros((anchors.num_anchors, 4), np.float32)
        dense[anchor[mine]] = offsets[mine]
        decoded[mine] = ops.convert_to_numpy(decode_boxes(dense, anchors))[anchor[mine]]
    return decoded


def _levels(anchors: Anchors, matches: Matches) -> tuple[Level, ...]:
    k = anchors.anchors_per_location
    counts = [height * width * k for height, width in anchors.feature_sizes]
    ends = np.cumsum(counts)
    best = np.bincount(np.searchsorted(ends, matches.best_anchor, side="right"), minlength=len(counts))
    owned = np.bincount(np.searchsorted(ends, matches.owned_anchor, side="right"), minlength=len(counts))
    sides = np.sqrt((anchors.boxes[:, 2:] - anchors.boxes[:, :2]).prod(axis=1))
    return tuple(
        Level(
            level=level,
            anchors=counts[i],
            smallest=float(sides[ends[i] - k : ends[i]].min()),
            largest=float(sides[ends[i] - k : ends[i]].max()),
            reached=int(np.count_nonzero(matches.reached[:, i])),
            best=int(best[i]),
            positives=int(owned[i]),
        )
        for i, level in enumerate(anchors.levels)
    )
