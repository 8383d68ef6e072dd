"""Mosaics of freshly read images: whose they are, in which order, and how often.

Their pixels and boxes are compared with NumPy's in tests/oracle.
"""

import dataclasses
import pathlib

import numpy as np
import pytest

from common.datacheck import datasets
from common.datacheck.datasets import open_source
from common.errors import UserError
from tests.oracle.watched import Batch, Watched
from tests.yolov4.test_pipeline import PLAIN, batches, make, source_of, write_coco
from yolov4 import fresh_mosaic
from yolov4.mosaic import TILES
from yolov4.pipeline import YOLOv4Pipeline

NUM_IMAGES = 96
INPUT = (128, 192)
FRESH = dataclasses.replace(PLAIN, mosaic_prob=1.0, mosaic_tiles="fresh", min_box_size=0.5)


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    return draw_flat(tmp_path_factory.mktemp("flat"))


def draw_flat(directory: pathlib.Path) -> pathlib.Path:
    """96 PNGs, each of one level of grey, 20 to 210, with a box that is all of it; its id is its level."""
    levels = [20 + 2 * i for i in range(NUM_IMAGES)]
    images = [(level, np.full((30 + level % 7, 50 - level % 5, 3), level, np.uint8)) for level in levels]
    boxes = [(level, (0, 0, image.shape[1], image.shape[0]), level % 6) for level, image in images]
    return write_coco(directory, images, boxes)


def watch(directory, config=FRESH, count=12, **options) -> list[Batch]:
    options = {"batch_size": 8, "training": True, "num_threads": 1} | options
    watched = Watched(YOLOv4Pipeline(source=source_of(directory), config=config, **options))
    return [watched.run() for _ in range(count)]


def read_by(all_batches: list[Batch], number: int) -> list[int]:
    """The ids of what one reader has read."""
    per_batch = [[batch.image_ids, *batch.other_image_ids][number] for batch in all_batches]
    return [image_id for ids in per_batch for image_id in ids]


def cut_of(image: np.ndarray) -> tuple[int, int]:
    """Where the levels change, from the picture alone."""
    rows, columns = (np.flatnonzero(np.diff(line)) for line in (image[:, 0, 0], image[0, :, 0]))
    return rows[0] + 1, columns[0] + 1


def test_a_mosaic_shows_four_images_with_their_boxes(flat):
    """Each tile is of the image that its reader has read for just this sample."""
    different = 0
    for batch in watch(flat):
        readers = np.array([batch.image_ids, *batch.other_image_ids])  # (4, 8)
        assert readers.shape == (TILES, 8) and batch.draws.coin(1.0).all()
        cuts = np.floor(batch.draws.uniform(0.2, 0.8, shape=[2]) * INPUT + 0.5).astype(int)
        batch.draws.finish()
        for row, ids in enumerate(readers.T):
            image = np.rint(batch.outputs["images"][row] * 255).astype(int)
            cut_y, cut_x = cuts[row].tolist()
            spans = [(0, 0, cut_x, cut_y), (cut_x, 0, INPUT[1], cut_y)]
            spans += [(0, cut_y, cut_x, INPUT[0]), (cut_x, cut_y, *INPUT[::-1])]
            for (left, top, right, bottom), level in zip(spans, ids, strict=True):
                assert (image[top:bottom, left:right] == level).all()
            boxes_px = batch.outputs["boxes"][row, :TILES] * [*INPUT[::-1], *INPUT[::-1]]
            np.testing.assert_allclose(boxes_px, spans, atol=0.01)
            np.testing.assert_array_equal(batch.outputs["classes"][row, :TILES], ids % 6)
            assert batch.outputs["num_boxes"].reshape(-1)[row] == TILES
            different += len(set(ids.tolist())) == TILES
    # By chance two of four are the same in 6 of 96 mosaics.
    assert different > 0.8 * NUM_IMAGES


def test_in_an_epoch_every_reader_reads_every_image_once_in_an_order_of_its_own(flat):
    loader = make(flat, FRESH)
    assert loader.steps_per_epoch == make(flat, PLAIN).steps_per_epoch == 12
    orders = []
    ranks = [watch(flat, count=6, shard_id=rank, num_shards=2) for rank in (0, 1)]
    for number in range(TILES):
        parts = [read_by(rank, number) for rank in ranks]
        assert not set(parts[0]) & set(parts[1])
        assert sorted(parts[0] + parts[1]) == [20 + 2 * i for i in range(NUM_IMAGES)]
        orders += parts
    assert len(set(map(tuple, orders))) == 2 * TILES
    for one in range(2 * TILES):  # no reader runs along with another
        for other in range(one):
            assert sum(a == b for a, b in zip(orders[one], orders[other], strict=True)) < 6


def test_the_first_reader_s_order_is_the_loader_s_own(flat):
    plain = [batch.image_ids for batch in watch(flat, PLAIN, seed=5)]
    fresh = watch(flat, seed=5)
    assert plain == [batch.image_ids for batch in fresh]
    named = YOLOv4Pipeline(
        source=source_of(flat), config=FRESH, batch_size=8, training=True, seed=5, name_images=True
    )
    assert [b["image_ids"].reshape(-1).tolist() for b in batches(named, 3)] == plain[:3]
    assert fresh_mosaic.reader_seeds(5)[0] == 5
    seeds = {seed for start in (0, 1, 2**31 - 1) for seed in fresh_mosaic.reader_seeds(start)}
    assert len(seeds) == 3 * TILES and all(0 <= seed < 2**31 for seed in seeds)


def test_what_is_no_mosaic_is_the_first_reader_s_image_as_ever(flat):
    """Also the rest of the pipeline's work is the same: with no mosaic at all, so is every output."""
    rare = dataclasses.replace(FRESH, mosaic_prob=1e-9)
    for one, other in zip(batches(make(flat, rare), 3), batches(make(flat, PLAIN), 3), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    half = dataclasses.replace(FRESH, mosaic_prob=0.5)
    (counts,) = np.unique([b["num_boxes"] for b in batches(make(flat, half), 12)], return_counts=True)[1:]
    assert counts.shape == (2,) and abs(counts[0] - 48) < 4 * 24**0.5


def test_cut_points_are_those_of_mosaics_of_the_batch(flat):
    cuts = {}
    for tiles in ("fresh", "batch"):
        config = dataclasses.replace(FRESH, mosaic_tiles=tiles)
        cuts[tiles] = []
        for batch in batches(make(flat, config, batch_size=16), 24):
            for image in np.rint(batch["images"] * 255).astype(int):
                # Two neighbours may be the same image, and then there is no border to be seen.
                if image[0, 0, 0] != image[-1, 0, 0] and image[0, 0, 0] != image[0, -1, 0]:
                    cuts[tiles].append(cut_of(image))
        cuts[tiles] = np.array(cuts[tiles]) / INPUT
        assert len(cuts[tiles]) > 250
        assert cuts[tiles].min() >= 0.195 and cuts[tiles].max() <= 0.805
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        for tiles in cuts:
            np.testing.assert_allclose(np.quantile(cuts[tiles], share, 0), 0.2 + 0.6 * share, atol=0.07)


def test_one_image_a_batch_is_enough_for_a_mosaic_of_four(flat):
    levels = [np.unique(batch["images"]) for batch in batches(make(flat, FRESH, batch_size=1), 20)]
    assert sum(len(shown) == TILES for shown in levels) > 14


def test_further_readers_are_there_only_for_mosaics_that_may_come(flat):
    for training, mosaic in ((True, True), (True, False), (False, True)):
        graph = make(flat, FRESH, training=training, mosaic=mosaic).pipeline.serialize()
        assert (b"reader_3" in graph) == (training and mosaic)
    for change in ({"mosaic_prob": 0.0}, {"mosaic_tiles": "batch"}):
        loader = make(flat, dataclasses.replace(FRESH, **change))
        assert b"reader_1" not in loader.pipeline.serialize()


def test_tfrecords_too(drawn_records):
    source = open_source(file_pattern=f"{drawn_records}-*.tfrecord")
    loader = YOLOv4Pipeline(source=source, config=FRESH, batch_size=4, training=True, count_lost=True)
    truth = np.diff(source.annotations.target_boxes.row_splits)
    shown = np.concatenate([b["num_boxes"] + b["lost"].sum(1) for b in batches(loader, 12)])
    assert len(shown) == 48 and truth.max() < shown.max() <= TILES * truth.max()


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    image = np.zeros((20, 30, 3), np.uint8)
    write_coco(tmp_path, [(i, image) for i in range(1, 9)], [(i, (1, 1, 5, 5), 0) for i in range(1, 9)])
    source = source_of(tmp_path)
    assert source.size == 8
    (tmp_path / "5.png").write_bytes((tmp_path / "5.png").read_bytes()[:40])
    loader = YOLOv4Pipeline(source=source, config=FRESH, batch_size=1, training=True)
    with pytest.raises(RuntimeError) as stopped:
        for _ in range(8):
            loader.pipeline.run()
    explained = datasets.explain(stopped.value, source, loader.pipeline_type)
    assert isinstance(explained, UserError) and "5.png" in str(explained)


@pytest.mark.parametrize("value", ["new", "Fresh", ""])
def test_tiles_must_be_of_a_known_kind(value):
    with pytest.raises(ValueError, match=r"mosaic_tiles.*expected one of batch, fresh"):
        dataclasses.replace(PLAIN, mosaic_tiles=value)
