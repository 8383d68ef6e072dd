import dataclasses

import numpy as np
import pytest

from common.data.open import open_source
from tests.common.drawn_sets import write_coco
from tests.common.reading import assert_iterator_resumes
from tests.oracle.watched import Batch, Watched
from tests.yolov4.rectangles import PLAIN, assert_equal, make, read
from yolov4 import fresh_mosaic
from yolov4.mosaic import TILES

LEVELS = [20 + 2 * i for i in range(96)]
FRESH = dataclasses.replace(PLAIN, mosaic_prob=1.0, mosaic_tiles="fresh", min_box_size=0.5)


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Images in which every pixel equals the image id. Each has one box, the whole image."""
    pictures = []
    for level in LEVELS:
        height, width = 30 + level % 7, 50 - level % 5
        image = np.full((height, width, 3), level, np.uint8)
        pictures.append((level, image, [(level % 6, (0, 0, width, height))]))
    return write_coco(tmp_path_factory.mktemp("flat"), pictures)


def watch(source, config=FRESH, count=12, **options) -> list[Batch]:
    watched = Watched(make(source, config=config, batch_size=8, **options))
    return [watched.run() for _ in range(count)]


def test_in_an_epoch_every_reader_reads_every_image_once_in_another_order(flat):
    assert make(flat, config=FRESH, batch_size=8).steps_per_epoch == 12
    orders = []
    ranks = [watch(flat, count=6, shard_id=rank, num_shards=2) for rank in (0, 1)]
    for number in range(TILES):
        parts = [
            [i for batch in rank for i in [batch.image_ids, *batch.other_image_ids][number]] for rank in ranks
        ]
        assert not set(parts[0]) & set(parts[1])
        assert sorted(parts[0] + parts[1]) == LEVELS
        orders += parts
    assert len(set(map(tuple, orders))) == 2 * TILES
    for one in range(2 * TILES):
        for other in range(one):
            assert sum(a == b for a, b in zip(orders[one], orders[other], strict=True)) < 6


def test_the_first_readers_order_is_the_loaders_own(flat):
    plain = [batch.image_ids for batch in watch(flat, PLAIN, seed=5)]
    assert plain == [batch.image_ids for batch in watch(flat, seed=5)]
    named = read(flat, config=FRESH, count=3, batch_size=8, seed=5, name_images=True)
    assert [batch["image_ids"].tolist() for batch in named] == plain[:3]
    assert fresh_mosaic.reader_seeds(5)[0] == 5
    seeds = {seed for start in (0, 1, 2**31 - 1) for seed in fresh_mosaic.reader_seeds(start)}
    assert len(seeds) == 3 * TILES and all(0 <= seed < 2**31 for seed in seeds)


def test_without_a_mosaic_all_is_as_with_the_first_reader_alone(flat):
    rare = dataclasses.replace(FRESH, mosaic_prob=1e-9)
    options = {"count": 3, "batch_size": 8}
    assert_equal(read(flat, config=rare, **options), read(flat, config=PLAIN, **options))


def test_further_readers_are_there_only_for_mosaics_that_may_come(flat):
    for training, mosaic in ((True, True), (True, False), (False, True)):
        graph = make(flat, config=FRESH, training=training, mosaic=mosaic).pipeline.serialize()
        assert (b"reader_3" in graph) == (training and mosaic)
    for change in ({"mosaic_prob": 0.0}, {"mosaic_tiles": "batch"}):
        loader = make(flat, config=dataclasses.replace(FRESH, **change))
        assert b"reader_1" not in loader.pipeline.serialize()


def test_a_saved_iterator_goes_on(rectangles, tmp_path):
    config = dataclasses.replace(FRESH, mosaic_prob=0.5, mixup_prob=0.5, cutmix_prob=0.5, multi_scale=1.4)
    assert_iterator_resumes(lambda: iter(make(rectangles, config=config).dataset()), tmp_path, 3, 2)


def test_tfrecords_too(drawn_records):
    source = open_source(file_pattern=f"{drawn_records}-*.tfrecord")
    truth = np.diff(source.annotations.target_boxes.row_splits)
    found = read(source, config=FRESH, count=12, batch_size=4, count_lost=True)
    shown = np.concatenate([batch["num_boxes"] + batch["lost"].sum(1) for batch in found])
    assert len(shown) == 48 and truth.max() < shown.max() <= TILES * truth.max()
