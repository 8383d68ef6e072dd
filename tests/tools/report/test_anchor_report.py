"""Tests anchor_report.py and efficientdet/anchor_templates.py."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common.anchors import Anchors
from common.letterbox import fit
from tests.common.made_annotations import annotations, random_annotations
from tests.common.test_box_encoder import encode_boxes_tf, hard_images, overlaps
from tests.oracle.numpy_boxes import to_letterbox
from tools.report import anchor_report

RATIOS = (1.0, 2.0, 0.5)
SQUARE = Anchors(3, 7, 3, RATIOS, 4.0, (128, 128))
WIDE = Anchors(3, 6, 2, RATIOS, 3.0, (96, 160))


def ends_of_levels(anchors):
    cells = [height * width for height, width in anchors.feature_sizes]
    return np.cumsum(cells) * anchors.anchors_per_location


def by_the_encoder(truth, anchors, max_instances):
    """Computes the report's numbers with encode_boxes_tf."""
    levels = np.zeros((3, len(anchors.levels)), int)
    num = {"unreached": 0, "lost": 0, "over_limit": 0}
    targets, ends = truth.target_boxes, ends_of_levels(anchors)

    def count_by_level(indices):
        return np.bincount(np.searchsorted(ends, indices, side="right"), minlength=len(ends))

    for i, (height, width) in enumerate(truth.image_sizes.tolist()):
        place = np.float32((0, 0, *fit(height, width, anchors.image_size)))
        mine = slice(targets.row_splits[i], targets.row_splits[i + 1])
        boxes = np.asarray(to_letterbox(targets.boxes[mine], place, anchors.image_size))
        numbers = tf.range(1, len(boxes) + 1)
        encoded = encode_boxes_tf(boxes, numbers, anchors, max_instances)
        kept = encoded.classes.numpy()[encoded.classes.numpy() >= 0]
        owners = np.concatenate([of.numpy().ravel() for of in encoded.class_targets])
        overlap = overlaps(boxes[kept], anchors)
        levels[0] += [(part > 0.5).any(axis=1).sum() for part in np.split(overlap, ends[:-1], axis=1)]
        levels[1] += count_by_level(overlap.shape[1] - 1 - overlap[:, ::-1].argmax(axis=1))
        levels[2] += count_by_level(np.flatnonzero(owners >= 0))
        without = set(kept.tolist()) - set(owners.tolist())
        num["over_limit"] += max(len(boxes) - max_instances, 0)
        num["unreached"] += int((overlap.max(axis=1, initial=0) <= 0.5).sum())
        num["lost"] += len(without)
    return levels, num


@pytest.mark.parametrize(("anchors", "most_boxes", "largest"), [(SQUARE, 12, 0.9), (WIDE, 150, 0.15)])
def test_everything_is_what_the_encoder_does(monkeypatch, anchors, most_boxes, largest):
    monkeypatch.setattr(anchor_report, "_BOXES_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    truth = random_annotations(rng, 10, most_boxes, num_classes=4, smallest=0.01, largest=largest)
    report = anchor_report.examine(truth, anchors, min_box_size=0)
    levels, num = by_the_encoder(truth, anchors, 100)
    found = [(of.reached, of.best, of.positives) for of in report.levels]
    np.testing.assert_array_equal(np.transpose(found), levels)
    assert np.cumsum([of.anchors for of in report.levels]).tolist() == ends_of_levels(anchors).tolist()
    assert {name: len(getattr(report, name)) for name in num} == num
    assert report.boxes == len(truth.target_boxes.boxes)
    assert num["unreached"] > 5
    if most_boxes > 100:
        assert num["lost"] > 5 and num["over_limit"] > 5


def test_sides_of_levels_are_those_of_the_anchors():
    report = anchor_report.examine(annotations([(50, 50)], []), SQUARE)
    sides = [(of.level, of.smallest, of.largest) for of in report.levels]
    np.testing.assert_allclose(sides[0], (3, 32, 32 * 2 ** (2 / 3)), rtol=1e-5)
    np.testing.assert_allclose(sides[4], (7, 512, 512 * 2 ** (2 / 3)), rtol=1e-5)


@pytest.mark.parametrize("level", [3, 4, 5])
def test_the_first_anchor_of_a_level_counts_there(level):
    anchors = Anchors(3, 5, 1, (1.0,), 1.0, (64, 64))
    first = annotations([(64, 64)], [(0, 0, 0, 0, 2**level, 2**level)])
    report = anchor_report.examine(first, anchors)
    expected = [(of, int(of == level), int(of == level)) for of in (3, 4, 5)]
    assert [(of.level, of.best, of.positives) for of in report.levels] == expected


def test_boxes_that_lose_to_an_identical_one_are_missed():
    rows = [(i, 0, 10, 20, 90, 80) for i in range(4)] + [(2, 0, 10, 20, 90, 80)]
    report = anchor_report.examine(annotations([(200, 200)] * 4, rows), SQUARE)
    assert report.lost.tolist() == pytest.approx([(57.6 * 51.2) ** 0.5])


def test_what_training_drops_is_counted():
    rows = [(0, 0, 5 * i, 5, 20 + i, 30) for i in range(9)] + [(1, 1, 10, 10, 1.5, 60)]
    truth = annotations([(200, 200)] * 2, rows)
    for options, counts in (({"max_instances": 6}, (3, 1)), ({"min_box_size": 0.9}, (0, 0))):
        report = anchor_report.examine(truth, SQUARE, **options)
        assert (len(report.over_limit), len(report.too_small)) == counts


def test_a_sample_is_drawn_and_said():
    truth = annotations([(90, 90)] * 60, [(i, 0, 10, 20, 40, 30) for i in range(0, 60, 2)])
    report = anchor_report.examine(truth, SQUARE, max_images=11, seed=3)
    assert (report.images, report.images_with_boxes, report.boxes) == (11, 30, 11)


@pytest.mark.parametrize("rows", [[], [(0, 0, 5, 5, 20, 20)]], ids=["empty", "crowd"])
def test_without_a_box(rows):
    report = anchor_report.examine(annotations([(90, 90)] * 2, rows, crowds=[0]), SQUARE)
    assert (report.images_with_boxes, report.boxes, len(report.lost)) == (0, 0, 0)


def test_the_nearest_anchor_of_each_kind_overlaps_most():
    boxes = np.concatenate(hard_images(np.random.default_rng(9), WIDE))
    boxes = boxes[(boxes[:, 2:] - boxes[:, :2]).min(axis=1) > 1e-3]  # float32 is too coarse for smaller ones
    levels = np.split(overlaps(boxes, WIDE), ends_of_levels(WIDE)[:-1], axis=1)
    by_kind = [of.reshape(len(boxes), -1, WIDE.anchors_per_location).max(axis=1) for of in levels]
    found = anchor_report.template_iou(boxes, WIDE)
    np.testing.assert_allclose(found, np.concatenate(by_kind, axis=1), atol=1e-4)


def test_other_scales_are_tried():
    rows = [(0, 0, 40 * i, 30 * i, side, side) for i, side in enumerate([10, 14, 20, 28, 40])]
    truth, given = annotations([(512, 512)], rows), Anchors(3, 7, 3, RATIOS, 3.5, (512, 512))
    report = anchor_report.examine(truth, given)
    assert list(report.fits) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0]
    best = max(report.fits, key=lambda scale: report.fits[scale].reached)
    assert best < 3 and report.fits[best].mean_iou > report.fits[3.5].mean_iou + 0.02
    again = anchor_report.examine(truth, dataclasses.replace(given, anchor_scale=best))
    assert again.fits[best] == report.fits[best]
    assert len(again.unreached) == round((1 - again.fits[best].reached) * 5) < len(report.unreached)
