"""Tests the k-means of anchor_fit.py and its rule when new anchors are better."""

import numpy as np
import pytest

from yolov4.anchor_fit import MAX_BOXES, Fit, beats, fit_anchors, shape_iou, split
from yolov4.config import get_config


def test_anchor_fit_counts_boxes_with_an_iou_above_half_as_reached():
    fit = Fit.of(np.array([0.2, 0.5, 0.6, 0.9]))
    assert fit == Fit(pytest.approx(0.55), 0.5, 4)
    assert str(fit) == "mean best IoU 0.550, 50.0 % of the boxes reached at 0.5"
    assert Fit.of(np.zeros(0)) == Fit(0.0, 0.0, 0)


OLD = np.random.default_rng(0).uniform(0.3, 0.9, 400)
MORE_REACHED = np.where(OLD > 0.5, OLD, OLD + 0.15)
LOW = np.full(100, 0.3)
NOISY = LOW + np.tile([0.19, 0.09, -0.05, -0.11, 0.08], 20)  # mean gain 0.04, deviation 0.11
COMPARISONS = {  # {id: (IoUs with new anchors, IoUs with old anchors, new anchors are better)}
    "equal": (OLD, OLD, False),
    "gain of 0.05": (OLD + 0.05, OLD, True),
    "gain of 0.01": (OLD + 0.01, OLD, False),
    "loss": (OLD - 0.05, OLD, False),
    "good boxes better": (np.where(OLD > 0.5, 0.95, OLD), OLD, True),
    "1 % no longer reached": (np.where(OLD > 0.505, 0.95, np.minimum(OLD, 0.5)), OLD, True),
    "5 % no longer reached": (np.where(OLD > 0.53, OLD + 0.2, np.minimum(OLD, 0.49)), OLD, False),
    "more reached": (MORE_REACHED, OLD, True),
    "more reached, mean hardly higher": (MORE_REACHED - 0.1 * (OLD > 0.7), OLD, False),
    "noisy gain of 100 boxes": (NOISY, LOW, True),
    "noisy gain of 25 boxes": (NOISY[:25], LOW[:25], False),
    "large gain of 20 boxes": (LOW[:20] + 0.6, LOW[:20], True),
    "large gain of 19 boxes": (LOW[:19] + 0.6, LOW[:19], False),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_fitted_anchors_count_as_better_only_with_a_clear_gain_in_iou(name):
    new_iou, old_iou, is_better = COMPARISONS[name]
    assert beats(new_iou, old_iou) is is_better


def test_split_for_the_anchor_fit_keeps_all_boxes_of_an_image_in_one_half():
    box_image = np.repeat(np.arange(101), np.random.default_rng(1).integers(1, 9, 101))
    chosen = split(box_image, np.random.default_rng(2))
    for image in range(101):
        assert len(set(chosen[box_image == image].tolist())) == 1
    assert len(np.unique(box_image[chosen])) == 50
    np.testing.assert_array_equal(chosen, split(box_image, np.random.default_rng(2)))
    assert (chosen != split(box_image, np.random.default_rng(3))).any()


def test_split_for_the_anchor_fit_halves_the_boxes_of_a_single_image():
    assert split(np.full(21, 7), np.random.default_rng(0)).sum() == 10
    assert split(np.zeros(0, np.int64), np.random.default_rng(0)).shape == (0,)


def mean_iou(sizes, anchors):
    return shape_iou(sizes, anchors).max(1).mean()


def test_fitted_anchors_have_a_higher_iou_than_published_ones_and_hardly_depend_on_the_seed():
    sizes = np.exp(np.random.default_rng(1).normal(3.5, 0.8, (800, 2)))
    fitted = mean_iou(sizes, fit_anchors(sizes, 9))
    assert fitted > mean_iou(sizes, np.array(get_config("yolov4").anchor_sizes)) + 0.02
    assert fitted > 0.99 * max(mean_iou(sizes, fit_anchors(sizes, 9, seed)) for seed in (1, 2))


def test_anchors_of_many_boxes_are_fitted_to_a_sample():
    sizes = np.concatenate([np.full((MAX_BOXES, 2), 10.0), np.full((MAX_BOXES, 2), 40.0)])
    sizes *= np.random.default_rng(4).uniform(0.9, 1.1, sizes.shape)
    anchors = fit_anchors(sizes, 2)
    np.testing.assert_allclose(anchors, [[10, 10], [40, 40]], rtol=0.01)
    assert shape_iou(sizes, anchors).shape == (2 * MAX_BOXES, 2)
