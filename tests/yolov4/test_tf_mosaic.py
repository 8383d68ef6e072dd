"""Mosaic of the tf.data twin against NumPy, pixel by pixel; boxes are read off painted masks."""

import numpy as np
import pytest
import tensorflow as tf

from common.tf_readers import Random
from yolov4 import mosaic, tf_mosaic
from yolov4.tf_mosaic import Canvases

SIZE = HEIGHT, WIDTH = 50, 70  # not square, so that a swapped axis shows
SCALE = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT], np.float32)
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


def paint(box: np.ndarray) -> np.ndarray:
    """bool (H, W): the pixels of one box."""
    left, top, right, bottom = box.astype(int)
    mask = np.zeros(SIZE, bool)
    mask[top:bottom, left:right] = True
    return mask


def bounds(mask: np.ndarray) -> np.ndarray:
    """ltrb in pixels."""
    ys, xs = np.nonzero(mask)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def check_boxes(mixed: tf_mosaic.Mixed, expected: dict[int, np.ndarray]) -> None:
    """`expected` is label -> mask; the boxes without area are padding."""
    boxes, labels = mixed.boxes_px.numpy(), mixed.labels.numpy()
    real = (boxes[:, 2:] > boxes[:, :2]).all(1)
    assert sorted(labels[real]) == sorted(label for label, mask in expected.items() if mask.any())
    for box, label in zip(boxes[real], labels[real], strict=True):
        np.testing.assert_array_equal(box, bounds(expected[label]))


def darknet_mosaic(canvases: list[np.ndarray], places: np.ndarray, cut_y: int, cut_x: int) -> np.ndarray:
    """src/data.c, load_data_detection: row by row, which part of which canvas is copied where."""
    mosaic = np.zeros_like(canvases[0])
    for i in range(4):
        top, left, height, width = places[i]
        left_shift, top_shift = min(cut_x, left), min(cut_y, top)
        right_shift = min(WIDTH - cut_x, WIDTH - left - width)
        bottom_shift = min(HEIGHT - cut_y, HEIGHT - top - height)
        for y in range(HEIGHT):
            if i < 2 and y < cut_y:
                row = canvases[i][y + HEIGHT - cut_y - bottom_shift]
            elif i >= 2 and y >= cut_y:
                row = canvases[i][top_shift + y - cut_y]
            else:
                continue
            if i % 2 == 0:
                mosaic[y, :cut_x] = row[WIDTH - cut_x - right_shift :][:cut_x]
            else:
                mosaic[y, cut_x:] = row[left_shift:][: WIDTH - cut_x]
    return mosaic


@pytest.mark.parametrize("cut", [(10, 14), (40, 56), (10, 56), (25, 33), (37, 20)])
@pytest.mark.parametrize("tiles", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1), (3, 3, 3, 3)])
def test_mosaic_is_darknet_s(canvases, tiles, cut):
    mixed = tf_mosaic.mosaic(canvases, tf.constant(tiles), tf.constant(cut))
    images, places = canvases.images.numpy(), PLACES[list(tiles)]
    np.testing.assert_array_equal(mixed.image, darknet_mosaic([images[i] for i in tiles], places, *cut))

    boxes, labels = mixed.boxes_px.numpy(), mixed.labels.numpy()
    assert mixed.boxes_px.shape == (12, 4)
    for tile, source in enumerate(tiles):  # the boxes of a tile are found again with all else blacked out
        expected = {}
        for box, label in zip(
            canvases.boxes_px[source].numpy(), canvases.labels[source].numpy(), strict=True
        ):
            masks = [np.zeros(SIZE, bool)] * 4
            masks[tile] = paint(box)
            expected[label] = darknet_mosaic(masks, places, *cut)
        rows = slice(3 * tile, 3 * tile + 3)
        check_boxes(
            tf_mosaic.Mixed(mixed.image, tf.constant(boxes[rows]), tf.constant(labels[rows])), expected
        )


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


def test_nothing_happens_without_chance(canvases):
    images, boxes, labels = mixer(canvases)()
    np.testing.assert_array_equal(images, canvases.images)
    np.testing.assert_array_equal(boxes[:, :3], canvases.boxes_px)
    assert not boxes[:, 3:].any() and not labels[:, 3:].any()


def test_the_share_of_mosaics(canvases):
    mix, changed = mixer(canvases, mosaic_prob=0.3), []
    for seed in range(100):
        images, *_ = mix(seed)
        changed += (images != canvases.images.numpy()).any((1, 2, 3)).tolist()
    assert abs(np.mean(changed) - 0.3) < 0.07  # three standard deviations of 400 draws


def test_an_image_alone_in_its_batch_is_a_mosaic_of_itself(canvases):
    alone = Canvases(*(tensor[3:] for tensor in canvases))
    _, _, labels = mixer(alone, mosaic_prob=1.0)()
    assert sorted(labels[0]) == sorted([31, 32, 33] * 4)


# --- what chance decides ---

COUNT = 4000


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
    cuts = tf_mosaic.random_cuts(COUNT, tf.constant(SIZE), Random(tf.constant([1, 2]))).numpy()
    assert mosaic.MIN_OFFSET == 0.2
    assert cuts.min(0).tolist() == [10, 14] and cuts.max(0).tolist() == [40, 56]
    for axis, low, high in ((0, 10, 40), (1, 14, 56)):
        assert np.histogram(cuts[:, axis], 5, (low, high))[0].min() > 0.8 * COUNT / 5
    assert abs(np.corrcoef(cuts.T)[0, 1]) < 0.05
