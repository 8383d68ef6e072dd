"""The tf.data twin against DALI where nothing is random; its random stages against NumPy, given the draws."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common.datacheck.datasets import open_source
from common.errors import UserError
from common.tf_readers import Random
from efficientdet import tf_pipeline
from efficientdet.config import get_config
from efficientdet.pipeline import STDDEV_RGB, EfficientDetPipeline
from efficientdet.tf_pipeline import EfficientDetTFPipeline
from tests.efficientdet.drawn_images import SIZES, find_rectangle
from tests.oracle import efficientdet_crops

INPUT = (192, 256)
NANO = dataclasses.replace(
    get_config("efficientdet-nano"), image_size=INPUT, augmentation="none", flip_prob=0.0
)


def make(source, config=NANO, **options) -> EfficientDetTFPipeline:
    options = {"batch_size": 8, "training": True} | options
    return EfficientDetTFPipeline(source=source, config=config, **options)


def evaluated(loader) -> dict[str, np.ndarray]:
    """All that an epoch of evaluation gives, by name, for each image once, in the order of the ids."""
    batches = list(loader.dataset().take(loader.steps_per_epoch))
    joined = {name: np.concatenate([targets[name] for _, targets in batches]) for name in loader.target_spec}
    joined["images"] = np.concatenate([images for images, _ in batches])
    image_ids, first = np.unique(joined["image_ids"], return_index=True)
    assert len(image_ids) == loader.size
    return {name: values[first] for name, values in joined.items()}


def compare_twins(source, config, batch_size) -> int:
    """Asserts that both loaders give the same; returns how many anchors went to another box."""
    options = {"source": source, "config": config, "batch_size": batch_size, "training": False}
    dali = EfficientDetPipeline(**options, count_lost=True)
    twin = EfficientDetTFPipeline(**options, count_lost=True)
    assert (twin.steps_per_epoch, twin.element_spec) == (dali.steps_per_epoch, dali.element_spec)
    expected, found = evaluated(dali), evaluated(twin)
    levels = np.abs(found.pop("images") - expected.pop("images")) * STDDEV_RGB
    assert levels.mean((1, 2, 3)).max() < 0.5
    for image, (height, width) in zip(levels, expected["letterbox"][:, 2:].astype(int), strict=True):
        # The filters end differently at the border.
        assert image[1 : height - 1, 1 : width - 1].max() < 1.5
    moved = 0
    for name, values in expected.items():
        same = np.ones(len(values), bool)
        if "_targets_" in name:
            classes = f"class_targets_{name[-1]}"
            same = found[classes] == expected[classes]
            moved += np.count_nonzero(~same) if name == classes else 0
        one, other = (x.reshape(*same.shape, -1)[same] for x in (values, found[name]))
        np.testing.assert_allclose(one, other, atol=2e-5, err_msg=name)
    return moved


def open_images(directory):
    return open_source(images=str(directory / "images"), annotations=str(directory / "instances.json"))


def test_equals_dali_on_drawn_images(rectangles, drawn):
    assert compare_twins(rectangles, NANO, 5) == 0
    few = dataclasses.replace(NANO, antialias=False, max_instances=2)
    assert compare_twins(open_images(drawn), few, 4) == 0


@pytest.mark.slow
def test_equals_dali_on_photographs(coco128):
    # A box right between two anchors goes to either by its last bit, which the readers do not share.
    config = dataclasses.replace(NANO, max_instances=20)
    assert compare_twins(open_images(coco128), config, 16) <= 12  # of 1.2 million


@pytest.mark.parametrize(
    "changes",
    [
        {"augmentation": "scale_jitter", "flip_prob": 0.5, "jitter_min": 0.3},
        {"augmentation": "resize_range", "flip_prob": 1.0, "resize_min": 40, "resize_max": 200},
    ],
)
def test_boxes_and_pixels_move_together(rectangles, changes):
    config = dataclasses.replace(NANO, **changes, min_box_size=3.0)
    found = []
    for images, targets in make(rectangles, config).dataset().take(6):
        boxes, classes = targets["boxes"].numpy()[:, 0], targets["classes"].numpy()[:, 0]
        for image, box, class_ in zip(images.numpy(), boxes, classes, strict=True):
            rectangle = find_rectangle(image)
            if class_ >= 0 and rectangle is not None:
                np.testing.assert_allclose(rectangle, box * [256, 192, 256, 192], atol=1.5)
                found.append(box)
    assert len(found) > 30
    assert len(np.unique(np.round(found, 3), axis=0)) > 20  # the views differ


class Scripted(Random):
    """Gives prepared numbers instead of random ones, each for the range and shape that it belongs to."""

    def __init__(self, *draws) -> None:
        self._draws = list(draws)

    def uniform(self, low, high, shape=()):
        *asked, number = self._draws.pop(0)
        assert (low, high, shape) == tuple(asked)
        return tf.constant(number, tf.float32)


def test_jittered_crop_is_automls():
    random = np.random.default_rng(0)
    for size in SIZES * 12:
        jitter, shares = random.uniform(0.1, 2.0), random.uniform(size=2)
        draws = Scripted((0.1, 2.0, (), jitter), (0.0, 1.0, (2,), shares))
        crop = tf_pipeline.jittered_crop(tf.constant(size, tf.float32), INPUT, 0.1, 2.0, draws)
        expected = efficientdet_crops.jittered_crop(size, INPUT, jitter, shares)
        assert (tuple(crop.window.numpy()), tuple(crop.size.numpy())) == expected


def test_resize_range_draws_the_shorter_side_and_fits():
    for size in SIZES:
        for drawn in (40.9, 77.0, 150.5):
            draws = Scripted((40, 151.0, (), drawn))
            crop = tf_pipeline.resize_range_crop(tf.constant(size, tf.float32), INPUT, 40, 150, draws)
            expected = efficientdet_crops.resize_range_crop(size, INPUT, drawn)
            assert (tuple(crop.window.numpy()), tuple(crop.size.numpy())) == expected


@pytest.mark.parametrize(("drawn", "flips"), [(0.39, True), (0.4, False)])
def test_flip_turns_pixels_and_boxes_or_neither(drawn, flips):
    image = np.arange(5 * 8 * 3).reshape(5, 8, 3)
    box = np.float32([[0.1, 0.2, 0.35, 0.9]])
    flipped, boxes = tf_pipeline.random_flip(image, tf.constant(box), 0.4, Scripted((0.0, 1.0, (), drawn)))
    np.testing.assert_array_equal(flipped, image[:, ::-1] if flips else image)
    np.testing.assert_allclose(boxes, [[0.65, 0.2, 0.9, 0.9]] if flips else box, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"augmentation": "min_iou_crop"},
        *({name: 0.5} for name in ("grid_mask_prob", "brightness", "contrast", "saturation", "hue")),
    ],
)
def test_what_only_dali_has_is_refused(rectangles, changes):
    config = dataclasses.replace(NANO, **changes)
    (setting,) = changes.items()
    with pytest.raises(UserError, match="--pipeline_type=tensorflow cannot do {}={}".format(*setting)):
        make(rectangles, config)
    make(rectangles, config, training=False)
