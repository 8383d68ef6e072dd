"""Compares batches of pipeline.py with float64 NumPy: pixels, boxes and anchor targets of 100 images.

watched.py returns the random numbers of the graph. From these, NumPy computes the same images and boxes.
"""

import dataclasses
import math

import numpy as np
import pytest
from nvidia.dali import Pipeline, types

from efficientdet import crops
from efficientdet.config import EfficientDetConfig, get_config
from efficientdet.pipeline import EfficientDetPipeline
from tests.efficientdet import numpy_crops
from tests.oracle import numpy_boxes, numpy_images
from tests.oracle.fuzzed import Annotated
from tests.oracle.watched import BATCH, Batch, Draws, run_epoch

INPUT = (128, 192)
OFF = {"augmentation": "none", "flip_prob": 0.0, "assignment": "max_iou"}
PLAIN = dataclasses.replace(get_config("efficientdet-nano"), image_size=INPUT, **OFF)
ANCHORS = PLAIN.anchors
MEAN = np.array([0.485, 0.456, 0.406]) * 255
STDDEV = np.array([0.229, 0.224, 0.225]) * 255

COLOR = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.5, "hue": 20.0}
WIDE_JITTER = {"augmentation": "scale_jitter", "jitter_min": 0.1, "jitter_max": 2.0}
RESIZE_RANGE = {"augmentation": "resize_range", "resize_min": 20, "resize_max": 150}
TRAININGS = {
    "scale_jitter": WIDE_JITTER,
    "grid_mask": WIDE_JITTER | {"jitter_min": 1.2, "jitter_max": 1.2, "grid_mask_prob": 0.7},
    "min_iou_crop": {"augmentation": "min_iou_crop", "flip_prob": 0.5},
    "resize_range": RESIZE_RANGE | {"antialias": False},
    "all": WIDE_JITTER | COLOR | {"flip_prob": 0.5, "grid_mask_prob": 0.7, "min_box_size": 3.0},
}


# --- crops and augmentations from the graph's random numbers ---


def assert_limits_of_crop(boxes_px, size, anchor, shape) -> None:
    """Asserts the limits of SSD's crops (arXiv 1512.02325, section 2.2).

    The IoU with each box is at least 0.1. The sides are at least 0.3 of the image's sides. The aspect ratio
    is 1/2 to 2.
    """
    crop_px = np.concatenate([anchor, anchor + shape]) * [*size[::-1], *size[::-1]]
    sides = np.minimum(boxes_px[:, 2:], crop_px[2:]) - np.maximum(boxes_px[:, :2], crop_px[:2])
    common = np.maximum(sides, 0).prod(1)
    areas = (boxes_px[:, 2:] - boxes_px[:, :2]).prod(1)
    assert (common / (areas + (crop_px[2:] - crop_px[:2]).prod() - common) > 0.1 - 1e-4).all()
    aspect = shape[0] * size[1] / (shape[1] * size[0])
    assert 0.5 - 1e-3 <= aspect <= 2 + 1e-3 and (shape >= 0.3 - 1e-3).all()


def batch_crops(config: EfficientDetConfig, images: list[Annotated], draws: Draws) -> list[tuple]:
    """Returns for each image: window, size in the network input, and which boxes stay."""
    stays = [np.ones(len(image.boxes_px), bool) for image in images]
    if config.augmentation == "scale_jitter":
        crop = numpy_crops.jittered_crop
        jitters = np.broadcast_to(draws.uniform(config.jitter_min, config.jitter_max), len(images))
        shares = np.stack([draws.uniform(0.0, 1.0), draws.uniform(0.0, 1.0)], axis=1)
        numbers = zip(jitters, shares, strict=True)
    elif config.augmentation == "min_iou_crop":
        crop = numpy_crops.min_iou_crop
        numbers = list(zip(*draws.take("random_bbox_crop"), strict=True))
        for row, (image, (anchor, shape)) in enumerate(zip(images, numbers, strict=True)):
            if (shape < 1).any():
                assert_limits_of_crop(image.boxes_px, image.size, anchor, shape)
                centers = (image.boxes_px[:, :2] + image.boxes_px[:, 2:]) / 2 / image.size[::-1]
                stays[row] = ((centers >= anchor) & (centers <= anchor + shape)).all(1)
    else:
        crop = numpy_crops.resize_range_crop
        numbers = zip(draws.uniform(float(config.resize_min), config.resize_max + 1.0))
    rows = zip(images, numbers, stays, strict=True)
    return [(*crop(image.size, INPUT, *of_image), mask) for image, of_image, mask in rows]


def batch_changes(config: EfficientDetConfig, count: int, draws: Draws) -> list[dict]:
    """Returns for each image the random numbers of its flip, GridMask and colours."""
    drawn = {"flip": np.zeros(count)}
    if config.flip_prob:
        drawn["flip"] = draws.coin(config.flip_prob)
    if config.grid_mask_prob:
        tile = draws.uniform(0.2, 0.6) * min(INPUT)
        drawn["ratio"] = 0.4 * draws.coin(config.grid_mask_prob)
        drawn["tile"] = np.rint(tile)
        drawn["angle"] = draws.uniform(math.radians(-10), math.radians(10))
        drawn["shift"] = np.stack([draws.uniform(0.0, 1.0), draws.uniform(0.0, 1.0)], 1) * tile[:, np.newaxis]
    if config.hue:
        for name in ("brightness", "contrast", "saturation"):
            limit = getattr(config, name)
            drawn[name] = draws.uniform(1 - limit, 1 + limit)
        drawn["hue"] = draws.uniform(-config.hue, config.hue)
    return [dict(zip(drawn, values, strict=True)) for values in zip(*drawn.values(), strict=True)]


def augmented_pixels(image: Annotated, window, size, antialias: bool, changes: dict) -> np.ndarray:
    """Returns the cropped, resized and augmented image, uint8 (*size, 3)."""
    pixels = numpy_images.resize(numpy_images.crop(image.pixels, window), size, antialias)
    if changes["flip"]:
        pixels = pixels[:, ::-1]
    if "tile" in changes:
        names = ("tile", "ratio", "angle", "shift")
        pixels = numpy_images.mask_grid(pixels, *(changes[name] for name in names))
    if "hue" in changes:
        names = ("hue", "saturation", "brightness", "contrast")
        pixels = numpy_images.twist_color(pixels, **{name: changes[name] for name in names})
    return pixels


# --- comparing ---


def assert_pixels(normalized: np.ndarray, expected: np.ndarray, config, where: str) -> None:
    """`expected` is at the top left; elsewhere is the mean colour."""
    height, width = expected.shape[:2]
    padding = normalized.copy()
    padding[:height, :width] = 0
    assert not padding.any(), where
    difference = np.abs(normalized[:height, :width] * STDDEV + MEAN - expected)
    if config.grid_mask_prob:  # on the edge of a square, rounding decides whether a pixel is black
        assert (difference.max(-1) > 6).mean() < 0.002 + 2 / (height * width), where
        difference = difference[difference.max(-1) <= 6]
    numpy_images.assert_small(difference, config, where)


def assert_anchor_targets(outputs: dict[str, np.ndarray], row: int, where: str) -> None:
    """Compares the targets with SSD's matching of the boxes in the same batch."""
    count, levels = (outputs["classes"][row] >= 0).sum(), ANCHORS.levels
    boxes, classes = outputs["boxes"][row, :count], outputs["classes"][row, :count]
    owners = numpy_boxes.match(boxes, ANCHORS.boxes_normalized)
    positive = owners >= 0
    class_targets = np.concatenate([outputs[f"class_targets_{level}"][row].reshape(-1) for level in levels])
    box_targets = np.concatenate([outputs[f"box_targets_{level}"][row].reshape(-1, 4) for level in levels])
    np.testing.assert_array_equal(class_targets >= 0, positive, err_msg=where)
    np.testing.assert_array_equal(class_targets[positive], classes[owners[positive]], err_msg=where)
    assert outputs["num_positives"].reshape(-1)[row] == positive.sum(), where
    assert not box_targets[~positive].any(), where
    expected = numpy_boxes.deltas(boxes[owners[positive]], ANCHORS.boxes_normalized[positive])
    np.testing.assert_allclose(box_targets[positive], expected, rtol=1e-4, atol=1e-4, err_msg=where)


def assert_row(batch: Batch, row: int, image: Annotated, crop: tuple, changes: dict, config) -> None:
    """Compares one image of a batch. `changes` are its flip, GridMask and colours."""
    window, size, stays = crop
    where = f"image {image.image_id} {image.size}, window {window}, size {size}, {changes}"
    expected = augmented_pixels(image, window, size, config.antialias, changes)
    assert_pixels(batch.outputs["images"][row], expected, config, where)
    boxes_px = numpy_boxes.move(image.boxes_px[stays], window, (0, 0, *size))
    if changes["flip"]:
        boxes_px = numpy_boxes.flip(boxes_px, size[1])
    touching = numpy_boxes.touch_window(image.boxes_px[stays], window).sum()
    numpy_boxes.assert_boxes(batch.outputs, row, boxes_px, image.classes[stays], config, where, touching)
    assert_anchor_targets(batch.outputs, row, where)


@pytest.mark.parametrize("name", TRAININGS)
def test_efficientdet_training_batches_equal_numpy(fuzzed, name):
    config = dataclasses.replace(PLAIN, **TRAININGS[name])
    num_cropped = 0
    for batch, images in run_epoch(EfficientDetPipeline, fuzzed, config=config, training=True):
        crops = batch_crops(config, images, batch.draws)
        changes = batch_changes(config, BATCH, batch.draws)
        batch.draws.finish()
        for row, image in enumerate(images):
            assert_row(batch, row, image, crops[row], changes[row], config)
            num_cropped += crops[row][0][2:] != image.size
    assert (num_cropped > 5) == (config.augmentation in ("scale_jitter", "min_iou_crop"))


def test_efficientdet_evaluation_batches_are_unaugmented_and_equal_numpy(fuzzed):
    augmented = dataclasses.replace(PLAIN, **TRAININGS["all"])
    plain = dataclasses.replace(PLAIN, min_box_size=augmented.min_box_size)
    for batch, images in run_epoch(EfficientDetPipeline, fuzzed, config=augmented, training=False):
        for row, image in enumerate(images):
            window, size = numpy_crops.letterbox_crop(image.size, INPUT)
            assert tuple(batch.outputs["letterbox"][row]) == (0, 0, *size)
            assert_row(batch, row, image, (window, size, slice(None)), {"flip": False}, plain)


def test_efficientdet_crop_without_a_whole_pixel_at_the_image_edge_becomes_the_last_pixel():
    """No whole pixel is between 0.76 and 0.96 of a side of three pixels."""
    pipe = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipe:
        pipe.set_outputs(
            *crops._whole_pixels(
                *(types.Constant(number, dtype=types.FLOAT, device="cpu") for number in (0.76, 0.2, 3.0))
            )
        )
    assert [np.asarray(output.as_tensor()).item() for output in pipe.run()] == [2, 1]
