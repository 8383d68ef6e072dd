import dataclasses

import cv2
import numpy as np
import pytest
import tensorflow as tf

from tests.common.reading import Scripted
from tests.yolov4.darknet_rules import darknet_axis
from tests.yolov4.rectangles import INPUT, PLAIN, SIZES
from yolov4 import tf_pipeline

ODD_SIZES = [(1, 1), (1, 700), (700, 1), (2, 2), (3, 1), (2, 5), (4001, 3072)]


@pytest.mark.parametrize("keep_aspect", [True, False])
def test_jittered_view_is_darknets(keep_aspect):
    random = np.random.default_rng(0)
    differences = 0
    for size in [*SIZES, *ODD_SIZES]:
        for image_size in (INPUT, (320, 608)):
            for _ in range(5):
                edges = random.integers(-31, 32, (2, 2)) / 64  # 64ths, so that halves are frequent and exact
                draws = Scripted((-0.3, 0.3, (2, 2), edges))
                sizes = tf.constant(size), tf.constant(image_size)
                window, place = tf_pipeline.jittered_crop(*sizes, 0.3, keep_aspect, draws)
                for axis in (0, 1):
                    sides = size[axis], size[1 - axis], image_size[axis], image_size[1 - axis]
                    expected = darknet_axis(*sides, *edges[:, axis], keep_aspect)
                    got = window[axis], window[2 + axis], place[axis], place[2 + axis]
                    differences += tuple(map(int, got)) != expected
                    assert np.abs(np.subtract(got, expected)).max() <= 1
    assert differences <= (2 if keep_aspect else 0)  # float32 rounds some halves differently


def test_flip_moves_pixels_boxes_and_padding_together_or_not_at_all():
    image = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
    boxes = np.array([[1, 1, 3, 4.5], [0, 0, 8, 5]], np.float32)
    place = tf.constant([1, 1, 4, 5])
    for draw in (0.29, 0.3):
        draws = Scripted((0.0, 1.0, (), draw))
        got, got_boxes, got_place = tf_pipeline.random_flip(image, boxes, place, 0.3, draws)
        is_turned = draw < 0.3
        np.testing.assert_array_equal(got, image[:, ::-1] if is_turned else image)
        np.testing.assert_array_equal(got_boxes, [[5, 1, 7, 4.5], [0, 0, 8, 5]] if is_turned else boxes)
        assert got_place.numpy().tolist() == [1, 2 if is_turned else 1, 4, 5]


@pytest.mark.parametrize("turn", [-36.0, 0.0, 25.0])
@pytest.mark.parametrize("saturation, value", [(1.0, 1.0), (1.4, 1 / 1.3), (1 / 1.5, 1.5)])
def test_hsv_is_opencv_s(turn, saturation, value):
    """A factor f becomes 1 / f if its second random number is at least 1/2."""
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    draws = [(-36.0, 36.0, (), turn)]
    for factor, limit in ((saturation, 1.5), (value, 2.0)):
        drawn = (factor, 0.49) if factor >= 1 else (1 / factor, 0.5)
        draws += [(1.0, limit, (), drawn[0]), (0.0, 1.0, (), drawn[1])]
    got = tf_pipeline.random_hsv(tf.constant(image), 36.0, 1.5, 2.0, Scripted(*draws)).numpy()
    hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)
    hsv[..., 0] = (hsv[..., 0] + turn) % 360
    hsv[..., 1:] = np.minimum(hsv[..., 1:] * (saturation, value), 1.0)
    expected = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * 255
    assert np.abs(got - expected).max() < 0.51 + 0.02


def test_multi_scale_draws_every_size_alike():
    config = dataclasses.replace(PLAIN, multi_scale=1.5)
    low, high = config.size_range
    assert (low, high) == (3, 6)
    for draw in (0.0, 1.99, 2.0, 3.99):
        draws = Scripted((0.0, 4, (), draw))
        expected = config.bucket(low + int(draw))
        assert tuple(tf_pipeline.input_size(config, True, draws).numpy()) == expected
    for fixed, training in ((config, False), (PLAIN, True)):
        assert tuple(tf_pipeline.input_size(fixed, training, Scripted()).numpy()) == INPUT
