"""RetinaNet: outputs and parameters against other implementations, the loss against odtk's formula."""

import dataclasses
import json
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from common import hparams
from common.training.fine_tuning import freeze
from efficientdet import losses
from efficientdet.backbone import extract_features
from efficientdet.config import MODEL_NAMES, EfficientDetConfig, get_config
from efficientdet.model import build_model
from efficientdet.resnet import RESNETS

# Mean absolute value, and the value [1, -1, -1, 5], of each output of another implementation for 7 classes,
# 160 x 288 pixels and the numbers of `pseudo_random` as weights and images: keras-hub 0.32.0's ResNetBackbone
# and FeaturePyramid (use_p5=True) and, in the heads, tf.nn.conv2d. Class levels, then box levels.
KERAS_HUB = {
    "retinanet-rn18fpn": [
        (0.35896, 0.12557),
        (0.37854, 0.08872),
        (0.31640, 0.08856),
        (0.30929, -0.01506),
        (0.29189, 0.01447),
        (0.35305, 0.07628),
        (0.33679, 0.16416),
        (0.30330, 0.24070),
        (0.29563, 0.12991),
        (0.28251, 0.11894),
    ],
    "retinanet-rn50fpn": [
        (0.34268, 0.08884),
        (0.32443, -0.02211),
        (0.31704, 0.07228),
        (0.30853, 0.02392),
        (0.29091, 0.03013),
        (0.33790, 0.30482),
        (0.33860, 0.16934),
        (0.30959, 0.19960),
        (0.29461, 0.14678),
        (0.28272, 0.11650),
    ],
}

NANO = get_config("retinanet-nano")


def pseudo_random(shape, seed):
    """float64 in (-0.5, 0.5), the same on every machine and for every version of NumPy."""
    index = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + seed
    return np.modf(np.abs(np.sin(index)) * 43758.5453)[0] - 0.5


@pytest.fixture(scope="module", params=KERAS_HUB)
def published(request) -> keras.Model:
    """A published row for 7 classes."""
    return build_model(request.param, 7, (160, 288))


def test_outputs_equal_another_implementation(published):
    model = published
    for weight in model.weights:
        value = pseudo_random(weight.shape, zlib.crc32(weight.path.encode()))
        if weight.name == "kernel":
            value *= 3 / np.sqrt(np.prod(weight.shape[:-1]))
        elif weight.name in ("gamma", "moving_variance"):
            value += 1
        weight.assign(value)
    class_logits, box_deltas = model(4 * pseudo_random((2, 160, 288, 3), 0))
    outputs = [np.asarray(output) for output in class_logits + box_deltas]
    actual = [(np.abs(output).mean(), output[1, -1, -1, 5]) for output in outputs]
    np.testing.assert_allclose(actual, KERAS_HUB[model.name], atol=5e-5)


# torchvision's documentation of each model, num_params; and its classifier, which a detector leaves out.
TORCHVISION = {
    "rn18": 11_689_512 - (512 * 1000 + 1000),
    "rn34": 21_797_672 - (512 * 1000 + 1000),
    "rn50": 25_557_032 - (2048 * 1000 + 1000),
    "rn101": 44_549_160 - (2048 * 1000 + 1000),
    "rn152": 60_192_808 - (2048 * 1000 + 1000),
    # and the last 1x1 convolution with its batch norm
    "mobilenetv2": 3_504_872 - (1280 * 1000 + 1000) - (320 * 1280 + 2 * 1280),
}


def convolution(kernel: int, inputs: int, outputs: int) -> int:
    return kernel * kernel * inputs * outputs + outputs


def pyramid_and_heads(taps: tuple[int, int, int], num_classes: int) -> int:
    """Counted from odtk/backbones/fpn.py and odtk/model.py."""
    return (
        sum(convolution(1, channels, 256) for channels in taps)
        + 3 * convolution(3, 256, 256)
        + convolution(3, taps[2], 256)
        + convolution(3, 256, 256)
        + 2 * 4 * convolution(3, 256, 256)
        + convolution(3, 256, 9 * num_classes)
        + convolution(3, 256, 9 * 4)
    )


def num_trainable(model: keras.Model) -> int:
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)


def test_parameters_are_those_of_torchvision_and_odtk(published):
    name, taps = {
        "retinanet-rn18fpn": ("rn18", (128, 256, 512)),
        "retinanet-rn50fpn": ("rn50", (512, 1024, 2048)),
    }[published.name]
    assert num_trainable(published) == TORCHVISION[name] + pyramid_and_heads(taps, 7)


def test_parameters_of_mobilenet():
    model = build_model("retinanet-mobilenetv2fpn", 80, (64, 64))
    assert num_trainable(model) == TORCHVISION["mobilenetv2"] + pyramid_and_heads((32, 96, 320), 80)


@pytest.mark.parametrize(
    ("name", "taps", "expected"),
    [
        ("rn18", (128, 256, 512), 21_410_100),
        ("rn34", (128, 256, 512), 31_518_260),
        ("rn50", (512, 1024, 2048), 37_968_692),
        ("rn101", (512, 1024, 2048), 56_960_820),
        ("rn152", (512, 1024, 2048), 72_604_468),
        ("mobilenetv2", (32, 96, 320), 11_488_244),
    ],
)
def test_parameters_that_the_documentation_has(name, taps, expected):
    """For COCO's 80 classes."""
    assert TORCHVISION[name] + pyramid_and_heads(taps, 80) == expected


def test_parameters_of_rn50_from_torchvisions_own_retinanet():
    """retinanet_resnet50_fpn, num_params: 91 classes, batch norms not counted, level 6 from level 5."""
    batch_norms = 53_120
    level_6 = convolution(3, 2048, 256) - convolution(3, 256, 256)
    counted = TORCHVISION["rn50"] + pyramid_and_heads((512, 1024, 2048), 91)
    assert counted == 34_014_999 + batch_norms + level_6


@pytest.mark.parametrize("name", ["rn18", "rn34", "rn50", "rn101", "rn152"])
def test_the_table_of_resnets_has_torchvisions_parameters(name):
    """Counted from the table, without building the large ones."""
    depth = RESNETS[get_config(f"retinanet-{name}fpn").backbone]
    counted, inputs = 7 * 7 * 3 * 64 + 2 * 64, 64
    for stage, blocks in enumerate(depth.blocks):
        inner = 64 * 2**stage
        outputs = 4 * inner if depth.bottleneck else inner
        for _ in range(blocks):
            if depth.bottleneck:
                counted += inputs * inner + 9 * inner * inner + inner * outputs + 4 * inner + 2 * outputs
            else:
                counted += 9 * inputs * inner + 9 * inner * inner + 4 * inner
            if inputs != outputs:
                counted += inputs * outputs + 2 * outputs
            inputs = outputs
    assert counted == TORCHVISION[name]


def test_every_published_row_is_odtks_structure():
    rows = [name for name in MODEL_NAMES if name.startswith("retinanet-") and name.endswith("fpn")]
    assert len(rows) == 6
    for row in map(get_config, rows):
        assert (row.fpn_channels, row.head_repeats, row.min_level, row.max_level) == (256, 4, 3, 7)
        assert (row.anchor_scale, row.num_scales, row.aspect_ratios) == (4.0, 3, (1.0, 2.0, 0.5))
        sides = row.anchors.boxes[:, 2:] - row.anchors.boxes[:, :2]
        np.testing.assert_allclose(sides[0], [32, 32], rtol=1e-6)  # arXiv 1708.02002: areas from 32**2 ...
        np.testing.assert_allclose(sides[-9], [512, 512], rtol=1e-6)  # ... to 512**2


def test_mobilenet_equals_keras_applications_with_the_same_weights():
    """On odd sides, where Keras' padding is symmetric as well."""
    size = (65, 97, 3)
    reference = keras.applications.MobileNetV2(input_shape=size, include_top=False, weights=None)
    taps = ["block_5_add", "block_12_add", "block_16_project_BN"]
    reference = keras.Model(reference.inputs, [reference.get_layer(tap).output for tap in taps])
    images = keras.Input(size)
    features = extract_features(images, "mobilenet-v2")
    model = keras.Model(images, [features[level] for level in (3, 4, 5)])

    rng = np.random.default_rng(0)
    assert [weight.shape for weight in model.weights] == [weight.shape for weight in reference.weights]
    for weight, other in zip(model.weights, reference.weights, strict=True):
        value = rng.normal(0, np.sqrt(2 / np.prod(weight.shape[:-1])), weight.shape)
        if weight.name in ("gamma", "moving_variance"):
            value = rng.uniform(0.5, 1.5, weight.shape)
        elif weight.name in ("beta", "moving_mean"):
            value = rng.normal(0, 0.1, weight.shape)
        weight.assign(value)
        # ours has PyTorch's epsilon of 1e-5, keras.applications 1e-3
        other.assign(value - (1e-3 - 1e-5) if weight.name == "moving_variance" else value)
    images = rng.normal(size=(2, *size)).astype(np.float32)
    for actual, expected in zip(model(images), reference(images), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize("image_size", [(64, 96), (65, 131), (40, 33)])
def test_outputs_fit_the_anchors_at_any_image_size(image_size):
    config = dataclasses.replace(NANO, image_size=image_size)
    model = build_model("retinanet-nano", 3, image_size)
    class_logits, box_deltas = model(np.zeros((2, *image_size, 3), np.float32))
    assert [tuple(x.shape) for x in class_logits] == [(2, *size, 27) for size in config.anchors.feature_sizes]
    assert [tuple(x.shape) for x in box_deltas] == [(2, *size, 36) for size in config.anchors.feature_sizes]
    for logits in class_logits:
        np.testing.assert_allclose(tf.sigmoid(logits), 0.01, rtol=0.1)


def test_heads_are_shared_and_have_no_batch_norm():
    model = build_model("retinanet-nano", 3, (64, 96))
    heads = {weight.path for weight in model.weights if "_net." in weight.path}
    assert heads == {
        f"{net}.{layer}/{kind}"
        for net in ("class_net", "box_net")
        for layer in ("conv_0", "conv_1", "predict")
        for kind in ("kernel", "bias")
    }


def test_every_weight_gets_a_gradient():
    model = build_model("retinanet-nano", 3, (128, 128))
    images = np.random.default_rng(0).normal(size=(2, 128, 128, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(tf.sin(x)) for x in tf.nest.flatten(model(images, training=True))])
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    assert all(gradient is not None and np.isfinite(gradient).all() for gradient in gradients)


def test_loss_is_odtks_but_for_one_more_positive():
    """odtk/loss.py: sums of focal loss and smooth L1 over the number of positive anchors."""
    config = dataclasses.replace(get_config("retinanet-rn18fpn"), min_level=5, max_level=5)
    rng = np.random.default_rng(3)
    logits = rng.normal(scale=2, size=(2, 3, 5, 9 * 4)).astype(np.float32)
    classes = rng.integers(-1, 4, (2, 3, 5, 9)).astype(np.int32)
    deltas, box_targets = rng.normal(scale=0.2, size=(2, 2, 3, 5, 36)).astype(np.float32)
    positive = classes >= 0
    targets = {
        "num_positives": tf.constant(positive.sum((1, 2, 3)), tf.float32),
        "class_targets_5": tf.constant(classes),
        "box_targets_5": tf.constant(box_targets),
    }
    values = losses.detection_loss([logits], [deltas], targets, config)

    p = 1 / (1 + np.exp(-logits.astype(np.float64).reshape(-1, 4)))
    is_class = classes.reshape(-1, 1) == np.arange(4)
    p_t, alpha = np.where(is_class, p, 1 - p), np.where(is_class, 0.25, 0.75)
    focal = (alpha * (1 - p_t) ** 2 * -np.log(p_t)).sum()
    x = np.abs(deltas.astype(np.float64) - box_targets).reshape(-1, 4)
    smooth_l1 = np.where(x >= 0.11, x - 0.5 * 0.11, 0.5 * x**2 / 0.11)[positive.reshape(-1)].sum()
    expected = (focal + smooth_l1) / (positive.sum() + 1)
    np.testing.assert_allclose(values["detection_loss"], expected, rtol=1e-5)


def test_frozen_batch_norms_stay_as_they_are():
    """--freeze=backbone.*bn is odtk's FixedBatchNorm2d."""
    model = build_model("retinanet-nano", 3, (64, 64))
    freeze(model, r"backbone.*bn")
    norms = [layer for layer in model.layers if layer.name.endswith("bn")]
    assert norms and not any(layer.trainable_weights for layer in norms)
    before = [np.array(weight) for layer in norms for weight in layer.weights]
    model(np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32), training=True)
    after = [np.array(weight) for layer in norms for weight in layer.weights]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert model.get_layer("backbone.stem.conv").trainable_weights


def test_settings_of_another_family_are_a_choice():
    """EfficientDet's pyramid takes the other backbones, RetinaNet's an EfficientNet."""
    nano = get_config("efficientdet-nano")
    for config in (
        dataclasses.replace(nano, backbone="mobilenet-v2", fpn_cells=1, head_repeats=1),
        dataclasses.replace(NANO, backbone="efficientnet-nano", max_level=5),
    ):
        model = build_model(config.model_name, 3, (64, 96), config)
        assert len(model.outputs) == 2 * len(config.anchors.levels)


def test_older_configs_are_still_read():
    config = get_config("efficientdet-d0")
    new = ("architecture", "antialias", "lr_schedule", "iterations", "milestones", "warmup_iterations")
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in (*new, "lr_step_factor")}
    assert hparams.from_json(EfficientDetConfig, json.loads(json.dumps(fields))) == config
