"""The matching of many images at once gives every anchor the box that the encoder of the loaders gives it."""

import itertools

import numpy as np
import pytest

from common.anchors import Anchors
from tests.common.test_box_encoder import (
    D0,
    D7X,
    ODD,
    SPARSE,
    WIDE,
    encode,
    encode_tf,
    flat_targets,
    hard_images,
    overlaps,
)
from tools.report import anchor_matching

LONG = Anchors(2, 3, 2, [1.0, 5.0, 0.2], 2.0, (64, 96))
ANCHORS = {"d0": D0, "wide": WIDE, "odd": ODD, "d7x": D7X, "sparse": SPARSE, "long": LONG}
MAX_INSTANCES = 600  # above what any image has: the choice of the largest is not the matching's


def flat(images):
    """Boxes of all images, and the image of each."""
    return np.concatenate(images), np.repeat(np.arange(len(images)), [len(boxes) for boxes in images])


def targets_of(matches, boxes, box_image, labels, image, anchors):
    """Class and box targets (A,), (A, 4) of one image, as the encoder has them."""
    mine = box_image[matches.owned_box] == image
    anchor, box = matches.owned_anchor[mine], matches.owned_box[mine]
    classes, offsets = np.full(anchors.num_anchors, -1), np.zeros((anchors.num_anchors, 4), np.float32)
    classes[anchor] = labels[box] - 1
    offsets[anchor] = anchor_matching.encode_offsets(boxes[box], anchors.boxes_normalized[anchor])
    return classes, offsets


def check(images, anchors, run):
    boxes, box_image = flat(images)
    labels = np.arange(1, len(boxes) + 1, dtype=np.int32)  # each box is known again
    matches = anchor_matching.match(boxes, box_image, anchors)
    splits = np.cumsum([0, *map(len, images)])
    labels_of = [labels[start:end] for start, end in itertools.pairwise(splits)]
    for image, encoded in enumerate(run(images, labels_of, anchors, MAX_INSTANCES)):
        expected_classes, expected_offsets = flat_targets(encoded)
        classes, offsets = targets_of(matches, boxes, box_image, labels, image, anchors)
        np.testing.assert_array_equal(classes, expected_classes)
        np.testing.assert_allclose(offsets, expected_offsets, rtol=1e-5, atol=1e-5)
    return matches


@pytest.mark.parametrize("name", ANCHORS)
def test_owners_and_offsets_are_those_of_encode_boxes_tf(name):
    check(hard_images(np.random.default_rng(0), ANCHORS[name]), ANCHORS[name], encode_tf)


def test_owners_and_offsets_are_those_of_the_dali_graph():
    check(hard_images(np.random.default_rng(5), WIDE), WIDE, encode)


@pytest.mark.parametrize("name", ANCHORS)
def test_best_anchors_and_levels_are_those_of_brute_force(name):
    anchors = ANCHORS[name]
    boxes, box_image = flat(hard_images(np.random.default_rng(8), anchors))
    matches = anchor_matching.match(boxes, box_image, anchors)
    overlap = overlaps(boxes, anchors)  # (M, A)
    np.testing.assert_array_equal(matches.best_iou, overlap.max(axis=1))
    last_best = overlap.shape[1] - 1 - overlap[:, ::-1].argmax(axis=1)
    np.testing.assert_array_equal(matches.best_anchor, last_best)
    k = anchors.anchors_per_location
    ends = np.cumsum([height * width * k for height, width in anchors.feature_sizes])
    levels = np.split(overlap, ends[:-1], axis=1)
    expected = np.stack([(level > 0.5).any(axis=1) for level in levels], axis=1)
    np.testing.assert_array_equal(matches.reached, expected)
    if name == "sparse":
        assert (matches.best_iou == 0).any()


@pytest.mark.parametrize("name", ANCHORS)
def test_best_overlap_alone_is_the_same(name):
    anchors = ANCHORS[name]
    boxes, box_image = flat(hard_images(np.random.default_rng(9), anchors))
    sides = (boxes[:, 2:] - boxes[:, :2]).min(axis=1)
    boxes, box_image = boxes[sides > 1e-3], box_image[sides > 1e-3]  # of less, float32 knows little
    expected = anchor_matching.match(boxes, box_image, anchors).best_iou
    np.testing.assert_allclose(anchor_matching.best_overlap(boxes, anchors), expected, atol=1e-4)


def test_images_do_not_compete_and_chunks_do_not_show(monkeypatch):
    images = hard_images(np.random.default_rng(3), D0)
    boxes, box_image = flat(images)
    whole = anchor_matching.match(boxes, box_image, D0)
    monkeypatch.setattr(anchor_matching, "_CHUNK", 7)
    for mine, other in zip(whole, anchor_matching.match(boxes, box_image, D0), strict=True):
        np.testing.assert_array_equal(mine, other)
    start = 0
    for number, of in enumerate(images):
        alone = anchor_matching.match(of, np.zeros(len(of), np.int64), D0)
        mine = box_image[whole.owned_box] == number
        np.testing.assert_array_equal(whole.owned_box[mine] - start, alone.owned_box)
        np.testing.assert_array_equal(whole.owned_anchor[mine], alone.owned_anchor)
        start += len(of)


def test_of_identical_boxes_one_owns_all_anchors():
    boxes = np.repeat(np.float32([[0.2, 0.3, 0.6, 0.7]]), 3, axis=0)
    matches = anchor_matching.match(boxes, np.zeros(3, np.int64), D0)
    assert set(matches.owned_box.tolist()) == {2}  # the last
    apart = anchor_matching.match(boxes, np.arange(3), D0)
    assert set(apart.owned_box.tolist()) == {0, 1, 2}


def test_without_boxes():
    matches = anchor_matching.match(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), D0)
    assert [len(of) for of in matches] == [0] * 5
    assert matches.reached.shape == (0, 5)
    assert anchor_matching.best_overlap(np.zeros((0, 4), np.float32), D0).shape == (0,)
