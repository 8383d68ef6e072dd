"""Detections against brute force in NumPy: a top-k over everything, suppression class by class in float64."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from efficientdet.config import get_config
from efficientdet.postprocess import detect

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
NO_SUPPRESSION = dataclasses.replace(HARD, nms_iou=1.0, score_threshold=0.0)


def random_outputs(batch_size=2, num_classes=CLASSES, seed=0):
    """Flat logits (B, A, C) and offsets (B, A, 4), so that many boxes overlap."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.5, (batch_size, ANCHORS.num_anchors, num_classes)).astype(np.float32)
    return logits, rng.normal(0, 0.3, (batch_size, ANCHORS.num_anchors, 4)).astype(np.float32)


def silent_outputs(num_classes=CLASSES):
    """One image where nothing is detected, to write detections into."""
    return (
        np.full((1, ANCHORS.num_anchors, num_classes), -20, np.float32),
        np.zeros((1, ANCHORS.num_anchors, 4), np.float32),
    )


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


def decode_numpy(deltas):
    """Offsets (A, 4) dy dx dh dw -> float64 (A, 4) ltrb normalised, from the anchors in tlbr pixels."""
    top, left, bottom, right = ANCHORS.boxes.T.astype(np.float64)
    dy, dx, dh, dw = deltas.T.astype(np.float64)
    height, width = np.exp(dh) * (bottom - top), np.exp(dw) * (right - left)
    y, x = dy * (bottom - top) + (top + bottom) / 2, dx * (right - left) + (left + right) / 2
    boxes_px = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    return boxes_px / [192, 128, 192, 128]


def iou_numpy(box, boxes):
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    intersection = np.prod(np.maximum(sides, 0), axis=1)
    return intersection / (
        np.prod(box[2:] - box[:2]) + np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) - intersection
    )


def detect_numpy(logits, deltas, config):
    """One image: list of (score, class, box) in descending order of score."""
    flat = logits.ravel()
    top = np.argsort(-flat, kind="stable")[: config.nms_candidates]
    scores, boxes = (
        1 / (1 + np.exp(-flat[top].astype(np.float64))),
        decode_numpy(deltas)[top // logits.shape[1]],
    )
    detections = []
    for class_ in range(logits.shape[1]):
        of_class = top % logits.shape[1] == class_
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


@pytest.mark.parametrize("max_detections", [40, 2500])  # fewer and more than there are
@pytest.mark.parametrize("config", [HARD, GAUSSIAN], ids=["hard", "gaussian"])
def test_equals_brute_force_per_class(config, max_detections):
    config = dataclasses.replace(config, max_detections=max_detections, score_threshold=0.3)
    logits, deltas = random_outputs()
    actual = run(logits, deltas, config)
    for i in range(len(logits)):
        expected = detect_numpy(logits[i], deltas[i], config)
        count = len(expected)
        if max_detections > 40:
            assert 500 < count < config.nms_candidates - 200  # enough suppressed, and enough left
        assert actual.count[i] == count
        np.testing.assert_allclose(actual.scores[i, :count], [score for score, _, _ in expected], rtol=2e-4)
        np.testing.assert_array_equal(actual.classes[i, :count], [class_ for _, class_, _ in expected])
        boxes = np.clip([box for _, _, box in expected], 0, 1)
        np.testing.assert_allclose(actual.boxes[i, :count], boxes, atol=1e-5)
        assert (actual.classes[i, count:] == -1).all()
        assert (actual.scores[i, count:] == 0).all()
        assert (actual.boxes[i, count:] == 0).all()
    assert actual.boxes.shape == (2, max_detections, 4)
    assert [x.dtype for x in actual] == [np.float32, np.float32, np.int32, np.int32]


@pytest.mark.parametrize("count", [1, 37, 2000, 30_000])  # 30,000 is more than all anchors and classes
def test_candidates_are_those_of_a_top_k_over_everything_ties_included(count):
    logits, deltas = random_outputs()
    logits = np.round(logits)  # about ten different values: almost everything is tied
    rows = min(count, 2000)
    config = dataclasses.replace(NO_SUPPRESSION, nms_candidates=count, max_detections=rows)
    actual = run(logits, deltas, config)
    for i in range(len(logits)):
        flat = logits[i].ravel()
        top = np.argsort(-flat, kind="stable")[:rows]
        assert actual.count[i] == rows
        np.testing.assert_allclose(actual.scores[i], 1 / (1 + np.exp(-flat[top])), rtol=1e-5)
        np.testing.assert_array_equal(actual.classes[i], top % CLASSES)
        expected = np.clip(decode_numpy(deltas[i])[top // CLASSES], 0, 1)
        np.testing.assert_allclose(actual.boxes[i], expected, atol=1e-5)


@pytest.mark.parametrize(
    "log_size", [-2.0, 0.0, 6.0]
)  # 6: four hundred times the anchor, far outside the image
@pytest.mark.parametrize("config", [HARD, GAUSSIAN], ids=["hard", "gaussian"])
def test_classes_do_not_suppress_each_other(config, log_size):
    logits, deltas = silent_outputs(num_classes=90)
    logits[0, 100] = np.linspace(-1, 1, 90)
    deltas[0, 100, 2:] = log_size
    actual = run(logits, deltas, config)
    assert actual.count == [90]
    np.testing.assert_array_equal(actual.classes[0, :90], np.arange(90)[::-1])
    np.testing.assert_allclose(actual.scores[0, :90], 1 / (1 + np.exp(-logits[0, 100, ::-1])), rtol=1e-5)


def test_equal_boxes_of_one_class_become_one():
    logits, deltas = silent_outputs()
    deltas[0, 9] = [0, 0, 0, 0]
    stride = ANCHORS.boxes[9] - ANCHORS.boxes[0]  # anchor 9 is anchor 0 one cell further
    size = ANCHORS.boxes[0, 2:] - ANCHORS.boxes[0, :2]
    deltas[0, 0, :2] = stride[:2] / size  # so that both decode to the same box
    logits[0, [0, 9], 3] = [0.5, 1.0]
    actual = run(logits, deltas, HARD)
    assert actual.count == [1]
    np.testing.assert_allclose(actual.scores[0, 0], 1 / (1 + np.exp(-1.0)), rtol=1e-6)
    soft = run(logits, deltas, GAUSSIAN)
    np.testing.assert_allclose(soft.scores[0, 1], np.exp(-1 / 0.5) / (1 + np.exp(-0.5)), rtol=1e-3)


@pytest.mark.parametrize("config", [HARD, GAUSSIAN], ids=["hard", "gaussian"])
def test_what_is_not_finite_is_no_detection_and_harms_no_other(config):
    logits, deltas = random_outputs(batch_size=1)
    bad = np.arange(0, ANCHORS.num_anchors, 3)
    quiet_logits, quiet_offsets = logits.copy(), deltas.copy()
    quiet_logits[0, bad] = -np.inf
    logits[0, bad[0::5]] = np.nan
    logits[0, bad[1::5], 2] = np.nan
    logits[0, bad[1::5], :2] = logits[0, bad[1::5], 3:] = -np.inf
    logits[0, bad[2::5]] = np.inf
    deltas[0, bad[3::5], 1] = np.nan
    deltas[0, bad[4::5], 2] = 1000  # exp overflows
    # Boxes are known only after the candidates are chosen: let all be candidates.
    config = dataclasses.replace(config, nms_candidates=ANCHORS.num_anchors * CLASSES)
    for actual, expected in zip(
        run(logits, deltas, config), run(quiet_logits, quiet_offsets, config), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_nothing_but_nan_gives_nothing():
    logits, deltas = silent_outputs()
    actual = run(logits * np.nan, deltas * np.nan, GAUSSIAN)
    assert actual.count == [0]
    assert (actual.classes == -1).all()
    assert (actual.scores == 0).all()
    assert (actual.boxes == 0).all()


def test_scores_at_or_below_the_threshold_are_dropped():
    logits, deltas = silent_outputs()
    logits[0, [0, 400, 900], 0] = [0.0, -2.0, -4.0]
    assert run(logits, deltas, dataclasses.replace(HARD, score_threshold=0.05)).count == [2]
    assert run(logits, deltas, dataclasses.replace(HARD, score_threshold=0.5)).count == [
        0
    ]  # sigmoid(0) = 0.5


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
    logits, deltas = random_outputs(batch_size=3)
    together = compiled(per_level(logits), per_level(deltas))
    assert together.boxes.shape == (3, 100, 4)
    for i in range(3):
        alone = compiled(per_level(logits[i : i + 1]), per_level(deltas[i : i + 1]))
        for actual, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(actual[i], expected[0])
