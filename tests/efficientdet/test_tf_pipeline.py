"""Tests tf_pipeline.py with drawn rectangles, and its crops with NumPy (numpy_crops.py)."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from efficientdet import tf_pipeline
from efficientdet.config import get_config
from efficientdet.tf_pipeline import EfficientDetTFPipeline
from tests.common.reading import Scripted
from tests.efficientdet import numpy_crops
from tests.efficientdet.drawn_images import SIZES, find_rectangle

INPUT = (192, 256)


@pytest.mark.parametrize(
    "changes",
    [
        {"augmentation": "scale_jitter", "flip_prob": 0.5, "jitter_min": 0.3},
        {"augmentation": "resize_range", "flip_prob": 1.0, "resize_min": 40, "resize_max": 200},
    ],
    ids=lambda changes: changes["augmentation"],
)
def test_boxes_enclose_their_pixels_after_augmentation(rectangles, changes):
    config = dataclasses.replace(
        get_config("efficientdet-nano"), image_size=INPUT, min_box_size=3.0, **changes
    )
    loader = EfficientDetTFPipeline(source=rectangles, config=config, batch_size=8, training=True)
    compared = []
    for images, targets in loader.dataset().take(6):
        boxes, classes = targets["boxes"].numpy()[:, 0], targets["classes"].numpy()[:, 0]
        for image, box, class_ in zip(images.numpy(), boxes, classes, strict=True):
            rectangle = find_rectangle(image)
            if class_ >= 0 and rectangle is not None:
                np.testing.assert_allclose(rectangle, box * [256, 192, 256, 192], atol=1.5)
                compared.append(box)
    assert len(compared) > 30
    assert len(np.unique(np.round(compared, 3), axis=0)) > 20


def test_jittered_crop_equals_automls():
    random = np.random.default_rng(0)
    for size in SIZES * 12:
        jitter, shares = random.uniform(0.1, 2.0), random.uniform(size=2)
        draws = Scripted((0.1, 2.0, (), jitter), (0.0, 1.0, (2,), shares))
        crop = tf_pipeline.jittered_crop(tf.constant(size, tf.float32), INPUT, 0.1, 2.0, draws)
        expected = numpy_crops.jittered_crop(size, INPUT, jitter, shares)
        assert (tuple(np.asarray(crop.window)), tuple(np.asarray(crop.size))) == expected


def test_resize_range_scales_the_shorter_side_within_the_input():
    for size in SIZES:
        for drawn in (40.9, 77.0, 150.5):
            draws = Scripted((40, 151.0, (), drawn))
            crop = tf_pipeline.resize_range_crop(tf.constant(size, tf.float32), INPUT, 40, 150, draws)
            expected = numpy_crops.resize_range_crop(size, INPUT, drawn)
            assert (tuple(np.asarray(crop.window)), tuple(np.asarray(crop.size))) == expected


@pytest.mark.parametrize(("drawn", "flips"), [(0.39, True), (0.4, False)])
def test_flip_mirrors_pixels_and_boxes_if_the_random_number_is_below_flip_prob(drawn, flips):
    image = np.arange(5 * 8 * 3).reshape(5, 8, 3)
    box = np.float32([[0.1, 0.2, 0.35, 0.9]])
    flipped, boxes = tf_pipeline.random_flip(image, tf.constant(box), 0.4, Scripted((0.0, 1.0, (), drawn)))
    np.testing.assert_array_equal(flipped, image[:, ::-1] if flips else image)
    np.testing.assert_allclose(boxes, [[0.65, 0.2, 0.9, 0.9]] if flips else box, atol=1e-6)
