import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.common.drawn_sets import write_coco
from tests.oracle import numpy_images
from tests.yolov4.rectangles import (
    ALL,
    BATCH,
    INPUT,
    PLAIN,
    SIZES,
    assert_equal,
    batches,
    count_found,
    find_rectangle,
    make,
    read,
)
from yolov4.pipeline import FILL

BOTH = pytest.mark.parametrize("kind", ["dali_cpu", "tensorflow"])


# --- boxes and pixels ---

VIEWS = {
    "flip": {"flip_prob": 1.0},
    "jitter, letterbox, flip": {"jitter": 0.3, "letterbox": True, "flip_prob": 0.5},
    "mosaic": {"mosaic_prob": 1.0, "jitter": 0.3, "letterbox": True, "flip_prob": 0.5},
    "mosaic, multi-scale": {"mosaic_prob": 0.5, "jitter": 0.3, "multi_scale": 1.5},
}


@pytest.mark.parametrize("name", VIEWS)
@BOTH
def test_boxes_and_pixels_move_together(rectangles, kind, name):
    # With this min_box_size, every visible rectangle keeps its box.
    config = dataclasses.replace(PLAIN, **VIEWS[name], min_box_size=0.01)
    found = read(rectangles, kind, config, 6)
    assert sum(map(count_found, found)) >= (50 if "mosaic" in name else 30)
    sizes = {batch["images"].shape[1:3] for batch in found}
    low, high = config.size_range
    assert sizes <= {config.bucket(units) for units in range(low, high + 1)}
    assert (len(sizes) > 1) == (config.multi_scale > 1)


@BOTH
def test_each_colour_setting_changes_what_it_names(tmp_path, kind):
    """The left half is grey, so it has no hue and no saturation."""
    image = np.full((*INPUT, 3), 100, np.uint8)
    image[:, 96:] = 130, 90, 50
    source = write_coco(tmp_path, [(i, image, [(0, (9, 9, 30, 30))]) for i in range(1, 9)])
    for change in ({}, {"hue": 36.0}, {"saturation": 1.5}, {"exposure": 1.5}):
        (batch,) = read(source, kind, dataclasses.replace(PLAIN, **change), batch_size=8)
        grey, color = batch["images"][:, 40, 40] * 255, batch["images"][:, 40, 150] * 255
        chroma = np.ptp(color, axis=1) / 80
        assert (np.ptp(grey, axis=1) < 1).all()
        assert (abs(grey - 100).max() > 10) == ("exposure" in change)
        assert (abs(color - [130, 90, 50]).max() > 5) == bool(change)
        assert chroma.min() > 0.6 and chroma.max() < 1.6


@BOTH
def test_a_letterboxed_training_image_lies_in_the_centre_and_colour_leaves_the_padding(rectangles, kind):
    config = dataclasses.replace(PLAIN, letterbox=True, hue=36.0, saturation=1.5, exposure=1.5)
    seen = set()
    for batch in read(rectangles, kind, config, 4):
        for image in batch["images"]:
            is_padding = np.isclose(image, FILL / 255, atol=1e-6).all(-1)
            left, top, right, bottom = find_rectangle(~is_padding).tolist()
            assert not is_padding[top:bottom, left:right].any(0).all()
            seen.add((top, left, bottom - top, right - left))
    assert seen == {numpy_images.letterbox(size, INPUT, centered=True) for size in SIZES}


# --- ranks, seeds, epochs ---


@BOTH
def test_ranks_draw_the_same_sizes_and_every_image_is_augmented_anew(tmp_path, kind):
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    source = write_coco(tmp_path, [(i, image, [(0, (9, 9, 30, 30))]) for i in range(1, 9)])
    config = dataclasses.replace(PLAIN, multi_scale=1.5, jitter=0.3)
    ranks = [read(source, kind, config, 4, batch_size=4, shard_id=rank, num_shards=2) for rank in (0, 1)]
    sizes = [[batch["images"].shape for batch in rank] for rank in ranks]
    assert sizes[0] == sizes[1] and len(set(sizes[0])) > 1
    pictures = [picture.tobytes() for rank in ranks for batch in rank for picture in batch["images"]]
    assert len(set(pictures)) == 32


@BOTH
def test_evaluation_is_never_augmented(rectangles, kind):
    mixed = {"mixup_prob": 1.0, "cutmix_prob": 1.0} if kind == "dali_cpu" else {}
    config = dataclasses.replace(PLAIN, **ALL, **mixed, mosaic_prob=1.0, multi_scale=1.5, letterbox=True)
    one = read(rectangles, kind, config, training=False, seed=1)
    plain = dataclasses.replace(PLAIN, letterbox=True)
    assert_equal(one, read(rectangles, kind, plain, training=False, seed=2))


@BOTH
def test_the_last_epochs_are_without_mosaic_mixup_and_cutmix(rectangles, kind):
    mixed = {"mixup_prob": 1.0, "cutmix_prob": 1.0} if kind == "dali_cpu" else {}
    config = dataclasses.replace(PLAIN, mosaic_prob=1.0, **mixed)
    plain = read(rectangles, kind)
    assert (plain[0]["num_boxes"] == 1).all()
    assert_equal(read(rectangles, kind, config, mosaic=False), plain)


def test_noise_has_one_size():
    loader = make(None, "synthetic", dataclasses.replace(PLAIN, multi_scale=1.4), num_classes=4)
    assert loader.element_spec["images"] == tf.TensorSpec((BATCH, *INPUT, 3), tf.float32)
    (batch,) = batches(loader, 1)
    assert batch["images"].min() >= 0 and 0.9 < batch["images"].max() <= 1
