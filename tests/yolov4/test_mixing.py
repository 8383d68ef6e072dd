"""Tests mixing.py at its limits. test_oracle.py compares mosaic, MixUp and CutMix with NumPy."""

import dataclasses

import numpy as np
import pytest
from nvidia.dali import fn

from tests.common.reading import run_graph
from yolov4 import mixing
from yolov4.config import get_config
from yolov4.mixing import Objects

OFF = dataclasses.replace(get_config("yolov4"), mosaic_prob=0.0, mixup_prob=0.0, cutmix_prob=0.0)


def test_cutmix_pastes_no_rectangle_without_area():
    """On a GPU, DALI would fill all pixels right of it and below it."""

    def define(size):
        pieces = mixing.random_rectangle(fn.batch_permutation(), fn.random.coin_flip(probability=1.0), size)
        return pieces.sizes, pieces.count

    sizes, counts = map(np.array, zip(*run_graph(define, [np.int32([5, 7])] * 400), strict=True))
    np.testing.assert_array_equal(counts, (sizes > 0).all((1, 2)))
    assert 0.5 < counts.mean() < 1


@pytest.mark.parametrize(
    ("mosaic", "mixup", "count"), [(0.0, 0.0, 1), (1.0, 0.0, 4), (0.0, 0.5, 2), (0.5, 0.5, 8)]
)
def test_largest_number_of_images_in_a_mixed_image_is_that_of_mosaic_times_two_with_mixup(
    mosaic, mixup, count
):
    assert mixing.images_of_one(dataclasses.replace(OFF, mosaic_prob=mosaic, mixup_prob=mixup)) == count


@pytest.mark.parametrize("field", ["mosaic_prob", "mixup_prob", "cutmix_prob"])
def test_mosaic_mixup_and_cutmix_of_images_without_boxes_give_no_boxes(field):
    config = dataclasses.replace(OFF, **{field: 1.0})
    images = [np.full((64, 96, 3), level, np.float32) for level in (0, 1, 0, 1)]
    no_objects = [[array] * 4 for array in (np.zeros((0, 4), np.float32), np.zeros(0, np.int32))]

    def define(images, boxes, labels, size):
        images, objects = mixing.mix(config, images, Objects(boxes, labels), fn.cat([0, 0], size), size)
        return images, *objects

    for _, boxes, labels in run_graph(define, images, *no_objects, [np.int32([64, 96])] * 4):
        assert len(boxes) == len(labels) == 0
