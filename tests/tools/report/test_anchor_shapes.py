"""Tests anchor_shapes.py with boxes whose IoUs with the anchors are computed by hand."""

import re

import pytest

from common import hparams
from tests.common.made_annotations import annotations
from tools.report import anchor_shapes, page
from tools.report.anchor_shapes import AnchorShape
from yolov4.config import get_config

# Heads of stride 16 and 32. Anchor 0 has no head, and both heads have anchor 2.
CHANGES = {
    "image_size": (128, 128),
    "anchors": (10, 10, 20, 20, 40, 40, 80, 80),
    "masks": ((1, 2), (2, 3)),
    "max_instances": 3,
}
CONFIG = hparams.replace(get_config("yolov4-tiny"), CHANGES)
# The image is 256 x 128, so stretching halves the widths. Sides in the network input: 20x20 (anchor 1),
# 40x60 (anchor 2, IoU 2/3), 10x10 (anchor 0) and 0.5x9 (too small).
ROWS = [(0, 0, 0, 0, 40, 20), (0, 0, 0, 0, 80, 60), (0, 0, 0, 0, 20, 10), (0, 0, 50, 50, 1, 9)]
TRUTH = annotations([(128, 256)], ROWS)


def test_anchors_of_yolov4_get_the_boxes_with_the_best_shape_iou():
    report = anchor_shapes.examine(TRUTH, CONFIG)
    assert report.anchors == (
        AnchorShape(10, 10, (), 1, 0),
        AnchorShape(20, 20, (16,), 1, 1),
        AnchorShape(40, 40, (16, 32), 1, 1),
        AnchorShape(80, 80, (32,), 0, 0),
    )
    assert (report.boxes, report.too_small, report.over_limit, report.unassigned) == (4, 1, 0, 1)
    assert report.fit.mean_iou == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert report.fit.reached == pytest.approx(2 / 3)


def test_anchors_of_yolov4_above_iou_thresh_get_boxes_too():
    # The shape IoU of 20x20 and 10x10 is 1/4, of 40x60 and 80x80 3/8, of 40x60 and 20x20 1/6.
    config = hparams.replace(CONFIG, {"iou_thresh": 0.24})
    report = anchor_shapes.examine(TRUTH, config)
    assert [row.assigned for row in report.anchors] == [0, 2, 2, 1]
    assert report.unassigned == 0


def test_anchor_report_of_yolov4_counts_letterboxed_boxes_and_those_over_max_instances():
    config = hparams.replace(CONFIG, {"letterbox": True, "max_instances": 2})
    report = anchor_shapes.examine(
        TRUTH, config
    )  # letterboxing halves all sides: 20x10, 40x30, 10x5, 0.5x4.5
    assert (report.too_small, report.over_limit) == (1, 1)
    assert [row.best for row in report.anchors] == [2, 0, 1, 0]


def test_anchor_report_of_yolov4_without_boxes_has_zeros():
    report = anchor_shapes.examine(annotations([(90, 90)], []), CONFIG)
    assert (report.boxes, report.over_limit, report.unassigned, report.fit.boxes) == (0, 0, 0, 0)
    assert not any(row.best or row.assigned for row in report.anchors)


def test_anchor_report_of_yolov4_is_shown_as_tables_of_anchors_and_missed_boxes():
    items = page.anchor_items(anchor_shapes.examine(TRUTH, CONFIG))
    words = re.sub(" +", " ", page.format_text([page.Section("Anchors", items)]))
    for expected in (
        "4 anchors of yolov4-tiny at 128x128, images stretched",
        "4 boxes: mean best IoU 0.556, 66.7 % of the boxes reached at 0.5",
        "40x40 16, 32 1 25.0 % 1\n",
        "no anchor: no head uses the best one 1 25.0 %\n",
    ):
        assert expected in words, words
