"""Tests postprocess.py and decoding.py against NumPy (darknet_rules.py, brute-force suppression)."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.common.test_nms import suppress_numpy
from tests.yolov4 import darknet_rules
from yolov4.config import MODEL_NAMES, get_config
from yolov4.postprocess import decode_heads, detect

SETTINGS = {"image_size": (96, 160), "score_threshold": 0.2, "nms_candidates": 100_000, "max_detections": 300}
CONFIG = dataclasses.replace(get_config("yolov4"), **SETTINGS)


def random_heads(config=CONFIG, batch_size=2, num_classes=4, seed=0, objectness=-0.5):
    """The decoded boxes overlap a lot."""
    rng = np.random.default_rng(seed)
    heads = []
    for stride in config.strides:
        grid = [side // stride for side in config.image_size]
        raw = rng.normal(0, 1.2, (batch_size, *grid, config.anchors_per_location, 5 + num_classes))
        raw[..., 2:4] *= 0.3
        raw[..., 4] += objectness
        heads.append(raw.astype(np.float32))
    return heads


def silent_heads(config=CONFIG, num_classes=4):
    """Heads without detections; tests write some into them."""
    heads = random_heads(config, 1, num_classes)
    for head in heads:
        head[..., 4:] = -20
    return heads


def run(heads, config):
    detections = detect([tf.constant(head) for head in heads], config)
    return type(detections)(*(np.asarray(x) for x in detections))


def decode_numpy(heads, config, image):
    boxes, scores = [], []
    for number, head in enumerate(heads):
        raw = head[image].astype(np.float64)
        for row, column, k in np.ndindex(raw.shape[:3]):
            numbers = raw[row, column, k]
            boxes.append(darknet_rules.decode(numbers[:4], config, number, row, column, k, raw.shape[:2]))
            scores.append(darknet_rules.sigmoid(numbers[4]) * darknet_rules.sigmoid(numbers[5:]))
    return np.array(boxes), np.array(scores)


def detect_numpy(heads, config, image):
    boxes, scores = decode_numpy(heads, config, image)
    if config.nms_candidates < scores.size:
        scores = np.where(scores >= np.sort(scores.ravel())[-config.nms_candidates], scores, 0)
    rows, classes = np.indices(scores.shape).reshape(2, -1)
    limits = {"num_classes": scores.shape[1], "max_detections": config.max_detections}
    limits |= {"score_threshold": config.score_threshold, "iou_threshold": config.nms_iou}
    limits["class_agnostic"] = config.nms_class_agnostic
    method = {"greedy": "hard", "diou": "diou"}[config.nms_method]
    candidates = boxes[rows], scores.ravel(), classes
    picked, best = suppress_numpy(*candidates, method, **limits, beta=config.diou_beta)
    return best, classes[picked], boxes[rows[picked]]


@pytest.mark.parametrize(
    ("model_name", "image_size"), zip(MODEL_NAMES, [(64, 64), (96, 160), (192, 32)], strict=True), ids=str
)
def test_decoded_boxes_and_scores_equal_darknet(model_name, image_size):
    config = dataclasses.replace(get_config(model_name), image_size=image_size)
    heads = random_heads(config, num_classes=3)
    boxes, scores = decode_heads([tf.constant(head) for head in heads], model_name, image_size)
    assert boxes.dtype == scores.dtype == tf.float32
    outside = 0
    for i in range(2):
        expected_boxes, expected_scores = decode_numpy(heads, config, i)
        np.testing.assert_allclose(boxes[i], expected_boxes, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(scores[i], expected_scores, rtol=1e-4)
        outside += ((expected_boxes < 0) | (expected_boxes > 1)).sum()
    assert outside > 20


def test_decoded_box_side_is_at_most_e_to_the_10_times_the_anchor_side():
    heads = silent_heads()
    heads[0][0, 0, 0, 0, 2:4] = 9.9, 80.0
    box = np.asarray(decode_heads(heads, "yolov4", (96, 160))[0])[0, 0]
    expected = [12 * math.exp(9.9) / 160, 16 * math.exp(10) / 96]
    np.testing.assert_allclose(box[2:] - box[:2], expected, rtol=1e-5)


@pytest.mark.parametrize("image_size", [(160, 96), (96, 128), (100, 160), (192, 320)], ids=str)
def test_decoding_yolov4_heads_that_do_not_fit_the_image_size_is_refused(image_size):
    with pytest.raises(ValueError, match=rf"image_size=\({image_size[0]}, {image_size[1]}\)"):
        decode_heads(random_heads(), "yolov4", image_size)


def test_yolov4_heads_of_another_model_in_wrong_order_or_of_wrong_shape_are_refused():
    heads = random_heads()
    with pytest.raises(ValueError, match="3 heads, but yolov4-tiny has 2"):
        decode_heads(heads, "yolov4-tiny", (96, 160))
    for wrong_heads, message in (
        (heads[::-1], "24, 40"),
        ([heads[0], heads[2], heads[1]], "a head has the shape"),
        ([head.reshape(*head.shape[:3], -1) for head in heads], "a head has the shape"),
        ([head[..., :5] for head in heads], "at least 6"),
    ):
        with pytest.raises(ValueError, match=message):
            detect(wrong_heads, CONFIG)


CHANGES = [
    *(
        {},
        {"nms_iou": 0.2},
        {"nms_iou": 0.2, "nms_class_agnostic": True},
        {"max_detections": 30},
        {"nms_candidates": 50},
    ),
    {"nms_method": "diou", "diou_beta": 2.0, "nms_iou": 0.3, "score_threshold": 0.4},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_yolov4_detections_equal_decoding_and_nms_by_brute_force_in_numpy(changes):
    config = dataclasses.replace(CONFIG, **changes)
    heads = random_heads(objectness=-1)
    actual = run(heads, config)
    for i in range(2):
        scores, classes, boxes = detect_numpy(heads, config, i)
        count = len(scores)
        assert actual.count[i] == count >= 20
        np.testing.assert_allclose(actual.scores[i, :count], scores, rtol=1e-5)
        np.testing.assert_array_equal(actual.classes[i, :count], classes)
        np.testing.assert_allclose(actual.boxes[i, :count], boxes.clip(0, 1), atol=1e-5)
        assert (actual.classes[i, count:] == -1).all()
        assert not actual.scores[i, count:].any() and not actual.boxes[i, count:].any()


def test_one_compiled_detection_graph_serves_every_batch_size_and_image_size():
    compiled = tf.function(
        lambda heads: detect(heads, CONFIG),
        input_signature=[[tf.TensorSpec([None, None, None, 3, 9]) for _ in CONFIG.strides]],
    )
    for batch_size, image_size in ((4, (96, 160)), (1, (64, 32))):
        config = dataclasses.replace(CONFIG, image_size=image_size)
        heads = random_heads(config, batch_size)
        for head in heads:
            head[1:2, ..., 4] = -20
        detections = compiled(heads)
        assert detections.boxes.shape == (batch_size, 300, 4)
        assert detections.count[0] > 10 and not detections.count[1:2].numpy().any()
        for actual, expected in zip(detections, run(heads, config), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
    assert compiled.experimental_get_tracing_count() == 1


def test_half_precision_outputs_are_converted_to_float32_first():
    heads = [head.astype(np.float16) for head in random_heads()]
    single_heads = [head.astype(np.float32) for head in heads]
    half, single = run(heads, CONFIG), run(single_heads, CONFIG)
    assert single.count.min() > 100
    half_decoded, single_decoded = (decode_heads(h, "yolov4", (96, 160)) for h in (heads, single_heads))
    for actual, expected in zip((*half, *half_decoded), (*single, *single_decoded), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("method", "dtype"), [("greedy", np.float16), ("diou", np.float32)])
def test_network_outputs_that_are_not_finite_give_no_detection_and_change_no_other_detection(method, dtype):
    config = dataclasses.replace(CONFIG, nms_method=method, max_detections=100)
    heads = [head.astype(dtype) for head in random_heads(batch_size=1)]
    quiet = [head.copy() for head in heads]
    values = [(0, np.inf), (1, np.nan), (2, np.inf), (3, -np.inf), (4, np.inf), (4, np.nan)]
    values.append((slice(5, 9), np.inf))
    for head, quiet_head in zip(heads, quiet, strict=True):
        flat, quiet_flat = head.reshape(-1, 9), quiet_head.reshape(-1, 9)
        for start, (number, value) in enumerate(values):
            bad = slice(start, None, 3 * len(values))
            flat[bad, 4] += 3  # with finite boxes, these scores would be the best
            flat[bad, number] = value
            quiet_flat[bad, 4] = -np.inf
    actual = run(heads, config)
    for values, expected in zip(actual, run(quiet, config), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert actual.count > 80
    all_nan = run([head * np.nan for head in heads], config)
    assert all_nan.count == [0] and (all_nan.boxes == 0).all()


def test_detections_at_or_below_the_score_threshold_are_dropped():
    heads = silent_heads()
    for number, logit in enumerate((0.0, -1.0, -3.0)):
        heads[0][0, 5, 6 * number + 2, 0, [4, 5 + number]] = logit, 100
    assert run(heads, dataclasses.replace(CONFIG, score_threshold=0.2)).count == [2]
    assert run(heads, dataclasses.replace(CONFIG, score_threshold=0.5)).count == [0]
    assert run(heads, dataclasses.replace(CONFIG, score_threshold=0.4999)).count == [1]
    assert run(heads, dataclasses.replace(CONFIG, score_threshold=0.0)).count > 3
