"""Boxes to anchor targets, and the heads' outputs back to boxes.

`encode_boxes` works inside a DALI graph, around `fn.box_encoder`; efficientdet/grid_matching.py gives the
same tensors by TensorFlow. Matching is that of SSD (arXiv 1512.02325, section 2.2): an anchor takes the box
that it overlaps most if their IoU exceeds 0.5, and every box gets its best anchor at any IoU. Deltas
are those of Faster R-CNN (arXiv 1506.01497, section 3.1.2) in TensorFlow's order, (dy, dx, dh, dw).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from common.anchors import MATCH_IOU, MAX_INSTANCES, Anchors
from common.dali_ops import pad_boxes, select_boxes

# (dx, dy, dw, dh) -> (dy, dx, dh, dw), row by row
_SWAP_XY = [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]


class EncodedBoxes(NamedTuple):
    """The targets of one image: DALI nodes from `encode_boxes`, TensorFlow tensors from `encode_batch_tf`.

    Attributes:
        num_positives: float32 (), the number of anchors that own a box.
        boxes: float32 (max_instances, 4), ltrb normalised, padded with -1.
        classes: int32 (max_instances,), 0-based, padded with -1.
        class_targets: one per level, int32 (h, w, anchors_per_location), 0-based, -1 for background.
        box_targets: one per level, float32 (h, w, anchors_per_location * 4), the (dy, dx, dh, dw) of each
            anchor in turn, zeros for background.
    """

    num_positives: Any
    boxes: Any
    classes: Any
    class_targets: tuple[Any, ...]
    box_targets: tuple[Any, ...]


# --- inside a DALI graph ---


def encode_boxes(
    boxes: DataNode,
    labels: DataNode,
    anchors: Anchors,
    max_instances: int = MAX_INSTANCES,
    device: str | None = None,
) -> EncodedBoxes:
    """Encodes the boxes of one image against the anchors; runs in a DALI graph.

    Boxes without area are dropped first (fn.box_encoder would give them infinite deltas), and of more than
    `max_instances` the largest are kept, so that the padded boxes and the targets are of the same boxes.
    Of equally good anchors a box gets the last; of equally good boxes an anchor takes the last. A box can
    end up without an anchor, where others take its best one.

    Args:
        boxes: float32 (N, 4), ltrb normalised; N may be 0.
        labels: int32 (N,), 1-based.
        anchors: those of the network input that the boxes are normalised to.
        max_instances: rows of the padded boxes and classes.
        device: "cpu" or "gpu", where to encode and where the results are; by default where `boxes` are. The
            choice of boxes is always made on the CPU, so boxes read there need no copy before.
    """
    selected = select_boxes(boxes.cpu(), labels.cpu(), max_instances=max_instances)
    return encode_selected(
        selected.boxes, selected.labels, anchors, max_instances, device=device or boxes.device
    )


def encode_selected(
    boxes: DataNode, labels: DataNode, anchors: Anchors, max_instances: int, *, device: str
) -> EncodedBoxes:
    """`encode_boxes` of boxes that all have an area, at most `max_instances`, on the CPU."""
    padded_boxes, padded_classes = pad_boxes(boxes, labels, max_instances)
    if device == "gpu":
        boxes, labels = boxes.gpu(), labels.gpu()
        padded_boxes, padded_classes = padded_boxes.gpu(), padded_classes.gpu()

    deltas, targets = fn.box_encoder(
        boxes, labels, anchors=anchors.boxes_normalized.ravel().tolist(), criteria=MATCH_IOU, offset=True
    )  # (A, 4) dx dy dw dh, (A,) 1-based with 0 for background
    num_positives = fn.reductions.sum(fn.cast(targets != 0, dtype=types.FLOAT))
    targets -= 1
    deltas = fn.coord_transform(deltas, M=_SWAP_XY)

    class_targets, box_targets = [], []
    for start, size, (height, width) in level_slices(anchors):
        k = anchors.anchors_per_location
        # By name: as inputs, start and shape would be GPU constants, each copied and waited for.
        part: dict[str, Any] = {"start": [start], "shape": [size], "axes": [0]}
        level_targets, level_deltas = fn.slice(targets, **part), fn.slice(deltas, **part)
        class_targets.append(fn.reshape(level_targets, shape=[height, width, k]))
        box_targets.append(fn.reshape(level_deltas, shape=[height, width, k * 4]))
    return EncodedBoxes(num_positives, padded_boxes, padded_classes, tuple(class_targets), tuple(box_targets))


def level_slices(anchors: Anchors) -> list[tuple[int, int, tuple[int, int]]]:
    """(first anchor, number of anchors, (feature height, feature width)) of each level."""
    slices, start = [], 0
    for height, width in anchors.feature_sizes:
        size = height * width * anchors.anchors_per_location
        slices.append((start, size, (height, width)))
        start += size
    return slices


# --- back from head outputs ---


def decode_boxes(deltas: Any, anchors: Anchors) -> Any:
    """The inverse of the encoding: the boxes that the heads' deltas stand for.

    Args:
        deltas: (..., A, 4), (dy, dx, dh, dw), or a list, (B, h, w, anchors_per_location * 4) per level.
        anchors: the anchors that the deltas are relative to.

    Returns:
        float32 (..., A, 4) ltrb, normalised, not clipped to the image.
    """
    if isinstance(deltas, list | tuple):
        deltas = ops.concatenate(split_anchors(deltas, 4), axis=1)
    return decode_deltas(deltas, anchors.boxes_normalized)


def decode_deltas(deltas: Any, prior: Any) -> Any:
    """`decode_boxes` of single anchors: deltas (..., 4) and the anchors, ltrb normalised, (..., 4)."""
    dy, dx, dh, dw = ops.unstack(ops.cast(deltas, "float32"), 4, axis=-1)
    left, top, right, bottom = ops.unstack(prior, 4, axis=-1)
    width, height = right - left, bottom - top
    x, y = dx * width + (left + right) / 2, dy * height + (top + bottom) / 2
    half_width, half_height = ops.exp(dw) * (width / 2), ops.exp(dh) * (height / 2)
    return ops.stack([x - half_width, y - half_height, x + half_width, y + half_height], axis=-1)


def split_anchors(per_level: Sequence[Any], num_values: int) -> list[Any]:
    """Each level's (B, h, w, k * num_values) as (B, h * w * k, num_values), in the order of the anchors."""
    return [
        ops.reshape(level, (-1, math.prod(level.shape[1:]) // num_values, num_values)) for level in per_level
    ]
