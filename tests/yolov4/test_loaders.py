"""Tests what the DALI loader and the tf.data loader promise alike. tests/apps/test_loaders.py has more."""

import dataclasses

import pytest
import tensorflow as tf

from tests.yolov4.rectangles import (
    BATCH,
    INPUT,
    PLAIN,
    assert_batches_equal,
    read_batches,
    take_batches,
    training_loader,
)

both_loaders = pytest.mark.parametrize("kind", ["dali_cpu", "tensorflow"])


@both_loaders
def test_ranks_draw_the_same_multi_scale_sizes(rectangles, kind):
    config = dataclasses.replace(PLAIN, multi_scale=1.5)
    sizes = []
    for rank in (0, 1):
        batches = read_batches(rectangles, kind, config, 4, batch_size=4, shard_id=rank, num_shards=2)
        sizes.append([batch["images"].shape for batch in batches])
    assert sizes[0] == sizes[1] and len(set(sizes[0])) > 1


@both_loaders
def test_loader_without_mosaic_has_no_mixup_and_no_cutmix(rectangles, kind):
    """The last epochs of a run (close_mosaic) have such loaders."""
    plain = read_batches(rectangles, kind)
    assert (plain[0]["num_boxes"] == 1).all()
    mixing = {"mosaic_prob": 1.0}
    if kind == "dali_cpu":  # the tf.data loader has neither MixUp nor CutMix
        mixing |= {"mixup_prob": 1.0, "cutmix_prob": 1.0}
    config = dataclasses.replace(PLAIN, **mixing)
    assert_batches_equal(read_batches(rectangles, kind, config, mosaic=False), plain)


def test_synthetic_images_are_uniform_noise_of_one_size_despite_multi_scale():
    config = dataclasses.replace(PLAIN, multi_scale=1.4)
    loader = training_loader(None, "synthetic", config, num_classes=4)
    assert loader.element_spec["images"] == tf.TensorSpec((BATCH, *INPUT, 3), tf.float32)
    (batch,) = take_batches(loader, 1)
    assert batch["images"].min() >= 0 and 0.9 < batch["images"].max() <= 1
