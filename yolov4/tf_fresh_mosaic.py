"""Mosaics of four freshly read images in plain TensorFlow: the twin of fresh_mosaic.py.

Here too a tile is cut out of a canvas that is never made, and an image that no tile shows is not decoded.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from common import dataset
from common.tf_readers import Random
from yolov4 import tf_mosaic
from yolov4.config import YOLOv4Config
from yolov4.crops import CropResize
from yolov4.mosaic import IS_FIRST, TILES
from yolov4.tf_mosaic import Mixed

Example = dict[str, tf.Tensor]  # of tf_readers.py


class Piece(NamedTuple):
    """A rectangle of a canvas and where it goes, int32 (2,) each, y and x in pixels."""

    start: tf.Tensor  # in the canvas
    size: tf.Tensor
    target: tf.Tensor  # in the mosaic


def make(
    examples: tuple[Example, ...],
    config: YOLOv4Config,
    image_size: tf.Tensor,
    random: Random,
    *,
    draw_crop: Callable[[tf.Tensor], CropResize],
    color: Callable[[tf.Tensor], tf.Tensor],
    fill: int,
) -> tuple[Mixed, tf.Tensor]:
    """A mosaic of the four images, or, if chance does not choose it, a plain canvas of the first.

    Args:
        examples: of the four readers.
        config: decides how often, and whether images are flipped.
        image_size: int32 (2,), (H, W) of the network input.
        random: for everything that is drawn here.
        draw_crop: the crop of a stored image of the given size, int32 (2,).
        color: changes the colours of an image, uint8 (h, w, 3).
        fill: the level around the images.

    Returns:
        The image; bool (), whether it is a mosaic.
    """
    chosen = random.uniform(0.0, 1.0) < config.mosaic_prob
    cut = tf.where(chosen, tf_mosaic.random_cuts(1, image_size, random)[0], image_size)

    def show(number: int) -> Mixed:
        example = examples[number]
        size = dataset.image_size_tf(example["encoded"])
        crop, flip = draw_crop(size), random.uniform(0.0, 1.0) < config.flip_prob
        place = tf.where(flip, mirrored(crop.place, image_size), crop.place)
        piece = piece_of(number, place, cut, image_size)
        return Mixed(
            tile_pixels(example["encoded"], crop, place, flip, piece, color, fill, config.antialias),
            tile_boxes(example["boxes"], size, crop, flip, piece, image_size),
            example["labels"],
        )

    def nothing(number: int) -> Mixed:
        size = tf.where(IS_FIRST[number] == 1, cut, image_size - cut)
        return Mixed(tf.zeros([size[0], size[1], 3], tf.uint8), tf.zeros([0, 4]), tf.zeros([0], tf.int32))

    tiles = [show(0)]
    for number in range(1, TILES):
        tiles.append(tf.cond(chosen, lambda n=number: show(n), lambda n=number: nothing(n)))
    images, boxes_px, labels = zip(*tiles, strict=True)
    upper, lower = tf.concat(images[:2], 1), tf.concat(images[2:], 1)
    return Mixed(tf.concat([upper, lower], 0), tf.concat(boxes_px, 0), tf.concat(labels, 0)), chosen


def mirrored(place: tf.Tensor, image_size: tf.Tensor) -> tf.Tensor:
    """The place (top, left, height, width) with left and right exchanged."""
    return tf.stack([place[0], image_size[1] - place[1] - place[3], place[2], place[3]])


def piece_of(number: int, place: tf.Tensor, cut: tf.Tensor, image_size: tf.Tensor) -> Piece:
    """What a tile shows of a canvas where the image has that place; the drawing is in mosaic.py."""
    is_first = tf.constant(IS_FIRST[number] == 1)
    rest, before = image_size - cut, place[:2]
    after = image_size - before - place[2:]
    return Piece(
        tf.where(is_first, rest - tf.minimum(rest, after), tf.minimum(cut, before)),
        tf.where(is_first, cut, rest),
        tf.where(is_first, 0, cut),
    )


def tile_pixels(
    encoded: tf.Tensor,
    crop: CropResize,
    place: tf.Tensor,
    flip: tf.Tensor,
    piece: Piece,
    color: Callable[[tf.Tensor], tf.Tensor],
    fill: int,
    antialias: bool,
) -> tf.Tensor:
    """uint8 (h, w, 3): the piece of the canvas. No more is decoded, resized and coloured than shows.

    Args:
        encoded: the file.
        crop: of the image before it is flipped.
        place: where it is afterwards.
        flip: bool ().
    """
    first = tf.maximum(piece.start, place[:2])
    shown = tf.minimum(piece.start + piece.size, place[:2] + place[2:]) - first
    part = first - place[:2]
    part = tf.where([False, flip], place[2:] - shown - part, part)
    scale = tf.cast(place[2:], tf.float32) / tf.cast(crop.window[2:], tf.float32)  # pixels of the canvas
    roi_start, roi_end = tf.cast(part, tf.float32) / scale, tf.cast(part + shown, tf.float32) / scale
    reach = tf.maximum(1 / scale, 1.0) + 1.0  # of the filter
    low = tf.maximum(tf.cast(tf.floor(roi_start - reach), tf.int32), 0)
    high = tf.minimum(tf.cast(tf.math.ceil(roi_end + reach), tf.int32), crop.window[2:])
    image = dataset.decode_image_tf(encoded, tf.concat([crop.window[:2] + low, high - low], 0))
    image = tf.raw_ops.ScaleAndTranslate(  # what tf.image.resize calls to antialias, of a part
        images=tf.cast(image, tf.float32)[tf.newaxis],
        size=shown,
        scale=scale,
        translation=(tf.cast(low, tf.float32) - roi_start) * scale,
        kernel_type="triangle",
        antialias=antialias,
    )[0]
    image = color(tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8))
    image = tf.cond(flip, lambda: image[:, ::-1], lambda: image)
    above = first - piece.start
    below = piece.size - shown - above
    paddings = [[above[0], below[0]], [above[1], below[1]], [0, 0]]
    return tf.ensure_shape(tf.pad(image, paddings, constant_values=fill), (None, None, 3))


def tile_boxes(
    boxes: tf.Tensor,
    size: tf.Tensor,
    crop: CropResize,
    flip: tf.Tensor,
    piece: Piece,
    image_size: tf.Tensor,
) -> tf.Tensor:
    """Boxes (N, 4) normalised by the image of that size -> in pixels of the mosaic, clipped to the tile."""
    moved = (boxes * _xyxy(size) - _xyxy(crop.window[:2])) / _xyxy(crop.window[2:])
    boxes_px = tf.clip_by_value(moved, 0.0, 1.0) * _xyxy(crop.place[2:]) + _xyxy(crop.place[:2])
    left, top, right, bottom = tf.unstack(boxes_px, axis=1)
    width = tf.cast(image_size[1], tf.float32)
    left, right = tf.where(flip, width - right, left), tf.where(flip, width - left, right)
    boxes_px = tf.stack([left, top, right, bottom], axis=1) + _xyxy(piece.target - piece.start)
    return tf.clip_by_value(boxes_px, _xyxy(piece.target), _xyxy(piece.target + piece.size))


def _xyxy(yx: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.gather(yx, [1, 0, 1, 0]), tf.float32)
