"""Shards: disjoint, together complete, and as many steps on every rank, for 1 to 8 ranks and 1 to 50 images.

Every combination goes through DALI's readers of files, with and without annotations; a good many through its
record reader and through the plain tf.data readers, which take longer.
"""

import functools
import itertools
import json

import numpy as np
import pytest
from nvidia import dali

from common import dali_ops, readers, tf_readers
from common.datacheck.coco import load_coco
from common.datacheck.datasets import open_coco, open_tfrecords
from common.datacheck.tfrecord import TFRecordSource
from common.datasets import CocoSource, ImageListSource, Source
from common.errors import UserError
from common.loader import steps_per_epoch
from tests.common.record_writing import png
from tools.conversion.coco_to_tfrecord import write_tfrecords

MAX_RANKS, MAX_SIZE = 8, 50
FIRST_ID = 100
EPOCHS = 3
RANKS = range(1, MAX_RANKS + 1)


def sizes(num_shards: int) -> list[int]:
    """Just enough images, one more, every remainder, and the largest."""
    return [num_shards, num_shards + 1, *range(3 * num_shards - 1, 4 * num_shards - 1), MAX_SIZE]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Fifty little images, and their annotations."""
    directory = tmp_path_factory.mktemp("images")
    names = [f"{i:02d}.png" for i in range(MAX_SIZE)]
    for name in names:
        (directory / name).write_bytes(png(8, 9))
    document = {
        "images": [
            {"id": FIRST_ID + i, "file_name": name, "width": 8, "height": 9} for i, name in enumerate(names)
        ],
        "annotations": [
            {"image_id": FIRST_ID + i, "category_id": 5, "bbox": [1, 1, 2, 2]} for i in range(MAX_SIZE)
        ],
        "categories": [{"id": 5, "name": "five"}],
    }
    (directory / "instances.json").write_text(json.dumps(document))
    return directory, load_coco(directory / "instances.json", directory)


@pytest.fixture(scope="module")
def source_of(images, tmp_path_factory):
    """source_of(kind, size): the first images."""
    directory, annotations = images

    @functools.cache
    def make(kind: str, size: int) -> Source:
        if kind == "images":
            return ImageListSource(tuple(str(directory / name) for name in annotations.file_names[:size]))
        first = annotations.select(np.arange(MAX_SIZE) < size)
        if kind == "coco":
            source = open_coco(str(directory), str(directory / "instances.json"))
            source.__dict__["annotations"] = first
            return source
        prefix = tmp_path_factory.mktemp("records") / "x"
        write_tfrecords(first, directory, prefix, num_shards=min(size, 3), num_workers=1)
        return open_tfrecords(f"{prefix}*.tfrecord")

    return make


def ids_of(source):
    return sorted(source.annotations.image_ids)


# --- who reads what ---


def image_ids_node(source, shard_id, **options):
    """`source.read` under a name of its own: operators of one pipeline must not share one."""
    options |= {"shard_id": shard_id, "name": f"reader{shard_id}"}
    if isinstance(source, CocoSource):
        return readers.coco_reader(source.images_dir, source.annotations, **options)[3]
    if isinstance(source, TFRecordSource):
        return readers.tfrecord_reader(source.records.files, source.label_map, **options)[3]
    return readers.file_reader(
        source.files, **{k: v for k, v in options.items() if k not in ("training", "seed")}
    )[3]


def by_dali(source, num_shards, count, batch_size, **options):
    """The image ids that each rank reads. The readers of all ranks sit in one pipeline: that is quicker."""
    pipeline = dali.Pipeline(batch_size, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        options |= {"num_shards": num_shards}
        pipeline.set_outputs(*(image_ids_node(source, i, **options) for i in range(num_shards)))
    pipeline.build()
    ranks: list[list[int]] = [[] for _ in range(num_shards)]
    for _ in range(count // batch_size):
        for rank, batch in zip(ranks, pipeline.run(), strict=True):
            rank += [int(np.array(image_id)) for image_id in batch]
    return ranks


def by_tensorflow(source, num_shards, count, batch_size, **options):
    """The same by the plain readers; in evaluation as the loaders go through them."""
    ranks = []
    for shard_id in range(num_shards):
        examples = tf_readers.examples(source, shard_id=shard_id, num_shards=num_shards, **options)
        if not options["training"]:
            examples = examples.repeat().take(count // 2).repeat()
        image_ids = examples.map(lambda example: example["image_id"]).take(count)
        ranks.append([int(image_id) for image_id in image_ids.as_numpy_iterator()])
    return ranks


def check_evaluation(read, source, num_shards):
    """Equal steps everywhere, twice: the second evaluation begins where the first one did."""
    batch_size = (1, 3, 4, 7)[(source.size + num_shards) % 4]
    count = batch_size * steps_per_epoch(source.size, batch_size * num_shards, training=False)
    ranks = read(source, num_shards, 2 * count, batch_size, training=False, seed=0)
    first, second = [rank[:count] for rank in ranks], [rank[count:] for rank in ranks]
    assert first == second
    assert [len(rank) for rank in first] == [count] * num_shards
    once = [image_id for rank in first for image_id in dict.fromkeys(rank)]  # without a rank's repeats
    assert sorted(once) == ids_of(source), (source.size, num_shards, batch_size)


def check_training_by_dali(source, num_shards):
    """Each rank reads its part of each permutation, and then its part of the next."""
    bounds = [dali_ops.shard_range(source.size, shard_id, num_shards) for shard_id in range(num_shards)]
    lengths = [end - begin for begin, end in bounds]
    count = EPOCHS * max(lengths)
    ranks = by_dali(source, num_shards, count, count, training=True, seed=3)
    for epoch in range(EPOCHS):
        parts = [rank[epoch * n : (epoch + 1) * n] for rank, n in zip(ranks, lengths, strict=True)]
        assert sorted(itertools.chain(*parts)) == ids_of(source), (source.size, num_shards, epoch)


def check_training_by_tensorflow(source, num_shards):
    """Ranks take turns in one endless sequence of permutations."""
    count = -(-EPOCHS * source.size // num_shards)
    ranks = by_tensorflow(source, num_shards, count, 1, training=True, seed=3)
    sequence = [image_id for turn in zip(*ranks, strict=True) for image_id in turn]
    for epoch in range(EPOCHS):
        images = sequence[epoch * source.size : (epoch + 1) * source.size]
        assert sorted(images) == ids_of(source), (source.size, num_shards, epoch)


@pytest.mark.parametrize("num_shards", RANKS)
def test_files_by_dali_in_all_combinations(source_of, num_shards):
    for size in range(num_shards, MAX_SIZE + 1):
        check_training_by_dali(source_of("coco", size), num_shards)
        check_evaluation(by_dali, source_of("coco", size), num_shards)
        check_evaluation(by_dali, source_of("images", size), num_shards)


@pytest.mark.parametrize("num_shards", RANKS)
def test_records_by_dali(source_of, num_shards):
    for size in sizes(num_shards):
        check_training_by_dali(source_of("tfrecord", size), num_shards)
        check_evaluation(by_dali, source_of("tfrecord", size), num_shards)


@pytest.mark.parametrize("num_shards", RANKS)
def test_files_by_tensorflow(source_of, num_shards):
    """Whatever is read, who reads what is decided in one place; test_tf_readers.py reads the rest."""
    for size in sizes(num_shards)[1::2]:
        check_training_by_tensorflow(source_of("coco", size), num_shards)
        check_evaluation(by_tensorflow, source_of("coco", size), num_shards)


@pytest.mark.parametrize("num_shards", RANKS)
def test_more_ranks_than_images_are_refused(source_of, num_shards):
    for size in range(1, num_shards):
        source = source_of("coco", size)
        for read in (by_dali, by_tensorflow):
            with pytest.raises(UserError, match=f"^{size} images cannot be shared by {num_shards} ranks"):
                read(source, num_shards, 2, 1, training=False, seed=0)


# --- how many steps that takes ---


def test_steps_in_all_combinations():
    """No argument of steps_per_epoch names the rank: what is to be shown is that they are enough for all."""
    for num_shards, size, batch_size in itertools.product(RANKS, range(1, MAX_SIZE + 1), range(1, 17)):
        if size < num_shards:
            continue
        bounds = [dali_ops.shard_range(size, shard_id, num_shards) for shard_id in range(num_shards)]
        assert bounds[0][0] == 0 and bounds[-1][1] == size
        assert all(this[1] == following[0] for this, following in itertools.pairwise(bounds))
        shards = [end - begin for begin, end in bounds]
        assert max(shards) - min(shards) <= 1 and min(shards) >= 1
        steps = steps_per_epoch(size, batch_size * num_shards, training=False)
        assert (steps - 1) * batch_size < max(shards) <= steps * batch_size
        steps = steps_per_epoch(size, batch_size * num_shards, training=True)
        assert steps == 1 or 0 <= size - steps * batch_size * num_shards < batch_size * num_shards
