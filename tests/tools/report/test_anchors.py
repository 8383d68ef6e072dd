"""Tests anchors.py with NumPy's matching (tests/oracle/numpy_boxes.py), pycocotools and examples by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.anchors import Anchors
from common.letterbox import fit
from tests.common.made_annotations import annotations, random_annotations
from tests.common.test_box_encoder import hard_images, largest, overlaps
from tests.oracle import numpy_boxes
from tools.report import anchors as anchor_report

RATIOS = (1.0, 2.0, 0.5)
SQUARE = Anchors(3, 7, 3, RATIOS, 4.0, (128, 128))
WIDE = Anchors(3, 6, 2, RATIOS, 3.0, (96, 160))


def level_ends(anchors):
    """The number of anchors up to and including each level."""
    cells = [height * width for height, width in anchors.feature_sizes]
    return np.cumsum(cells) * anchors.anchors_per_location


def expected_report(truth, anchors, max_instances):
    """Computes the numbers of a report in NumPy, from the IoUs of all boxes with all anchors."""
    levels = np.zeros((3, len(anchors.levels)), int)
    counts = {"unreached": 0, "lost": 0, "over_limit": 0}
    targets, level_stops = truth.target_boxes, level_ends(anchors)

    def count_by_level(indices):
        return np.bincount(np.searchsorted(level_stops, indices, side="right"), minlength=len(level_stops))

    for i, (height, width) in enumerate(truth.image_sizes.tolist()):
        place = np.float32((0, 0, *fit(height, width, anchors.image_size)))
        rows = slice(targets.row_splits[i], targets.row_splits[i + 1])
        boxes = np.asarray(numpy_boxes.to_letterbox(targets.boxes[rows], place, anchors.image_size))
        selected = boxes[largest(boxes, max_instances)]
        owners = numpy_boxes.match(selected, anchors.boxes_normalized)
        overlap = overlaps(selected, anchors)
        levels[0] += [(part > 0.5).any(axis=1).sum() for part in np.split(overlap, level_stops[:-1], axis=1)]
        levels[1] += count_by_level(overlap.shape[1] - 1 - overlap[:, ::-1].argmax(axis=1))
        levels[2] += count_by_level(np.flatnonzero(owners >= 0))
        counts["over_limit"] += len(boxes) - len(selected)
        counts["unreached"] += int((overlap.max(axis=1, initial=0) <= 0.5).sum())
        counts["lost"] += len(set(range(len(selected))) - set(owners.tolist()))
    return levels, counts


CASES = {"few large boxes": (SQUARE, 12, 0.9), "many small boxes": (WIDE, 150, 0.15)}


@pytest.mark.parametrize(("anchors", "most_boxes", "largest_side"), CASES.values(), ids=CASES)
def test_anchor_report_equals_matching_of_all_boxes_with_all_anchors(
    monkeypatch, anchors, most_boxes, largest_side
):
    monkeypatch.setattr(anchor_report, "_BOXES_AT_ONCE", 7)
    monkeypatch.setattr(anchor_report, "_BATCH_SIZE", 4)
    rng = np.random.default_rng(0)
    truth = random_annotations(rng, 10, most_boxes, num_classes=4, smallest=0.01, largest=largest_side)
    report = anchor_report.examine(truth, anchors, min_box_size=0)
    levels, counts = expected_report(truth, anchors, 100)
    by_level = [(level.reached, level.best, level.positives) for level in report.levels]
    np.testing.assert_array_equal(np.transpose(by_level), levels)
    assert np.cumsum([level.anchors for level in report.levels]).tolist() == level_ends(anchors).tolist()
    assert {name: getattr(report, name) for name in counts} == counts
    assert report.boxes == len(truth.target_boxes.boxes)
    assert counts["unreached"] > 5
    if most_boxes > 100:
        assert counts["lost"] > 5 and counts["over_limit"] > 5


def test_anchor_report_gives_each_level_the_sides_of_its_smallest_and_largest_anchor():
    report = anchor_report.examine(annotations([(50, 50)], []), SQUARE)
    sides = [(level.level, level.smallest, level.largest) for level in report.levels]
    np.testing.assert_allclose(sides[0], (3, 32, 32 * 2 ** (2 / 3)), rtol=1e-5)
    np.testing.assert_allclose(sides[4], (7, 512, 512 * 2 ** (2 / 3)), rtol=1e-5)


def test_anchor_report_counts_a_box_of_the_first_anchor_of_a_level_in_that_level():
    anchors = Anchors(3, 5, 1, (1.0,), 1.0, (64, 64))
    report = anchor_report.examine(annotations([(64, 64)], [(0, 0, 0, 0, 16, 16)]), anchors)
    counts = [(level.level, level.best, level.positives) for level in report.levels]
    assert counts == [(3, 0, 0), (4, 1, 1), (5, 0, 0)]


def test_anchor_report_counts_a_box_as_lost_if_an_identical_box_has_its_anchor():
    rows = [(i, 0, 10, 20, 90, 80) for i in range(4)] + [(2, 0, 10, 20, 90, 80)]
    report = anchor_report.examine(annotations([(200, 200)] * 4, rows), SQUARE)
    assert (report.lost, report.boxes) == (1, 5)


def test_anchor_report_counts_too_small_boxes_and_boxes_over_max_instances():
    rows = [(0, 0, 5 * i, 5, 20 + i, 30) for i in range(9)] + [(1, 1, 10, 10, 1.5, 60)]
    truth = annotations([(200, 200)] * 2, rows)
    for options, counts in (({"max_instances": 6}, (3, 1)), ({"min_box_size": 0.9}, (0, 0))):
        report = anchor_report.examine(truth, SQUARE, **options)
        assert (report.over_limit, report.too_small) == counts


def test_anchor_report_counts_images_and_boxes_of_the_sample():
    truth = annotations([(90, 90)] * 60, [(i, 0, 10, 20, 40, 30) for i in range(0, 60, 2)])
    report = anchor_report.examine(truth, SQUARE, max_images=11, seed=3)
    assert (report.images, report.images_with_boxes, report.boxes) == (11, 30, 11)


@pytest.mark.parametrize("rows", [[], [(0, 0, 5, 5, 20, 20)]], ids=["empty", "crowd"])
def test_anchor_report_of_data_without_boxes_has_zeros(rows):
    report = anchor_report.examine(annotations([(90, 90)] * 2, rows, crowds=[0]), SQUARE)
    assert (report.images_with_boxes, report.boxes, report.lost, report.ceiling) == (0, 0, 0, {})


def test_anchor_report_template_iou_is_the_largest_iou_with_that_template_at_any_cell():
    boxes = np.concatenate(hard_images(np.random.default_rng(9), WIDE))
    boxes = boxes[(boxes[:, 2:] - boxes[:, :2]).min(axis=1) > 1e-3]  # float32 is too coarse for smaller ones
    levels = np.split(overlaps(boxes, WIDE), level_ends(WIDE)[:-1], axis=1)
    by_template = [level.reshape(len(boxes), -1, WIDE.anchors_per_location).max(axis=1) for level in levels]
    iou = anchor_report.template_iou(boxes, WIDE)
    np.testing.assert_allclose(iou, np.concatenate(by_template, axis=1), atol=1e-4)


def test_anchor_scale_with_the_best_fit_in_the_anchor_report_reaches_more_boxes():
    rows = [(0, 0, 40 * i, 30 * i, side, side) for i, side in enumerate([10, 14, 20, 28, 40])]
    truth, anchors = annotations([(512, 512)], rows), Anchors(3, 7, 3, RATIOS, 3.5, (512, 512))
    report = anchor_report.examine(truth, anchors)
    assert list(report.fits) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0]
    best = max(report.fits, key=lambda scale: report.fits[scale].reached)
    assert best < 3 and report.fits[best].mean_iou > report.fits[3.5].mean_iou + 0.02
    best_report = anchor_report.examine(truth, dataclasses.replace(anchors, anchor_scale=best))
    assert best_report.fits[best] == report.fits[best]
    assert best_report.unreached == round((1 - best_report.fits[best].reached) * 5) < report.unreached


# --- the boxes of the network input ---


def test_anchor_report_moves_boxes_into_the_letterbox_as_the_numpy_oracle():
    truth = random_annotations(np.random.default_rng(0), 20, 6)
    image_size = (96, 160)
    boxes, targets = anchor_report.letterboxed(truth, image_size), truth.target_boxes
    for i, (height, width) in enumerate(truth.image_sizes.tolist()):
        place = (0, 0, *fit(height, width, image_size))
        rows = slice(targets.row_splits[i], targets.row_splits[i + 1])
        expected = np.asarray(numpy_boxes.to_letterbox(targets.boxes[rows], place, image_size))
        np.testing.assert_allclose(boxes[rows], expected, atol=1e-7)


@pytest.mark.parametrize("max_instances", [7, 100])
def test_anchor_report_selects_the_largest_boxes_that_are_not_too_small(max_instances):
    truth = random_annotations(np.random.default_rng(1), 12, 30, smallest=0.004)
    anchors = Anchors(3, 7, 3, RATIOS, 4.0, (128, 64))
    boxes = anchor_report.letterboxed(truth, anchors.image_size)
    splits = truth.target_boxes.row_splits
    result = anchor_report.assign(boxes, splits, anchors, max_instances, 1.5)
    large = ((boxes[:, 2:] - boxes[:, :2]) * (64, 128)).min(axis=1) >= 1.5
    expected = []
    for start, end in itertools.pairwise(splits):
        rows = start + np.flatnonzero(large[start:end])
        expected += rows[largest(boxes[rows], max_instances)].tolist()
    assert result.selected.tolist() == expected
    assert result.too_small == np.count_nonzero(~large) > 0
    assert result.over_limit == np.count_nonzero(large) - len(expected)
    assert bool(result.over_limit) == (max_instances < 30)


def test_anchor_report_selects_the_first_of_equally_large_boxes():
    rows = [(0, 0, *corner, 50, 50) for corner in ((0, 0), (50, 50), (0, 50))] + [(1, 0, 0, 0, 10, 10)]
    truth = annotations([(100, 100)] * 2, rows)
    boxes = anchor_report.letterboxed(truth, (128, 128))
    result = anchor_report.assign(boxes, truth.target_boxes.row_splits, SQUARE, 2, 0.0)
    assert result.selected.tolist() == [0, 1, 3]


def test_anchor_sample_has_no_images_without_boxes():
    rows = [(1, 0, 1, 1, 9, 9), (2, 0, 1, 1, 9, 9), (4, 0, 1, 1, 0, 9)]
    truth = annotations([(50, 50)] * 5, rows, crowds=[1])
    sample = anchor_report.sample_images(truth, 10, np.random.default_rng(0))
    assert sample.image_ids.tolist() == [102, 105]  # image 105 counts, although its box has no area


def test_anchor_sample_depends_on_the_seed_and_spreads_over_the_data():
    truth = annotations([(50, 50)] * 300, [(i, 0, 1, 1, 9, 9) for i in range(300)])
    first, repeated, second = (
        anchor_report.sample_images(truth, 40, np.random.default_rng(seed)).image_ids.tolist()
        for seed in (0, 0, 1)
    )
    assert first == repeated != second
    assert len(set(first)) == 40
    assert max(first) - min(first) > 200


# --- AP of the boxes that have an anchor ---


def test_ap_ceiling_is_the_ap_of_pycocotools_if_exactly_the_boxes_with_an_anchor_are_detected():
    truth = random_annotations(np.random.default_rng(2), 8, 60, smallest=0.005, largest=0.4)
    report = anchor_report.examine(truth, WIDE, max_instances=12, min_box_size=2.0)
    targets, detected_rows = truth.target_boxes, []
    for i, (height, width) in enumerate(truth.image_sizes.tolist()):
        rows = np.arange(targets.row_splits[i], targets.row_splits[i + 1])
        place = np.float32((0, 0, *fit(height, width, WIDE.image_size)))
        boxes = np.asarray(numpy_boxes.to_letterbox(targets.boxes[rows], place, WIDE.image_size))
        large = np.flatnonzero(((boxes[:, 2:] - boxes[:, :2]) * (160, 96)).min(axis=1, initial=9) >= 2)
        selected = large[largest(boxes[large], 12)]
        owners = np.unique(numpy_boxes.match(boxes[selected], WIDE.boxes_normalized))
        detected_rows += rows[selected[owners[owners >= 0]]].tolist()
    assert 0 < len(detected_rows) < report.boxes

    coco = COCO()
    coco.dataset = truth.ground_truth()
    coco.createIndex()
    detections = [coco.dataset["annotations"][row] | {"score": 1.0} for row in detected_rows]
    evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    assert [report.ceiling[name] for name in names] == pytest.approx(evaluation.stats[:6].tolist())
    assert 0.1 < report.ceiling["AP"] < 0.99
