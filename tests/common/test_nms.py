"""Tests nms.py against loops in NumPy and against OpenCV."""

import cv2
import numpy as np
import pytest
import tensorflow as tf

from common import nms

SETTINGS = {"num_classes": 5, "max_detections": 60, "score_threshold": 0.05}
SETTINGS |= {"iou_threshold": 0.45, "sigma": 0.5, "beta": 0.6}


def random_candidates(batch_size=2, count=300, num_classes=5, seed=0):
    """Many boxes overlap, and many scores are equal."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(0, 1, (batch_size, 12, 2))
    centers = np.take_along_axis(centers, rng.integers(0, 12, (batch_size, count, 1)), axis=1)
    centers += rng.normal(0, 0.03, centers.shape)
    half_sizes = rng.uniform(0.02, 0.2, centers.shape)
    boxes = np.concatenate([centers - half_sizes, centers + half_sizes], axis=-1)
    scores = np.round(rng.uniform(0, 1, (batch_size, count)), 2)
    classes = rng.integers(0, num_classes, (batch_size, count))
    return boxes.astype(np.float32), scores.astype(np.float32), classes.astype(np.int32)


def run(boxes, scores, classes, **changes):
    """Returns the detections as NumPy arrays; `changes` are arguments of `suppress`."""
    settings = SETTINGS | changes
    detections = nms.suppress(*map(tf.constant, (boxes, scores, classes)), **settings)
    return nms.Detections(*(np.asarray(x) for x in detections))


def iou_numpy(box, boxes):
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    intersection = np.prod(np.maximum(sides, 0), axis=1)
    union = np.prod(box[2:] - box[:2]) + np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) - intersection
    return np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)


def distance_numpy(box, boxes):
    """Returns Darknet's d / c: squared distance of centres / squared diagonal of the enclosing box."""
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2 - (box[:2] + box[2:]) / 2
    hull = np.maximum(box[2:], boxes[:, 2:]) - np.minimum(box[:2], boxes[:, :2])
    squared = np.sum(hull**2, axis=1)
    return np.divide(np.sum(centers**2, axis=1), squared, out=np.zeros_like(squared), where=squared > 0)


def suppress_numpy(boxes, scores, classes, method, **changes):
    """Returns the indices and scores of the selected boxes, best first."""
    settings = SETTINGS | changes
    boxes, scores = boxes.astype(np.float64), scores.astype(np.float64)
    groups = np.zeros_like(classes) if settings.get("class_agnostic") else classes
    picked = []
    for group in range(settings["num_classes"]):
        left = np.where(groups == group, scores, 0)
        while left.max(initial=0) > np.float32(settings["score_threshold"]):
            best = left.argmax()
            picked.append((left[best], best))
            overlap = iou_numpy(boxes[best], boxes)
            if method == "gaussian":
                left *= np.exp(-(overlap**2) / settings["sigma"])
            else:
                if method == "diou":
                    overlap -= distance_numpy(boxes[best], boxes) ** settings["beta"]
                left[overlap > settings["iou_threshold"]] = 0
            left[best] = 0
    picked.sort(key=lambda pick: (-pick[0], pick[1]))
    picked = picked[: settings["max_detections"]]
    return [index for _, index in picked], [score for score, _ in picked]


@pytest.mark.parametrize(("num_classes", "max_detections", "beta"), [(1, 400, 0.6), (5, 20, 1), (80, 100, 4)])
@pytest.mark.parametrize("method", ["hard", "gaussian", "diou"])
def test_nms_equals_brute_force_in_numpy(method, num_classes, max_detections, beta):
    changes = {"method": method, "num_classes": num_classes, "max_detections": max_detections, "beta": beta}
    boxes, scores, classes = random_candidates(batch_size=4, num_classes=num_classes)
    boxes[:, :3] = [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.5, 0.1, 0.5, 0.9]]
    scores[:, :3], classes[:, :3] = 1, 0
    if method == "gaussian":  # Soft-NMS changes scores, and rounding could reorder equal scores
        scores += np.arange(300, dtype=np.float32) * 1e-5
    scores[1], scores[3] = SETTINGS["score_threshold"], 0
    actual = run(boxes, scores, classes, **changes)
    assert actual.boxes.shape == (4, max_detections, 4)
    assert [x.dtype for x in actual] == [np.float32, np.float32, np.int32, np.int32]
    for i in range(4):
        picked, expected_scores = suppress_numpy(boxes[i], scores[i], classes[i], **changes)
        count = len(picked)
        assert count == 0 if i % 2 else 12 <= count <= 299
        assert actual.count[i] == count
        np.testing.assert_allclose(actual.scores[i, :count], expected_scores, rtol=2e-4)
        np.testing.assert_array_equal(actual.classes[i, :count], classes[i, picked])
        np.testing.assert_array_equal(actual.boxes[i, :count], boxes[i, picked].clip(0, 1))
        assert (actual.classes[i, count:] == -1).all()
        assert (actual.scores[i, count:] == 0).all() and (actual.boxes[i, count:] == 0).all()


@pytest.mark.parametrize("method", ["hard", "gaussian", "diou"])
def test_class_agnostic_nms_equals_brute_force_without_classes(method):
    boxes, scores, classes = random_candidates(batch_size=1)
    scores += np.arange(300, dtype=np.float32) * 1e-5
    options = {"method": method, "max_detections": 300, "class_agnostic": True}
    actual = run(boxes, scores, classes, **options)
    picked, expected_scores = suppress_numpy(boxes[0], scores[0], classes[0], **options)
    assert actual.count == [len(picked)] and len(set(classes[0, picked])) >= 3
    assert actual.count < run(boxes, scores, classes, **options | {"class_agnostic": False}).count
    np.testing.assert_allclose(actual.scores[0, : len(picked)], expected_scores, rtol=2e-4)
    np.testing.assert_array_equal(actual.classes[0, : len(picked)], classes[0, picked])
    np.testing.assert_array_equal(actual.boxes[0, : len(picked)], boxes[0, picked].clip(0, 1))


@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_hard_nms_equals_opencv(threshold):
    boxes, scores, classes = random_candidates(batch_size=1, count=500, seed=3)
    scores = scores + np.arange(500, dtype=np.float32) * 1e-5
    pixels = np.rint(boxes[0] * 1000).astype(int)
    ltwh_px = np.concatenate([pixels[:, :2], pixels[:, 2:] - pixels[:, :2]], axis=1)
    picked = cv2.dnn.NMSBoxesBatched(ltwh_px, scores[0], classes[0], 0.05, threshold)
    picked = np.array(sorted(picked, key=lambda index: -scores[0, index]))
    boxes = (pixels / 1000).astype(np.float32)
    actual = run(boxes[None], scores, classes, method="hard", iou_threshold=threshold, max_detections=500)
    assert actual.count == [len(picked)]
    np.testing.assert_array_equal(actual.scores[0, : len(picked)], scores[0, picked])
    np.testing.assert_array_equal(actual.classes[0, : len(picked)], classes[0, picked])
    np.testing.assert_array_equal(actual.boxes[0, : len(picked)], boxes[picked].clip(0, 1))


@pytest.mark.parametrize("beta", [0.6, 1.0, 4.0])
def test_nms_drops_box_only_above_the_iou_threshold(beta):
    boxes = np.float32([[[0.25, 0.25, 0.75, 0.75], [0.25, 0.25, 0.75, 0.5]]])  # IoU exactly 0.5
    candidates = boxes, np.float32([[0.9, 0.8]]), np.int32([[0, 0]])
    edge = 0.5 - (0.125**2 / 0.5) ** beta
    assert run(*candidates, method="diou", beta=beta, iou_threshold=edge + 1e-6).count == [2]
    assert run(*candidates, method="diou", beta=beta, iou_threshold=edge - 1e-6).count == [1]
    assert run(*candidates, method="diou", beta=1.0, iou_threshold=0.46875).count == [2]
    assert run(*candidates, method="hard", iou_threshold=0.5).count == [2]
    assert run(*candidates, method="hard", iou_threshold=0.49).count == [1]


@pytest.mark.parametrize(("method", "overlap"), [("hard", 9 / 16), ("diou", 9 / 16 - 1 / 64)])
def test_boxes_that_reach_beyond_eight_image_sides_are_clipped_there_before_nms(method, overlap):
    """The clipped boxes have 16 x 16 and 12 x 12 image sides."""
    candidates = np.float32([[[-99, -99, 99, 99], [-4, -4, 99, 99]]]), np.float32([[0.9, 0.8]]), [[0, 0]]
    for threshold, count in ((overlap - 1e-6, 1), (overlap + 1e-6, 2)):
        assert run(*candidates, method=method, beta=1.0, iou_threshold=threshold).count == [count]


def test_unknown_nms_method_is_refused():
    with pytest.raises(ValueError, match="greedy"):
        run(*random_candidates(), method="greedy")


@pytest.mark.parametrize("count", [1, 37, 700, 5000])
def test_top_nms_candidates_of_all_levels_equal_top_k_over_all_scores(count):
    scores = np.round(np.random.default_rng(1).normal(0, 2, (2, 400, 7))).astype(np.float32)
    levels = np.split(scores, np.cumsum([250, 100, 45, 1]), axis=1)
    specs = [tf.TensorSpec((None, None, 7))] * len(levels)
    compiled = tf.function(lambda *levels: nms.top_candidates(levels, count), input_signature=specs)
    values, rows, classes = (np.asarray(x) for x in compiled(*levels))
    for i in range(2):
        top = np.argsort(-scores[i].ravel(), kind="stable")[:count]
        np.testing.assert_array_equal(values[i], scores[i].ravel()[top])
        np.testing.assert_array_equal(rows[i], top // 7)
        np.testing.assert_array_equal(classes[i], top % 7)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_non_finite_scores_are_chosen_last_as_nms_candidates(dtype):
    maxima = np.array([[np.nan, 3, np.inf, 1, 5, -np.inf, 2]], dtype)
    for count, expected in ((3, [1, 4, 6]), (4, [1, 3, 4, 6]), (99, np.arange(7))):
        np.testing.assert_array_equal(nms.top_rows(tf.constant(maxima), count), [expected])
