"""Tests model.py and network.py against Darknet's public cfg files and published sizes."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from yolov4.config import get_config
from yolov4.model import build_model
from yolov4.network import describe

TINY = get_config("yolov4-tiny")
NANO = get_config("yolov4-nano")

# The layers in Darknet's yolov4.cfg and yolov4-tiny.cfg, one word for each. 64x3/2 is a convolution with 64
# filters of 3 x 3 and stride 2. m: mish, l: leaky, !: linear without batch norm, r: route (h: the second of
# two groups), s: shortcut, p: maxpool, u: upsample, y: yolo with the indices of its anchors.
DARKNET = {
    "yolov4": """
        32x3m 64x3/2m 64x1m r-2 64x1m 32x1m 64x3m s-3 64x1m r-1,-7 64x1m 128x3/2m 64x1m r-2 64x1m
        64x1m 64x3m s-3 64x1m 64x3m s-3 64x1m r-1,-10 128x1m 256x3/2m 128x1m r-2 128x1m
        128x1m 128x3m s-3 128x1m 128x3m s-3 128x1m 128x3m s-3 128x1m 128x3m s-3
        128x1m 128x3m s-3 128x1m 128x3m s-3 128x1m 128x3m s-3 128x1m 128x3m s-3 128x1m r-1,-28 256x1m
        512x3/2m 256x1m r-2 256x1m 256x1m 256x3m s-3 256x1m 256x3m s-3 256x1m 256x3m s-3 256x1m 256x3m s-3
        256x1m 256x3m s-3 256x1m 256x3m s-3 256x1m 256x3m s-3 256x1m 256x3m s-3 256x1m r-1,-28 512x1m
        1024x3/2m 512x1m r-2 512x1m 512x1m 512x3m s-3 512x1m 512x3m s-3 512x1m 512x3m s-3 512x1m 512x3m s-3
        512x1m r-1,-16 1024x1m 512x1l 1024x3l 512x1l p5 r-2 p9 r-4 p13 r-1,-3,-5,-6 512x1l 1024x3l 512x1l
        256x1l u r85 256x1l r-1,-3 256x1l 512x3l 256x1l 512x3l 256x1l
        128x1l u r54 128x1l r-1,-3 128x1l 256x3l 128x1l 256x3l 128x1l 256x3l 255x1! y0,1,2
        r-4 256x3/2l r-1,-16 256x1l 512x3l 256x1l 512x3l 256x1l 512x3l 255x1! y3,4,5
        r-4 512x3/2l r-1,-37 512x1l 1024x3l 512x1l 1024x3l 512x1l 1024x3l 255x1! y6,7,8""",
    "yolov4-tiny": """
        32x3/2l 64x3/2l 64x3l r-1h 32x3l 32x3l r-1,-2 64x1l r-6,-1 p2/2
        128x3l r-1h 64x3l 64x3l r-1,-2 128x1l r-6,-1 p2/2 256x3l r-1h 128x3l 128x3l r-1,-2 256x1l r-6,-1 p2/2
        512x3l 256x1l 512x3l 255x1! y3,4,5 r-4 128x1l u r-1,23 256x3l 255x1! y1,2,3""",
}


def word(layer, config):
    """Returns the layer in the notation of DARKNET. Numbers of other layers are relative, so negative."""
    back = ",".join(str(index - layer.index) for index in layer.inputs)
    options = layer.options
    stride = "/2" if options.get("stride") == 2 else ""
    match layer.kind:
        case "convolutional":
            activation = {"mish": "m", "leaky": "l", "linear": "!"}[options["activation"]]
            assert ("batch_normalize" in options) == (activation != "!")
            assert options["filters"] == layer.channels
            return f"{layer.channels}x{options['size']}{stride}{activation}"
        case "route":
            return f"r{back}{'h' if options.get('groups') == 2 else ''}"
        case "shortcut":
            assert layer.inputs[0] == layer.index - 1
            return f"s{layer.inputs[1] - layer.index}"
        case "maxpool":
            return f"p{options['size']}{stride}"
        case "upsample":
            return "u"
        case "yolo":
            return "y" + ",".join(str(anchor) for anchor in config.masks[options["head"]])
    raise AssertionError(layer)


@pytest.mark.parametrize("name", list(DARKNET))
def test_yolov4_network_layers_equal_those_of_darknets_public_cfg(name):
    expected = DARKNET[name].split()
    for index, text in enumerate(expected):  # in r85, r54 and r-1,23, layer numbers are absolute
        if text[0] == "r" and not text.endswith("h"):
            numbers = [int(number) for number in text[1:].split(",")]
            expected[index] = "r" + ",".join(str(n if n < 0 else n - index) for n in numbers)
    assert [word(layer, get_config(name)) for layer in describe(get_config(name), 80)] == expected


def convolutions(model):
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]


def test_networks_have_the_published_parameters_operations_and_outputs(published_yolov4):
    tiny = build_model("yolov4-tiny", 80)
    for model, weights, trained, layers, billions_of_operations, sides in (
        (published_yolov4, 64_429_405, 64_363_101, 110, 128.4, (76, 38, 19)),
        (tiny, 6_062_814, 6_056_606, 21, 6.9, (26, 13)),
    ):
        assert model.count_params() == weights
        assert sum(math.prod(weight.shape) for weight in model.trainable_weights) == trained
        assert len(convolutions(model)) == layers
        # A multiply-add counts as two operations, as in Darknet.
        operations = sum(
            2 * np.prod(layer.output.shape[1:3]) * np.prod(layer.kernel.shape)
            for layer in convolutions(model)
        )
        assert operations / 1e9 == pytest.approx(billions_of_operations, abs=0.05)
        assert [output.shape for output in model.outputs] == [(None, s, s, 3, 85) for s in sides]


def test_yolov4_layer_widths_scaled_by_the_width_factor_are_multiples_of_eight():
    """0.3 * 64 = 19.2 filters become 16."""
    layers = describe(dataclasses.replace(TINY, width=0.3), 4)
    channels = [layer.channels for layer in layers if "batch_normalize" in layer.options]
    assert channels[:3] == [8, 16, 16] and 152 in channels
    thin = describe(dataclasses.replace(TINY, width=0.01), 4)
    assert {layer.channels for layer in thin if "batch_normalize" in layer.options} == {8}


def test_model_of_any_size_and_model_rebuilt_from_its_config_give_equal_outputs():
    images = np.random.default_rng(0).random((2, 64, 128, 3), np.float32)
    thin = dataclasses.replace(TINY, width=0.25)
    fixed = build_model("yolov4-tiny", 3, (64, 128), config=thin)
    free = build_model("yolov4-tiny", 3, config=thin, any_size=True)
    rebuilt = keras.Model.from_config(free.get_config())
    assert rebuilt.input_shape == (None, None, None, 3)
    assert [output.shape for output in rebuilt.outputs] == 2 * [(None, None, None, 3, 8)]
    for model in (free, rebuilt):
        model.set_weights(fixed.get_weights())
        for expected, actual in zip(fixed(images), model(images), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert model(images[:, :32, :96])[0].shape == (2, 2, 6, 3, 8)


def test_layer_names_begin_with_backbone_neck_or_head_and_the_darknet_layer_number(published_yolov4):
    named = {}
    for layer in convolutions(published_yolov4):
        part, number, kind = layer.name.split(".")
        assert kind == "conv"
        named[int(number.removeprefix("layer_"))] = part
    assert {n for n, part in named.items() if part == "backbone"} == {n for n in named if n <= 104}
    assert sorted(n for n, part in named.items() if part == "head") == [137, 138, 148, 149, 159, 160]


def test_initial_kernels_are_uniform_as_in_darknet():
    """Darknet: rand_uniform(-1, 1) * sqrt(2 / (size * size * input channels))."""
    model = build_model("yolov4-tiny", 80, (64, 64))
    for layer in convolutions(model):
        kernel = np.asarray(layer.kernel)
        size, _, inputs, _ = kernel.shape
        limit = np.sqrt(2 / (size * size * inputs))
        assert 0.98 * limit < np.abs(kernel).max() <= limit * (1 + 1e-6), layer.name
        np.testing.assert_allclose(kernel.std(), limit / np.sqrt(3), rtol=0.05, err_msg=layer.name)


def test_initial_batch_norms_and_biases_equal_darknet():
    config = dataclasses.replace(NANO, objectness_bias=-3.0, class_prior=False)
    model = build_model("yolov4-nano", 4, (64, 64), config=config)
    for layer in model.layers:
        if layer.name.endswith(".bn"):
            assert layer.epsilon == 1e-5
            assert layer.momentum == NANO.bn_momentum
            for values, expected in ((layer.gamma, 1), (layer.beta, 0), (layer.moving_mean, 0)):
                np.testing.assert_array_equal(values, expected)
            np.testing.assert_array_equal(layer.moving_variance, 1)
        elif layer.name in ("head.layer_30.conv", "head.layer_37.conv", "head.layer_45.conv"):
            np.testing.assert_array_equal(layer.bias, 3 * [0, 0, 0, 0, -3, 0, 0, 0, 0])
    heads = build_model("yolov4-nano", 2, (64, 64))(np.zeros((1, 64, 64, 3), np.float32))
    np.testing.assert_allclose(heads[0][..., 4], NANO.objectness_bias)


def test_class_prior_starts_class_probabilities_at_one_over_their_number():
    for num_classes, expected in ((1, 0.5), (2, 0.5), (4, 0.25), (80, 1 / 80)):
        config = dataclasses.replace(NANO, class_prior=True)
        model = build_model("yolov4-nano", num_classes, (64, 64), config=config)
        for head in model(np.zeros((1, 64, 64, 3), np.float32)):
            np.testing.assert_allclose(tf.sigmoid(head[..., 5:]), expected, rtol=1e-6)
            np.testing.assert_allclose(head[..., 4], NANO.objectness_bias)


def test_mixed_precision_model_has_float32_outputs_and_variables():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        config = dataclasses.replace(get_config("yolov4"), width=0.1)
        model = build_model("yolov4", 3, (32, 64), config=config)
    finally:
        keras.config.set_dtype_policy(before)
    heads = model(np.ones((2, 32, 64, 3), np.float32), training=True)
    assert {head.dtype for head in heads} == {tf.float32}
    for head in heads:
        assert not np.array_equal(head, tf.cast(tf.cast(head, tf.float16), tf.float32))
    assert {weight.dtype for weight in model.weights} == {"float32"}
    kinds = ("conv", "bn", "mish", "leaky", "add", "pool", "upsample", "concat")
    inner = [layer for layer in model.layers if layer.name.split(".")[-1] in kinds]
    linear = [layer for layer in inner if getattr(layer, "use_bias", False)]
    assert {layer.output.dtype for layer in linear} == {"float32"}
    assert {layer.output.dtype for layer in inner if layer not in linear} == {"float16"}


def test_compiled_convolution_with_mish_equals_eager_one(published_yolov4):
    mish = published_yolov4.get_layer("backbone.layer_0.mish")
    model = keras.Model(published_yolov4.input, mish.output)
    images = np.random.default_rng(0).random((1, 608, 608, 3), np.float32)
    compiled = tf.function(lambda images: model(images, training=False))
    np.testing.assert_allclose(compiled(images), model(images), rtol=1e-4, atol=1e-4)
