"""Losses against plain NumPy in float64, finite differences, and the two corrections to google/automl."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from efficientdet import losses
from efficientdet.config import get_config

CONFIG = get_config("efficientdet-nano")


def numpy_focal(logits, classes, alpha, gamma, smoothing=0.0):
    """arXiv 1708.02002 equation 5, element by element."""
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
    return logits, classes, deltas, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gamma", [1.5, 2.0])
def test_focal_loss_is_the_papers(gamma, smoothing):
    logits, classes, _, _ = random_level(np.random.default_rng(0))
    ours = losses.focal_loss(logits, classes, alpha=0.25, gamma=gamma, label_smoothing=smoothing)
    np.testing.assert_allclose(ours, numpy_focal(logits, classes, 0.25, gamma, smoothing), rtol=1e-5)


def test_focal_loss_against_keras_for_all_background():
    logits = np.random.default_rng(1).normal(size=(1, 2, 2, 9 * 3)).astype(np.float32)
    classes = np.full((1, 2, 2, 9), -1, np.int32)
    ours = losses.focal_loss(logits, classes, alpha=0.25, gamma=1.5)
    theirs = keras.losses.BinaryFocalCrossentropy(
        apply_class_balancing=True, alpha=0.25, gamma=1.5, from_logits=True, reduction="sum", axis=1
    )(np.zeros((logits.size, 1)), logits.reshape(-1, 1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_focal_loss_is_finite_for_extreme_logits():
    logits = tf.constant(np.array([1e4, -1e4, 80.0, -80.0, 0.0, 1e-30], np.float32).reshape(1, 1, 1, 6))
    for positive in range(-1, 6):
        classes = tf.constant(positive, tf.int32, shape=(1, 1, 1, 1))
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = losses.focal_loss(logits, classes, alpha=0.25, gamma=1.5)
        assert np.isfinite(loss)
        assert np.all(np.isfinite(tape.gradient(loss, logits)))


def test_box_loss_is_huber_on_positive_anchors_only():
    _, classes, deltas, targets = random_level(np.random.default_rng(2))
    ours = losses.box_loss(deltas, targets, classes, delta=0.1)
    np.testing.assert_allclose(ours, numpy_huber(deltas, targets, classes, 0.1), rtol=1e-5)


def test_an_exactly_aligned_positive_is_trained():
    """automl's mask `box_targets != 0` would give 0 here: its fault, not ours."""
    deltas = np.full((1, 1, 1, 4), 0.3, np.float32)
    targets = np.zeros((1, 1, 1, 4), np.float32)
    positive = losses.box_loss(deltas, targets, np.zeros((1, 1, 1, 1), np.int32), delta=0.1)
    np.testing.assert_allclose(positive, 4 * (0.1 * 0.3 - 0.5 * 0.1**2), rtol=1e-6)
    background = losses.box_loss(deltas, targets, np.full((1, 1, 1, 1), -1, np.int32), delta=0.1)
    assert float(background) == 0.0


def test_gradients_match_finite_differences():
    rng = np.random.default_rng(3)
    logits, classes, deltas, targets = random_level(rng, num_classes=2, size=(1, 1, 2), anchors=2)

    def value(logits, deltas):
        return losses.focal_loss(logits, classes, alpha=0.25, gamma=1.5) + losses.box_loss(
            deltas, targets, classes, delta=0.1
        )

    theory, numeric = tf.test.compute_gradient(value, [tf.constant(logits), tf.constant(deltas)], delta=1e-2)
    for a, b in zip(theory, numeric, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)


def test_l2_is_half_the_sum_of_squares_of_the_kernels():
    layers = [
        keras.layers.Conv2D(3, 3),
        keras.layers.DepthwiseConv2D(3),
        keras.layers.SeparableConv2D(2, 3),
        keras.layers.BatchNormalization(),
    ]
    model = keras.Sequential([keras.Input((8, 8, 4)), *layers])
    kernels = [v for v in model.trainable_variables if v.ndim == 4]
    assert len(kernels) == 4  # convolution, depthwise, and both halves of the separable one
    expected = 4e-5 * sum(0.5 * np.sum(np.square(np.array(v))) for v in kernels)
    np.testing.assert_allclose(losses.l2_loss(model.trainable_variables, 4e-5), expected, rtol=1e-5)


def make_targets(rng, config, num_classes):
    logits, deltas, targets, arrays = [], [], {"num_positives": np.array([3.0, 0.0], np.float32)}, []
    for level, (height, width) in zip(config.anchors.levels, config.anchors.feature_sizes, strict=True):
        values = random_level(rng, num_classes, (2, height, width), config.anchors_per_location)
        logits.append(values[0])
        deltas.append(values[2])
        targets[f"class_targets_{level}"] = values[1]
        targets[f"box_targets_{level}"] = values[3]
        arrays.append(values)
    return logits, deltas, {k: tf.constant(v) for k, v in targets.items()}, arrays


def test_detection_loss_sums_levels_and_normalises_by_the_positives():
    config = dataclasses.replace(CONFIG, image_size=(64, 128), label_smoothing=0.05)
    logits, deltas, targets, arrays = make_targets(np.random.default_rng(4), config, 3)
    values = losses.detection_loss(logits, deltas, targets, config)
    normaliser = 3.0 + 0.0 + 1.0
    class_loss = sum(numpy_focal(a[0], a[1], 0.25, 1.5, 0.05) for a in arrays) / normaliser
    box_loss = sum(numpy_huber(a[2], a[3], a[1], 0.1) for a in arrays) / (4 * normaliser)
    np.testing.assert_allclose(values["class_loss"], class_loss, rtol=1e-5)
    np.testing.assert_allclose(values["box_loss"], box_loss, rtol=1e-5)
    np.testing.assert_allclose(values["detection_loss"], class_loss + 50 * box_loss, rtol=1e-5)


def test_half_precision_logits_give_a_float32_loss():
    logits, classes, deltas, targets = random_level(np.random.default_rng(5))
    half = tf.cast(logits, tf.float16)
    loss = losses.focal_loss(half, classes, alpha=0.25, gamma=1.5)
    assert loss.dtype == tf.float32
    np.testing.assert_allclose(loss, numpy_focal(half.numpy(), classes, 0.25, 1.5), rtol=1e-4)
    assert losses.box_loss(tf.cast(deltas, tf.float16), targets, classes, delta=0.1).dtype == tf.float32


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_compiled_or_not_the_focal_loss_is_the_same(monkeypatch, label_smoothing):
    rng = np.random.default_rng(11)
    logits = tf.constant(rng.normal(-2, 4, (2, 6, 5, 9 * 7)).astype(np.float32))
    class_targets = tf.constant(rng.integers(-1, 7, (2, 6, 5, 9)).astype(np.int32))

    def loss_and_gradient():
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = 3 * losses.focal_loss(
                logits, class_targets, alpha=0.25, gamma=1.5, label_smoothing=label_smoothing
            )
        return loss, tape.gradient(loss, logits)

    expected_loss, expected = loss_and_gradient()
    monkeypatch.setattr(losses, "FUSE_FROM", 1)
    loss, gradient = tf.function(loss_and_gradient)()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
