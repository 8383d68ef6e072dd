"""Tests tf_pipeline.py: each random change against Darknet or OpenCV, then whole batches.

The oracle of the DALI pipeline (test_oracle.py) covers the same facts there.
"""

import dataclasses

import cv2
import numpy as np
import pytest
import tensorflow as tf

from tests.common.drawn_sets import GREY, write_coco
from tests.common.reading import Scripted
from tests.yolov4.darknet_rules import darknet_axis
from tests.yolov4.rectangles import (
    AUGMENTATIONS,
    COLORS,
    INPUT,
    PLAIN,
    SIZES,
    assert_batches_equal,
    read_batches,
)
from yolov4 import tf_pipeline
from yolov4.pipeline import FILL

ODD_SIZES = [(1, 1), (1, 700), (700, 1), (2, 2), (3, 1), (2, 5), (4001, 3072)]


@pytest.mark.parametrize("keep_aspect", [True, False], ids=["letterboxed", "stretched"])
def test_jittered_crop_equals_darknet(keep_aspect):
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
                    expected = darknet_axis(*sides, *edges[:, axis], keep_aspect=keep_aspect)
                    result = window[axis], window[2 + axis], place[axis], place[2 + axis]
                    differences += tuple(map(int, result)) != expected
                    assert np.abs(np.subtract(result, expected)).max() <= 1
    assert differences <= (2 if keep_aspect else 0)  # float32 rounds some halves differently


@pytest.mark.parametrize(
    ("draw", "flips"), [(0.29, True), (0.3, False)], ids=["below-probability", "at-probability"]
)
def test_flip_mirrors_pixels_boxes_and_image_area_if_the_random_number_is_below_flip_prob(draw, flips):
    image = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
    boxes = np.array([[1, 1, 3, 4.5], [0, 0, 8, 5]], np.float32)
    place = tf.constant([1, 1, 4, 5])
    draws = Scripted((0.0, 1.0, (), draw))
    new_image, new_boxes, new_place = tf_pipeline.random_flip(image, boxes, place, 0.3, draws)
    np.testing.assert_array_equal(new_image, image[:, ::-1] if flips else image)
    np.testing.assert_array_equal(new_boxes, [[5, 1, 7, 4.5], [0, 0, 8, 5]] if flips else boxes)
    assert new_place.numpy().tolist() == [1, 2 if flips else 1, 4, 5]


@pytest.mark.parametrize(
    ("hue", "saturation", "value"),
    [(0.0, 1.0, 1.0), (-36.0, 1.4, 1 / 1.3), (25.0, 1 / 1.5, 1.5)],
    ids=["unchanged", "more saturated and darker", "less saturated and brighter"],
)
def test_random_hsv_equals_opencv(hue, saturation, value):
    """A factor f becomes 1 / f if its second random number is at least 1/2."""
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    draws = [(-36.0, 36.0, (), hue)]
    for factor, limit in ((saturation, 1.5), (value, 2.0)):
        drawn = (factor, 0.49) if factor >= 1 else (1 / factor, 0.5)
        draws += [(1.0, limit, (), drawn[0]), (0.0, 1.0, (), drawn[1])]
    result = tf_pipeline.random_hsv(tf.constant(image), 36.0, 1.5, 2.0, Scripted(*draws)).numpy()
    hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)
    hsv[..., 0] = (hsv[..., 0] + hue) % 360
    hsv[..., 1:] = np.minimum(hsv[..., 1:] * (saturation, value), 1.0)
    expected = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * 255
    assert np.abs(result - expected).max() < 0.51 + 0.02


def test_multi_scale_draws_each_size_with_equal_probability():
    config = dataclasses.replace(PLAIN, multi_scale=1.5)
    for draw, units in ((0.0, 3), (1.99, 4), (2.0, 5), (3.99, 6)):
        size = tf_pipeline.input_size(config, True, Scripted((0.0, 4, (), draw)))
        assert tuple(size.numpy()) == config.bucket(units)
    for fixed, training in ((config, False), (PLAIN, True)):
        assert tuple(tf_pipeline.input_size(fixed, training, Scripted()).numpy()) == INPUT


# --- whole batches ---


def paint_boxes(shape: tuple[int, int], boxes: np.ndarray, classes: np.ndarray, margin: float) -> np.ndarray:
    """Returns bool (classes, H, W): pixels in boxes that are enlarged by `margin`."""
    height, width = shape
    y, x = np.mgrid[:height, :width] + 0.5
    masks = np.zeros((len(COLORS), height, width), bool)
    for (x0, y0, x1, y1), index in zip(boxes * ([width, height] * 2), classes, strict=True):
        masks[index] |= (x > x0 - margin) & (x < x1 + margin) & (y > y0 - margin) & (y < y1 + margin)
    return masks


@pytest.mark.parametrize("mosaic_prob", [0.0, 0.5], ids=["crop", "mosaic"])
def test_boxes_enclose_their_pixels_after_augmentation(rectangles, mosaic_prob):
    """Each box is filled with the colour of its class, to 1.5 pixels."""
    # With this min_box_size, every visible rectangle keeps its box.
    changes = {"jitter": 0.3, "letterbox": True, "flip_prob": 0.5, "multi_scale": 1.5}
    config = dataclasses.replace(PLAIN, mosaic_prob=mosaic_prob, min_box_size=0.01, **changes)
    palette = np.array([*COLORS, GREY, (FILL,) * 3])
    count, sizes = 0, set()
    for batch in read_batches(rectangles, "tensorflow", config, 6):
        rows = (batch[name] for name in ("images", "boxes", "classes", "num_boxes"))
        for image, boxes, classes, real in zip(*rows, strict=True):
            assert (classes[:real] >= 0).all() and (classes[real:] == -1).all() and (boxes[real:] == -1).all()
            assert (boxes[:real] >= 0).all() and (boxes[:real] <= 1).all()
            nearest = np.abs(image[:, :, np.newaxis] * 255 - palette).sum(-1).argmin(-1)
            inner = paint_boxes(image.shape[:2], boxes[:real], classes[:real], -1.5)
            outer = paint_boxes(image.shape[:2], boxes[:real], classes[:real], 1.5)
            for index in range(len(COLORS)):
                assert not (nearest[~outer[index]] == index).any()
                assert (nearest[inner[index]] == index).all()
            count += int(real)
        sizes.add(batch["images"].shape[1:3])
    assert count >= (50 if mosaic_prob else 30)
    assert len(sizes) > 1 and sizes <= {config.bucket(units) for units in (3, 4, 5, 6)}


@pytest.mark.parametrize(("field", "value"), [("hue", 36.0), ("saturation", 1.5), ("exposure", 1.5)])
def test_hue_saturation_and_exposure_each_change_only_their_component_and_no_padding(tmp_path, field, value):
    """The left half is grey, so it has no hue and no saturation. Above and below is padding."""
    image = np.full((64, 192, 3), 100, np.uint8)
    image[:, 96:] = 130, 90, 50
    source = write_coco(tmp_path, [(i, image, [(0, (9, 9, 30, 30))]) for i in range(1, 9)])
    config = dataclasses.replace(PLAIN, letterbox=True, **{field: value})
    (batch,) = read_batches(source, "tensorflow", config, batch_size=8)
    images = batch["images"] * 255  # (8, 128, 192, 3)
    np.testing.assert_allclose(images[:, [0, 31, 96, 127]], FILL, atol=1e-4)
    grey, color = images[:, 64, 40], images[:, 64, 150]
    chroma = np.ptp(color, axis=1) / 80
    assert (np.ptp(grey, axis=1) < 1).all()
    assert (abs(grey - 100).max() > 10) == (field == "exposure")
    assert abs(color - [130, 90, 50]).max() > 5
    assert chroma.min() > 0.6 and chroma.max() < 1.6


def test_tf_data_evaluation_batches_are_not_augmented(rectangles):
    plain = dataclasses.replace(PLAIN, letterbox=True)
    augmented = dataclasses.replace(plain, **AUGMENTATIONS, mosaic_prob=1.0, multi_scale=1.5)
    assert_batches_equal(
        read_batches(rectangles, "tensorflow", augmented, training=False, seed=1),
        read_batches(rectangles, "tensorflow", plain, training=False, seed=2),
    )
