"""Tests mosaics of fresh images: three more readers give the tiles of a mosaic."""

import dataclasses

import numpy as np
import pytest

from common.data.open import open_source
from tests.common.drawn_sets import write_coco
from tests.common.reading import assert_iterator_resumes
from tests.oracle.watched import Batch, Watched
from tests.yolov4.rectangles import PLAIN, read_batches, training_loader
from yolov4 import fresh_mosaic
from yolov4.mosaic import TILES

LEVELS = [20 + 2 * i for i in range(96)]
FRESH = dataclasses.replace(PLAIN, mosaic_prob=1.0, mosaic_tiles="fresh", min_box_size=0.5)


@pytest.fixture(scope="module")
def flat_images(tmp_path_factory):
    """Images in which every pixel equals the image id. Each has one box, which covers the image."""
    pictures = []
    for level in LEVELS:
        height, width = 30 + level % 7, 50 - level % 5
        image = np.full((height, width, 3), level, np.uint8)
        pictures.append((level, image, [(level % 6, (0, 0, width, height))]))
    return write_coco(tmp_path_factory.mktemp("flat"), pictures)


def watch(source, config=FRESH, count=12, **options) -> list[Batch]:
    watched = Watched(training_loader(source, config=config, batch_size=8, **options))
    return [watched.run() for _ in range(count)]


def test_each_reader_of_fresh_mosaics_reads_each_image_once_per_epoch_in_its_own_order(flat_images):
    assert training_loader(flat_images, config=FRESH, batch_size=8).steps_per_epoch == 12
    orders = []
    ranks = [watch(flat_images, count=6, shard_id=rank, num_shards=2) for rank in (0, 1)]
    for reader in range(TILES):
        shards = [
            [i for batch in rank for i in [batch.image_ids, *batch.other_image_ids][reader]] for rank in ranks
        ]
        assert not set(shards[0]) & set(shards[1])
        assert sorted(shards[0] + shards[1]) == LEVELS
        orders += shards
    assert len(set(map(tuple, orders))) == 2 * TILES
    for one in range(2 * TILES):
        for other in range(one):
            assert sum(a == b for a, b in zip(orders[one], orders[other], strict=True)) < 6


def test_first_reader_of_fresh_mosaics_has_the_image_order_of_a_loader_without_mosaic(flat_images):
    plain = [batch.image_ids for batch in watch(flat_images, PLAIN, seed=5)]
    assert plain == [batch.image_ids for batch in watch(flat_images, seed=5)]
    options = {"count": 3, "batch_size": 8, "seed": 5, "name_images": True}
    batches = read_batches(flat_images, config=FRESH, **options)
    assert [batch["image_ids"].tolist() for batch in batches] == plain[:3]


def test_reader_seeds_of_fresh_mosaics_are_all_different_and_the_first_is_the_loader_seed():
    assert fresh_mosaic.reader_seeds(5)[0] == 5
    seeds = {seed for start in (0, 1, 2**31 - 1) for seed in fresh_mosaic.reader_seeds(start)}
    assert len(seeds) == 3 * TILES and all(0 <= seed < 2**31 for seed in seeds)


def test_dali_graph_has_several_readers_only_for_training_with_fresh_mosaics(flat_images):
    for training, mosaic in ((True, True), (True, False), (False, True)):
        loader = training_loader(flat_images, config=FRESH, training=training, mosaic=mosaic)
        assert (b"reader_3" in loader.pipeline.serialize()) == (training and mosaic)
    for change in ({"mosaic_prob": 0.0}, {"mosaic_tiles": "batch"}):
        loader = training_loader(flat_images, config=dataclasses.replace(FRESH, **change))
        assert b"reader_1" not in loader.pipeline.serialize()


def test_restored_iterator_with_fresh_mosaics_gives_the_same_batches(rectangles, tmp_path):
    config = dataclasses.replace(FRESH, mosaic_prob=0.5, mixup_prob=0.5, cutmix_prob=0.5, multi_scale=1.4)
    assert_iterator_resumes(
        lambda: iter(training_loader(rectangles, config=config).dataset()), tmp_path, before=3, after=2
    )


def test_fresh_mosaics_from_tfrecords_have_the_boxes_of_four_images(drawn_records):
    source = open_source(file_pattern=f"{drawn_records}-*.tfrecord")
    most = np.diff(source.annotations.target_boxes.row_splits).max()
    batches = read_batches(source, config=FRESH, count=12, batch_size=4, count_lost=True)
    counts = np.concatenate([batch["num_boxes"] + batch["lost"].sum(1) for batch in batches])
    assert len(counts) == 48 and most < counts.max() <= TILES * most
