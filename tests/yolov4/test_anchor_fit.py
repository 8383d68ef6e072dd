import numpy as np
import pytest

from yolov4.anchor_fit import MAX_BOXES, Fit, beats, fit_anchors, shape_iou, split


def test_fit_by_hand():
    fit = Fit.of(np.array([0.2, 0.5, 0.6, 0.9]))
    assert fit == Fit(pytest.approx(0.55), 0.5, 4)  # a box counts only if its IoU is above 0.5
    assert str(fit) == "mean best IoU 0.550, 50.0 % of the boxes reached at 0.5"
    assert Fit.of(np.zeros(0)) == Fit(0.0, 0.0, 0)


RNG = np.random.default_rng(0)
OWN = RNG.uniform(0.3, 0.9, 400)


MORE_REACHED = np.where(OWN > 0.5, OWN, OWN + 0.15)


GAINS = [
    (OWN, False),
    (OWN + 0.05, True),
    (OWN + 0.01, False),
    (OWN - 0.05, False),
    (np.where(OWN > 0.5, 0.95, OWN), True),
    (np.where(OWN > 0.505, 0.95, np.minimum(OWN, 0.5)), True),
    (MORE_REACHED, True),
    (MORE_REACHED - 0.1 * (OWN > 0.7), False),
    (np.where(OWN > 0.6, OWN + 0.2, np.minimum(OWN, 0.49)), False),
]


@pytest.mark.parametrize(("new", "by_mean"), GAINS)
def test_beats_needs_a_sure_gain_that_is_worth_it_and_costs_nothing(new, by_mean):
    assert beats(new, OWN) is by_mean


@pytest.mark.parametrize(("count", "sure"), [(25, False), (100, True)])
def test_the_same_gain_is_sure_with_more_boxes(count, sure):
    own = np.full(count, 0.3)
    mean = own + np.tile([0.19, 0.09, -0.05, -0.11, 0.08], count // 5)  # mean gain 0.04, deviation 0.11
    assert beats(mean, own) is sure


def test_a_few_boxes_prove_nothing():
    own, new = np.full(19, 0.4), np.full(19, 0.9)
    assert not beats(new, own)
    assert beats(np.append(new, 0.9), np.append(own, 0.4))


def test_boxes_of_an_image_stay_in_one_half():
    box_image = np.repeat(np.arange(101), np.random.default_rng(1).integers(1, 9, 101))
    chosen = split(box_image, np.random.default_rng(2))
    for image in range(101):
        assert len(set(chosen[box_image == image].tolist())) == 1
    assert len(np.unique(box_image[chosen])) == 50
    np.testing.assert_array_equal(chosen, split(box_image, np.random.default_rng(2)))
    assert (chosen != split(box_image, np.random.default_rng(3))).any()


def test_the_boxes_of_a_single_image_are_split_all_the_same():
    assert split(np.full(21, 7), np.random.default_rng(0)).sum() == 10
    assert split(np.zeros(0, np.int64), np.random.default_rng(0)).shape == (0,)


def test_of_many_boxes_a_sample_is_enough():
    sizes = np.concatenate([np.full((MAX_BOXES, 2), 10.0), np.full((MAX_BOXES, 2), 40.0)])
    sizes *= np.random.default_rng(4).uniform(0.9, 1.1, sizes.shape)
    anchors = fit_anchors(sizes, 2)
    np.testing.assert_allclose(anchors, [[10, 10], [40, 40]], rtol=0.01)
    assert shape_iou(sizes, anchors).shape == (2 * MAX_BOXES, 2)
