"""Detections against brute force in NumPy: a top-k over everything, suppression class by class in float64.

tests/common/test_nms.py tests the suppression itself.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from efficientdet.config import get_config
from efficientdet.postprocess import decode_all, detect

CLASSES = 5
CONFIG = dataclasses.replace(
    get_config("efficientdet-nano"),
    image_size=(128, 192),
    max_level=6,
    nms_candidates=2000,
    score_threshold=0.05,
)
ANCHORS = CONFIG.anchors
HARD = dataclasses.replace(CONFIG, nms_method="hard")
GAUSSIAN = dataclasses.replace(CONFIG, nms_method="gaussian")


def random_outputs(batch_size=2, seed=0):
    """Flat logits (B, A, C) and deltas (B, A, 4), so that many boxes overlap."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.5, (batch_size, ANCHORS.num_anchors, CLASSES)).astype(np.float32)
    return logits, rng.normal(0, 0.3, (batch_size, ANCHORS.num_anchors, 4)).astype(np.float32)


def silent_outputs(num_classes=CLASSES):
    """One image where nothing is detected, to write detections into."""
    logits = np.full((1, ANCHORS.num_anchors, num_classes), -20, np.float32)
    return logits, np.zeros((1, ANCHORS.num_anchors, 4), np.float32)


def per_level(flat):
    """(B, A, n) -> the tensors that the model gives, (B, h, w, 9 n)."""
    levels, start = [], 0
    for height, width in ANCHORS.feature_sizes:
        size = height * width * 9
        levels.append(flat[:, start : start + size].reshape(-1, height, width, 9 * flat.shape[2]))
        start += size
    return levels


def run(logits, deltas, config):
    detections = detect(per_level(logits), per_level(deltas), config, ANCHORS)
    return type(detections)(*(np.asarray(x) for x in detections))


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def decode_numpy(deltas):
    """Deltas (A, 4) dy dx dh dw -> float64 (A, 4) ltrb normalised, from the anchors in tlbr pixels."""
    top, left, bottom, right = ANCHORS.boxes.T.astype(np.float64)
    dy, dx, dh, dw = deltas.T.astype(np.float64)
    height, width = np.exp(dh) * (bottom - top), np.exp(dw) * (right - left)
    y, x = dy * (bottom - top) + (top + bottom) / 2, dx * (right - left) + (left + right) / 2
    boxes_px = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    return boxes_px / [192, 128, 192, 128]


def iou_numpy(box, boxes):
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    intersection = np.prod(np.maximum(sides, 0), axis=1)
    areas = np.prod(box[2:] - box[:2]) + np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return intersection / (areas - intersection)


def detect_numpy(logits, deltas, config):
    """One image: list of (score, class, box) in descending order of score."""
    flat = logits.ravel()
    top = np.argsort(-flat, kind="stable")[: config.nms_candidates]
    scores, boxes = sigmoid(flat[top]), decode_numpy(deltas)[top // CLASSES]
    detections = []
    for class_ in range(CLASSES):
        of_class = top % CLASSES == class_
        class_scores, class_boxes = scores[of_class], boxes[of_class]
        while len(class_scores) and class_scores.max() > config.score_threshold:
            best = class_scores.argmax()
            detections.append((class_scores[best], class_, class_boxes[best]))
            overlap = iou_numpy(class_boxes[best], class_boxes)
            if config.nms_method == "hard":
                class_scores = np.where(overlap > config.nms_iou, 0, class_scores)
            else:
                class_scores = class_scores * np.exp(-(overlap**2) / config.nms_sigma)
            class_scores[best] = 0
    return sorted(detections, key=lambda detection: -detection[0])[: config.max_detections]


@pytest.mark.parametrize(
    ("config", "max_detections"),
    [
        (HARD, 40),  # fewer than there are
        (HARD, 2500),  # more
        (dataclasses.replace(HARD, nms_iou=0.3), 2500),
        (GAUSSIAN, 2500),
        (dataclasses.replace(GAUSSIAN, nms_sigma=0.3), 2500),
    ],
)
def test_equals_brute_force_per_class(config, max_detections):
    config = dataclasses.replace(config, max_detections=max_detections, score_threshold=0.3)
    logits, deltas = random_outputs()
    actual = run(logits, deltas, config)
    for i in range(len(logits)):
        expected = detect_numpy(logits[i], deltas[i], config)
        count = len(expected)
        if max_detections > 40:
            assert 300 < count < config.nms_candidates - 200  # enough suppressed, and enough left
        assert actual.count[i] == count
        np.testing.assert_allclose(actual.scores[i, :count], [score for score, _, _ in expected], rtol=2e-4)
        np.testing.assert_array_equal(actual.classes[i, :count], [class_ for _, class_, _ in expected])
        boxes = np.clip([box for _, _, box in expected], 0, 1)
        np.testing.assert_allclose(actual.boxes[i, :count], boxes, atol=1e-5)
        assert (actual.classes[i, count:] == -1).all()
        assert not actual.scores[i, count:].any()
        assert not actual.boxes[i, count:].any()
    assert actual.boxes.shape == (2, max_detections, 4)
    assert [x.dtype for x in actual] == [np.float32, np.float32, np.int32, np.int32]


@pytest.mark.parametrize("count", [37, 30_000])  # 30,000 is more than all anchors and classes
def test_candidates_are_those_of_a_top_k_over_everything_ties_included(count):
    logits, deltas = random_outputs()
    logits = np.round(logits)  # about ten different values: almost everything is tied
    rows = min(count, 2000)
    config = dataclasses.replace(HARD, nms_iou=1.0, score_threshold=0.0)  # no suppression
    actual = run(logits, deltas, dataclasses.replace(config, nms_candidates=count, max_detections=rows))
    for i in range(len(logits)):
        flat = logits[i].ravel()
        top = np.argsort(-flat, kind="stable")[:rows]
        assert actual.count[i] == rows
        np.testing.assert_allclose(actual.scores[i], sigmoid(flat[top]), rtol=1e-5)
        np.testing.assert_array_equal(actual.classes[i], top % CLASSES)
        expected = np.clip(decode_numpy(deltas[i])[top // CLASSES], 0, 1)
        np.testing.assert_allclose(actual.boxes[i], expected, atol=1e-5)


def test_every_anchor_can_be_decoded_without_suppression():
    logits, deltas = random_outputs()
    boxes, scores = decode_all(per_level(np.float16(logits)), per_level(deltas), ANCHORS)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, sigmoid(np.float16(logits)), rtol=1e-5)
    for found, of_image in zip(boxes, deltas, strict=True):
        np.testing.assert_allclose(found, decode_numpy(of_image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [HARD, GAUSSIAN], ids=["hard", "gaussian"])
def test_classes_do_not_suppress_each_other(config):
    """Not even boxes four hundred times as large as the anchor, far outside the image."""
    logits, deltas = silent_outputs(num_classes=90)
    logits[0, 100] = np.linspace(-1, 1, 90)
    deltas[0, 100, 2:] = 6.0
    actual = run(logits, deltas, config)
    assert actual.count == [90]
    np.testing.assert_array_equal(actual.classes[0, :90], np.arange(90)[::-1])
    np.testing.assert_allclose(actual.scores[0, :90], sigmoid(logits[0, 100, ::-1]), rtol=1e-5)


@pytest.mark.parametrize("config", [HARD, GAUSSIAN], ids=["hard", "gaussian"])
def test_what_is_not_finite_is_no_detection_and_harms_no_other(config):
    logits, deltas = random_outputs(batch_size=1)
    bad = np.arange(0, ANCHORS.num_anchors, 3)
    quiet_logits, quiet_deltas = logits.copy(), deltas.copy()
    quiet_logits[0, bad] = -np.inf
    logits[0, bad[0::5]] = np.nan
    logits[0, bad[1::5], 2] = np.nan
    logits[0, bad[1::5], :2] = logits[0, bad[1::5], 3:] = -np.inf
    logits[0, bad[2::5]] = np.inf
    deltas[0, bad[3::5], 1] = np.nan
    deltas[0, bad[4::5], 2] = 1000  # exp overflows
    # Boxes are known only after the candidates are chosen: let all be candidates.
    config = dataclasses.replace(config, nms_candidates=ANCHORS.num_anchors * CLASSES)
    found, expected = run(logits, deltas, config), run(quiet_logits, quiet_deltas, config)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert run(logits * np.nan, deltas * np.nan, config).count == [0]


@pytest.mark.parametrize(("threshold", "count"), [(0.05, 2), (0.5, 0)])  # sigmoid(0) = 0.5
def test_scores_at_or_below_the_threshold_are_dropped(threshold, count):
    logits, deltas = silent_outputs()
    logits[0, [0, 400, 900], 0] = [0.0, -2.0, -4.0]
    assert run(logits, deltas, dataclasses.replace(HARD, score_threshold=threshold)).count == [count]


def test_half_precision_outputs_are_computed_with_in_float32():
    logits, deltas = (array.astype(np.float16) for array in random_outputs())
    half = run(logits, deltas, GAUSSIAN)
    single = run(logits.astype(np.float32), deltas.astype(np.float32), GAUSSIAN)
    for actual, expected in zip(half, single, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_graph_of_any_batch_size():
    shapes = [(None, height, width, 9 * CLASSES) for height, width in ANCHORS.feature_sizes]
    specs = [
        [tf.TensorSpec(shape, tf.float32) for shape in shapes],
        [tf.TensorSpec((*shape[:3], 36), tf.float32) for shape in shapes],
    ]
    compiled = tf.function(
        lambda logits, deltas: detect(logits, deltas, GAUSSIAN, ANCHORS), input_signature=specs
    )
    logits, deltas = random_outputs(batch_size=2)
    together = compiled(per_level(logits), per_level(deltas))
    assert together.boxes.shape == (2, 100, 4)
    alone = compiled(per_level(logits[1:]), per_level(deltas[1:]))
    for actual, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(actual[1], expected[0])
