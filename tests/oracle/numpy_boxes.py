"""Transforms boxes in float64 NumPy, and compares them with a pipeline's outputs.

Boxes are ltrb in pixels of the stored image or of the network input.
"""

import numpy as np
from numpy.typing import ArrayLike

PIXEL = 0.01  # tolerance of boxes, in pixels
DOUBTFUL = 1e-3  # pixels; a box this close to a threshold may be kept or dropped
DOUBTFUL_AREA = 1e-4
MATCH_IOU = 0.5


def to_xyxy(yx: tuple[float, float]) -> np.ndarray:
    """Returns [x, y, x, y] for (y, x)."""
    return np.array([*yx[::-1]] * 2, np.float64)


def to_letterbox(boxes: ArrayLike, place: ArrayLike, image_size: tuple[int, int]) -> np.ndarray:
    """Returns boxes normalised by the network input, float32.

    Args:
        boxes: (..., 4), normalised by the image.
        place: (..., 4): top, left, height, width in pixels of the image in the network input.
        image_size: height, width of the network input.
    """
    shares = np.asarray(place, np.float32) / np.array(image_size * 2, np.float32)
    top, left, height, width = np.moveaxis(shares, -1, 0)
    return np.float32(boxes) * np.stack([width, height] * 2, -1) + np.stack([left, top] * 2, -1)


def move(boxes_px: np.ndarray, window: tuple[int, ...], place: tuple[int, ...]) -> np.ndarray:
    """Converts boxes to pixels of the network input, and clips them to `place`.

    Args:
        boxes_px: (N, 4) in the stored image.
        window, place: top, left, height, width.
    """
    origin, target = to_xyxy(place[:2]), to_xyxy(place[2:])
    inside = (boxes_px - to_xyxy(window[:2])) / to_xyxy(window[2:])
    return np.clip(inside, 0, 1) * target + origin


def touch_window(boxes_px: np.ndarray, window: tuple[int, ...]) -> np.ndarray:
    """Returns (N,): whether each box touches the window without an overlap."""
    corners = np.array([window[1], window[0], window[1] + window[3], window[0] + window[2]])
    sides = np.minimum(boxes_px[:, 2:], corners[2:]) - np.maximum(boxes_px[:, :2], corners[:2])
    return np.abs(sides.min(1, initial=np.inf)) < DOUBTFUL


def flip(boxes_px: np.ndarray, width: float) -> np.ndarray:
    x_min, y_min, x_max, y_max = boxes_px.T
    return np.stack([width - x_max, y_min, width - x_min, y_max], axis=1)


def assert_boxes(outputs, row: int, boxes_px, classes, config, where: str, touching: int = 0) -> None:
    """Compares boxes, classes and numbers of lost boxes.

    Args:
        boxes_px, classes: all visible boxes of the image.
        touching: number of further boxes that only rounding errors can make visible.
    """
    row_classes, max_instances = outputs["classes"][row], config.max_instances
    count = (row_classes >= 0).sum()
    assert (row_classes[count:] == -1).all() and (outputs["boxes"][row, count:] == -1).all(), where
    row_boxes_px = outputs["boxes"][row, :count].astype(np.float64) * to_xyxy(
        outputs["images"][row].shape[:2]
    )

    sides = boxes_px[:, 2:] - boxes_px[:, :2]
    smallest, areas = sides.min(1, initial=np.inf), sides.prod(1)
    certain, possible = (smallest >= config.min_box_size + slack for slack in (DOUBTFUL, -DOUBTFUL))
    shown = [(smallest > DOUBTFUL).sum(), (smallest > 0).sum() + touching]
    lost = outputs["lost"][row]
    small, over = (shown[0] - possible.sum(), shown[1] - certain.sum()), [certain.sum(), possible.sum()]
    over = np.maximum(np.subtract(over, max_instances), 0)
    assert small[0] <= lost[0] <= small[1], f"{where}: {lost[0]} small boxes, not {small}"
    assert over[0] <= lost[1] <= over[1], f"{where}: {lost[1]} boxes over the maximum, not {over}"

    assert min(max_instances, certain.sum()) <= count <= max_instances, where
    if possible.sum() > max_instances:
        limit = np.sort(areas[possible])[-max_instances]
        certain &= areas > limit * (1 + DOUBTFUL_AREA)
        possible &= areas >= limit * (1 - DOUBTFUL_AREA)
    next_row = 0
    for box_px, label, must in zip(boxes_px[possible], classes[possible], certain[possible], strict=True):
        is_next = next_row < count and row_classes[next_row] == label
        is_next = is_next and np.abs(row_boxes_px[next_row] - box_px).max() <= PIXEL
        assert is_next or not must, (
            f"{where}: {box_px} of class {label} is not row {next_row} of {row_boxes_px}"
        )
        next_row += is_next
    assert next_row == count, f"{where}: {row_boxes_px[next_row]} equals no expected box"


def match(boxes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Returns the index of the box of each anchor by SSD's rule, or -1.

    An anchor gets the box with the highest IoU, if this IoU is above 1/2. Then every box gets the anchor with
    the highest IoU.
    """
    if len(boxes) == 0:
        return np.full(len(anchors), -1)
    one, other = boxes[:, np.newaxis], anchors
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    common = np.where((sides > 0).all(-1), sides.prod(-1), np.float32(0))
    areas = [(x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (one, other)]
    iou = common / (areas[0] + areas[1] - common)
    owners = len(boxes) - 1 - iou[::-1].argmax(0)
    owners[iou.max(0) <= MATCH_IOU] = -1
    best = len(anchors) - 1 - iou[:, ::-1].argmax(1)
    for box, anchor in enumerate(best):
        owners[anchor] = box
    return owners


def deltas(boxes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Returns dy, dx, dh, dw of boxes relative to anchors, all (P, 4) (arXiv 1506.01497 section 3.1.2)."""
    boxes, anchors = boxes.astype(np.float64), anchors.astype(np.float64)
    sizes = anchors[:, 2:] - anchors[:, :2]
    shifts = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / sizes
    scales = np.log((boxes[:, 2:] - boxes[:, :2]) / sizes)
    return np.concatenate([shifts[:, ::-1], scales[:, ::-1]], axis=1)
