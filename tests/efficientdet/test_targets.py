"""Tests the task-aligned assignment of targets.py, and its loss, with the formulas of the paper in NumPy."""

import dataclasses

import numpy as np
import tensorflow as tf

from common import box_encoder
from common import boxes as box_ops
from efficientdet import losses
from efficientdet.config import get_config
from efficientdet.targets import assign_targets


def test_task_aligned_assignment_follows_the_paper():
    rng = np.random.default_rng(2)
    left_top, sides = rng.random((2, 2, 60, 2))
    predicted = np.concatenate([left_top, left_top + 0.6 * sides], axis=-1).astype(np.float32)
    scores, centers = rng.random((2, 60, 3), np.float32), rng.random((60, 2), np.float32)
    boxes, classes = np.full((2, 6, 4), -1, np.float32), np.full((2, 6), -1, np.int32)
    boxes[0, :3] = [0.1, 0.1, 0.7, 0.8], [0.1, 0.12, 0.72, 0.82], [*centers[7], *centers[7] + 0.001]
    classes[0, :3] = 2, 0, 2
    targets = assign_targets(predicted, scores, centers, boxes, classes, (64, 64))

    owners, quality = {}, np.zeros((2, 60, 3))  # owners: {anchor: (IoU, index of its box)}
    iou = np.array([box_ops.iou(predicted[0], box) for box in boxes[0, :3]])
    alignment = scores[0][:, classes[0, :3]].T ** 0.5 * iou**6.0
    for b, box in enumerate(boxes[0, :3]):
        distance, reach = np.abs(centers - (box[:2] + box[2:]) / 2), (box[2:] - box[:2]) / 2
        alignment[b, (distance >= np.maximum(reach, 4 / 64)).any(axis=1)] = 0
        for anchor in [a for a in np.argsort(-alignment[b])[:10] if alignment[b, a] > 0]:
            owners[anchor] = max(owners.get(anchor, (0.0, 0)), (iou[b, anchor], b))
    for anchor, (_, b) in owners.items():
        same_box = [a for a in owners if owners[a][1] == b]
        largest_iou, largest_alignment = iou[b, same_box].max(), alignment[b, same_box].max()
        quality[0, anchor, classes[0, b]] = alignment[b, anchor] / largest_alignment * largest_iou
        np.testing.assert_allclose(targets.boxes[0, anchor], boxes[0, b], atol=1e-7)
    assert len({b for _, b in owners.values()}) >= 2
    np.testing.assert_allclose(targets.quality, quality, atol=1e-6)


def test_task_aligned_loss_is_cross_entropy_plus_ciou_over_positives():
    config = dataclasses.replace(get_config("efficientdet-nano"), image_size=(64, 96))
    rng, sizes = np.random.default_rng(5), config.anchors.feature_sizes
    logits, deltas = ([rng.normal(size=(2, *size, n)).astype("f") for size in sizes] for n in (3, 4))
    boxes, classes = np.full((2, 5, 4), -1, np.float32), np.full((2, 5), -1, np.int32)
    boxes[0, :2], classes[0, :2] = [[0.1, 0.2, 0.6, 0.9], [0.5, 0.1, 0.9, 0.4]], [2, 0]
    targets = {"boxes": boxes, "classes": classes, "num_positives": tf.constant([3.0, 0.0])}
    values = losses.detection_loss(logits, deltas, targets, config)

    predicted, anchors = box_encoder.decode_boxes(deltas, config.anchors), config.anchors.boxes_normalized
    p = 1 / (1 + np.exp(-np.concatenate([x.reshape(2, -1, 3) for x in logits], axis=1, dtype=np.float64)))
    centers = (anchors[:, :2] + anchors[:, 2:]) / 2
    assigned = assign_targets(predicted, p.astype("f"), centers, boxes, classes, config.image_size)
    q = assigned.quality.numpy()
    assert (q > 0).sum() > 10
    class_loss = -np.sum(q * np.log(p) + (1 - q) * np.log(1 - p)) / (3 + 1)
    box_loss = np.sum(q.sum(axis=-1) * (1 - box_ops.ciou(predicted, assigned.boxes))) / (3 + 1)
    np.testing.assert_allclose(values["class_loss"], class_loss, rtol=1e-5)
    np.testing.assert_allclose(values["box_loss"], box_loss, rtol=1e-5)
    np.testing.assert_allclose(values["detection_loss"], class_loss + 2 * box_loss, rtol=1e-5)
