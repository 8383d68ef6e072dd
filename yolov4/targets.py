"""Assigns boxes to predictions: AlexeyAB/darknet src/yolo_layer.c, process_batch.

A box is assigned to the cell that contains its centre, and to the anchor with the best shape IoU among the
anchors of all heads. If iou_thresh is below 1, the box is also assigned to every anchor whose shape IoU is
above iou_thresh.

With neighbour_cells, which Darknet does not have, a box is also assigned to the cells in the nearest column
and in the nearest row (ultralytics/yolov5 utils/loss.py, build_targets).
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from common import boxes as box_ops
from common.layers import is_cpu_only
from yolov4.decoding import decode_boxes

if TYPE_CHECKING:
    from yolov4.config import YOLOv4Config

# A prediction whose box fits an object is still background if no class has more than this probability
# (src/yolo_layer.c, process_batch and compare_yolo_class).
IGNORE_CLASS_PROBABILITY = 0.25

IGNORE_CHUNK = 16  # number of boxes that are compared with all predictions at once


class Assignment(NamedTuple):
    """The assignment of M boxes per image to the predictions of a head: K anchors, h x w cells, C classes.

    With neighbour_cells, each box is there three times: with its own cell, with the cell in the nearest
    column and with the cell in the nearest row. So M is three times the number of boxes.
    """

    boxes: tf.Tensor  # float32 (B, M, 4), ltrb, normalised; the whole image for an invalid box
    assigned: tf.Tensor  # bool (B, M, K): whether the box is assigned to this anchor in its cell
    rows: tf.Tensor  # int64 (B, M): the row of the box's cell
    columns: tf.Tensor  # int64 (B, M): the column of the box's cell
    cells: tf.Tensor  # int64 (B, M, K): index of the prediction among the head's h * w * K predictions
    owner: tf.Tensor  # bool (B, M, K): whether the box is the first that is assigned to this prediction
    class_targets: tf.Tensor  # bool (B, M, K, C): the classes of all boxes assigned to this prediction
    num_classes: tf.Tensor  # float32 (B, M, K): the number of these classes


def valid_boxes(boxes: tf.Tensor, classes: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Returns bool (B, M): which boxes can be used in training.

    Such a box is finite and has sides above 0, a centre inside the image, and a class below num_classes.
    """
    left, top, right, bottom = tf.unstack(tf.cast(boxes, tf.float32), axis=-1)
    center_x, center_y = (left + right) / 2, (top + bottom) / 2
    inside = (center_x >= 0) & (center_x <= 1) & (center_y >= 0) & (center_y <= 1)
    extended = (right > left) & (bottom > top) & tf.reduce_all(tf.math.is_finite(boxes), axis=-1)
    classes = tf.cast(classes, tf.float32)  # because TensorFlow compares int32 on the host
    return inside & extended & (classes >= 0) & (classes < num_classes)


def assign_targets(
    boxes: tf.Tensor,
    classes: tf.Tensor,
    config: "YOLOv4Config",
    head: int,
    *,
    grid_size: tuple[tf.Tensor | int, tf.Tensor | int],
    num_classes: int,
) -> Assignment:
    """Assigns each box to predictions of one head.

    Args:
        boxes: float32 (B, M, 4), ltrb, normalised to the network input, padded.
        classes: int (B, M), 0-based, -1 in the padding.
        head: number of the head, the finest stride first.
        grid_size: (rows, columns) of the head.
        num_classes: C.
    """
    valid = valid_boxes(boxes, classes, num_classes)
    boxes = tf.where(valid[..., None], tf.cast(boxes, tf.float32), [0.0, 0.0, 1.0, 1.0])
    grid = tf.cast(tf.stack([grid_size[1], grid_size[0]]), tf.float32)  # columns, rows

    centers = (boxes[..., :2] + boxes[..., 2:]) / 2
    position = tf.minimum(tf.floor(centers * grid), grid - 1)  # (B, M, 2): column, row
    if config.neighbour_cells:
        position, valid = _with_neighbours(position, centers * grid, valid, grid)
        boxes, classes = tf.tile(boxes, [1, 3, 1]), tf.tile(classes, [1, 3])
    cell = position[..., 1] * grid[0] + position[..., 0]  # (B, M), a whole number

    fitting = _fitting_anchors(boxes[..., 2:] - boxes[..., :2], config, head, grid * config.strides[head])
    assigned = fitting & valid[..., None]  # (B, M, K)

    # The matrix products below count boxes that share a prediction.
    same_cell = tf.cast(cell[:, :, None] == cell[:, None, :], tf.float32)  # (B, M, M)
    earlier = tf.linalg.band_part(same_cell, -1, 0) - tf.linalg.band_part(same_cell, 0, 0)
    assigned_number = tf.cast(assigned, tf.float32)
    owner = assigned & (earlier @ assigned_number < 0.5)
    one_hot = tf.one_hot(classes, num_classes)  # (B, M, C)
    by_class = assigned_number[..., None] * one_hot[:, :, None, :]  # (B, M, K, C)
    shape = tf.shape(by_class)
    meeting = same_cell @ tf.reshape(by_class, [shape[0], shape[1], len(config.masks[head]) * num_classes])
    class_targets = tf.reshape(meeting, shape) > 0.5

    per_cell = config.anchors_per_location
    return Assignment(
        boxes=boxes,
        assigned=assigned,
        rows=tf.cast(position[..., 1], tf.int64),  # TensorFlow slices int32 of a GPU on the host
        columns=tf.cast(position[..., 0], tf.int64),
        cells=tf.cast(cell[..., None] * per_cell + tf.range(per_cell, dtype=tf.float32), tf.int64),
        owner=owner,
        class_targets=class_targets,
        num_classes=tf.reduce_sum(tf.cast(class_targets, tf.float32), axis=-1),
    )


def _with_neighbours(
    position: tf.Tensor, centers: tf.Tensor, valid: tf.Tensor, grid: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the own cells of M boxes, then the cells in the nearest columns, then in the nearest rows.

    Args:
        position: (B, M, 2), column and row of each box's own cell.
        centers: (B, M, 2), x and y of each box's centre, in units of cells.
        valid: bool (B, M), which boxes are valid.
        grid: (2,), numbers of columns and rows.

    Returns:
        position: (B, 3 M, 2), column and row of each cell.
        valid: bool (B, 3 M), whether the box is valid and the cell is in the grid.
    """
    step = tf.where(centers - position < 0.5, -1.0, 1.0)
    positions = [position, position + step * [1.0, 0.0], position + step * [0.0, 1.0]]
    inside = [tf.reduce_all((p >= 0) & (p < grid), axis=-1) & valid for p in positions]
    position = tf.clip_by_value(tf.concat(positions, axis=1), 0.0, grid - 1)
    return position, tf.concat(inside, axis=1)


def ignore_mask(
    raw: tf.Tensor,
    boxes: tf.Tensor,
    classes: tf.Tensor,
    num_boxes: tf.Tensor,
    config: "YOLOv4Config",
    head: int,
) -> tf.Tensor:
    """Returns bool (B, h, w, K): which predictions are too good to count as background.

    Such a prediction has an IoU above ignore_thresh with a ground-truth box, and a probability above
    IGNORE_CLASS_PROBABILITY for some class.

    Args:
        raw: (B, h, w, K, 5 + C), outputs of head number `head`. No gradient flows back to them.
        boxes, classes: as for `assign_targets`.
        num_boxes: int (B,), number of boxes before the padding.
    """
    raw = tf.stop_gradient(raw)
    shape = tf.shape(raw)
    batch, num_predictions = shape[0], shape[1] * shape[2] * shape[3]
    predictions = tf.reshape(decode_boxes(raw, config, head), [batch, 1, num_predictions, 4])

    valid = valid_boxes(boxes, classes, raw.shape[-1] - 5)
    boxes = tf.where(valid[..., None], tf.cast(boxes, tf.float32), 0.0)  # no area, so an IoU of 0
    padding = -boxes.shape[1] % IGNORE_CHUNK
    boxes = tf.pad(boxes, [[0, 0], [0, padding], [0, 0]])
    num_chunks: tf.Tensor | int = boxes.shape[1] // IGNORE_CHUNK
    if is_cpu_only():  # on a GPU, the host would wait for this number
        num_chunks = (tf.cast(tf.reduce_max(num_boxes), tf.int32) + IGNORE_CHUNK - 1) // IGNORE_CHUNK

    def compare(chunk: tf.Tensor, best_iou: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        some = tf.slice(boxes, [0, chunk * IGNORE_CHUNK, 0], [-1, IGNORE_CHUNK, 4])
        iou = box_ops.iou(some[:, :, None, :], predictions)  # (B, chunk, h w K)
        return chunk + 1, tf.maximum(best_iou, tf.reduce_max(iou, axis=1))

    _, best_iou = tf.while_loop(
        lambda chunk, _: chunk < num_chunks,
        compare,
        [0, tf.zeros([batch, num_predictions])],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, None])],
        parallel_iterations=1,
    )
    logit = math.log(IGNORE_CLASS_PROBABILITY / (1 - IGNORE_CLASS_PROBABILITY))
    probable = tf.reduce_max(tf.cast(raw[..., 5:], tf.float32), axis=-1) > logit
    return probable & (tf.reshape(best_iou, shape[:4]) > config.ignore_thresh)


def _fitting_anchors(
    sizes: tf.Tensor, config: "YOLOv4Config", head: int, image_size_wh: tf.Tensor
) -> tf.Tensor:
    """Returns bool (B, M, K): which of the head's K anchors each box is assigned to.

    `sizes` (B, M, 2) holds the width and height of each box. The shape IoU is the IoU of two boxes with the
    same centre.
    """
    anchors = tf.constant(config.anchor_sizes, tf.float32) / image_size_wh  # (A, 2)
    common = tf.minimum(sizes[..., None, :], anchors)
    intersection = common[..., 0] * common[..., 1]
    areas = (sizes[..., 0] * sizes[..., 1])[..., None]
    fit = intersection / (areas + anchors[:, 0] * anchors[:, 1] - intersection)
    # tf.argmax is not used, because it may return any of several equal values.
    numbers = tf.range(config.num_anchors, dtype=tf.float32)
    is_best = fit == tf.reduce_max(fit, axis=-1, keepdims=True)
    best = tf.reduce_min(tf.where(is_best, numbers, float(config.num_anchors)), axis=-1)  # (B, M)
    fitting = best[..., None] == tf.constant(config.masks[head], tf.float32)
    if config.iou_thresh < 1:
        fitting |= tf.gather(fit, config.masks[head], axis=-1) > config.iou_thresh
    return fitting
