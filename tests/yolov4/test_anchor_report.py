"""Boxes without a place in YOLOv4's targets, against Darknet's rules in plain loops."""

import dataclasses

import numpy as np
import pytest

from tests.common.made_annotations import annotations, random_annotations
from tests.yolov4 import darknet_rules
from yolov4 import anchor_report
from yolov4.config import get_config
from yolov4.network_boxes import network_boxes

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
def test_lost_and_unassigned_boxes_are_those_of_darknets_rules(config):
    truth = random_annotations(np.random.default_rng(0), 19, 120, smallest=0.01, largest=0.3)
    report = anchor_report.examine(truth, config)
    options = {"keep_aspect": config.letterbox, "centered": True, "max_instances": 200, "min_box_size": 1}
    shown = network_boxes(truth, config.image_size, **options)
    boxes, image = shown.boxes[shown.kept], shown.image[shown.kept]
    lost = unassigned = 0
    for number in range(truth.num_images):
        of_image = owners(boxes[image == number], config)
        lost += sum(owner not in (-1, n) for n, owner in enumerate(of_image))
        unassigned += of_image.count(-1)
    assert (report.lost, report.unassigned) == (lost, unassigned)
    assert lost > 10
    assert bool(unassigned) == (config is TINY)  # its first anchor belongs to no head
    assert report.boxes == truth.num_boxes


# Boxes of 40 x 40 in one image of 192 x 256; the first two have their centres in one cell.
HERE, SAME, NEAR, FAR = (60, 60, 40, 40), (60, 60, 40, 40), (61, 61, 40, 40), (150, 120, 40, 40)


MEETINGS = [
    ([(0, *HERE), (0, *FAR)], 0),
    ([(0, *HERE), (0, *SAME), (0, *FAR)], 1),
    ([(0, *HERE), (1, *SAME), (0, *FAR)], 1),  # of another class it is found all the same
    ([(0, *HERE), (1, *NEAR), (0, *FAR)], 1),
    ([(0, *HERE), (0, *SAME), (1, *SAME), (1, *SAME)], 3),
]


@pytest.mark.parametrize(("rows", "lost"), MEETINGS)
def test_boxes_that_meet_in_a_prediction(rows, lost):
    truth = annotations([(192, 256)], [(0, *row) for row in rows])
    report = anchor_report.examine(truth, V4)
    assert (report.lost, report.unassigned) == (lost, 0)
    assert report.share_without_place == lost / len(rows)


def test_what_training_drops_is_said():
    config = dataclasses.replace(V4, max_instances=2)
    boxes = (HERE, FAR, (5, 5, 30, 30), (9, 9, 0.5, 90))
    truth = annotations([(192, 256)], [(0, 0, *box) for box in boxes])
    assert str(anchor_report.examine(truth, config)) == (
        "of 4 boxes in 1 images 0 have no head, 0 lose their cell and anchor to another box, 1 are smaller "
        "than min_box_size, 1 are beyond max_instances"
    )


def test_a_sample_of_the_images():
    truth = annotations([(192, 256)] * 40, [(i, 0, *HERE) for i in range(40)])
    report = anchor_report.examine(truth, V4, max_images=17)
    assert (report.images, report.boxes, report.lost) == (17, 17, 0)


def test_boxes_without_area_alone():
    report = anchor_report.examine(annotations([(192, 256)], [(0, 0, 5, 5, 0, 9)]), V4)
    assert (report.lost, report.unassigned, report.share_without_place) == (0, 0, 0)
