"""Tests sharding, and the selection of boxes by DALI and by TensorFlow."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from nvidia import dali
from nvidia.dali import fn

from common import dali_ops
from common.data import tf_readers
from common.data.loader import steps_per_epoch
from common.data.sharding import shard_range
from tests.common.reading import first_images, numbered_images, run_graph
from tests.common.test_box_encoder import INF, NAN, NO_BOXES, grid_boxes, largest, random_boxes, random_labels

MAX_SIZE = 50


# --- shards ---


@pytest.mark.parametrize("num_shards", range(1, 9))
def test_shards_cover_the_images_evenly_and_steps_cover_the_shards(num_shards):
    for size in range(num_shards, MAX_SIZE + 1):
        shards = [range(*shard_range(size, shard_id, num_shards)) for shard_id in range(num_shards)]
        assert [image for shard in shards for image in shard] == list(range(size))
        lengths = [len(shard) for shard in shards]
        assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 1
        for batch_size in range(1, 17):
            steps = steps_per_epoch(size, batch_size * num_shards, training=False)
            assert (steps - 1) * batch_size < max(lengths) <= steps * batch_size
            steps = steps_per_epoch(size, batch_size * num_shards, training=True)
            assert steps == max(size // (batch_size * num_shards), 1)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    directory = tmp_path_factory.mktemp("numbered")
    return numbered_images(directory, range(100, 100 + MAX_SIZE)), directory


def read_ids(source, num_shards, count, batch_size, **options):
    """Returns the image ids of each rank. For speed, all readers are in one pipeline."""
    pipeline = dali.Pipeline(batch_size, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        shards = [{"shard_id": i, "num_shards": num_shards, "name": f"reader{i}"} for i in range(num_shards)]
        pipeline.set_outputs(*(source.read(**shard, **options)[3] for shard in shards))
    pipeline.build()
    ranks = [[] for _ in range(num_shards)]
    for _ in range(count // batch_size):
        for rank, batch in zip(ranks, pipeline.run(), strict=True):
            rank += [int(np.array(image_id)) for image_id in batch]
    return ranks


@pytest.mark.parametrize("kind", ["coco", "images", "tfrecord"])
@pytest.mark.parametrize(("num_shards", "size"), [(1, 1), (3, 3), (5, 14)])
def test_ranks_together_read_every_image_of_each_epoch_and_no_two_ranks_the_same_image(
    numbered, kind, num_shards, size
):
    source = first_images(numbered[0], size, kind, numbered[1])
    image_ids = sorted(source.annotations.image_ids)

    # Each rank reads two epochs of evaluation. Both have the same images.
    batch_size = (1, 3, 4, 7)[(size + num_shards) % 4]
    count = batch_size * steps_per_epoch(size, batch_size * num_shards, training=False)
    ranks = read_ids(source, num_shards, 2 * count, batch_size, training=False, seed=0)
    assert all(len(rank) == 2 * count and rank[:count] == rank[count:] for rank in ranks)
    once = [image_id for rank in ranks for image_id in dict.fromkeys(rank)]  # a rank may repeat images
    assert sorted(once) == image_ids

    # In each epoch of training, the ranks together read every image once.
    if kind != "images":
        num_epochs = 3
        lengths = [len(range(*shard_range(size, rank, num_shards))) for rank in range(num_shards)]
        count = num_epochs * max(lengths)
        ranks = read_ids(source, num_shards, count, count, training=True, seed=3)
        for epoch in range(num_epochs):
            parts = [rank[epoch * n : (epoch + 1) * n] for rank, n in zip(ranks, lengths, strict=True)]
            assert sorted(itertools.chain(*parts)) == image_ids


# --- which boxes are dropped ---


def run_tf(function, images, labels):
    """Does the same as `run_graph`, without DALI."""
    pairs = zip(map(tf.constant, images), map(tf.constant, labels), strict=True)
    return [[np.asarray(output) for output in function(*pair)] for pair in pairs]


ALL = 10_000

SELECT = pytest.mark.parametrize(
    ("run", "select"),
    [(run_graph, dali_ops.select_boxes), (run_tf, tf_readers.select_boxes)],
    ids=["dali", "tensorflow"],
)


@SELECT
def test_box_without_area_or_finite_sides_is_dropped(run, select):
    sound = [0.2, 0.2, 0.8, 0.8]
    bad = [np.where(place, value, sound) for value in (NAN, INF, -INF) for place in np.eye(4, dtype=bool)]
    bad += [[0.2, 0.2, 0.2, 0.8], [0.2, 0.2, 0.8, 0.2], [0, 0, 0, 0]]
    bad += [[0.8, 0.2, 0.2, 0.8], [0.2, 0.8, 0.8, 0.2]]
    bad += [[INF] * 4, [-INF, -INF, INF, INF]]
    bad += [[-3e38, 0, 3e38, 1], [0, -3e38, 1, 3e38]]  # finite edges, but infinite sides
    good = [[-0.0, 0.0, 1.0, 1.0], [0.5, 0.5, np.nextafter(np.float32(0.5), 1), 0.6], [-2, -2, 3, 3]]
    images = [np.float32(bad[:7] + good[:1] + bad[7:] + good[1:]), np.float32(bad), NO_BOXES]
    labels = [np.arange(len(boxes), dtype=np.int32) for boxes in images]
    results = run(lambda b, n: select(b, n, (0.0, 0.0), ALL), images, labels)
    for (boxes, box_labels, _), kept in zip(results, (good, [], []), strict=True):
        expected = np.float32(kept).reshape(-1, 4)
        np.testing.assert_array_equal(boxes.view(np.int32), expected.view(np.int32))
        assert box_labels.tolist() == [7, len(bad) + 1, len(bad) + 2][: len(expected)]
        assert (boxes.dtype, box_labels.dtype) == (np.float32, np.int32)


@SELECT
def test_box_below_the_minimum_height_or_width_is_dropped(run, select):
    boxes = np.float32([[0, 0, 0.25, 0.5], [0, 0, 0.125, 0.5], [0, 0, 0.25, 0.25], [0.5, 0.5, 0.75, 1]])
    labels = np.int32([1, 2, 3, 4])
    ((large, labels, lost),) = run(lambda b, n: select(b, n, (0.5, 0.25), ALL), [boxes], [labels])
    np.testing.assert_array_equal(labels, [1, 4])
    np.testing.assert_array_equal(large, boxes[[0, 3]])
    assert lost.tolist() == [2, 0] and lost.dtype == np.int32


@SELECT
@pytest.mark.parametrize("count", [1, 100])
def test_box_limit_keeps_the_largest_boxes_in_input_order_and_of_equal_boxes_the_first(run, select, count):
    rng = np.random.default_rng(3)
    images = [random_boxes(rng, n) for n in (500, 101, 100, 99, 1)]
    images += [NO_BOXES, np.repeat(random_boxes(rng, 1), 150, axis=0), grid_boxes(rng, 300)]
    images[0][::2, 2] = images[0][::2, 0]
    labels = random_labels(rng, images)
    results = run(lambda b, n: select(b, n, (0.0, 0.0), count), images, labels)
    for boxes, box_labels, (selected, selected_labels, lost) in zip(images, labels, results, strict=True):
        has_area = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))
        expected = has_area[largest(boxes[has_area], count)]
        np.testing.assert_array_equal(selected, boxes[expected])
        np.testing.assert_array_equal(selected_labels, box_labels[expected])
        assert lost.tolist() == [0, len(has_area) - len(expected)]


def test_dali_box_selection_without_a_limit_keeps_all_boxes():
    boxes = random_boxes(np.random.default_rng(3), 300)
    ((selected, *_),) = run_graph(dali_ops.select_boxes, [boxes], [np.ones(300, np.int32)])
    np.testing.assert_array_equal(selected, boxes)


def test_dali_box_selection_equals_numpy_if_each_image_keeps_at_most_one_box():
    """DALI 2.4 reads wrong memory if it compares arrays of certain shapes in one batch."""
    random = np.random.default_rng(0)
    batches = [[random_boxes(random, n) for n in random.integers(0, 4, 4)] for _ in range(60)]
    for boxes in itertools.chain(*batches):
        boxes[1:, 2] = boxes[1:, 0]
        boxes[: random.integers(2), 2] = 0.0
    pipeline = dali.Pipeline(4, num_threads=2, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        nodes = [
            fn.external_source(source=iter(source), batch=True)
            for source in (batches, [random_labels(random, images) for images in batches])
        ]
        pipeline.set_outputs(dali_ops.select_boxes(*nodes, min_size=(0.0, 0.0), max_instances=ALL).boxes)
    pipeline.build()
    for images in batches:
        (selected,) = pipeline.run()
        for number, boxes in enumerate(images):
            expected = boxes[(boxes[:, 2:] > boxes[:, :2]).all(1)]
            np.testing.assert_array_equal(np.array(selected.at(number)), expected)
