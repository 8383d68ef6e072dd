"""What the loaders of both apps give to the ranks of a run: equal steps, one order, their own augmentation.

Which images a rank reads is tested with the readers (tests/common/test_dali_ops.py, test_tf_readers.py).
"""

import itertools
import json

import numpy as np
import PIL.Image
import pytest

from common import hparams
from common.datacheck.datasets import open_coco
from common.loader import steps_per_epoch
from tests.apps.conftest import either_app

LOADERS = ["dali_cpu", "tensorflow"]
PLAIN = {  # hparams without anything random
    "efficientdet": "augmentation=none,flip_prob=0",
    "yolov4": "jitter=0,flip_prob=0,hue=0,mosaic_prob=0,mixup_prob=0,cutmix_prob=0,multi_scale=1,"
    "saturation=1,exposure=1",
}
BOTH = {  # what draws from the random numbers of an image or of a batch, one at a time
    "efficientdet": ("augmentation=scale_jitter", "flip_prob=0.5"),
    "yolov4": ("jitter=0.3", "hue=36", "mosaic_prob=0.5"),
}
ONLY_DALI = {  # and what the tf.data twins refuse
    "efficientdet": ("augmentation=min_iou_crop", "grid_mask_prob=0.5", "hue=60"),
    "yolov4": ("mixup_prob=0.5", "cutmix_prob=0.5"),
}


def random_changes(app, pipeline_type):
    return BOTH[app.name] + (ONLY_DALI[app.name] if pipeline_type == "dali_cpu" else ())


@pytest.fixture
def make(app):
    """make(source, pipeline_type, hparams, options of the loader) -> loader"""

    def run(source, pipeline_type, changes, *, training=True, **options):
        config = app.package.config.get_config(app.model_name)
        for spec in (f"{PLAIN[app.name]},image_size=64x96", *changes):
            config = hparams.override(config, spec)
        options = {"batch_size": 2, "num_threads": 1, "name_images": training} | options
        return app.make_loader(pipeline_type, source=source, config=config, training=training, **options)

    return run


def read(loader, steps):
    return [(images.numpy(), targets) for images, targets in loader.dataset().take(steps)]


def image_ids(loader, steps):
    """Of each step, in the order in which they come."""
    return [targets["image_ids"].numpy().reshape(-1).tolist() for _, targets in read(loader, steps)]


@pytest.fixture(scope="session")
def twins(tmp_path_factory):
    """16 times the same picture, with the same two boxes."""
    directory = tmp_path_factory.mktemp("twins")
    picture = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    images, annotations = [], []
    for i in range(16):
        PIL.Image.fromarray(picture).save(directory / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "height": 60, "width": 90})
        for box in ([9, 9, 30, 30], [50, 20, 30, 35]):
            of_image = {"image_id": i, "category_id": 1, "bbox": box, "area": box[2] * box[3]}
            annotations.append({"id": len(annotations) + 1, **of_image})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "x"}]}
    (directory / "instances.json").write_text(json.dumps(document))
    return open_coco(str(directory), str(directory / "instances.json"))


@pytest.fixture(scope="session")
def source(drawn):
    return open_coco(str(drawn / "images"), str(drawn / "instances.json"))


@pytest.mark.parametrize("pipeline_type", [*LOADERS, "synthetic"])
def test_all_ranks_take_equally_many_steps(make, source, pipeline_type):
    for num_shards in (1, 5):
        for training in (True, False):
            options = {"training": training, "num_shards": num_shards}
            ranks = range(num_shards)
            loaders = [make(source, pipeline_type, [], shard_id=rank, **options) for rank in ranks]
            expected = steps_per_epoch(loaders[0].size, 2 * num_shards, training=training)
            assert [loader.steps_per_epoch for loader in loaders] == [expected] * num_shards
            assert [loader.size for loader in loaders] == [loaders[0].size] * num_shards


@either_app
def test_evaluation_needs_no_more_steps_than_it_says(make, source):
    """Twelve images on five ranks in batches of two: three steps would be too many, one too few."""
    seen = []
    for shard_id in range(5):
        options = {"training": False, "with_targets": False, "shard_id": shard_id, "num_shards": 5}
        loader = make(source, "dali_cpu", [], **options)
        assert loader.steps_per_epoch == 2
        first, second, *again = image_ids(loader, 4)
        assert [first, second] == again
        seen += dict.fromkeys(first + second)
    assert sorted(seen) == sorted(source.annotations.image_ids)


@pytest.mark.parametrize("pipeline_type", LOADERS)
def test_the_order_follows_the_seed_and_nothing_else(app, make, source, pipeline_type):
    """What the ranks read together in step k; random or not, and however many threads read it."""
    everything = random_changes(app, pipeline_type)

    def order(changes, **options):
        options |= {"num_shards": 2, "with_targets": False}
        loaders = (make(source, pipeline_type, changes, shard_id=rank, **options) for rank in (0, 1))
        return [sorted(a + b) for a, b in zip(*(image_ids(loader, 9) for loader in loaders), strict=True)]

    first = order(everything, seed=0)
    for epoch in (first[:3], first[3:6], first[6:]):  # steps of two ranks with two images each
        assert sorted(itertools.chain(*epoch)) == sorted(source.annotations.image_ids)
    assert order([], seed=0, num_threads=2) == first
    assert order([], seed=1) != first


@pytest.mark.parametrize("pipeline_type", LOADERS)
def test_no_kind_of_randomness_is_the_same_on_two_ranks(app, make, twins, pipeline_type):
    def same(*changes):
        options = {"batch_size": 8, "num_shards": 2, "seed": 5}
        options["with_targets"] = app.name == "yolov4"  # MixUp of twins shows in the boxes alone
        loaders = [make(twins, pipeline_type, changes, shard_id=rank, **options) for rank in (0, 1)]
        (one, of_one), (other, of_other) = (read(loader, 1)[0] for loader in loaders)
        return np.array_equal(one, other) and np.array_equal(of_one.get("boxes"), of_other.get("boxes"))

    assert same()  # twins they are
    for change in random_changes(app, pipeline_type):
        assert not same(change), change
