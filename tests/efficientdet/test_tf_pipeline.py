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


def compare_twins(source, config, batch_size) -> int:
    """Asserts that both loaders give the same; returns how many anchors went to another box."""
    options = {"source": source, "config": config, "batch_size": batch_size, "training": False}
    dali = EfficientDetPipeline(**options, count_lost=True)
    twin = EfficientDetTFPipeline(**options, count_lost=True)
    steps = dali.steps_per_epoch
    assert (twin.steps_per_epoch, twin.size, twin.element_spec) == (steps, dali.size, dali.element_spec)
    seen, moved = set(), 0
    for (images, targets), (tf_images, tf_targets) in zip(
        dali.dataset().take(steps), twin.dataset().take(steps), strict=True
    ):
        for i, image_id in enumerate(targets["image_ids"].numpy()):
            if image_id in seen:  # both repeat images at the end, not the same ones
                continue
            seen.add(image_id)
            levels = np.abs(images[i] - tf_images[i]) * STDDEV_RGB
            assert levels.mean() < 0.5
            height, width = targets["letterbox"][i, 2:].numpy().astype(int)
            # The filters end differently at the border.
            assert levels[1 : height - 1, 1 : width - 1].max() < 1.5
            same = {}
            for level in config.anchors.levels:
                name = f"class_targets_{level}"
                same[level] = (tf_targets[name][i] == targets[name][i]).numpy()
                moved += np.count_nonzero(~same[level])
            for name, tensor in targets.items():
                one, other = tf_targets[name][i].numpy(), tensor[i].numpy()
                if "_targets_" in name:
                    kept = same[int(name[-1])]
                    one, other = (x.reshape(*kept.shape, -1)[kept] for x in (one, other))
                np.testing.assert_allclose(one, other, atol=2e-5, err_msg=f"{name} of image {image_id}")
    assert len(seen) == source.size
    return moved


@pytest.mark.parametrize("antialias", [True, False])
def test_equals_dali_on_drawn_images(rectangles, antialias):
    assert compare_twins(rectangles, dataclasses.replace(NANO, antialias=antialias), 5) == 0


def test_equals_dali_on_photographs(coco128):
    source = open_source(images=str(coco128 / "images"), annotations=str(coco128 / "instances.json"))
    # A box right between two anchors goes to either by its last bit, which the readers do not share.
    assert compare_twins(source, dataclasses.replace(NANO, max_instances=20), 16) <= 12  # of 1.2 million


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
