"""A tile of the twin is what would be cut out of the whole canvas; mosaics are as many and as DALI's."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from common import dataset
from tests.yolov4.test_fresh_mosaic import FRESH, INPUT, cut_of, draw_flat
from tests.yolov4.test_pipeline import PLAIN, encode, source_of
from yolov4 import fresh_mosaic, tf_fresh_mosaic, tf_mosaic, tf_pipeline
from yolov4.crops import CropResize
from yolov4.mosaic import TILES
from yolov4.tf_mosaic import Canvases
from yolov4.tf_pipeline import YOLOv4TFPipeline

FILL = 127


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    return draw_flat(tmp_path_factory.mktemp("flat"))


def batches(directory, config=FRESH, count=12, **options):
    options = {"batch_size": 8, "training": True, "name_images": True} | options
    loader = YOLOv4TFPipeline(source=source_of(directory), config=config, **options)
    for images, targets in loader.dataset().take(count):
        yield np.rint(images.numpy() * 255).astype(int), {k: v.numpy() for k, v in targets.items()}


def random_crop(random, size) -> tuple[CropResize, bool]:
    """Any part of an image of that size, anywhere; whether it is flipped."""
    spans = []
    for side in (*size, *INPUT):
        length = random.integers(1, side + 1)
        spans.append((random.integers(0, side - length + 1), length))
    window, place = (np.array(spans[i : i + 2], np.int32).T.ravel() for i in (0, 2))
    return CropResize(tf.constant(window), tf.constant(place)), bool(random.integers(2))


def test_a_tile_is_cut_out_of_the_whole_canvas():
    """For any views: against the stages that make the canvases, and tf_mosaic.py, which cuts them."""
    random, image_size = np.random.default_rng(0), tf.constant(INPUT)
    boxes = np.float32([[0.1, 0.2, 0.5, 0.6], [0, 0, 1, 1], [0.7, 0.4, 0.9, 1.0]])
    for _ in range(12):
        cut = tf.constant([random.integers(26, 103), random.integers(38, 155)], tf.int32)
        tiles, canvases = [], []
        for number in range(TILES):
            size = random.integers(20, 300, 2)
            noise = Image.fromarray(random.integers(0, 256, (9, 14, 3), np.uint8))
            encoded = tf.constant(encode(noise.resize(size[::-1].tolist(), Image.Resampling.BICUBIC), "PNG"))
            crop, flip = random_crop(random, size)
            image = tf_pipeline.resize(dataset.decode_image_tf(encoded, crop.window), crop.place[2:])
            image = tf_pipeline.pad(image, crop.place, image_size)
            in_window = tf_pipeline.boxes_to_window(boxes, tf.constant(size, tf.int32), crop.window)
            boxes_px, place = tf_pipeline.boxes_to_input(in_window, crop.place), crop.place
            if flip:
                image, boxes_px, place = tf_pipeline.random_flip(image, boxes_px, place, 1.0, AlwaysZero())
            canvases.append((image, boxes_px, tf.range(3), place))

            piece = tf_fresh_mosaic.piece_of(number, place, cut, image_size)
            flip = tf.constant(flip)
            tiles.append(
                (
                    tf_fresh_mosaic.tile_pixels(encoded, crop, place, flip, piece, lambda i: i, FILL, True),
                    tf_fresh_mosaic.tile_boxes(
                        boxes, tf.constant(size, tf.int32), crop, flip, piece, image_size
                    ),
                )
            )
        expected = tf_mosaic.mosaic(
            Canvases(*map(tf.stack, zip(*canvases, strict=True))), tf.range(TILES), cut
        )
        pixels = [tile.numpy().astype(int) for tile, _ in tiles]
        got = np.block([[[pixels[0]], [pixels[1]]], [[pixels[2]], [pixels[3]]]])
        assert got.shape == expected.image.shape
        assert np.abs(got - expected.image.numpy()).max() <= 1
        np.testing.assert_allclose(np.concatenate([b for _, b in tiles]), expected.boxes_px, atol=0.01)


class AlwaysZero:
    """Stands in for Random."""

    def uniform(self, low, high):
        return 0.0


def test_four_images_each_reader_s_own_and_cut_as_dali_s(flat):
    cuts, different, seen = [], 0, []
    for images, targets in batches(flat, count=24):  # two epochs
        assert (targets["num_boxes"] == TILES).all()
        seen += targets["image_ids"].tolist()
        for image, image_id in zip(images, targets["image_ids"], strict=True):
            levels = image[[0, 0, -1, -1], [0, -1, 0, -1], 0]
            assert levels[0] == image_id  # the first tile is of the image that is named
            different += len(set(levels)) == TILES
            if levels[0] not in levels[1:3]:
                cuts.append(cut_of(image))
    assert sorted(seen) == sorted(2 * [20 + 2 * i for i in range(96)])
    assert different > 0.8 * len(seen)
    cuts = np.array(cuts) / INPUT
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        np.testing.assert_allclose(np.quantile(cuts, share, 0), 0.2 + 0.6 * share, atol=0.09)


def test_what_is_no_mosaic_is_one_image(flat):
    rare = dataclasses.replace(FRESH, mosaic_prob=1e-9)
    plain = batches(flat, PLAIN, count=2)
    for (images, targets), (plain_images, plain_targets) in zip(
        batches(flat, rare, count=2), plain, strict=True
    ):
        np.testing.assert_array_equal(images, plain_images)
        for name, values in plain_targets.items():
            np.testing.assert_array_equal(targets[name], values)


def test_mixup_and_cutmix_leave_mosaics_alone(flat):
    config = dataclasses.replace(FRESH, mosaic_prob=0.5, mixup_prob=1.0)
    counts = np.concatenate([targets["num_boxes"] for _, targets in batches(flat, config)])
    # Four: a mosaic. Two and five: one image with another, or with a mosaic.
    assert set(counts.tolist()) == {2, TILES, 1 + TILES}
    assert abs((counts == TILES).sum() - 48) < 4 * 24**0.5
    one, *others = fresh_mosaic.reader_seeds(3)
    assert one == 3 and len({one, *others}) == TILES


def test_a_batch_of_one_makes_a_mosaic_of_four(flat):
    config = dataclasses.replace(FRESH, mixup_prob=1.0)
    ((_, targets),) = batches(flat, config, count=1, batch_size=1)
    assert targets["num_boxes"].tolist() == [TILES]
