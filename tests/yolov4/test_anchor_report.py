"""Boxes without a place in YOLOv4's targets, against Darknet's rules in plain loops; the AP ceiling."""

import dataclasses

import numpy as np
import pytest

from tests.common.made_annotations import annotations, random_annotations
from tests.yolov4 import darknet_rules
from yolov4 import anchor_report, ap_ceiling
from yolov4.config import get_config

V4 = dataclasses.replace(get_config("yolov4"), image_size=(192, 256))
TINY = dataclasses.replace(get_config("yolov4-tiny"), image_size=(192, 256))
LETTERBOXED = dataclasses.replace(V4, letterbox=True)


def owners(boxes, config):
    """One image by Darknet's rules: whose place each box is found in; -1: it trains nothing."""
    by_box = [[] for _ in boxes]  # the first box of each prediction that it trains
    for head, stride in enumerate(config.strides):
        grid = [side // stride for side in config.image_size]
        trained = darknet_rules.assign(boxes, np.zeros(len(boxes), int), config, head, grid, 1)
        for _, numbers in sorted(trained.items()):
            for number in numbers:
                by_box[number].append(numbers[0])
    return [n if n in firsts else [*firsts, -1][0] for n, firsts in enumerate(by_box)]


@pytest.mark.parametrize("config", [LETTERBOXED, TINY], ids=["letterboxed", "tiny"])
def test_owners_lost_and_unassigned_boxes_are_those_of_darknets_rules(config):
    truth = random_annotations(np.random.default_rng(0), 19, 120, smallest=0.01, largest=0.3)
    report = anchor_report.examine(truth, config)
    options = {"keep_aspect": config.letterbox, "centered": True, "max_instances": 200, "min_box_size": 1}
    shown = ap_ceiling.network_boxes(truth, config.image_size, **options)
    boxes, image = shown.boxes[shown.kept], shown.image[shown.kept]
    expected, lost, unassigned = [], [], []
    for number, image_id in enumerate(truth.image_ids.tolist()):
        first = len(expected)
        of_image = owners(boxes[image == number], config)
        lost += [image_id] * sum(owner not in (-1, n) for n, owner in enumerate(of_image))
        unassigned += [image_id] * of_image.count(-1)
        expected += [owner if owner < 0 else first + owner for owner in of_image]
    np.testing.assert_array_equal(anchor_report.prediction_owners(boxes, image, config), expected)
    assert [int(text.split()[1]) for text in report.lost.offenders] == lost
    assert [int(text.split()[1]) for text in report.unassigned.offenders] == unassigned
    assert len(lost) > 10
    assert bool(unassigned) == (config is TINY)  # its first anchor belongs to no head
    assert report.boxes == truth.num_boxes


# Boxes of 40 x 40 in one image of 192 x 256; the first two have their centres in one cell.
HERE, SAME, NEAR, FAR = (60, 60, 40, 40), (60, 60, 40, 40), (61, 61, 40, 40), (150, 120, 40, 40)


MEETINGS = [
    ([(0, *HERE), (0, *FAR)], 0, 1.0),
    ([(0, *HERE), (0, *SAME), (0, *FAR)], 1, 67 / 101),  # 2 of 3: recalls up to 0.66
    # of another class it is found all the same, there where the first is; it is named as lost
    ([(0, *HERE), (1, *SAME), (0, *FAR)], 1, 1.0),
    ([(0, *HERE), (1, *NEAR), (0, *FAR)], 1, None),
    ([(0, *HERE), (0, *SAME), (1, *SAME), (1, *SAME)], 3, 51 / 101),  # one of each class
]


@pytest.mark.parametrize(("rows", "lost", "ap"), MEETINGS)
def test_boxes_that_meet_in_a_prediction(rows, lost, ap):
    truth = annotations([(192, 256)], [(0, *row) for row in rows])
    report = anchor_report.examine(truth, V4)
    assert report.lost.count == lost
    if ap is None:  # right at 0.5, but not exactly there
        assert report.ceiling["AP50"] == pytest.approx(1)
        assert report.ceiling["AP"] < 0.99
        assert report.reasons == ("1 without a cell and anchor",)
    else:
        assert report.ceiling["AP"] == pytest.approx(ap)
        assert bool(report.reasons) == (ap < 1)


def test_what_training_drops_is_said():
    config = dataclasses.replace(V4, max_instances=2)
    boxes = (HERE, FAR, (5, 5, 30, 30), (9, 9, 0.5, 90))
    truth = annotations([(192, 256)], [(0, 0, *box) for box in boxes])
    report = anchor_report.examine(truth, config)
    lines = report.lines()
    assert lines[0] == "of 4 boxes in 1 images 0 lose their cell and anchor to another box"
    assert lines[1].startswith("AP ceiling, of perfect outputs: AP 0.5")
    assert lines[2].endswith(": 1 beyond max_instances; 1 smaller than min_box_size in the network")


def test_a_sample_of_the_images():
    truth = annotations([(192, 256)] * 40, [(i, 0, *HERE) for i in range(40)])
    report = anchor_report.examine(truth, V4, max_images=17)
    assert (report.images, report.boxes, report.lost.count) == (17, 17, 0)
    assert report.ceiling["AP"] == pytest.approx(1)


def test_boxes_without_area_alone():
    report = anchor_report.examine(annotations([(192, 256)], [(0, 0, 5, 5, 0, 9)]), V4)
    assert (report.lost.count, report.unassigned.count, report.ceiling["AP"]) == (0, 0, 0)
