"""Tests losses.py with the formulas in float64 NumPy, and with Keras."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from efficientdet import losses
from efficientdet.config import get_config

CONFIG = dataclasses.replace(get_config("efficientdet-d0"), image_size=(64, 128), label_smoothing=0.05)


def numpy_focal(logits, classes, alpha=0.25, gamma=1.5, smoothing=0.0):
    """Focal loss of arXiv 1708.02002 equation 5."""
    num_classes = logits.shape[-1] // classes.shape[-1]
    x = logits.astype(np.float64).reshape(-1, num_classes)
    y = (classes.reshape(-1, 1) == np.arange(num_classes)).astype(np.float64)
    p = 1 / (1 + np.exp(-x))
    p_t = y * p + (1 - y) * (1 - p)
    smooth = y * (1 - smoothing) + 0.5 * smoothing
    cross_entropy = -smooth * np.log(p) - (1 - smooth) * np.log(1 - p)
    return np.sum((y * alpha + (1 - y) * (1 - alpha)) * (1 - p_t) ** gamma * cross_entropy)


def numpy_huber(deltas, targets, classes, delta):
    error = np.abs(deltas.astype(np.float64) - targets).reshape(-1, 4)[classes.reshape(-1) >= 0]
    return np.sum(np.where(error <= delta, 0.5 * error**2, delta * error - 0.5 * delta**2))


def random_level(rng, num_classes=7, size=(2, 5, 3), anchors=9):
    logits = rng.normal(scale=4, size=(*size, anchors * num_classes)).astype(np.float32)
    classes = rng.integers(-1, num_classes, size=(*size, anchors)).astype(np.int32)
    deltas, targets = rng.normal(scale=0.2, size=(2, *size, anchors * 4)).astype(np.float32)
    targets[..., ::3] = 0
    return logits, classes, deltas, targets


def random_batch(config, num_classes=3):
    """Returns (arguments of detection_loss, levels) for two images, the second without objects."""
    rng, count = np.random.default_rng(4), config.anchors_per_location
    levels = [random_level(rng, num_classes, (2, *size), count) for size in config.anchors.feature_sizes]
    targets = {"num_positives": tf.constant([3.0, 0.0])}
    for level, (_, classes, _, box_targets) in zip(config.anchors.levels, levels, strict=True):
        targets[f"class_targets_{level}"] = tf.constant(classes)
        targets[f"box_targets_{level}"] = tf.constant(box_targets)
    return ([level[0] for level in levels], [level[2] for level in levels], targets, config), levels


@pytest.mark.parametrize(("gamma", "smoothing"), [(1.5, 0.0), (2.0, 0.1)])
def test_focal_loss_equals_the_formula_of_the_paper(gamma, smoothing):
    logits, classes, _, _ = random_level(np.random.default_rng(0))
    loss = losses.focal_loss(logits, classes, alpha=0.25, gamma=gamma, label_smoothing=smoothing)
    np.testing.assert_allclose(loss, numpy_focal(logits, classes, 0.25, gamma, smoothing), rtol=1e-5)


def test_focal_loss_of_background_only_equals_keras():
    logits = np.random.default_rng(1).normal(size=(1, 2, 2, 9 * 3)).astype(np.float32)
    classes = np.full((1, 2, 2, 9), -1, np.int32)
    loss = losses.focal_loss(logits, classes, alpha=0.25, gamma=1.5)
    expected = keras.losses.BinaryFocalCrossentropy(
        apply_class_balancing=True, alpha=0.25, gamma=1.5, from_logits=True, reduction="sum", axis=1
    )(np.zeros((logits.size, 1)), logits.reshape(-1, 1))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_focal_loss_and_gradient_are_finite_for_extreme_logits():
    logits = tf.constant([[[[1e4, -1e4, 80.0, -80.0, 0.0, 1e-30]]]])
    for positive in range(-1, 6):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = losses.focal_loss(logits, tf.constant([[[[positive]]]]), alpha=0.25, gamma=1.5)
        assert np.isfinite(loss)
        assert np.isfinite(tape.gradient(loss, logits)).all()


def test_l2_loss_is_half_the_sum_of_squared_kernels():
    layers = [
        keras.layers.Conv2D(3, 3),
        keras.layers.DepthwiseConv2D(3),
        keras.layers.SeparableConv2D(2, 3),
        keras.layers.BatchNormalization(),
    ]
    model = keras.Sequential([keras.Input((8, 8, 4)), *layers])
    kernels = [v for v in model.trainable_variables if v.ndim == 4]
    assert len(kernels) == 4
    expected = 4e-5 * sum(0.5 * np.sum(np.square(np.array(v))) for v in kernels)
    np.testing.assert_allclose(losses.l2_loss(model.trainable_variables, 4e-5), expected, rtol=1e-5)
    assert losses.l2_loss([], 4e-5) == 0


def test_detection_loss_is_the_sum_of_levels_over_the_number_of_positives():
    arguments, levels = random_batch(CONFIG)
    values = losses.detection_loss(*arguments)
    normaliser = 3.0 + 0.0 + 1.0
    class_loss = sum(numpy_focal(level[0], level[1], 0.25, 1.5, 0.05) for level in levels) / normaliser
    box_loss = sum(numpy_huber(level[2], level[3], level[1], 0.1) for level in levels) / (4 * normaliser)
    np.testing.assert_allclose(values["class_loss"], class_loss, rtol=1e-5)
    np.testing.assert_allclose(values["box_loss"], box_loss, rtol=1e-5)
    np.testing.assert_allclose(values["detection_loss"], class_loss + 50 * box_loss, rtol=1e-5)


def test_replicas_divide_the_loss_by_their_common_number_of_positives():
    """Two replicas with 3 and 7 positives divide by (3 + 7 + 1) / 2."""
    shares = [losses.num_positives_share({"num_positives": tf.constant([n])}, 2) for n in (3.0, 7.0)]
    assert float(sum(shares)) == 11
    arguments, _ = random_batch(CONFIG)
    one_replica, two_replicas = (
        losses.detection_loss(*arguments, num_positives=n)["class_loss"] for n in (None, 5.5)
    )
    np.testing.assert_allclose(two_replicas, one_replica * 4 / 5.5, rtol=1e-5)


def test_retinanet_loss_equals_odtks_sum_divided_by_the_number_of_positives_plus_one():
    """odtk/loss.py divides by the number of positive anchors; we divide by this number + 1."""
    row = get_config("retinanet-rn18fpn")
    arguments, levels = random_batch(dataclasses.replace(row, image_size=(96, 160), min_level=5, max_level=5))
    ((logits, classes, deltas, box_targets),) = levels
    focal = numpy_focal(logits, classes, 0.25, 2.0)
    x = np.abs(deltas.astype(np.float64) - box_targets).reshape(-1, 4)
    smooth_l1 = np.where(x >= 0.11, x - 0.5 * 0.11, 0.5 * x**2 / 0.11)[classes.reshape(-1) >= 0].sum()
    expected = (focal + smooth_l1) / (3 + 1)
    np.testing.assert_allclose(losses.detection_loss(*arguments)["detection_loss"], expected, rtol=1e-5)


def test_loss_of_half_precision_outputs_is_float32():
    logits, classes, deltas, targets = random_level(np.random.default_rng(5))
    half = tf.cast(logits, tf.float16)
    loss = losses.focal_loss(half, classes, alpha=0.25, gamma=1.5)
    assert loss.dtype == tf.float32
    np.testing.assert_allclose(loss, numpy_focal(half.numpy(), classes), rtol=1e-4)
    assert losses.box_loss(tf.cast(deltas, tf.float16), targets, classes, delta=0.1).dtype == tf.float32


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_compiled_focal_loss_equals_uncompiled(monkeypatch, label_smoothing):
    logits, classes, _, _ = map(tf.constant, random_level(np.random.default_rng(11)))
    options = {"alpha": 0.25, "gamma": 1.5, "label_smoothing": label_smoothing}

    def loss_and_gradient():
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = 3 * losses.focal_loss(logits, classes, **options)
        return loss, tape.gradient(loss, logits)

    expected_loss, expected = loss_and_gradient()
    monkeypatch.setattr(losses, "FUSE_FROM", logits.shape.num_elements())
    loss, gradient = tf.function(loss_and_gradient)()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
