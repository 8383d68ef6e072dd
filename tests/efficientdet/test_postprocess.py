import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common import nms
from efficientdet.config import get_config
from efficientdet.postprocess import candidates, decode_all, detect

CLASSES = 5
SETTINGS = {"image_size": (128, 192), "max_level": 6, "nms_candidates": 2000, "score_threshold": 0.05}
NINE = {"num_scales": 3, "aspect_ratios": (1.0, 2.0, 0.5)}
CONFIG = dataclasses.replace(get_config("efficientdet-nano"), **SETTINGS, **NINE)
ANCHORS = CONFIG.anchors


def random_outputs(batch_size=2, seed=0):
    """Returns logits (B, A, C) and deltas (B, A, 4); many boxes overlap."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.5, (batch_size, ANCHORS.num_anchors, CLASSES)).astype(np.float32)
    return logits, rng.normal(0, 0.3, (batch_size, ANCHORS.num_anchors, 4)).astype(np.float32)


def per_level(flat):
    """Splits (B, A, n) into a tensor for each level, (B, h, w, 9 n)."""
    levels, start = [], 0
    for height, width in ANCHORS.feature_sizes:
        size = height * width * 9
        levels.append(flat[:, start : start + size].reshape(-1, height, width, 9 * flat.shape[2]))
        start += size
    return levels


def run(logits, deltas, config):
    return detect((per_level(logits), per_level(deltas)), config)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def decode_numpy(deltas):
    """Decodes (A, 4) deltas dy, dx, dh, dw to (A, 4) boxes, which are ltrb and normalised."""
    top, left, bottom, right = ANCHORS.boxes.T.astype(np.float64)
    dy, dx, dh, dw = deltas.T.astype(np.float64)
    height, width = np.exp(dh) * (bottom - top), np.exp(dw) * (right - left)
    y, x = dy * (bottom - top) + (top + bottom) / 2, dx * (right - left) + (left + right) / 2
    boxes_px = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    return boxes_px / [192, 128, 192, 128]


@pytest.mark.parametrize("count", [37, 30_000])
def test_candidates_are_those_of_a_top_k_over_everything_ties_included(count):
    logits, deltas = random_outputs()
    logits = np.round(logits)  # about ten different values remain, so most scores occur many times
    config = dataclasses.replace(CONFIG, nms_candidates=count)
    boxes, scores, classes = candidates((per_level(logits), per_level(deltas)), config)
    for i in range(len(logits)):
        flat = logits[i].ravel()
        top = np.argsort(-flat, kind="stable")[:count]
        np.testing.assert_allclose(scores[i], sigmoid(flat[top]), rtol=1e-5)
        np.testing.assert_array_equal(classes[i], top % CLASSES)
        np.testing.assert_allclose(boxes[i], decode_numpy(deltas[i])[top // CLASSES], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["hard", "gaussian"])
def test_detections_are_what_suppression_leaves_of_the_candidates(method):
    limits = {"score_threshold": 0.35, "max_detections": 150}
    rule = {"nms_method": method, "nms_iou": 0.4, "nms_sigma": 0.3}
    config = dataclasses.replace(CONFIG, nms_candidates=700, **rule, **limits)
    outputs = [per_level(flat) for flat in random_outputs()]
    options = {"num_classes": CLASSES, "method": method, "iou_threshold": 0.4, "sigma": 0.3}
    expected = nms.suppress(*candidates(outputs, config), **options, **limits)
    found = detect(outputs, config)
    assert found.boxes.shape == (2, 150, 4)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_anchor_can_be_decoded_without_suppression():
    logits, deltas = random_outputs()
    boxes, scores = decode_all((per_level(np.float16(logits)), per_level(deltas)), CONFIG)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, sigmoid(np.float16(logits)), rtol=1e-5)
    for found, of_image in zip(boxes, deltas, strict=True):
        np.testing.assert_allclose(found, decode_numpy(of_image), rtol=1e-4, atol=1e-5)


def test_what_is_not_finite_is_no_detection_and_harms_no_other():
    logits, deltas = random_outputs(batch_size=1)
    bad = np.arange(0, ANCHORS.num_anchors, 3)
    quiet_logits, quiet_deltas = logits.copy(), deltas.copy()
    quiet_logits[0, bad] = -np.inf
    logits[0, bad[0::5]] = np.nan
    logits[0, bad[1::5], 2] = np.nan
    logits[0, bad[1::5], :2] = logits[0, bad[1::5], 3:] = -np.inf
    logits[0, bad[2::5]] = np.inf
    deltas[0, bad[3::5], 1] = np.nan
    deltas[0, bad[4::5], 2] = 1000
    config = dataclasses.replace(CONFIG, nms_candidates=ANCHORS.num_anchors * CLASSES)
    found, expected = run(logits, deltas, config), run(quiet_logits, quiet_deltas, config)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert run(logits * np.nan, deltas * np.nan, config).count == [0]


def test_half_precision_outputs_are_computed_with_in_float32():
    logits, deltas = (array.astype(np.float16) for array in random_outputs())
    half = run(logits, deltas, CONFIG)
    single = run(logits.astype(np.float32), deltas.astype(np.float32), CONFIG)
    for actual, expected in zip(half, single, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_graph_of_any_batch_size():
    shapes = [(None, height, width, 9) for height, width in ANCHORS.feature_sizes]
    specs = [[tf.TensorSpec((*shape[:3], 9 * n), tf.float32) for shape in shapes] for n in (CLASSES, 4)]
    compiled = tf.function(lambda *outputs: detect(outputs, CONFIG), input_signature=specs)
    logits, deltas = random_outputs()
    together = compiled(per_level(logits), per_level(deltas))
    assert together.boxes.shape == (2, 100, 4)
    alone = compiled(per_level(logits[1:]), per_level(deltas[1:]))
    for actual, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(actual[1], expected[0])
