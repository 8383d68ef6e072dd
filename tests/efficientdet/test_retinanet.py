"""Tests RetinaNet (resnet.py, retinanet.py) with outputs of keras-hub, and numbers of odtk and the paper."""

import numpy as np
import pytest

from efficientdet.config import MODEL_NAMES, get_config
from efficientdet.model import build_model
from tests.efficientdet.networks import summarize_outputs

# The result of networks.summarize_outputs for 7 classes and images of 160 x 288 pixels. The model consists of
# keras-hub 0.32.0's ResNetBackbone and FeaturePyramid (use_p5=True), and of heads made with tf.nn.conv2d.
KERAS_HUB_RN18 = [
    [0.35896, 0.37854, 0.31640, 0.30929, 0.29189],
    [0.12557, 0.08872, 0.08856, -0.01506, 0.01447],
    [0.35305, 0.33679, 0.30330, 0.29563, 0.28251],
    [0.07628, 0.16416, 0.24070, 0.12991, 0.11894],
]


def test_retinanet_outputs_equal_keras_hub():
    outputs = summarize_outputs(build_model("retinanet-rn18fpn", 7, (160, 288)), training=False)
    np.testing.assert_allclose(outputs, KERAS_HUB_RN18, atol=5e-5)


def test_retinanet_settings_and_anchors_equal_those_of_odtk():
    rows = [name for name in MODEL_NAMES if name.startswith("retinanet-") and name.endswith("fpn")]
    assert len(rows) == 6
    for row in map(get_config, rows):
        assert (row.fpn_channels, row.head_repeats, row.min_level, row.max_level) == (256, 4, 3, 7)
        assert (row.anchor_scale, row.num_scales, row.aspect_ratios) == (4.0, 3, (1.0, 2.0, 0.5))
        sides = row.anchors.boxes[:, 2:] - row.anchors.boxes[:, :2]
        np.testing.assert_allclose(sides[0], [32, 32], rtol=1e-6)  # arXiv 1708.02002: area 32**2 at level 3
        np.testing.assert_allclose(sides[-9], [512, 512], rtol=1e-6)  # the paper has area 512**2 at level 7


def test_retinanet_heads_share_weights_start_small_and_have_no_batch_norm():
    model = build_model("retinanet-nano", 3, (64, 96))
    heads = {weight.path for weight in model.weights if "_net." in weight.path}
    assert heads == {
        f"{net}.{layer}/{kind}"
        for net in ("class_net", "box_net")
        for layer in ("conv_0", "conv_1", "predict")
        for kind in ("kernel", "bias")
    }
    kernel = np.asarray(model.get_layer("box_net.conv_1").kernel)
    assert kernel.std() == pytest.approx(0.01, rel=0.05)  # as in section 4.1 of arXiv 1708.02002
