"""Mosaic in plain TensorFlow, with the rules of mosaic.py.

Boxes without area are padding. A box outside its tile loses its area, and so becomes padding.
"""

from typing import NamedTuple

import tensorflow as tf

from common import boxes as box_ops
from common.data.tf_readers import Random, xyxy
from yolov4.mosaic import IS_FIRST, MIN_OFFSET, TILES


class Canvases(NamedTuple):
    """A batch of network inputs."""

    images: tf.Tensor  # uint8 (B, H, W, 3)
    boxes_px: tf.Tensor  # float32 (B, N, 4), ltrb
    labels: tf.Tensor  # int32 (B, N), 1-based
    places: tf.Tensor  # int32 (B, 4): (top, left, height, width) of the image in its canvas, in pixels


class Mixed(NamedTuple):
    """One network input made of several canvases."""

    image: tf.Tensor  # uint8 (H, W, 3)
    boxes_px: tf.Tensor  # float32 (M, 4)
    labels: tf.Tensor  # int32 (M,)


def mix(
    canvases: Canvases, mosaic_prob: float, random: Random, min_visible: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Replaces each sample by a mosaic with probability `mosaic_prob`.

    Returns:
        uint8 (B, H, W, 3), images; float32 (B, 4 N, 4), boxes in pixels; int32 (B, 4 N), their labels.
    """
    batch_size, num_boxes = canvases.labels.shape[0], tf.shape(canvases.labels)[1]
    size = tf.shape(canvases.images)[1:3]
    is_mosaic = random.uniform(0.0, 1.0, (batch_size,)) < mosaic_prob
    tiles = [tf.range(batch_size)] + [random_others(batch_size, random) for _ in range(TILES - 1)]
    tiles = tf.stack(tiles)  # (4, B)
    cuts = random_cuts(batch_size, size, random)

    def make(index: tf.Tensor) -> Mixed:
        mixed = tf.cond(
            is_mosaic[index],
            lambda: mosaic(canvases, tiles[:, index], cuts[index], min_visible),
            lambda: Mixed(canvases.images[index], canvases.boxes_px[index], canvases.labels[index]),
        )
        padding = [[0, TILES * num_boxes - tf.shape(mixed.labels)[0]]]
        return Mixed(
            tf.ensure_shape(mixed.image, canvases.images.shape[1:]),
            tf.ensure_shape(tf.pad(mixed.boxes_px, padding + [[0, 0]]), (None, 4)),
            tf.pad(mixed.labels, padding),
        )

    signature = Mixed(
        tf.TensorSpec(canvases.images.shape[1:], tf.uint8),
        tf.TensorSpec((None, 4), tf.float32),
        tf.TensorSpec((None,), tf.int32),
    )
    return tuple(tf.map_fn(make, tf.range(batch_size), fn_output_signature=signature))


def random_others(batch_size: int, random: Random) -> tf.Tensor:
    """Returns int32 (B,): for each sample another sample's index."""
    order = random.permutation(batch_size)
    return tf.scatter_nd(order[:, tf.newaxis], tf.roll(order, 1, axis=0), [batch_size])


def random_cuts(batch_size: int, size: tf.Tensor, random: Random) -> tf.Tensor:
    """Returns int32 (B, 2): row and column of the cut point of each mosaic. `size` is height and width."""
    shares = random.uniform(MIN_OFFSET, 1.0 - MIN_OFFSET, (batch_size, 2))
    return tf.cast(tf.round(shares * tf.cast(size, tf.float32)), tf.int32)


def mosaic(canvases: Canvases, tiles: tf.Tensor, cut: tf.Tensor, min_visible: float = 0.0) -> Mixed:
    """Makes a mosaic of parts of four canvases (Darknet src/data.c, load_data_detection, blend_truth_mosaic).

    Args:
        tiles: int32 (4,), canvas of each quarter: top left, top right, bottom left, bottom right.
        cut: int32 (2,), row and column of the cut point.
        min_visible: a box loses its area if its tile shows less than this share of it.
    """
    size = tf.shape(canvases.images)[1:3]
    pieces, boxes_px = [], []
    for i, is_first in enumerate(IS_FIRST):  # the same formulas as in mosaic.tiles
        before = canvases.places[tiles[i], :2]
        after = size - before - canvases.places[tiles[i], 2:]
        rest = size - cut
        starts = is_first * (rest - tf.minimum(rest, after)) + (1 - is_first) * tf.minimum(cut, before)
        lengths = is_first * cut + (1 - is_first) * rest
        targets = (1 - is_first) * cut
        (top, left), (bottom, right) = tf.unstack(starts), tf.unstack(starts + lengths)
        pieces.append(canvases.images[tiles[i], top:bottom, left:right])
        moved_px = canvases.boxes_px[tiles[i]] + xyxy(targets - starts)
        clipped_px = tf.clip_by_value(moved_px, xyxy(targets), xyxy(targets + lengths))
        stays = box_ops.area(clipped_px) >= min_visible * box_ops.area(moved_px)
        boxes_px.append(tf.where(stays[:, tf.newaxis], clipped_px, 0.0))
    upper, lower = tf.concat(pieces[:2], 1), tf.concat(pieces[2:], 1)
    labels = tf.reshape(tf.gather(canvases.labels, tiles), [-1])
    return Mixed(tf.concat([upper, lower], 0), tf.concat(boxes_px, 0), labels)
