"""Mosaic of the tf.data twin against Darknet's copying loop in NumPy, and what chance decides."""

import numpy as np
import pytest
import tensorflow as tf

from common.tf_readers import Random
from tests.yolov4.test_mosaic import darknet_mosaic
from yolov4 import tf_mosaic
from yolov4.tf_mosaic import Canvases

SIZE = (50, 70)  # not square, so that a swapped axis shows
PLACES = np.array([[0, 0, 50, 70], [10, 0, 40, 55], [0, 20, 31, 50], [15, 25, 10, 20]], np.int32)
EMPTY = 2  # the canvas without boxes


@pytest.fixture(scope="module")
def canvases() -> Canvases:
    """Four canvases of noise with other padding each, and boxes in whole pixels."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (4, *SIZE, 3), np.uint8)
    boxes, labels = np.zeros((4, 3, 4), np.float32), np.zeros((4, 3), np.int32)
    for i, (top, left, height, width) in enumerate(PLACES):
        for j in range(0 if i == EMPTY else 3):
            xs, ys = (np.sort(random.choice(side + 1, 2, replace=False)) for side in (width, height))
            boxes[i, j] = np.array([left + xs[0], top + ys[0], left + xs[1], top + ys[1]])
            labels[i, j] = 10 * i + j + 1
    return Canvases(*map(tf.constant, (images, boxes, labels, PLACES)))


@pytest.mark.parametrize("cut", [(10, 14), (40, 56), (10, 56), (25, 33), (37, 20)])
@pytest.mark.parametrize("tiles", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (3, 3, 3, 3)])
def test_mosaic_is_darknet_s(canvases, tiles, cut):
    mixed = tf_mosaic.mosaic(canvases, tf.constant(tiles), tf.constant(cut))
    arrays = list(zip(*(part.numpy() for part in canvases), [None] * 4, strict=True))
    image, boxes, labels = darknet_mosaic(arrays, tiles, *cut)
    np.testing.assert_array_equal(mixed.image, image)
    np.testing.assert_array_equal(mixed.labels, labels)
    real = labels > 0
    np.testing.assert_array_equal(mixed.boxes_px.numpy()[real], boxes[real])
    sides = mixed.boxes_px.numpy()[~real, 2:] - mixed.boxes_px.numpy()[~real, :2]
    assert not sides.any()  # padding stays without area


# --- a whole batch ---


def mixer(canvases: Canvases, mosaic_prob=0.0):
    """A function from a seed to images, boxes and labels."""
    run = tf.function(lambda seed: tf_mosaic.mix(canvases, mosaic_prob, Random(tf.stack([seed, 5]))))
    return lambda seed=0: tuple(tensor.numpy() for tensor in run(tf.constant(seed)))


def test_a_mosaic_has_the_sample_s_own_canvas_at_the_top_left(canvases):
    _, _, labels = mixer(canvases, mosaic_prob=1.0)()
    tiles = labels.reshape(4, 4, 3)
    np.testing.assert_array_equal(tiles[:, 0], canvases.labels)
    for k in (1, 2, 3):
        assert (np.sort(tiles[:, k].ravel()) == np.sort(canvases.labels.numpy().ravel())).all()
        assert (tiles[:, k] != tiles[:, 0]).any(1).all()


def test_the_share_of_mosaics_and_the_others_stay(canvases):
    mix, changed = mixer(canvases, mosaic_prob=0.3), []
    for seed in range(100):
        images, boxes, labels = mix(seed)
        changed += (images != canvases.images.numpy()).any((1, 2, 3)).tolist()
        for row in np.flatnonzero(~np.array(changed[-4:])):
            np.testing.assert_array_equal(boxes[row, :3], canvases.boxes_px[row])
            assert not boxes[row, 3:].any() and not labels[row, 3:].any()
    assert abs(np.mean(changed) - 0.3) < 0.07  # three standard deviations of 400 draws


def test_an_image_alone_in_its_batch_is_a_mosaic_of_itself(canvases):
    alone = Canvases(*(tensor[3:] for tensor in canvases))
    _, _, labels = mixer(alone, mosaic_prob=1.0)()
    assert sorted(labels[0]) == sorted([31, 32, 33] * 4)


def test_others_are_others_and_all_of_them():
    for count in (2, 5):
        others = np.array(
            [tf_mosaic.random_others(count, Random(tf.constant([i, 2]))).numpy() for i in range(120)]
        )
        assert (np.sort(others) == np.arange(count)).all()
        shares = [(others[:, i] == j).mean() for i in range(count) for j in range(count) if i != j]
        np.testing.assert_allclose(shares, 1 / (count - 1), atol=0.14)
        assert (others != np.arange(count)).all()
    np.testing.assert_array_equal(tf_mosaic.random_others(1, Random(tf.constant([1, 2]))), [0])


def test_cuts_keep_away_from_the_border():
    count = 4000
    cuts = tf_mosaic.random_cuts(count, tf.constant(SIZE), Random(tf.constant([1, 2]))).numpy()
    assert cuts.min(0).tolist() == [10, 14] and cuts.max(0).tolist() == [40, 56]
    for axis, low, high in ((0, 10, 40), (1, 14, 56)):
        assert np.histogram(cuts[:, axis], 5, (low, high))[0].min() > 0.8 * count / 5
    assert abs(np.corrcoef(cuts.T)[0, 1]) < 0.05
