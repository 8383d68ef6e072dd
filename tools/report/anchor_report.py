"""What the anchors of a network can do with a data set, before anything is trained.

Which boxes each level matches, which boxes no anchor reaches, which lose their anchors to other boxes, what
AP perfect outputs would get, and whether other anchors would fit better. Images are letterboxed whole to one
network input, as in evaluation. common/grid_matching.py matches boxes, as in training.
"""

import dataclasses

import numpy as np

from common import grid_matching
from common.anchors import Anchors
from common.annotations import Annotations
from common.box_encoder import MATCH_IOU, MAX_INSTANCES
from yolov4 import anchor_fit, ap_ceiling
from yolov4.anchor_fit import Fit
from yolov4.ap_ceiling import BoxGroup

SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of anchors that are tried
MAX_TRIED_BOXES = 20_000  # of the sample: more would not change the choice
_IMAGES_AT_ONCE = 64
_BOXES_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True)
class Level:
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


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Other anchors, with how well they fit boxes that they were not fitted to.

    Attributes:
        hparams: for --hparams.
        old, new: how well the given and the suggested anchors fit the same held-out boxes.
        lost: boxes of the whole sample that would own no anchor.
    """

    hparams: str
    old: Fit
    new: Fit
    lost: int


@dataclasses.dataclass(frozen=True, eq=False)
class AnchorReport:
    """What the anchors match in a sample of the images.

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
        fit: of the best anchors of all boxes that training keeps.
        ceiling: ap_ceiling.NAMES -> value; None where there is no box.
        reasons: why it is below 1, in words.
        suggestion: other anchors, if they are better.
    """

    anchors: Anchors
    max_instances: int
    images: int
    images_with_boxes: int
    boxes: int
    too_small: BoxGroup
    over_limit: BoxGroup
    unreached: BoxGroup
    lost: BoxGroup
    levels: tuple[Level, ...]
    fit: Fit
    ceiling: dict[str, float] | None
    reasons: tuple[str, ...]
    suggestion: Suggestion | None


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
        seed: chooses the sample, and the boxes that new anchors are fitted to.
    """
    random = np.random.default_rng(seed)
    network = ap_ceiling.network_boxes(
        ap_ceiling.sample_images(annotations, max_images, random),
        anchors.image_size,
        keep_aspect=True,
        centered=False,
        max_instances=max_instances,
        min_box_size=min_box_size,
    )
    kept = network.kept
    boxes, image = network.boxes[kept], network.image[kept]
    iou = template_iou(boxes, anchors)
    owned, owners = match(boxes, image, anchors)
    with_anchor = np.unique(owners)
    lost = np.setdiff1d(np.arange(len(kept)), with_anchor)
    ceiling, reasons = None, ()
    if network.num_true:
        classes = network.sample.target_boxes.classes[kept[with_anchor]]
        ceiling = ap_ceiling.score(network, kept[with_anchor], classes)
        if ceiling["AP"] < ap_ceiling.PERFECT:
            reasons = ap_ceiling.reasons(network, {"without an anchor": len(lost)})
    return AnchorReport(
        anchors=anchors,
        max_instances=max_instances,
        images=network.sample.num_images,
        images_with_boxes=len(np.unique(annotations.box_image[~annotations.is_crowd])),
        boxes=network.num_true,
        too_small=network.group(np.flatnonzero(network.too_small)),
        over_limit=network.group(np.flatnonzero(network.over_limit)),
        unreached=network.group(kept[iou.max(axis=1) <= MATCH_IOU]),
        lost=network.group(kept[lost]),
        levels=_levels(anchors, iou, owned),
        fit=Fit.of(iou.max(axis=1)),
        ceiling=ceiling,
        reasons=reasons,
        suggestion=suggest(boxes, image, anchors, random),
    )


def suggest(
    boxes: np.ndarray, image: np.ndarray, anchors: Anchors, random: np.random.Generator
) -> Suggestion | None:
    """Another anchor_scale, and other aspect_ratios (as many as given), if they fit better.

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
    old_iou = best_iou = template_iou(held_out, anchors).max(axis=1)
    best = anchors
    for ratios in (anchors.aspect_ratios, _fit_ratios(fitted, anchors, random)):
        tried = [
            dataclasses.replace(anchors, anchor_scale=scale, aspect_ratios=ratios)
            for scale in sorted({*SCALES, anchors.anchor_scale})
        ]
        fits = [Fit.of(template_iou(fitted, these).max(axis=1)) for these in tried]
        candidate = tried[int(np.argmax([fit.mean_iou + fit.reached for fit in fits]))]
        candidate_iou = template_iou(held_out, candidate).max(axis=1)
        if anchor_fit.beats(candidate_iou, best_iou, by_reach=True):
            best, best_iou = candidate, candidate_iou
    if best == anchors:
        return None
    ratios_text = ",".join(f"{ratio:g}" for ratio in best.aspect_ratios)
    _, owners = match(boxes, image, best)
    return Suggestion(
        hparams=f"anchor_scale={best.anchor_scale:g},aspect_ratios={ratios_text}",
        old=Fit.of(old_iou),
        new=Fit.of(best_iou),
        lost=len(boxes) - len(np.unique(owners)),
    )


def match(boxes: np.ndarray, image: np.ndarray, anchors: Anchors) -> tuple[np.ndarray, np.ndarray]:
    """The anchors that own a box, and the box of each: int (P,) anchor, int (P,) index of the box.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, each with an area.
        image: int (M,), ascending; boxes compete within their image only.
        anchors: those of the network input.
    """
    owned, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, int(image.max(initial=-1)) + 1, _IMAGES_AT_ONCE):
        first, last = np.searchsorted(image, [start, start + _IMAGES_AT_ONCE])
        within = (image[first:last] - start).astype(np.int32)
        found = grid_matching.match(boxes[first:last], within, _IMAGES_AT_ONCE, anchors, MATCH_IOU)
        owned.append(found[0].numpy() % anchors.num_anchors)
        owners.append(found[1].numpy() + first)
    return np.concatenate(owned), np.concatenate(owners)


def template_iou(boxes: np.ndarray, anchors: Anchors) -> np.ndarray:
    """float64 (M, T): of each level, scale and ratio the IoU of the nearest anchor, which overlaps most.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, each with an area.
        anchors: those of the network input.
    """
    templates = grid_matching.templates(anchors)
    iou = np.zeros((len(boxes), len(templates.sizes)))
    for start in range(0, len(boxes), _BOXES_AT_ONCE):
        some = boxes[start : start + _BOXES_AT_ONCE, None].astype(np.float64)
        centers, sizes = (some[..., :2] + some[..., 2:]) / 2, some[..., 2:] - some[..., :2]
        cell = np.clip(np.rint(centers * templates.cells - 0.5), 0, templates.cells - 1)
        distance = np.abs(centers - (cell + 0.5) / templates.cells)
        common = np.minimum(np.minimum(sizes, templates.sizes), (sizes + templates.sizes) / 2 - distance)
        intersection = np.maximum(common, 0.0).prod(axis=2)
        union = sizes.prod(axis=2) + templates.sizes.prod(axis=1) - intersection
        iou[start : start + _BOXES_AT_ONCE] = intersection / union
    return iou


def _fit_ratios(boxes: np.ndarray, anchors: Anchors, random: np.random.Generator) -> tuple[float, ...]:
    """As many ratios as given, by k-means on the shapes of the boxes without their sizes."""
    sides = (boxes[:, 2:] - boxes[:, :2]) * np.array(anchors.image_size[::-1], np.float64)
    shapes = sides / np.sqrt(sides.prod(axis=1, keepdims=True))
    count = len(anchors.aspect_ratios)
    if len(np.unique(shapes, axis=0)) < count:
        return anchors.aspect_ratios
    fitted = anchor_fit.fit_anchors(shapes, count, int(random.integers(2**31)))
    ratios = sorted({float(f"{width / height:.2g}") for width, height in fitted})
    return tuple(ratios) if len(ratios) == count else anchors.aspect_ratios


def _levels(anchors: Anchors, iou: np.ndarray, owned: np.ndarray) -> tuple[Level, ...]:
    k = anchors.anchors_per_location
    counts = [height * width * k for height, width in anchors.feature_sizes]
    positives = np.histogram(owned, [0, *np.cumsum(counts)])[0].tolist()
    by_level = iou.reshape(len(iou), len(counts), k).max(axis=2)
    best = len(counts) - 1 - by_level[:, ::-1].argmax(axis=1)  # the last of equals, as in matching
    sides = np.sqrt(grid_matching.templates(anchors).sizes.prod(axis=1) * np.prod(anchors.image_size))
    return tuple(
        Level(
            level=level,
            anchors=counts[i],
            smallest=float(sides[i * k : i * k + k].min()),
            largest=float(sides[i * k : i * k + k].max()),
            reached=int(np.count_nonzero(by_level[:, i] > MATCH_IOU)),
            best=int(np.count_nonzero(best == i)),
            positives=positives[i],
        )
        for i, level in enumerate(anchors.levels)
    )
