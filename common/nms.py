"""Non-maximum suppression (NMS) of a batch in the TensorFlow graph, within each class or over all classes.

There are three methods:
    hard: drops a box if its IoU with a better box exceeds iou_threshold.
    gaussian: multiplies a score by exp(-IoU**2 / sigma) for each better box (Soft-NMS, arXiv 1704.04503).
    diou: drops a box if IoU - (d**2 / c**2)**beta exceeds iou_threshold. d is the distance of the centres, c
        the diagonal of the box around both boxes (arXiv 1911.08287, section 3.3; beta is from
        AlexeyAB/darknet src/box.c, box_diounms).

Darknet's nms_kind=greedynms (src/box.c, diounms_sort) equals diou with beta 0.6. Without an nms_kind, Darknet
uses do_nms_sort, which equals hard.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from common import boxes as box_ops

# Boxes are clipped to this range before suppression. With larger boxes, `moved_apart` would lose precision.
_NEIGHBOURHOOD = (-8.0, 8.0)


class Detections(NamedTuple):
    """The detections of a batch. Each image has D = max_detections rows, the best first, padding at the end.

    Attributes:
        boxes: float32 (B, D, 4), ltrb, normalised to the network input and clipped to it; 0 in the padding.
        scores: float32 (B, D), probabilities, lowered by Gaussian suppression; 0 in the padding.
        classes: int32 (B, D), 0-based; -1 in the padding.
        count: int32 (B,), number of detections without the padding.
    """

    boxes: tf.Tensor
    scores: tf.Tensor
    classes: tf.Tensor
    count: tf.Tensor


def top_candidates(levels: Sequence[tf.Tensor], count: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the K = min(count, N * C) best scores or logits, as one top-k over all of them would do.

    Only the `count` rows with the largest maxima are searched. They contain the `count` best scores.

    Args:
        levels: scores or logits of each level, (B, n, C). The levels are joined along n to N rows.
        count: largest number of scores to return.

    Returns:
        scores: float32 (B, K), in descending order. NaN and +infinity are replaced by -infinity.
        rows: int32 (B, K), the row of each score.
        classes: int32 (B, K), the class of each score.
    """
    num_classes = levels[0].shape[2]
    joined = tf.concat(levels, axis=1)
    rows = top_rows(tf.reduce_max(joined, axis=2), count)
    scores = without_nonfinite(tf.cast(tf.gather(joined, rows, batch_dims=1), tf.float32))  # (B, R, C)
    scores = tf.reshape(scores, [tf.shape(rows)[0], tf.shape(rows)[1] * num_classes])
    scores, index = tf.math.top_k(scores, tf.minimum(count, tf.shape(scores)[1]))
    return scores, tf.gather(rows, index // num_classes, batch_dims=1), index % num_classes


def top_rows(maxima: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the positions of the R = min(count, N) largest of N numbers per image.

    `maxima` is (B, N). The result is int32 (B, R), ascending. Numbers that are not finite are chosen last.
    """
    _, rows = tf.math.top_k(without_nonfinite(maxima), tf.minimum(count, tf.shape(maxima)[1]))
    return tf.sort(rows, axis=1)


def without_nonfinite(scores: tf.Tensor) -> tf.Tensor:
    """Replaces NaN and +inf by -inf."""
    return tf.where(scores <= scores.dtype.max, scores, -math.inf)


def suppress(
    boxes: tf.Tensor,
    scores: tf.Tensor,
    classes: tf.Tensor,
    *,
    num_classes: int,
    method: str,
    max_detections: int,
    score_threshold: float,
    class_agnostic: bool = False,
    iou_threshold: float = 0.5,
    sigma: float = 0.5,
    beta: float = 1.0,
) -> Detections:
    """Runs non-maximum suppression on K candidates per image, within each class.

    A candidate that is not finite is dropped. Of equal scores, the first counts as better.

    Args:
        boxes: float32 (B, K, 4), ltrb normalised. Boxes may reach outside 0..1; detections are clipped.
        scores: float32 (B, K), probabilities.
        classes: int32 (B, K), 0-based, below `num_classes`.
        method: hard, gaussian or diou: see the top of this file.
        max_detections: D, the largest number of detections per image.
        score_threshold: 0 or more. Candidates must have a larger score, also after suppression.
        class_agnostic: if True, a box also suppresses boxes of other classes.

    Raises:
        ValueError: an unknown method.
    """
    if method not in ("hard", "gaussian", "diou"):
        raise ValueError(f"method={method!r}: need hard, gaussian or diou")
    boxes, scores = only_finite(boxes, scores)
    groups = groups_of(classes, class_agnostic)
    if method == "diou":
        nearby = tf.clip_by_value(boxes, *_NEIGHBOURHOOD)
        picks = _pick_by_diou(nearby, scores, groups, max_detections, iou_threshold, score_threshold, beta)
    else:
        picks = _pick_by_iou(
            moved_apart(boxes, groups, num_classes),
            scores,
            max_detections,
            score_threshold=score_threshold,
            iou_threshold=1.0 if method == "gaussian" else iou_threshold,
            # The paper has exp(-IoU**2 / sigma), TensorFlow exp(-IoU**2 / (2 sigma)).
            soft_nms_sigma=sigma / 2 if method == "gaussian" else 0.0,
        )
    selected, scores, count = picks
    is_detection = tf.sequence_mask(count, max_detections)
    detected_boxes = box_ops.clip(tf.gather(boxes, selected, batch_dims=1))
    return Detections(
        boxes=tf.where(is_detection[..., tf.newaxis], detected_boxes, 0.0),
        scores=tf.where(is_detection, scores, 0.0),
        classes=tf.where(is_detection, tf.gather(classes, selected, batch_dims=1), -1),
        count=count,
    )


def only_finite(boxes: tf.Tensor, scores: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sets box (B, K, 4) and score (B, K) of a candidate to 0 unless both are finite."""
    is_finite = tf.reduce_all(tf.math.is_finite(boxes), axis=-1) & tf.math.is_finite(scores)
    return tf.where(is_finite[..., tf.newaxis], boxes, 0.0), tf.where(is_finite, scores, 0.0)


def groups_of(classes: tf.Tensor, class_agnostic: bool) -> tf.Tensor:
    """Returns the groups of candidates that suppress each other: the classes, or one group of all."""
    return tf.zeros_like(classes) if class_agnostic else classes


def moved_apart(boxes: tf.Tensor, classes: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Moves the boxes (B, K, 4) of each class to a separate region, so boxes of two classes never overlap.

    The regions form a square grid, so coordinates stay small and precise.
    """
    boxes = tf.clip_by_value(boxes, *_NEIGHBOURHOOD)
    columns = math.ceil(math.sqrt(num_classes))
    place = tf.cast(tf.stack([classes % columns, classes // columns] * 2, axis=-1), tf.float32)
    highest, lowest = (reduce(boxes, [1, 2], keepdims=True) for reduce in (tf.reduce_max, tf.reduce_min))
    return boxes + place * (highest - lowest)


def _pick_by_iou(
    boxes: tf.Tensor, scores: tf.Tensor, max_detections: int, **options: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Runs hard or Gaussian suppression on all boxes of each image.

    Args:
        boxes, scores, max_detections: as for `suppress`.
        options: score_threshold, iou_threshold and soft_nms_sigma of NonMaxSuppressionV5.

    Returns:
        (B, D) indices into the K candidates, padded with 0; (B, D) scores; (B,) number of picked boxes.
    """

    def pick_from_one(image: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        boxes, scores = image
        picks = tf.raw_ops.NonMaxSuppressionV5(
            boxes=boxes, scores=scores, max_output_size=max_detections, pad_to_max_output_size=True, **options
        )
        return tuple(picks)  # map_fn needs exactly the type in its signature

    return tf.map_fn(
        pick_from_one,
        (box_ops.ltrb_to_tlbr(boxes), scores),
        fn_output_signature=(
            tf.TensorSpec([max_detections], tf.int32),
            tf.TensorSpec([max_detections], tf.float32),
            tf.TensorSpec([], tf.int32),
        ),
    )


def _pick_by_diou(
    boxes: tf.Tensor,
    scores: tf.Tensor,
    classes: tf.Tensor,
    max_detections: int,
    iou_threshold: float,
    score_threshold: float,
    beta: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Like `_pick_by_iou`, with DIoU. Each turn picks one box per image and drops boxes that overlap it."""
    positions = tf.range(tf.shape(scores)[1])
    places = tf.range(max_detections)

    def any_left(turn: tf.Tensor, scores: tf.Tensor, selected: tf.Tensor) -> tf.Tensor:
        return (turn < max_detections) & tf.reduce_any(scores > score_threshold)

    def pick(turn: tf.Tensor, scores: tf.Tensor, selected: tf.Tensor) -> tuple[tf.Tensor, ...]:
        best = tf.argmax(scores, axis=1, output_type=tf.int32)[:, tf.newaxis]  # (B, 1)
        best_score = tf.gather(scores, best, batch_dims=1)
        overlap = box_ops.diou(boxes, tf.gather(boxes, best, batch_dims=1), beta)  # (B, K)
        is_overlapped = (classes == tf.gather(classes, best, batch_dims=1)) & (overlap > iou_threshold)
        is_place = (places == turn) & (best_score > score_threshold)  # (B, D)
        left = tf.where(is_overlapped | (positions == best), 0.0, scores)
        return turn + 1, left, tf.where(is_place, best, selected)

    empty = tf.fill([tf.shape(scores)[0], max_detections], -1)
    _, _, selected = tf.while_loop(any_left, pick, (0, scores, empty))
    count = tf.reduce_sum(tf.cast(selected >= 0, tf.int32), axis=1)
    selected = tf.maximum(selected, 0)
    return selected, tf.gather(scores, selected, batch_dims=1), count
