"""Measures how well the anchors of a network fit the boxes of a data set, before any training.

Whole images are letterboxed to the network input. Their boxes are assigned to anchors by the DALI operators
of training (common/box_encoder.py). This does not apply to models with task-aligned assignment, such as
efficientdet-nano. For YOLOv4's anchors see anchor_shapes.py.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np
from nvidia import dali
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from common.anchors import MATCH_IOU, MAX_INSTANCES, Anchors
from common.box_encoder import encode_selected, level_slices
from common.dali_ops import select_boxes
from common.data.annotations import Annotations, records
from common.evaluation.coco_metrics import score
from common.letterbox import fit
from yolov4.anchor_fit import Fit

SCALES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_BATCH_SIZE = 32
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

    Attributes:
        max_instances: largest number of boxes that are kept per image.
        images: number of images in the sample.
        images_with_boxes: number of images with boxes in the data set.
        boxes: number of boxes in the sample, without crowds.
        too_small: number of boxes dropped because a side is below min_box_size.
        over_limit: number of boxes dropped because their image has more than max_instances.
        unreached: number of boxes that have no IoU above MATCH_IOU with any anchor.
        lost: number of boxes that get no anchor, because their best anchor is assigned to another box.
        fits: anchor scale -> how well anchors of this scale fit the boxes.
        ceiling: COCO's metrics (coco_metrics.NAMES) if a network found exactly the boxes that have an anchor.
            Empty if there are no boxes.
    """

    anchors: Anchors
    max_instances: int
    images: int
    images_with_boxes: int
    boxes: int
    too_small: int
    over_limit: int
    unreached: int
    lost: int
    levels: tuple[Level, ...]
    fits: dict[float, Fit]
    ceiling: dict[str, Any]


class AnchorAssignment(NamedTuple):
    """The result of `assign` for M boxes.

    Attributes:
        selected: int (K,), the indices of the boxes that are not dropped.
        positives: int (P,), the anchors that get a box.
        owners: int (P,), the index of the box of each of these anchors.
        too_small, over_limit: numbers of boxes dropped because of min_box_size and because of max_instances.
    """

    selected: np.ndarray
    positives: np.ndarray
    owners: np.ndarray
    too_small: int
    over_limit: int


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
    sample = sample_images(annotations, max_images, np.random.default_rng(seed))
    boxes = letterboxed(sample, anchors.image_size)
    assignment = assign(boxes, sample.target_boxes.row_splits, anchors, max_instances, min_box_size)
    boxes = boxes[assignment.selected]
    iou = template_iou(boxes, anchors)
    fits = {}
    for scale in sorted({*SCALES, anchors.anchor_scale}):
        scaled = dataclasses.replace(anchors, anchor_scale=scale)
        fits[scale] = Fit.of(template_iou(boxes, scaled).max(axis=1))
    return AnchorReport(
        anchors=anchors,
        max_instances=max_instances,
        images=sample.num_images,
        images_with_boxes=len(np.unique(annotations.box_image[~annotations.is_crowd])),
        boxes=int(np.count_nonzero(~sample.is_crowd)),
        too_small=assignment.too_small,
        over_limit=assignment.over_limit,
        unreached=int(np.count_nonzero(iou.max(axis=1) <= MATCH_IOU)),
        lost=len(np.setdiff1d(assignment.selected, assignment.owners)),
        levels=_levels(anchors, iou, assignment.positives),
        fits=fits,
        ceiling=perfect_metrics(sample, np.unique(assignment.owners)) if sample.num_images else {},
    )


def sample_images(annotations: Annotations, max_images: int, random: np.random.Generator) -> Annotations:
    """Selects at most `max_images` images that have boxes, without crowds."""
    images = np.unique(annotations.box_image[~annotations.is_crowd])
    if len(images) > max_images:
        images = random.choice(images, max_images, replace=False)
    return annotations.select(np.isin(np.arange(annotations.num_images), images))


def letterboxed(annotations: Annotations, image_size: tuple[int, int]) -> np.ndarray:
    """Returns `target_boxes`, float32 (M, 4) ltrb, normalised to the network input instead of the image."""
    height, width = annotations.image_sizes.astype(np.int64).T
    new_height, new_width = fit(height, width, image_size, np.minimum, np.maximum)
    scales = (np.stack([new_width, new_height] * 2, axis=1) / (image_size[::-1] * 2)).astype(np.float32)
    return annotations.target_boxes.boxes * np.repeat(scales, _box_counts(annotations), axis=0)


def assign(
    boxes: np.ndarray, row_splits: np.ndarray, anchors: Anchors, max_instances: int, min_box_size: float
) -> AnchorAssignment:
    """Selects boxes and assigns them to anchors, as training does.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input.
        row_splits: int (I + 1,); the boxes of image i are the rows row_splits[i] : row_splits[i + 1].
        max_instances, min_box_size: see `examine`.
    """
    # Each box has its number, from 1, as its label. So class targets are the numbers of the assigned boxes.
    numbers = np.arange(1, len(boxes) + 1, dtype=np.int32)
    images = [slice(start, end) for start, end in itertools.pairwise(row_splits)]
    batches = [images[start : start + _BATCH_SIZE] for start in range(0, len(images), _BATCH_SIZE)]
    min_size = min_box_size / anchors.image_size[0], min_box_size / anchors.image_size[1]

    @dali.pipeline_def(batch_size=_BATCH_SIZE, num_threads=4, device_id=None)  # type: ignore[call-overload]
    def graph() -> tuple[DataNode, ...]:
        source = (([boxes[rows] for rows in batch], [numbers[rows] for rows in batch]) for batch in batches)
        inputs: Any = fn.external_source(source, num_outputs=2)
        rows = select_boxes(inputs[0], inputs[1], min_size, max_instances)
        encoded = encode_selected(rows.boxes, rows.labels, anchors, max_instances, device="cpu")
        return rows.labels, rows.lost, *encoded.class_targets

    pipeline = graph()
    selected, positives, owners = ([np.zeros(0, int)] for _ in range(3))
    too_small, over_limit = 0, 0
    for _ in batches:
        for labels, lost, *class_targets in zip(*pipeline.run(), strict=True):
            targets = np.concatenate([np.asarray(level).ravel() for level in class_targets])  # (A,)
            selected.append(np.asarray(labels) - 1)
            positives.append(np.flatnonzero(targets >= 0))
            owners.append(targets[positives[-1]])
            too_small, over_limit = np.add((too_small, over_limit), lost).tolist()
    arrays = np.concatenate(selected), np.concatenate(positives), np.concatenate(owners)
    return AnchorAssignment(*arrays, too_small, over_limit)


def template_iou(boxes: np.ndarray, anchors: Anchors) -> np.ndarray:
    """Returns float64 (M, T), the IoU of each box with the nearest anchor of each template.

    Args:
        boxes: float32 (M, 4), ltrb normalised to the network input, with areas above 0.
        anchors: anchors of the network input; each level, scale and ratio is a template.
    """
    cells = np.repeat(anchors.feature_sizes, anchors.anchors_per_location, axis=0)[:, ::-1]  # columns, rows
    anchor_sizes = _template_sizes(anchors)
    iou = np.zeros((len(boxes), len(anchor_sizes)))
    for start in range(0, len(boxes), _BOXES_AT_ONCE):
        part = boxes[start : start + _BOXES_AT_ONCE, None].astype(np.float64)
        centers, sizes = (part[..., :2] + part[..., 2:]) / 2, part[..., 2:] - part[..., :2]
        cell = np.clip(np.rint(centers * cells - 0.5), 0, cells - 1)
        distance = np.abs(centers - (cell + 0.5) / cells)
        common = np.minimum(np.minimum(sizes, anchor_sizes), (sizes + anchor_sizes) / 2 - distance)
        intersection = np.maximum(common, 0.0).prod(axis=2)
        union = sizes.prod(axis=2) + anchor_sizes.prod(axis=1) - intersection
        iou[start : start + _BOXES_AT_ONCE] = intersection / union
    return iou


def perfect_metrics(annotations: Annotations, rows: np.ndarray) -> dict[str, Any]:
    """Returns COCO's metrics of detections that are exactly these rows of `target_boxes`."""
    targets = annotations.target_boxes
    image = np.repeat(np.arange(annotations.num_images), _box_counts(annotations))[rows]
    boxes_px = targets.boxes[rows] * np.tile(annotations.image_sizes[image][:, ::-1], 2)
    boxes_ltwh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    category_ids = np.array(annotations.label_map.category_ids)[targets.classes[rows]]
    columns = annotations.image_ids[image], category_ids, boxes_ltwh_px, np.ones(len(rows))
    return score(annotations.ground_truth(), records("image_id category_id bbox score", *columns)).metrics


def _box_counts(annotations: Annotations) -> np.ndarray:
    return np.diff(annotations.target_boxes.row_splits)


def _template_sizes(anchors: Anchors) -> np.ndarray:
    """Returns float64 (T, 2), the width and height of each level's anchors, normalised by the image."""
    first = np.concatenate(
        [np.arange(anchors.anchors_per_location) + start for start, *_ in level_slices(anchors)]
    )
    left_top, right_bottom = np.split(anchors.boxes_normalized[first].astype(np.float64), 2, axis=1)
    return right_bottom - left_top


def _levels(anchors: Anchors, iou: np.ndarray, positives: np.ndarray) -> tuple[Level, ...]:
    k = anchors.anchors_per_location
    counts = [size for _, size, _ in level_slices(anchors)]
    by_level = iou.reshape(len(iou), len(counts), k).max(axis=2)
    best = len(counts) - 1 - by_level[:, ::-1].argmax(axis=1)
    sides = np.sqrt(_template_sizes(anchors).prod(axis=1) * np.prod(anchors.image_size)).reshape(-1, k)
    columns = (
        np.array(anchors.levels),
        np.array(counts),
        sides.min(axis=1),
        sides.max(axis=1),
        (by_level > MATCH_IOU).sum(axis=0),
        np.bincount(best, minlength=len(counts)),
        np.histogram(positives, [0, *np.cumsum(counts)])[0],
    )
    return tuple(map(Level._make, zip(*(column.tolist() for column in columns), strict=True)))
