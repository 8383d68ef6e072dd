"""Tests postprocess.py with a decoder and a top-k in float64 NumPy."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common import nms
from efficientdet.config import get_config
from efficientdet.postprocess import candidates, decode_all, detect

CLASSES = 5
CONFIG = dataclasses.replace(
    get_config("efficientdet-nano"),
    image_size=(128, 192),
    max_level=6,
    num_scales=3,
    aspect_ratios=(1.0, 2.0, 0.5),
    nms_candidates=2000,
    score_threshold=0.05,
)
ANCHORS = CONFIG.anchors


def random_outputs(batch_size=2, seed=0):
    """Returns logits (B, A, C) and deltas (B, A, 4); many boxes overlap."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.5, (batch_size, ANCHORS.num_anchors, CLASSES)).astype(np.float32)
    return logits, rng.normal(0, 0.3, (batch_size, ANCHORS.num_anchors, 4)).astype(np.float32)


def to_levels(*arrays):
    """Splits each array (B, A, n) into a list with a tensor for each level, (B, h, w, 9 n)."""
    levels = [[] for _ in arrays]
    start = 0
    for height, width in ANCHORS.feature_sizes:
        end = start + height * width * 9
        for array, tensors in zip(arrays, levels, strict=True):
            tensors.append(array[:, start:end].reshape(-1, height, width, 9 * array.shape[2]))
        start = end
    return levels


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def decode_numpy(deltas):
    """Decodes (A, 4) deltas dy, dx, dh, dw to (A, 4) boxes, which are ltrb and normalised."""
    y_min, x_min, y_max, x_max = ANCHORS.boxes.T.astype(np.float64)
    dy, dx, dh, dw = deltas.T.astype(np.float64)
    height, width = np.exp(dh) * (y_max - y_min), np.exp(dw) * (x_max - x_min)
    y, x = dy * (y_max - y_min) + (y_min + y_max) / 2, dx * (x_max - x_min) + (x_min + x_max) / 2
    boxes_px = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    return boxes_px / [192, 128, 192, 128]


@pytest.mark.parametrize(("count", "dtype"), [(37, np.float32), (30_000, np.float16)])
def test_nms_candidates_equal_a_stable_top_k_over_all_anchors_and_classes(count, dtype):
    logits, deltas = (array.astype(dtype) for array in random_outputs())
    logits = np.round(logits)  # about ten different values remain, so most scores occur many times
    config = dataclasses.replace(CONFIG, nms_candidates=count)
    boxes, scores, classes = candidates(to_levels(logits, deltas), config)
    assert boxes.dtype == scores.dtype == np.float32
    for i in range(len(logits)):
        flat = logits[i].ravel()
        top = np.argsort(-flat, kind="stable")[:count]
        np.testing.assert_allclose(scores[i], sigmoid(flat[top]), rtol=1e-5)
        np.testing.assert_array_equal(classes[i], top % CLASSES)
        np.testing.assert_allclose(boxes[i], decode_numpy(deltas[i])[top // CLASSES], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "class_agnostic"), [("hard", False), ("gaussian", False), ("hard", True)])
def test_detections_are_the_nms_candidates_after_suppression(method, class_agnostic):
    limits = {"score_threshold": 0.35, "max_detections": 150}
    changes = {"nms_method": method, "nms_iou": 0.4, "nms_sigma": 0.3, "nms_class_agnostic": class_agnostic}
    config = dataclasses.replace(CONFIG, nms_candidates=700, **changes, **limits)
    outputs = to_levels(*random_outputs())
    options = {"num_classes": CLASSES, "method": method, "iou_threshold": 0.4, "sigma": 0.3}
    options["class_agnostic"] = class_agnostic
    expected = nms.suppress(*candidates(outputs, config), **options, **limits)
    detections = detect(outputs, config)
    assert detections.boxes.shape == (2, 150, 4)
    for actual, field in zip(detections, expected, strict=True):
        np.testing.assert_array_equal(actual, field)


def test_efficientdet_boxes_and_scores_of_all_anchors_are_decoded_as_by_numpy():
    logits, deltas = random_outputs()
    boxes, scores = decode_all(to_levels(np.float16(logits), deltas), CONFIG)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, sigmoid(np.float16(logits)), rtol=1e-5)
    for image_boxes, image_deltas in zip(boxes, deltas, strict=True):
        np.testing.assert_allclose(image_boxes, decode_numpy(image_deltas), rtol=1e-4, atol=1e-5)


def test_network_outputs_that_are_not_finite_give_no_detection_and_change_no_other_detection():
    logits, deltas = random_outputs(batch_size=1)
    bad = np.arange(0, ANCHORS.num_anchors, 3)
    logits_without_bad, finite_deltas = logits.copy(), deltas.copy()
    logits_without_bad[0, bad] = -np.inf
    logits[0, bad[0::5]] = np.nan
    logits[0, bad[1::5], 2] = np.nan
    logits[0, bad[1::5], :2] = logits[0, bad[1::5], 3:] = -np.inf
    logits[0, bad[2::5]] = np.inf
    deltas[0, bad[3::5], 1] = np.nan
    deltas[0, bad[4::5], 2] = 1000
    config = dataclasses.replace(CONFIG, nms_candidates=ANCHORS.num_anchors * CLASSES)
    detections = detect(to_levels(logits, deltas), config)
    expected = detect(to_levels(logits_without_bad, finite_deltas), config)
    for actual, field in zip(detections, expected, strict=True):
        np.testing.assert_array_equal(actual, field)
    assert detect(to_levels(logits * np.nan, deltas * np.nan), config).count == [0]


def test_detection_graph_of_unknown_batch_size_treats_each_image_independently():
    shapes = [(None, height, width, 9) for height, width in ANCHORS.feature_sizes]
    specs = [[tf.TensorSpec((*shape[:3], 9 * n), tf.float32) for shape in shapes] for n in (CLASSES, 4)]
    compiled = tf.function(lambda *outputs: detect(outputs, CONFIG), input_signature=specs)
    logits, deltas = random_outputs()
    of_two = compiled(*to_levels(logits, deltas))
    assert of_two.boxes.shape == (2, 100, 4)
    of_second = compiled(*to_levels(logits[1:], deltas[1:]))
    for actual, expected in zip(of_two, of_second, strict=True):
        np.testing.assert_array_equal(actual[1], expected[0])
