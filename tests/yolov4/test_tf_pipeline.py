"""The tf.data twin: equal to DALI where nothing is random; by given draws, Darknet's and OpenCV's results."""

import dataclasses

import cv2
import numpy as np
import pytest
import tensorflow as tf

from common.datacheck.datasets import open_coco
from common.errors import UserError
from tests.yolov4.rectangles import INPUT, OFF, PLAIN, SIZES, make
from tests.yolov4.test_crops import ODD_SIZES, darknet_axis
from yolov4 import tf_pipeline
from yolov4.config import get_config

NANO = dataclasses.replace(get_config("yolov4-nano"), image_size=INPUT, **OFF)


def compare_twins(source, config, batch_size) -> None:
    loaders = [
        make(source, kind, config, batch_size=batch_size, training=False, count_lost=True)
        for kind in ("dali_cpu", "tensorflow")
    ]
    steps = loaders[0].steps_per_epoch
    seen = set()
    for (images, targets), (tf_images, tf_targets) in zip(
        *(loader.dataset().take(steps) for loader in loaders), strict=True
    ):
        for i, image_id in enumerate(targets["image_ids"].numpy()):
            if image_id in seen:  # both repeat images at the end, not the same ones
                continue
            seen.add(image_id)
            levels = np.abs(images[i] - tf_images[i]) * 255
            assert levels.mean() < 0.5
            top, left, height, width = targets["letterbox"][i].numpy().astype(int)
            # The filters end differently at the border.
            assert levels[top + 1 : top + height - 1, left + 1 : left + width - 1].max() < 1.5
            for name, tensor in targets.items():
                np.testing.assert_allclose(
                    tf_targets[name][i], tensor[i], atol=1e-6, err_msg=f"{name} of image {image_id}"
                )
    assert len(seen) == source.size


@pytest.mark.parametrize("keep_aspect, antialias", [(True, True), (False, True), (False, False)])
def test_equals_dali_on_drawn_images(rectangles, keep_aspect, antialias):
    compare_twins(rectangles, dataclasses.replace(NANO, letterbox=keep_aspect, antialias=antialias), 5)


def test_equals_dali_on_photographs(coco128):
    source = open_coco(str(coco128 / "images"), str(coco128 / "instances.json"))
    compare_twins(source, dataclasses.replace(NANO, letterbox=True), 16)


# --- the stages that chance decides, by given numbers ---


class Draws:
    """Stands in for Random: gives these numbers, one a call, and remembers what was asked for."""

    def __init__(self, *values) -> None:
        self._values = list(values)
        self.asked = []

    def uniform(self, low, high, shape=()):
        self.asked.append((low, high, *shape))
        return tf.constant(self._values.pop(0), tf.float32)


@pytest.mark.parametrize("keep_aspect", [True, False])
def test_jittered_view_is_darknets(keep_aspect):
    random = np.random.default_rng(0)
    differences = 0
    for size in [*SIZES, *ODD_SIZES]:
        for image_size in (INPUT, (320, 608)):
            for _ in range(5):
                edges = random.integers(-31, 32, (2, 2)) / 64  # 64ths: halves are met exactly
                draws = Draws(edges)
                sizes = tf.constant(size), tf.constant(image_size)
                window, place = tf_pipeline.jittered_crop(*sizes, 0.3, keep_aspect, draws)
                assert draws.asked == [(-0.3, 0.3, 2, 2)]
                for axis in (0, 1):
                    sides = size[axis], size[1 - axis], image_size[axis], image_size[1 - axis]
                    expected = darknet_axis(*sides, *edges[:, axis], keep_aspect)
                    got = window[axis], window[2 + axis], place[axis], place[2 + axis]
                    differences += tuple(map(int, got)) != expected
                    assert np.abs(np.subtract(got, expected)).max() <= 1
    assert differences <= (2 if keep_aspect else 0)  # a half that float32 and float64 round apart


def test_flip_moves_pixels_boxes_and_padding_together_or_not_at_all():
    image = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
    boxes = np.array([[1, 1, 3, 4.5], [0, 0, 8, 5]], np.float32)
    place = tf.constant([1, 1, 4, 5])
    for draw in (0.29, 0.3):
        draws = Draws(draw)
        got, got_boxes, got_place = tf_pipeline.random_flip(image, boxes, place, 0.3, draws)
        is_turned = draw < 0.3
        np.testing.assert_array_equal(got, image[:, ::-1] if is_turned else image)
        np.testing.assert_array_equal(got_boxes, [[5, 1, 7, 4.5], [0, 0, 8, 5]] if is_turned else boxes)
        assert got_place.numpy().tolist() == [1, 2 if is_turned else 1, 4, 5]
        assert draws.asked == [(0.0, 1.0)]


@pytest.mark.parametrize("turn", [-36.0, 0.0, 25.0])
@pytest.mark.parametrize("saturation, value", [(1.0, 1.0), (1.4, 1 / 1.3), (1 / 1.5, 1.5)])
def test_hsv_is_opencv_s(turn, saturation, value):
    """A second draw of half or more turns a factor over."""
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    numbers = [turn]
    for factor in (saturation, value):
        numbers += [factor, 0.49] if factor >= 1 else [1 / factor, 0.5]
    draws = Draws(*numbers)
    got = tf_pipeline.random_hsv(tf.constant(image), 36.0, 1.5, 2.0, draws).numpy()
    assert draws.asked == [(-36.0, 36.0), (1.0, 1.5), (0.0, 1.0), (1.0, 2.0), (0.0, 1.0)]
    hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)  # degrees, 0..1, 0..1
    hsv[..., 0] = (hsv[..., 0] + turn) % 360
    hsv[..., 1:] = np.minimum(hsv[..., 1:] * (saturation, value), 1.0)
    expected = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * 255
    assert np.abs(got - expected).max() < 0.51 + 0.02


def test_multi_scale_draws_every_size_alike():
    config = dataclasses.replace(PLAIN, multi_scale=1.5)
    low, high = config.size_range
    assert (low, high) == (3, 6)
    for draw in (0.0, 1.99, 2.0, 3.99):
        draws = Draws(draw)
        expected = config.bucket(low + int(draw))
        assert tuple(tf_pipeline.input_size(config, True, draws).numpy()) == expected
        assert draws.asked == [(0.0, 4)]
    for fixed, training in ((config, False), (PLAIN, True)):
        assert tuple(tf_pipeline.input_size(fixed, training, Draws()).numpy()) == INPUT


@pytest.mark.parametrize(
    "change",
    [{"mixup_prob": 0.1}, {"cutmix_prob": 0.1}, {"mosaic_prob": 0.5, "mosaic_tiles": "fresh"}],
    ids=lambda change: next(iter(change)),
)
def test_what_only_dali_has_is_refused(rectangles, change):
    config = dataclasses.replace(NANO, **change)
    name, value = list(change.items())[-1]
    with pytest.raises(UserError, match=f"--pipeline_type=tensorflow cannot do {name}={value}: use dali_cpu"):
        make(rectangles, "tensorflow", config)
    make(rectangles, "tensorflow", config, training=False)
