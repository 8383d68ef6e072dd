"""Measures how well the anchors of a YOLOv4 model fit the boxes of a data set, before any training.

YOLOv4 compares only the shapes of boxes and anchors (yolov4/targets.py). The images are resized without
augmentation.
"""

from typing import NamedTuple

import numpy as np

from common.data.annotations import Annotations
from yolov4.anchor_fit import Fit, shape_iou
from yolov4.config import YOLOv4Config
from yolov4.fit_anchors import box_sizes, trained_iou


class AnchorShape(NamedTuple):
    """One anchor and the boxes that it fits.

    Attributes:
        width, height: sides in pixels of the network input.
        strides: strides of the heads that use the anchor.
        best: number of boxes whose best anchor it is.
        assigned: number of boxes that each of these heads assigns to it.
    """

    width: float
    height: float
    strides: tuple[int, ...]
    best: int
    assigned: int


class ShapeReport(NamedTuple):
    """How the anchors fit all boxes without crowds.

    Attributes:
        boxes: number of boxes.
        too_small: number of boxes dropped because a side is below min_box_size; `fit` is without them.
        over_limit: number of boxes dropped because their image has more than max_instances.
        unassigned: number of boxes that no anchor gets.
    """

    config: YOLOv4Config
    boxes: int
    too_small: int
    over_limit: int
    unassigned: int
    fit: Fit
    anchors: tuple[AnchorShape, ...]


def examine(annotations: Annotations, config: YOLOv4Config) -> ShapeReport:
    """Compares the shapes of all boxes with the anchors of a model."""
    all_sizes = box_sizes(annotations, config.image_size, config.letterbox)
    is_large = all_sizes.min(axis=1, initial=np.inf) >= config.min_box_size
    image = np.repeat(np.arange(annotations.num_images), np.diff(annotations.target_boxes.row_splits))
    per_image = np.bincount(image[is_large], minlength=1)
    sizes = all_sizes[is_large]
    iou = shape_iou(sizes, np.array(config.anchor_sizes))  # (N, A)
    is_best = iou.argmax(axis=1, keepdims=True) == np.arange(config.num_anchors)
    is_assigned = is_best | (iou > config.iou_thresh)
    best_iou = trained_iou(sizes, config)
    anchors = []
    for index, (width, height) in enumerate(config.anchor_sizes):
        strides = tuple(
            stride for stride, mask in zip(config.strides, config.masks, strict=True) if index in mask
        )
        assigned = int(is_assigned[:, index].sum()) if strides else 0
        anchors.append(AnchorShape(width, height, strides, int(is_best[:, index].sum()), assigned))
    return ShapeReport(
        config=config,
        boxes=len(all_sizes),
        too_small=int(np.count_nonzero(~is_large)),
        over_limit=int(np.maximum(per_image - config.max_instances, 0).sum()),
        unassigned=int(np.count_nonzero(best_iou == 0)),
        fit=Fit.of(best_iou),
        anchors=tuple(anchors),
    )
