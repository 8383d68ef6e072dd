"""What the loaders of this app promise: the same elements, numbers that follow the seed, exact resuming.

tests/apps/test_sharding.py tests what ranks read.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common.args import MAX_SEED
from common.loader import SYNTHETIC_BOXES, gpu_visible
from efficientdet import loaders
from efficientdet.config import get_config

CONFIG = dataclasses.replace(get_config("efficientdet-nano"), image_size=(64, 96))
AUGMENTED = dataclasses.replace(CONFIG, augmentation="scale_jitter", jitter_min=0.3, flip_prob=0.5)


def make(pipeline_type, source, config=CONFIG, **options):
    options = {"batch_size": 2, "training": True} | options
    return loaders.make_loader(pipeline_type, source=source, config=config, **options)


@pytest.mark.parametrize("training", [True, False])
def test_loaders_cannot_be_told_apart(rectangles, training):
    specs = []
    for pipeline_type in ("dali_cpu", "tensorflow", "synthetic"):
        loader = make(pipeline_type, rectangles, training=training, batch_size=5, count_lost=True)
        assert loader.pipeline_type == pipeline_type
        assert loader.saveable
        data = loader.dataset()
        specs.append(data.element_spec)
        images, targets = next(iter(data))
        assert images.shape == (5, *CONFIG.image_size, 3)
        assert set(loader.element_spec) == {"images", *targets}
        for name, tensor in targets.items():
            assert loader.element_spec[name].is_compatible_with(tensor)
        assert np.isfinite(images).all()
        assert (targets["num_positives"].numpy() > 0).all()
        if pipeline_type != "synthetic":
            assert loader.size == 24
            assert loader.steps_per_epoch == (4 if training else 5)
    assert specs[0] == specs[1] == specs[2]


def test_auto_is_the_best_that_the_machine_has(rectangles):
    expected = "dali_gpu" if gpu_visible() else "dali_cpu"
    assert make("auto", rectangles).pipeline_type == expected


def test_synthetic_needs_no_source_and_repeats():
    loader = make("synthetic", None, batch_size=3, num_classes=4, seed=1)
    assert loader.size == 1024
    (images, targets), (again, _) = loader.dataset().take(2)
    np.testing.assert_array_equal(images, again)
    assert len(np.unique(images[:, 0, 0, 0])) == 3  # three images, not one
    assert (targets["num_positives"].numpy() > 0).all()
    classes = targets["classes"].numpy()
    assert classes.min() == -1 and 0 <= classes.max() < 4
    assert ((classes >= 0).sum(1) == SYNTHETIC_BOXES).all()


def test_every_epoch_has_another_seed_within_the_range():
    assert loaders.epoch_kwargs(CONFIG, 5, 3) == {"seed": 8}
    assert loaders.epoch_kwargs(CONFIG, MAX_SEED, 2) == {"seed": 1}


@pytest.mark.parametrize("pipeline_type", ["dali_cpu", "tensorflow"])
def test_seed_and_rank_decide_the_augmentation(twins, pipeline_type):
    """All images are equal, so that what differs is the augmentation."""

    def draw(**options):
        options |= {"batch_size": 4, "num_shards": 2, "with_targets": False}
        loader = make(pipeline_type, twins, AUGMENTED, **options)
        return [image.numpy().tobytes() for images, _ in loader.dataset().take(2) for image in images]

    first = draw(seed=0, num_threads=1)
    assert draw(seed=0, num_threads=2) == first
    assert len({*first, *draw(seed=1), *draw(seed=0, shard_id=1)}) == 3 * 8


@pytest.mark.parametrize("pipeline_type", ["dali_cpu", "tensorflow"])
def test_iterator_resumes_bit_exactly_in_the_middle_of_an_epoch(rectangles, tmp_path, pipeline_type):
    def fresh():
        return iter(make(pipeline_type, rectangles, AUGMENTED, batch_size=8, seed=3).dataset())

    iterator = fresh()
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "loader")
    expected = [next(iterator) for _ in range(3)]  # into the second epoch
    restored = fresh()
    tf.train.Checkpoint(iterator=restored).restore(path).assert_consumed()
    for batch in expected:
        for one, other in zip(tf.nest.flatten(batch), tf.nest.flatten(next(restored)), strict=True):
            np.testing.assert_array_equal(one, other)
