"""Tests losses.py against darknet_rules.py (NumPy, float64) and against central differences."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.yolov4 import darknet_rules
from yolov4 import losses
from yolov4.config import get_config

DARKNET = dataclasses.replace(get_config("yolov4"), max_delta=0.0)
YOLOV4 = dataclasses.replace(DARKNET, box_gradient="exact", size_weighting=True)
TINY = dataclasses.replace(
    get_config("yolov4-tiny"),
    box_gradient="exact",
    label_smoothing=0.1,
    objectness_iou=0.8,
    neighbour_cells=True,
    scale_xy=(2.0, 2.0),
)
# Different normalisers, so that mixing them up is noticed.
WEIGHTED = dataclasses.replace(
    YOLOV4, iou_normalizer=0.5, obj_normalizer=0.7, cls_normalizer=1.3, ignore_thresh=0.3
)
LIMITED = dataclasses.replace(DARKNET, max_delta=1e-3)
NUM_CLASSES = 3
NAMES = ["box_loss", "objectness_loss", "class_loss"]

# (left, top, right, bottom, class)
BOXES = [
    (0.30, 0.30, 0.60, 0.80, 0),
    (0.31, 0.31, 0.60, 0.80, 0),
    (0.30, 0.30, 0.59, 0.80, 2),
    (0.05, 0.40, 0.25, 0.70, 1),
    (0.70, 0.00, 1.00, 0.40, 1),
    (0.00, 0.00, 1.00, 1.00, 2),
]


def make_targets(images, max_instances=8):
    """Boxes are (left, top, right, bottom, class)."""
    boxes = np.full((len(images), max_instances, 4), -1, np.float32)
    classes = np.full((len(images), max_instances), -1, np.int32)
    for b, rows in enumerate(images):
        for m, row in enumerate(rows):
            boxes[b, m], classes[b, m] = row[:4], row[4]
    arrays = {"boxes": boxes, "classes": classes, "num_boxes": np.int32([len(rows) for rows in images])}
    return {name: tf.constant(array) for name, array in arrays.items()}


def make_heads(config, batch, image_size, seed=0, scale=0.7):
    rng = np.random.default_rng(seed)
    grids = [(image_size[0] // stride, image_size[1] // stride) for stride in config.strides]
    return [np.float32(rng.normal(0, scale, (batch, *grid, 3, 5 + NUM_CLASSES))) for grid in grids]


def value_and_gradients(heads, targets, config, scale=1.0, mode="eager"):
    """Returns the losses, and the gradients of scale * detection_loss for each head."""

    def run(heads, targets):
        with tf.GradientTape() as tape:
            tape.watch(heads)
            values = losses.detection_loss(heads, targets, config)
            scaled = scale * values["detection_loss"]
        return values, tape.gradient(scaled, heads)

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla")
    values, gradients = run([tf.convert_to_tensor(head) for head in heads], targets)
    return {name: float(value) for name, value in values.items()}, [g.numpy() for g in gradients]


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        pytest.param(LIMITED, "eager", id="yolov4-limited-gradient"),
        pytest.param(WEIGHTED, "eager", id="yolov4-weighted"),
        pytest.param(TINY, "eager", id="tiny"),
        pytest.param(TINY, "xla", id="tiny-xla", marks=pytest.mark.slow),
    ],
)
def test_yolov4_loss_values_equal_darknets_rules_in_numpy(config, mode):
    targets = make_targets([BOXES, BOXES[3:4], []])
    heads = make_heads(config, 3, (96, 64))
    values, _ = value_and_gradients(heads, targets, config, mode=mode)
    expected, _ = darknet_rules.losses(heads, targets["boxes"].numpy(), targets["classes"].numpy(), config)
    np.testing.assert_allclose([values[name] for name in NAMES], expected, rtol=2e-5)
    assert values["detection_loss"] == pytest.approx(expected.sum(), rel=2e-5)
    assert all(value > 0 for value in values.values())


@pytest.mark.parametrize("config", [WEIGHTED, TINY], ids=["weighted", "tiny"])
def test_yolov4_loss_gradients_equal_central_differences(config):
    """Alpha and the ignore mask stay fixed, as in the computed gradients."""
    targets = make_targets([BOXES[:5]])
    heads = make_heads(config, 1, (32, 64), seed=1)
    _, gradients = value_and_gradients(heads, targets, config)
    boxes, classes = targets["boxes"].numpy(), targets["classes"].numpy()
    _, constants = darknet_rules.losses(heads, boxes, classes, config)
    moved = [head.astype(np.float64) for head in heads]
    for head, gradient in zip(moved, gradients, strict=True):
        numeric = np.zeros(head.shape)
        for index in np.ndindex(head.shape):
            before = head[index]
            sides = []
            for step in (1e-6, -1e-6):
                head[index] = before + step
                sides.append(darknet_rules.losses(moved, boxes, classes, config, constants)[0].sum())
            head[index] = before
            numeric[index] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(gradient, numeric, atol=2e-6, rtol=1e-4)


def test_box_gradients_of_published_models_equal_darknet_deltas():
    rows = [*BOXES, (0.51, 0.51, 0.53, 0.55, 0)]
    targets = make_targets([rows, []])
    boxes, classes = targets["boxes"][0].numpy().astype(float), targets["classes"][0].numpy()
    overlaps = []
    for model_name in ("yolov4", "yolov4-tiny"):
        config = dataclasses.replace(get_config(model_name), max_delta=0.0)
        assert config.box_gradient == "darknet"
        heads = make_heads(config, 2, (96, 64), seed=4, scale=2.0)
        heads[0][..., 2:4] -= 2.0
        for head, gradient in enumerate(box_gradients(heads, targets, config)):
            raw = heads[head][0].astype(np.float64)
            expected = np.zeros((*raw.shape[:3], 4))
            trained = darknet_rules.assign(boxes, classes, config, head, raw.shape[:2], NUM_CLASSES)
            for cell, numbers in trained.items():
                shared = len({classes[n] for n in numbers}) if config.iou_thresh < 1 else 1
                prediction = darknet_rules.decode(raw[cell][:4], config, head, *cell, grid_size=raw.shape[:2])
                for n in numbers:
                    delta = darknet_rules.box_delta(
                        raw[cell][:4], boxes[n], config, head, cell, raw.shape[:2]
                    )
                    expected[cell] += delta / shared
                    overlaps.append(darknet_rules.iou(prediction, boxes[n]))
            np.testing.assert_allclose(-2 * gradient[0], expected, rtol=1e-4, atol=1e-5)
            assert not gradient[1].any()
    assert min(overlaps) == 0 and max(overlaps) > 0.2


def box_gradients(heads, targets, config, **options):
    _, gradients = value_and_gradients(heads, targets, config, **options)
    return [gradient[..., :4] for gradient in gradients]


@pytest.mark.parametrize("config", [WEIGHTED, TINY], ids=["weighted", "tiny"])
def test_yolov4_max_delta_clips_the_gradient_of_each_box_before_gradients_are_summed_and_scaled(config):
    heads, scale = make_heads(config, 1, (64, 96), seed=3), 32768.0
    rows = BOXES[:5]
    config = dataclasses.replace(config, iou_normalizer=20.0)
    limited = dataclasses.replace(config, max_delta=0.8)
    expected, clipped = [np.zeros_like(head[..., :4]) for head in heads], 0
    for row in rows:
        gradients = box_gradients(heads, make_targets([[row]]), config)
        for total, gradient in zip(expected, gradients, strict=True):
            total += np.clip(gradient, -0.8, 0.8)
            clipped += (np.abs(gradient) > 0.8).sum()
    assert clipped > 10
    if config.iou_thresh < 1:
        boxes, classes = np.array(rows)[:, :4], [row[4] for row in rows]
        for head, total in enumerate(expected):
            trained = darknet_rules.assign(boxes, classes, config, head, total.shape[1:3], NUM_CLASSES)
            for cell, numbers in trained.items():
                total[(0, *cell)] /= len({classes[n] for n in numbers})
    twice = make_targets([rows, rows])
    gradients = box_gradients([np.concatenate([head, head]) for head in heads], twice, limited, scale=scale)
    for gradient, total in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient[:1] / scale, total / 2, atol=1e-5)


@pytest.mark.parametrize("config", [YOLOV4, DARKNET], ids=["exact", "darknet"])
def test_box_gradient_of_nan_and_infinite_outputs_is_finite(config):
    heads = make_heads(config, 1, (64, 96))
    for head, bad in zip(heads, (np.nan, np.inf, -np.inf), strict=True):
        head[..., 0] = bad
    for gradient in box_gradients(heads, make_targets([BOXES]), config):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("model_name", ["yolov4", "yolov4-nano"])
def test_loss_and_gradients_of_degenerate_boxes_and_extreme_outputs_are_finite(model_name):
    config = get_config(model_name)
    invalid = [(0.5, 0.5, 0.5, 0.5, 0), (0.2, 0.2, 0.2, 0.9, 1), (0.6, 0.6, 0.4, 0.4, 1)]
    invalid += [(np.nan, 0.1, 0.2, 0.3, 0), (0.1, 0.1, np.inf, 0.3, 0)]
    invalid += [(0.1, 0.1, 0.4, 0.3, number) for number in (-1, NUM_CLASSES)]
    valid = [(0.5, 0.5, 0.5 + 1e-7, 0.5 + 1e-7, 2), (1e-30, 1e-30, 2e-30, 1e-3, 2), (0.0, 0.0, 1.0, 1.0, 2)]
    valid += [*[(0.3, 0.3, 0.5, 0.8, 1)] * 3, (1.0 - 1e-7, 0.0, 1.0, 1.0, 0)]
    targets = make_targets([invalid + valid, [], invalid, valid[2:3], valid], max_instances=14)
    rng = np.random.default_rng(0)
    heads = make_heads(config, 5, (64, 96))
    for head in heads:
        head[0] = rng.choice([-1e4, 1e4], head[0].shape)
        head[4] = rng.choice([-1e4, -50, -20, 0, 20, 50, 1e4], head[4].shape)
        head[3], head[2], head[1] = 1e4, -1e4, 0.0
    values, gradients = value_and_gradients(heads, targets, config)
    assert all(np.isfinite(value) for value in values.values())
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not any(gradient[1:3, ..., :4].any() for gradient in gradients)


def test_loss_of_half_precision_outputs_is_float32():
    heads = [tf.cast(head, tf.float16) for head in make_heads(YOLOV4, 1, (64, 96))]
    targets = make_targets([BOXES])
    expected, gradients = value_and_gradients([tf.cast(head, tf.float32) for head in heads], targets, YOLOV4)
    with tf.GradientTape() as tape:
        tape.watch(heads)
        values = losses.detection_loss(heads, targets, YOLOV4)
    assert {value.dtype for value in values.values()} == {tf.float32}
    assert {name: float(value) for name, value in values.items()} == pytest.approx(expected, rel=1e-6)
    for a, b in zip(tape.gradient(values["detection_loss"], heads), gradients, strict=True):
        assert a.dtype == tf.float16
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_loss_and_gradients_on_gpu_equal_cpu(mode):
    heads, targets = make_heads(YOLOV4, 2, (128, 192)), make_targets([BOXES, []])
    with tf.device("cpu"):
        expected, gradients = value_and_gradients(heads, targets, YOLOV4)
    with tf.device("gpu"):
        values, gpu_gradients = value_and_gradients(heads, targets, YOLOV4, mode=mode)
    assert values == pytest.approx(expected, rel=1e-5)
    for a, b in zip(gradients, gpu_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_l2_gradient_is_weight_decay_times_each_kernel_and_none_for_other_variables():
    values = {"kernel": [[1.0, -2.0]], "other_kernel": [3.0], "bias": [4.0], "gamma": [5.0]}
    variables = [keras.Variable(value, name=name) for name, value in values.items()]
    with tf.GradientTape() as tape:
        value = losses.l2_loss(variables, 5e-4)
    assert float(value) == pytest.approx(5e-4 * (1 + 4 + 9) / 2)
    kernel, other, *none = tape.gradient(value, [v.value for v in variables])
    np.testing.assert_allclose(kernel, [[5e-4, -1e-3]], rtol=1e-5)
    np.testing.assert_allclose(other, [1.5e-3], rtol=1e-5)
    assert none == [None, None]
    assert float(losses.l2_loss([], 5e-4)) == 0.0
