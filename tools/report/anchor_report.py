"""What the anchors of a network can do with a data set, before anything is trained.

Which boxes each level matches, which boxes no anchor reaches, which lose their anchors to other boxes, and
how well anchors of other scales would fit. Images are letterboxed whole to one network input, as in
evaluation. efficientdet/grid_matching.py matches boxes, as it does in training unless their assignment is
task-aligned.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from common.anchors import Anchors
from common.annotations import Annotations
from common.box_encoder import MATCH_IOU, MAX_INSTANCES
from efficientdet import grid_matching
from tools.report.network_boxes import network_boxes, sample_images
from yolov4.anchor_fit import Fit

SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # of anchors that are tried
_IMAGES_AT_ONCE = 64
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
    owned, owners = match(boxes, network.image[kept], anchors)
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
        found = grid_matching.match(boxes[first:last], within, anchors, MATCH_IOU)
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


def _levels(anchors: Anchors, iou: np.ndarray, owned: np.ndarray) -> tuple[Level, ...]:
    k = anchors.anchors_per_location
    counts = [height * width * k for height, width in anchors.feature_sizes]
    by_level = iou.reshape(len(iou), len(counts), k).max(axis=2)
    best = len(counts) - 1 - by_level[:, ::-1].argmax(axis=1)  # the last of equals, as in matching
    sides = np.sqrt(grid_matching.templates(anchors).sizes.prod(axis=1) * np.prod(anchors.image_size))
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
