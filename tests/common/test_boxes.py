"""Tests boxes.py against pycocotools and against numbers computed by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from pycocotools import mask as coco_mask

from common import boxes as box_ops

OVERLAPS = [box_ops.iou, box_ops.diou, box_ops.ciou]


def random_boxes(rng, *shape):
    corners = rng.random((*shape, 2, 2))
    return np.concatenate([corners.min(axis=-2), corners.max(axis=-2)], axis=-1)


def test_box_conversions_area_and_clipping_equal_hand_computed_values():
    # This box reaches from 1 to 4 in x and from 2 to 8 in y.
    box = np.array([[1.0, 2.0, 4.0, 8.0]])
    np.testing.assert_array_equal(box_ops.ltrb_to_tlbr(box), [[2, 1, 8, 4]])
    np.testing.assert_array_equal(box_ops.ltrb_to_cxcywh(box), [[2.5, 5, 3, 6]])
    np.testing.assert_array_equal(box_ops.cxcywh_to_ltrb([[2.5, 5, 3, 6]]), box)
    np.testing.assert_array_equal(box_ops.area(box), [18])
    np.testing.assert_array_equal(box_ops.clip([[-0.5, 0.25, 0.5, 2.0]]), [[0, 0.25, 0.5, 1]])


def test_iou_equals_pycocotools():
    rng = np.random.default_rng(1)
    a, b = random_boxes(rng, 40), random_boxes(rng, 30)
    b[:10] = a[:10]
    b[10:20] = a[10:20] * 0.5
    ltwh = [np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1) for boxes in (a, b)]
    expected = coco_mask.iou(*ltwh, [0] * len(b))
    np.testing.assert_allclose(box_ops.iou(a[:, None], b[None]), expected, atol=1e-12)
    np.testing.assert_allclose(box_ops.iou(a[:30], b), np.diag(expected), atol=1e-12)
    assert box_ops.iou(a[:0, None], b[None]).shape == (0, 30)


def test_diou_and_ciou_equal_hand_computed_values():
    # The boxes are two 2 x 2 squares with a horizontal gap of 1. The box that encloses them is 5 x 2.
    a, apart = [0.0, 0.0, 2.0, 2.0], [3.0, 0.0, 5.0, 2.0]
    assert float(box_ops.iou(a, apart)) == 0
    assert float(box_ops.diou(a, apart)) == pytest.approx(-9 / 29)
    assert float(box_ops.ciou(a, apart)) == pytest.approx(-9 / 29)
    # `half` is the upper half of `a`: their IoU is 1/2, and their centres are 1/2 apart.
    half = [0.0, 0.0, 2.0, 1.0]
    v = 4 / np.pi**2 * (np.arctan(2.0) - np.arctan(1.0)) ** 2
    assert float(box_ops.diou(a, half)) == pytest.approx(0.5 - 0.25 / 8)
    assert float(box_ops.ciou(a, half)) == pytest.approx(0.5 - 0.25 / 8 - v * v / (0.5 + v))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_iou_diou_and_ciou_are_symmetric_and_independent_of_position_and_scale(overlap):
    rng = np.random.default_rng(2)
    a, b = random_boxes(rng, 50), random_boxes(rng, 50)
    np.testing.assert_allclose(overlap(a, a), 1, atol=1e-9)
    np.testing.assert_allclose(overlap(a, b), overlap(b, a), atol=1e-12)
    shift = [70, -20, 70, -20]
    np.testing.assert_allclose(overlap(a * 608 + shift, b * 608 + shift), overlap(a, b), atol=1e-9)
    small = np.float32(a / 608), np.float32(b / 608)
    np.testing.assert_allclose(overlap(*small), overlap(a, b), atol=1e-4)


DEGENERATE = [[0.5] * 4, [0.2, 0.3, 0.8, 0.3], [0.0] * 4, [0.8, 0.8, 0.2, 0.2]]
DEGENERATE += [[0.5, 0.5, 0.5 + 1e-7, 0.5 + 1e-7], [0.0, 0.0, 1e-40, 1e-40]]
DEGENERATE += [[-1e6, -1e6, 1e6, 1e6], [0.2, 0.2, 0.6, 0.6]]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_iou_diou_and_ciou_and_their_gradients_are_finite_for_degenerate_boxes(overlap):
    a = tf.constant(np.repeat(np.float32(DEGENERATE), len(DEGENERATE), axis=0))
    b = tf.constant(np.tile(np.float32(DEGENERATE), (len(DEGENERATE), 1)))
    with tf.GradientTape() as tape:
        tape.watch([a, b])
        value = overlap(a, b)
    assert np.isfinite(value).all()
    for gradient in tape.gradient(value, [a, b]):
        assert np.isfinite(gradient).all()


def test_ciou_gradient_treats_alpha_as_constant():
    a, b = np.array([0.1, 0.1, 0.5, 0.9]), np.array([0.2, 0.2, 0.9, 0.6])
    variable = tf.Variable(a)
    with tf.GradientTape() as tape:
        value = box_ops.ciou(variable, b)
    gradient = tape.gradient(value, variable)

    def v(box):
        return 4 / np.pi**2 * (np.arctan((box[2] - box[0]) / (box[3] - box[1])) - np.arctan(0.7 / 0.4)) ** 2

    alpha = v(a) / (1 - box_ops.iou(a, b) + v(a))
    for step in np.eye(4) * 1e-6:  # central differences of DIoU - alpha v, with constant alpha
        high = box_ops.diou(a + step, b) - alpha * v(a + step)
        low = box_ops.diou(a - step, b) - alpha * v(a - step)
        np.testing.assert_allclose(gradient[step > 0][0], (high - low) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "float16", "float32", "float64"])
def test_box_area_is_float64_only_for_float64_boxes_and_else_float32(dtype):
    expected = "float64" if dtype == "float64" else "float32"
    assert box_ops.area(np.array([[0, 0, 3, 2]], dtype)).dtype == expected


def test_box_functions_work_on_symbolic_tensors_and_in_graphs():
    a, b = keras.Input((7, 4)), keras.Input((7, 4))
    outputs = [box_ops.ciou(box_ops.cxcywh_to_ltrb(a), b), box_ops.diou(box_ops.ltrb_to_tlbr(a), b)]
    model = keras.Model([a, b], [*outputs, box_ops.area(box_ops.clip(a))])
    rng = np.random.default_rng(4)
    x, y = [np.float32(random_boxes(rng, 2, 7)) for _ in range(2)]
    results = tf.function(model)([x, y])
    np.testing.assert_allclose(results[0], box_ops.ciou(box_ops.cxcywh_to_ltrb(x), y), atol=1e-6)
    assert [tuple(result.shape) for result in results] == [(2, 7)] * 3
