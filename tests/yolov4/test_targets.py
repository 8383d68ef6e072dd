"""Tests targets.py against a table by hand and against darknet_rules.py (loops in float64)."""

import dataclasses

import numpy as np
import pytest

from tests.yolov4 import darknet_rules
from yolov4 import targets
from yolov4.config import get_config

CONFIGS = {name: get_config(name) for name in ("yolov4", "yolov4-tiny")}
NUM_CLASSES = 5
HEIGHT, WIDTH = 256, 512  # of the table's image; float32 is exact at cell borders

# {name of a box: (centre x, centre y, width, height in pixels, class)}
TABLE = {
    "smallest anchor": (100, 60, 12, 16, 0),
    "whole image": (256, 128, 512, 256, 1),
    "anchor 3 of yolov4": (300, 100, 36, 75, 2),
    "anchor 3 of tiny": (44, 140, 81, 82, 2),
    "same cell, other anchor": (47, 143, 24, 27, 3),
    "one pixel": (1.5, 2.5, 1, 1, 0),
    "centre on a corner of cells": (64, 96, 30, 30, 4),
    "centre a hair before it": (63.996, 95.996, 30, 30, 4),
    "last cell": (511.5, 255.5, 1, 1, 2),
    "centre on both borders": (512, 256, 192, 243, 1),
    "centre on the upper left corner": (0, 0, 142, 110, 0),
    "class -1": (100, 100, 36, 75, -1),
    "class too high": (100, 100, 36, 75, NUM_CLASSES),
    "no width": (100, 100, 0, 75, 0),
    "inverted": (100, 100, -36, 75, 0),
    "not a number": (np.nan, 100, 36, 75, 0),
    "infinite": (100, 100, np.inf, 75, 0),
    "centre outside": (-1, 100, 36, 75, 0),
}

# Computed by hand: {name of a box: its predictions as (head, anchor, row, column)}
EXPECTED = {
    "yolov4": {
        "smallest anchor": {(0, 0, 7, 12), (0, 1, 7, 12)},
        # IoU with anchor 1: 684 / 2700 = 0.253. Anchor 2: 36 * 28 / 2812 = 0.36.
        # Anchor 4: 36 * 55 / 4900 = 0.40. Anchor 5: 2700 / 10512 = 0.257.
        "anchor 3 of yolov4": {(1, 3, 6, 18), (0, 1, 12, 37), (0, 2, 12, 37), (1, 4, 6, 18), (1, 5, 6, 18)},
        "one pixel": {(0, 0, 0, 0)},  # IoU 1 / 192: the best anchor, although below the threshold
        "centre a hair before it": {
            (0, 0, 11, 7), (0, 1, 11, 7), (0, 2, 11, 7), (1, 3, 5, 3), (1, 4, 5, 3)
        },
        "centre on both borders": {(2, 7, 7, 15), (2, 6, 7, 15), (2, 8, 7, 15), (1, 5, 15, 31)},
    },
    "yolov4-tiny": {
        "smallest anchor": set(),  # anchor 0 belongs to no head
        "anchor 3 of tiny": {(0, 3, 8, 2), (1, 3, 4, 1)},  # anchor 3 belongs to both heads
        "same cell, other anchor": {(0, 1, 8, 2)},
        "centre on both borders": {(1, 4, 7, 15)},
    },
}  # fmt: skip
INVALID = [*TABLE][-7:]


def table_boxes():
    rows = np.array([row[:4] for row in TABLE.values()])
    boxes_px = np.concatenate([rows[:, :2] - rows[:, 2:] / 2, rows[:, :2] + rows[:, 2:] / 2], axis=-1)
    boxes = boxes_px / [WIDTH, HEIGHT, WIDTH, HEIGHT]
    return boxes.astype(np.float32), np.array([row[4] for row in TABLE.values()], np.int32)


def assign(boxes, classes, config, head, grid_size):
    one_image = np.asarray(boxes, np.float32)[None], np.asarray(classes, np.int32)[None]
    batch = targets.assign_targets(*one_image, config, head, grid_size=grid_size, num_classes=NUM_CLASSES)
    return targets.Assignment(*(value[0].numpy() for value in batch))


def grid(config, head, height=HEIGHT, width=WIDTH):
    return height // config.strides[head], width // config.strides[head]


def predictions_of(assignment, config, head):
    return [
        {
            (head, config.masks[head][k], int(assignment.rows[m]), int(assignment.columns[m]))
            for k in np.flatnonzero(assignment.assigned[m])
        }
        for m in range(len(assignment.rows))
    ]


@pytest.mark.parametrize("model_name", CONFIGS)
def test_predictions_assigned_to_boxes_equal_a_table_made_by_hand(model_name):
    config = CONFIGS[model_name]
    boxes, classes = table_boxes()
    trained = [set() for _ in boxes]
    for head in range(len(config.masks)):
        assignment = assign(boxes, classes, config, head, grid(config, head))
        for predictions, of_head in zip(trained, predictions_of(assignment, config, head), strict=True):
            predictions |= of_head
    by_name = dict(zip(TABLE, trained, strict=True))
    expected = EXPECTED[model_name] | {name: set() for name in INVALID}
    assert {name: by_name[name] for name in expected} == expected


@pytest.mark.parametrize("model_name", [*CONFIGS, "yolov4-nano"])
def test_assignment_in_a_crowded_image_equals_darknet(model_name):
    config = get_config(model_name)
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(0.01), 0, (150, 2)))
    centers = rng.choice(rng.uniform(0, 1, (20, 2)), 150) + rng.normal(0, 0.01, (150, 2))
    drawn = np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=-1).clip(0, 1)
    boxes, classes = table_boxes()
    boxes = np.concatenate([boxes, drawn.astype(np.float32)])
    classes = np.concatenate([classes, rng.integers(-1, NUM_CLASSES + 1, 150).astype(np.int32)])
    shared, of_several_classes = 0, 0
    for head in range(len(config.masks)):
        grid_size = grid(config, head)
        assignment = assign(boxes, classes, config, head, grid_size)
        expected = darknet_rules.assign(boxes, classes, config, head, grid_size, NUM_CLASSES)
        trained = {}
        for m, k in zip(*np.nonzero(assignment.assigned), strict=True):
            cell = (int(assignment.rows[m]), int(assignment.columns[m]), int(k))
            assert assignment.cells[m, k] == np.ravel_multi_index(cell, (*grid_size, len(config.masks[head])))
            assert assignment.owner[m, k] == (cell not in trained)
            trained.setdefault(cell, []).append(int(m) % len(boxes))
            union = sorted({int(classes[n]) for n in expected[cell]})
            assert np.flatnonzero(assignment.class_targets[m, k]).tolist() == union
            assert assignment.num_classes[m, k] == len(union)
        assert trained == expected
        assert len(trained) > 3
        assert not (assignment.owner & ~assignment.assigned).any()
        shared += (assignment.assigned & ~assignment.owner).sum()
        of_several_classes += (assignment.num_classes[assignment.assigned] > 1).sum()
    assert shared > 5 and of_several_classes > 5


def test_box_is_assigned_to_the_first_of_the_anchors_with_equal_iou():
    anchors = (10.0, 20.0, 20.0, 10.0, 20.0, 20.0, 20.0, 20.0, 40.0, 40.0, 9.0, 9.0)
    config = dataclasses.replace(CONFIGS["yolov4-tiny"], anchors=anchors)
    boxes = [[0.5, 0.5, 0.5 + 20 / 128, 0.5 + 20 / 128], [0.25, 0.5, 0.25 + 15 / 128, 0.5 + 15 / 128]]
    for head, grid_size, expected in ((0, (8, 8), [{2}, {2}]), (1, (4, 4), [set(), set()])):
        trained = predictions_of(assign(boxes, [0, 0], config, head, grid_size), config, head)
        assert [{anchor for _, anchor, _, _ in predictions} for predictions in trained] == expected


def test_box_centre_that_rounds_to_one_is_in_the_last_cell():
    edge = float(np.nextafter(np.float32(1), np.float32(0)))
    boxes = [[edge, edge, 1, 1], [0.9, 0.9, 1.1, 1.1]]
    assignment = assign(boxes, [0, 0], CONFIGS["yolov4"], 0, (52, 52))
    assert assignment.rows.tolist() == assignment.columns.tolist() == [51, 51]


def outputs_near_boxes(boxes, rng, config, head, grid_size):
    """Returns raw outputs of a head. The predictions at the boxes' cells decode to about these boxes."""
    rows, columns = grid_size
    stride, scale = config.strides[head], config.scale_xy[head]
    raw = rng.normal(0, 1, (rows, columns, len(config.masks[head]), 5 + NUM_CLASSES))
    raw[..., 5:] -= 2.5  # about half of the predictions have no class above 0.25
    for box in boxes:
        center, size = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
        column, row = np.minimum((center * [columns, rows]).astype(int), [columns - 1, rows - 1])
        for k, anchor in enumerate(config.masks[head]):
            share = (center * [columns, rows] - [column, row] + (scale - 1) / 2) / scale
            raw[row, column, k, :2] = np.log(share / (1 - share))
            raw[row, column, k, 2:4] = np.log(
                size * [columns * stride, rows * stride] / config.anchor_sizes[anchor]
            )
    raw[..., :4] += rng.normal(0, 0.12, raw[..., :4].shape)
    return raw.astype(np.float32)


@pytest.mark.parametrize("model_name", CONFIGS)
def test_ignore_mask_equals_brute_force(model_name):
    config = CONFIGS[model_name]
    rng = np.random.default_rng(5)
    counts = np.array([37, 0, 3], np.int32)
    boxes, classes = np.full((3, 40, 4), -1, np.float32), np.full((3, 40), -1, np.int32)
    for b, count in enumerate(counts):
        sizes = rng.uniform(0.05, 0.4, (count, 2))
        corners = rng.uniform(0, 1 - sizes)
        boxes[b, :count] = np.concatenate([corners, corners + sizes], axis=-1)
        classes[b, :count] = rng.integers(0, NUM_CLASSES, count)
    valid_boxes = boxes.astype(float)
    classes[0, [2, 7]] = -1, NUM_CLASSES
    boxes[0, 11, 2] = np.nan
    ignored = 0
    for head in range(len(config.masks)):
        size = grid(config, head, 160, 224)
        raw = np.stack(
            [outputs_near_boxes(valid_boxes[b, : counts[b]], rng, config, head, size) for b in range(3)]
        )
        mask = targets.ignore_mask(raw, boxes, classes, counts, config, head).numpy()
        images = zip(raw, boxes, classes, strict=True)
        best = np.stack([darknet_rules.best_ious(*image, config, head) for image in images])
        clear = np.abs(best - config.ignore_thresh) > 1e-4  # leaves out predictions that rounding decides
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(mask[clear], best[clear] > config.ignore_thresh)
        ignored += mask.sum(axis=(1, 2, 3))
    assert ignored[0] > 10 and ignored[1] == 0 and ignored[2] > 0


def test_ignore_mask_depends_on_the_class_score_but_not_on_objectness_and_skips_padded_boxes():
    config = CONFIGS["yolov4"]
    boxes, classes = np.zeros((1, 200, 4), np.float32), np.zeros((1, 200), np.int32)
    boxes[0, 150] = 0.3, 0.3, 0.55, 0.6
    raw = outputs_near_boxes(boxes[0, 150:151].astype(float), np.random.default_rng(0), config, 2, (4, 4))
    raw[..., 4] = -50.0
    for logit, count, expected in [(-1.11, 200, False), (-1.08, 200, True), (0, 100, False)]:
        raw[..., 5:] = -50.0
        raw[..., 5 + 3] = logit
        mask = targets.ignore_mask(raw[None], boxes, classes, np.array([count]), config, 2)
        assert mask.numpy().any() == expected
