"""Tests the mosaic of the tf.data loader against Darknet's."""

import numpy as np
import pytest
import tensorflow as tf

from common.data.tf_readers import Random
from tests.yolov4.darknet_rules import darknet_mosaic
from yolov4 import tf_mosaic
from yolov4.tf_mosaic import Canvases, Mixed

SIZE = (50, 70)
FILL = 127


def draw_canvas(random, size, index):
    """Returns (image, boxes_px, labels, place, size). The image is noise, padded with FILL."""
    sides = [random.integers(side // 4, side + 1) for side in size]
    starts = [random.integers(0, side - shown + 1) for side, shown in zip(size, sides, strict=True)]
    (top, left), (height, width) = starts, sides
    image = np.full((*size, 3), FILL, np.uint8)
    image[top : top + height, left : left + width] = random.integers(0, 256, (height, width, 3))
    corners = np.sort(random.integers(0, (width + 1, height + 1), (index % 4, 2, 2)), axis=1)
    boxes = (corners + [left, top]).reshape(-1, 4).astype(np.float32)
    labels = 4 * index + np.arange(1, index % 4 + 1, dtype=np.int32)
    return image, boxes, labels, np.int32([top, left, height, width]), np.int32(size)


@pytest.fixture(scope="module")
def drawn() -> list[tuple]:
    random = np.random.default_rng(0)
    return [draw_canvas(random, SIZE, index) for index in range(4)]


@pytest.fixture(scope="module")
def canvases(drawn) -> Canvases:
    images, boxes, labels, places, _ = zip(*drawn, strict=True)
    boxes = [np.pad(rows, ((0, 3 - len(rows)), (0, 0))) for rows in boxes]
    labels = [np.pad(numbers, (0, 3 - len(numbers))) for numbers in labels]
    return Canvases(*(tf.constant(np.stack(part)) for part in (images, boxes, labels, places)))


@pytest.mark.parametrize(
    ("tiles", "cut"),
    [
        ((0, 1, 2, 3), (10, 14)),
        ((3, 2, 1, 0), (40, 56)),
        ((1, 3, 0, 2), (25, 33)),
        ((2, 0, 1, 3), (37, 20)),
    ],
    ids=str,
)
@pytest.mark.parametrize("min_visible", [0.0, 0.5])
def test_tf_mosaic_equals_darknet_with_and_without_min_visible(drawn, canvases, tiles, cut, min_visible):
    mixed = tf_mosaic.mosaic(canvases, tf.constant(tiles), tf.constant(cut), min_visible)
    mixed = Mixed(*(part.numpy() for part in mixed))
    image, boxes, labels = darknet_mosaic(drawn, tiles, *cut, min_visible=min_visible)
    real = mixed.labels > 0
    np.testing.assert_array_equal(mixed.image, image)
    np.testing.assert_array_equal(mixed.labels[real], labels)
    np.testing.assert_array_equal(mixed.boxes_px[real], boxes)
    padding = mixed.boxes_px[~real]
    assert not (padding[:, 2:] - padding[:, :2]).any()


# --- a batch ---


def mixer(canvases: Canvases, mosaic_prob: float):
    """Returns a function seed -> (images, boxes, labels)."""
    run = tf.function(lambda seed: tf_mosaic.mix(canvases, mosaic_prob, Random(seed, 5)))
    return lambda seed: tuple(tensor.numpy() for tensor in run(tf.constant(seed)))


def test_mosaic_has_its_own_image_at_the_top_left_and_other_images_in_the_other_tiles(canvases):
    _, _, labels = mixer(canvases, mosaic_prob=1.0)(0)
    tiles = labels.reshape(4, 4, 3)
    np.testing.assert_array_equal(tiles[:, 0], canvases.labels)
    for k in (1, 2, 3):
        assert (np.sort(tiles[:, k].ravel()) == np.sort(canvases.labels.numpy().ravel())).all()
        assert (tiles[:, k] != tiles[:, 0]).any(1).all()


def test_share_of_mosaics_is_mosaic_prob_and_images_without_mosaic_stay_unchanged(canvases):
    mix, is_mosaic = mixer(canvases, mosaic_prob=0.3), []
    for seed in range(100):
        images, boxes, labels = mix(seed)
        is_mosaic += (images != canvases.images.numpy()).any((1, 2, 3)).tolist()
        for row in np.flatnonzero(~np.array(is_mosaic[-4:])):
            np.testing.assert_array_equal(boxes[row, :3], canvases.boxes_px[row])
            assert not boxes[row, 3:].any() and not labels[row, 3:].any()
    assert abs(np.mean(is_mosaic) - 0.3) < 0.07


@pytest.mark.parametrize("count", [1, 2, 5])
def test_mosaic_pairs_no_image_with_itself_except_in_a_batch_of_one(count):
    for seed in range(20):
        partners = tf_mosaic.random_others(count, Random(seed, 2)).numpy()
        assert (np.sort(partners) == np.arange(count)).all()
        assert count == 1 or (partners != np.arange(count)).all()


def test_mosaic_cuts_are_uniform_between_a_fifth_and_four_fifths():
    count = 4000
    cuts = tf_mosaic.random_cuts(count, tf.constant(SIZE), Random(1, 2)).numpy()
    assert cuts.min(0).tolist() == [10, 14] and cuts.max(0).tolist() == [40, 56]
    for axis, low, high in ((0, 10, 40), (1, 14, 56)):
        assert np.histogram(cuts[:, axis], 5, (low, high))[0].min() > 0.8 * count / 5
