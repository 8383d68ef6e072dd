"""Tests box_encoder.py: DALI and TensorFlow against the matching rule in NumPy, and decoding."""

import numpy as np
import pytest
import tensorflow as tf

from common import box_encoder
from common.anchors import Anchors
from common.data import tf_readers
from tests.common.reading import run_graph
from tests.oracle import numpy_boxes

RATIOS = [1.0, 2.0, 0.5]
D0 = Anchors(3, 7, 3, RATIOS, 4.0, (128, 128))
WIDE = Anchors(3, 7, 3, RATIOS, 4.0, (96, 160))
ODD = Anchors(3, 7, 3, RATIOS, 5.0, (130, 77))  # sides that no stride divides; the anchor scale of d7
D7X = Anchors(3, 8, 3, RATIOS, 4.0, (160, 128))
SPARSE = Anchors(3, 5, 1, [1.0], 0.1, (128, 96))

NO_BOXES = np.zeros((0, 4), np.float32)
INF, NAN = np.inf, np.nan


# --- inputs ---


def random_boxes(rng, count, largest=0.4):
    center, size = rng.random((count, 2)), rng.uniform(0.01, largest, (count, 2))
    return np.float32(np.concatenate([center - size / 2, center + size / 2], axis=1).clip(0, 1))


def grid_boxes(rng, count):
    """Corners are on a coarse grid, so that many IoUs with an anchor are equal."""
    cells = rng.choice([4, 8, 16])
    left_top = rng.integers(0, cells, (count, 2))
    return np.float32(np.concatenate([left_top, left_top + rng.integers(1, 4, (count, 2))], axis=1) / cells)


def hard_images(rng, anchors):
    """Returns boxes of many images that are easy to encode wrongly."""
    images = [
        NO_BOXES,
        np.float32([[0, 0, 1, 1]]),
        random_boxes(rng, 1),
        random_boxes(rng, 500, largest=0.1),
        np.repeat(random_boxes(rng, 3), 4, axis=0),
        random_boxes(rng, 30, largest=0.011),  # tiny boxes, which have a low IoU with all anchors
        np.float32([[0.3, 0.3, 0.3 + 1e-6, 0.3 + 1e-6], [0.3, 0.3, 0.3 + 1e-4, 0.9]]),
        np.float32([[1.5, 1.5, 1.6, 1.6]]),
        anchors.boxes_normalized[rng.integers(0, anchors.num_anchors, 20)],
        np.float32([[-0.3, -0.2, 1.1, 1.4], [-0.01, 0.5, 0.2, 0.6]]),
    ]
    images += [random_boxes(rng, int(count)) for count in rng.integers(1, 60, 6)]
    images += [grid_boxes(rng, int(count)) for count in rng.integers(1, 60, 6)]
    return images


def random_labels(rng, images):
    return [rng.integers(1, 91, len(boxes)).astype(np.int32) for boxes in images]


# --- the matching rule in NumPy ---


def largest(boxes, count):
    """Returns the ascending indices of the `count` largest boxes; of equal ones, the first."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return np.sort(np.argsort(-areas, kind="stable")[:count])


def overlaps(boxes, anchors):
    """Returns IoUs, float32 (N, A)."""
    one, other = boxes[:, np.newaxis], anchors.boxes_normalized
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    intersection = np.maximum(sides, 0).prod(axis=-1)
    areas = [(x[..., 2:] - x[..., :2]).prod(axis=-1) for x in (one, other)]
    return intersection / (areas[0] + areas[1] - intersection)


def targets_by_the_rule(boxes, labels, anchors):
    """Returns class targets (A,) and box targets (A, 4), float64."""
    owners = numpy_boxes.match(boxes, anchors.boxes_normalized)
    positive = owners >= 0
    classes, deltas = np.full(anchors.num_anchors, -1), np.zeros((anchors.num_anchors, 4))
    classes[positive] = labels[owners[positive]] - 1
    deltas[positive] = numpy_boxes.deltas(boxes[owners[positive]], anchors.boxes_normalized[positive])
    return classes, deltas


# --- encoding by DALI and by TensorFlow ---


def encode(images, labels, anchors, max_instances=box_encoder.MAX_INSTANCES):
    def graph(boxes, labels):
        return tf.nest.flatten(box_encoder.encode_boxes(boxes, labels, anchors, max_instances))

    count = len(anchors.levels)
    return [
        box_encoder.EncodedBoxes(
            *values[:3], class_targets=values[3 : 3 + count], box_targets=values[3 + count :]
        )
        for values in run_graph(graph, images, labels)
    ]


def encode_tf(images, labels, anchors, max_instances=box_encoder.MAX_INSTANCES):
    """Encodes the boxes of each image without DALI."""
    results = []
    for boxes, boxes_labels in zip(images, labels, strict=True):
        boxes, boxes_labels, _ = tf_readers.select_boxes(boxes, boxes_labels, (0.0, 0.0), max_instances)
        boxes, classes = tf_readers.pad_boxes_tf(boxes, boxes_labels, max_instances)
        encoded = box_encoder.encode_boxes_tf(boxes, classes, anchors)
        results.append(tf.nest.map_structure(np.asarray, encoded))
    return results


def flat_targets(encoded):
    classes = np.concatenate([level.reshape(-1) for level in encoded.class_targets])
    deltas = np.concatenate([level.reshape(-1, 4) for level in encoded.box_targets])
    return classes, deltas


def assert_close(one, other, tolerance=1e-6):
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# --- encoding ---


@pytest.mark.parametrize("anchors", [ODD, D7X], ids=["odd image sides", "anchors of d7x"])
def test_anchor_targets_of_dali_and_tensorflow_equal_the_matching_rule_in_numpy(anchors):
    rng = np.random.default_rng(0)
    images = hard_images(rng, anchors)
    labels = random_labels(rng, images)
    results = [run(images, labels, anchors, max_instances=60) for run in (encode, encode_tf)]
    k = anchors.anchors_per_location
    shapes = [(), (60, 4), (60,), *((*size, k) for size in anchors.feature_sizes)]
    shapes += [(*size, 4 * k) for size in anchors.feature_sizes]
    dtypes = [np.float32, np.float32, np.int32]
    dtypes += [dtype for dtype in (np.int32, np.float32) for _ in anchors.levels]
    for boxes, boxes_labels, encoded, by_tensorflow in zip(images, labels, *results, strict=True):
        assert_close(encoded, by_tensorflow)
        arrays = tf.nest.flatten(encoded)
        assert [array.shape for array in arrays] == shapes
        assert [array.dtype for array in arrays] == dtypes

        selected = largest(boxes, 60)
        boxes, boxes_labels = boxes[selected], boxes_labels[selected]
        expected_classes, expected_deltas = targets_by_the_rule(boxes, boxes_labels, anchors)
        classes, deltas = flat_targets(encoded)
        np.testing.assert_array_equal(classes, expected_classes)
        np.testing.assert_allclose(deltas, expected_deltas, rtol=1e-5, atol=2e-6)
        assert encoded.num_positives == np.sum(expected_classes >= 0)

        np.testing.assert_array_equal(encoded.boxes[: len(boxes)], boxes)
        np.testing.assert_array_equal(encoded.boxes[len(boxes) :], -1)
        np.testing.assert_array_equal(encoded.classes[: len(boxes)], boxes_labels - 1)
        np.testing.assert_array_equal(encoded.classes[len(boxes) :], -1)


@pytest.mark.parametrize("anchors", [WIDE, SPARSE], ids=["wide image", "sparse anchors"])
def test_anchors_with_equal_ious_get_equal_targets_from_dali_and_tensorflow(anchors):
    rng = np.random.default_rng(12)
    images = [boxes for boxes in hard_images(rng, anchors) if not len(boxes) or boxes.max() <= 1]
    images = [boxes.clip(0, 1)[:40] for boxes in images] + [grid_boxes(rng, 40) for _ in range(20)]
    labels = random_labels(rng, images)
    runs = (run(images, labels, anchors, max_instances=40) for run in (encode, encode_tf))
    for by_dali, by_tensorflow in zip(*runs, strict=True):
        assert_close(by_dali, by_tensorflow)


@pytest.mark.parametrize("run", [encode, encode_tf], ids=["dali", "tensorflow"])
def test_anchor_with_iou_of_exactly_one_half_is_background_unless_it_is_the_best_of_its_box(run):
    squares = Anchors(3, 3, 1, [1.0], 4.0, (128, 128))  # anchors of 32 pixels, every 8 pixels
    # Five anchors have an IoU of exactly 1/2 with the first box. Only the last of the five is positive.
    half = np.float32([[44, 36, 76, 100]]) / 128
    above_half = np.float32([[44, 36, 76, 99.9]]) / 128
    half, above_half = run([half, above_half], [np.int32([1])] * 2, squares)
    (positive,) = np.flatnonzero(flat_targets(half)[0] == 0)
    np.testing.assert_array_equal(squares.boxes[positive], [68, 44, 100, 76])
    positive = np.flatnonzero(flat_targets(above_half)[0] == 0)
    np.testing.assert_array_equal(squares.boxes[positive, 0], [36, 44, 52, 60])


def test_batch_without_boxes_is_encoded_by_dali_and_tensorflow_alike():
    images, labels = [NO_BOXES] * 3, [np.zeros(0, np.int32)] * 3
    assert_close(encode(images, labels, WIDE), encode_tf(images, labels, WIDE))


def test_degenerate_boxes_do_not_change_targets_of_other_boxes():
    good = np.float32([[0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.8]])
    bad = np.float32([[0.5, 0.5, 0.5, 0.9], [0.8, 0.8, 0.2, 0.2], [NAN, 0, 1, 1], [0, 0, INF, 1]])
    mixed, labels = np.concatenate([bad[:2], good[:1], bad[2:], good[1:]]), np.int32([9, 9, 1, 9, 9, 2])
    result, expected = encode([mixed, good], [labels, np.int32([1, 2])], D0)
    assert len(result.boxes) == 100
    assert_close(result, expected, tolerance=0)


# --- decoding ---


def test_anchor_box_targets_decode_to_the_matched_box_or_without_one_to_the_anchor_itself():
    rng = np.random.default_rng(4)
    images = [random_boxes(rng, 20, largest=0.9) for _ in range(3)]
    encoded = encode(images, random_labels(rng, images), D7X)
    batched = [np.stack(levels) for levels in zip(*[one.box_targets for one in encoded], strict=True)]
    decoded = np.asarray(box_encoder.decode_boxes(batched, D7X))
    assert decoded.shape == (3, D7X.num_anchors, 4)
    for boxes, result in zip(images, decoded, strict=True):
        owners = numpy_boxes.match(boxes, D7X.boxes_normalized)
        positive = owners >= 0
        np.testing.assert_allclose(result[positive], boxes[owners[positive]], atol=1e-5)
        np.testing.assert_allclose(result[~positive], D7X.boxes_normalized[~positive], atol=1e-6)


def test_decoding_of_float16_box_deltas_with_two_batch_axes_computes_in_float32():
    deltas = np.random.default_rng(5).normal(size=(2, 3, WIDE.num_anchors, 4)).astype(np.float16)
    decoded = box_encoder.decode_boxes(deltas, WIDE)
    assert decoded.dtype == tf.float32
    np.testing.assert_allclose(decoded[1, 2], box_encoder.decode_boxes(deltas[1, 2].astype(np.float32), WIDE))


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("on_gpu", [True, False], ids=["boxes-on-gpu", "boxes-on-cpu"])
def test_targets_encoded_on_gpu_equal_those_of_cpu(on_gpu):
    rng = np.random.default_rng(8)
    images = hard_images(rng, ODD)
    labels = random_labels(rng, images)

    def graph(boxes, labels):
        if on_gpu:
            encoded = box_encoder.encode_boxes(boxes.gpu(), labels.gpu(), ODD)
        else:
            encoded = box_encoder.encode_boxes(boxes, labels, ODD, device="gpu")
        assert {node.device for node in tf.nest.flatten(encoded)} == {"gpu"}
        return tf.nest.flatten(encoded)

    assert_close(encode(images, labels, ODD), run_graph(graph, images, labels, device_id=0))
