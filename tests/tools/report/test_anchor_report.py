"""What anchors match, miss and lose, counted again with the encoder of the loaders, image by image."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from common import box_encoder
from common.anchors import Anchors
from common.datacheck.coco import load_coco
from common.evaluation import coco_metrics
from common.letterbox import boxes_from_letterbox, boxes_to_letterbox, fit
from tests.common.made_annotations import annotations, random_annotations
from tests.common.test_box_encoder import encode_boxes_tf, hard_images, overlaps
from tools.report import anchor_report

RATIOS = (1.0, 2.0, 0.5)
SQUARE = Anchors(3, 7, 3, RATIOS, 4.0, (128, 128))
WIDE = Anchors(3, 6, 2, RATIOS, 3.0, (96, 160))
D0 = Anchors(3, 7, 3, RATIOS, 4.0, (512, 512))


def by_the_encoder(truth, anchors, max_instances):
    """The same numbers from encode_boxes_tf and decode_boxes on dense tensors, in a loop over images."""
    levels = np.zeros((len(anchors.levels), 3), int)  # reached, best, positives
    num = {"unreached": 0, "lost": 0, "over_limit": 0}
    lost_images, results = [], []
    targets = truth.target_boxes
    k = anchors.anchors_per_location
    ends = np.cumsum([height * width * k for height, width in anchors.feature_sizes])
    for i, (height, width) in enumerate(truth.image_sizes.tolist()):
        place = np.float32((0, 0, *fit(height, width, anchors.image_size)))
        mine = slice(targets.row_splits[i], targets.row_splits[i + 1])
        boxes = np.asarray(boxes_to_letterbox(targets.boxes[mine], place, anchors.image_size))
        num["over_limit"] += max(len(boxes) - max_instances, 0)
        numbers = tf.range(1, len(boxes) + 1)  # as labels: each box is known again
        encoded = encode_boxes_tf(boxes, numbers, anchors, max_instances)
        kept = encoded.classes.numpy()[encoded.classes.numpy() >= 0]
        owners = np.concatenate([of.numpy().ravel() for of in encoded.class_targets])
        overlap = overlaps(boxes[kept], anchors)
        for level, part in enumerate(np.split(overlap, ends[:-1], axis=1)):
            levels[level, 0] += (part > 0.5).any(axis=1).sum()
        best = overlap.shape[1] - 1 - overlap[:, ::-1].argmax(axis=1)
        levels[:, 1] += np.bincount(np.searchsorted(ends, best, side="right"), minlength=len(ends))
        levels[:, 2] += np.bincount(
            np.searchsorted(ends, np.flatnonzero(owners >= 0), side="right"), minlength=len(ends)
        )
        num["unreached"] += int((overlap.max(axis=1, initial=0) <= 0.5).sum())
        without = set(kept.tolist()) - set(owners.tolist())
        num["lost"] += len(without)
        lost_images += [int(truth.image_ids[i])] * len(without)

        decoded = box_encoder.decode_boxes([of[None] for of in encoded.box_targets], anchors)
        decoded = np.asarray(boxes_from_letterbox(decoded[0], place, anchors.image_size))
        for owner in sorted(set(owners.tolist()) - {-1}):
            anchor = np.flatnonzero(owners == owner)[-1]  # any of them
            left, top, right, bottom = decoded[anchor].clip(0, 1) * [width, height, width, height]
            results.append(
                {
                    "image_id": int(truth.image_ids[i]),
                    "category_id": truth.label_map.category_ids[int(targets.classes[mine][owner])],
                    "bbox": [float(round(x, 2)) for x in (left, top, right - left, bottom - top)],
                    "score": 1.0,
                }
            )
    return levels, num, lost_images, coco_metrics.score(truth.ground_truth(), results).metrics


@pytest.mark.parametrize(
    ("anchors", "most_boxes", "largest"),
    [(SQUARE, 12, 0.9), (WIDE, 150, 0.15)],
    ids=["square", "wide and crowded"],
)
def test_everything_is_what_the_encoder_does(anchors, most_boxes, largest):
    rng = np.random.default_rng(0)
    truth = random_annotations(rng, 14, most_boxes, num_classes=4, smallest=0.01, largest=largest)
    report = anchor_report.examine(truth, anchors, min_box_size=0)
    levels, num, lost_images, metrics = by_the_encoder(truth, anchors, 100)
    assert [(of.reached, of.best, of.positives) for of in report.levels] == [tuple(row) for row in levels]
    assert [of.anchors for of in report.levels] == [
        h * w * anchors.anchors_per_location for h, w in anchors.feature_sizes
    ]
    assert report.anchors.num_anchors == sum(of.anchors for of in report.levels) == len(anchors.boxes)
    assert {name: getattr(report, name).count for name in num} == num
    assert [int(text.split()[1]) for text in report.lost.offenders] == lost_images
    assert report.lost.images == len(set(lost_images))
    assert num["unreached"] > 5
    assert report.boxes == len(truth.target_boxes.boxes)
    assert report.ceiling == pytest.approx({name: metrics[name] for name in report.ceiling}, abs=1e-4)
    if most_boxes > 100:
        assert num["lost"] > 5
        assert num["over_limit"] > 5
        assert report.ceiling["AP"] < 0.99


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
    assert [of.best for of in report.levels] == [int(of.level == level) for of in report.levels]
    assert [of.positives for of in report.levels] == [int(of.level == level) for of in report.levels]


def test_the_ceiling_is_one_where_every_box_has_an_anchor():
    rows = [(i, i % 3, 10 + 3 * i, 20, 60 + 9 * i, 80 + 5 * i) for i in range(6)]
    report = anchor_report.examine(annotations([(300, 250)] * 6, rows), SQUARE)
    assert report.ceiling["AP"] == pytest.approx(1, abs=1e-6)
    assert report.reasons == ()
    assert report.lost.count == 0


def test_boxes_that_lose_to_an_identical_one_are_named_and_missed():
    rows = [(i, 0, 10, 20, 90, 80) for i in range(4)] + [(2, 0, 10, 20, 90, 80)]
    report = anchor_report.examine(annotations([(200, 200)] * 4, rows), SQUARE)
    assert report.lost.offenders == (
        "image 103 ('3.jpg') has 'cat' at [10.0, 20.0, 90.0, 80.0], 57.60 x 51.20 pixels in the network",
    )
    assert report.reasons == ("1 without an anchor",)
    # recall stops at 4 of 5, with no false detection before: 81 of COCO's 101 recalls
    assert report.ceiling["AP"] == pytest.approx(81 / 101)


def test_what_training_drops_is_said():
    rows = [(0, 0, 5 * i, 5, 20 + i, 30) for i in range(9)] + [
        (1, 1, 10, 10, 1.5, 60),
        (1, 1, 10, 10, 50, 60),
    ]
    report = anchor_report.examine(annotations([(200, 200)] * 2, rows), SQUARE, max_instances=6)
    assert (report.over_limit.count, report.too_small.count) == (3, 1)
    assert all(text.startswith("image 101 ('1.jpg') has 'cat'") for text in report.over_limit.offenders)
    assert "[10.0, 10.0, 1.5, 60.0], 0.96 x 38.40 pixels" in report.too_small.offenders[0]
    assert {"3 beyond max_instances", "1 smaller than min_box_size in the network"} <= set(report.reasons)
    loose = anchor_report.examine(annotations([(200, 200)] * 2, rows), SQUARE, min_box_size=0.9)
    assert (loose.over_limit.count, loose.too_small.count) == (0, 0)


def test_a_sample_is_drawn_and_said():
    truth = annotations([(90, 90)] * 60, [(i, 0, 10, 20, 40, 30) for i in range(0, 60, 2)])
    report = anchor_report.examine(truth, SQUARE, max_images=11, seed=3)
    assert (report.images, report.images_with_boxes, report.boxes) == (11, 30, 11)
    again = anchor_report.examine(truth, SQUARE, max_images=11, seed=3)
    assert (report.levels, report.ceiling) == (again.levels, again.ceiling)


@pytest.mark.parametrize("rows", [[], [(0, 0, 5, 5, 20, 20)]], ids=["empty", "crowd"])
def test_without_a_box_there_is_no_ceiling(rows):
    report = anchor_report.examine(annotations([(90, 90)] * 2, rows, crowds=[0]), SQUARE)
    assert (report.boxes, report.ceiling, report.reasons) == (0, {}, ())


def test_boxes_without_area_alone():
    report = anchor_report.examine(annotations([(90, 90)], [(0, 0, 5, 5, 0, 20)]), SQUARE)
    assert report.ceiling["AP"] == 0
    assert report.reasons == ("1 without area in their image",)


@pytest.mark.parametrize("anchors", [D0, WIDE], ids=["d0", "wide"])
def test_the_nearest_anchor_of_each_kind_overlaps_most(anchors):
    boxes = np.concatenate(hard_images(np.random.default_rng(9), anchors))
    boxes = boxes[(boxes[:, 2:] - boxes[:, :2]).min(axis=1) > 1e-3]  # of less, float32 knows little
    k = anchors.anchors_per_location
    ends = np.cumsum([height * width * k for height, width in anchors.feature_sizes])
    levels = np.split(overlaps(boxes, anchors), ends[:-1], axis=1)
    expected = np.concatenate([of.reshape(len(boxes), -1, k).max(axis=1) for of in levels], axis=1)
    np.testing.assert_allclose(anchor_report.template_iou(boxes, anchors), expected, atol=1e-4)


def test_matching_in_parts_does_not_show(monkeypatch):
    images = hard_images(np.random.default_rng(3), D0)
    boxes, image = np.concatenate(images), np.repeat(np.arange(len(images)), list(map(len, images)))
    whole = anchor_report.match(boxes, image, D0)
    monkeypatch.setattr(anchor_report, "_IMAGES_AT_ONCE", 2)
    parts = anchor_report.match(boxes, image, D0)
    assert len(images) > 2
    assert sorted(zip(*whole, strict=True)) == sorted(zip(*parts, strict=True))


# --- other anchors ---


def planted(rng, num_images, sides):
    """Images of 512 x 512 with boxes of sizes drawn from a list and of RATIOS, a little off them."""
    rows = []
    for i in range(num_images):
        for _ in range(4):
            side, ratio = (rng.choice(of) * rng.uniform(0.9, 1.1) for of in (sides, RATIOS))
            w, h = side * ratio**0.5, side / ratio**0.5
            rows.append((i, 0, rng.uniform(0, 512 - w), rng.uniform(0, 512 - h), w, h))
    return annotations([(512, 512)] * num_images, rows)


def test_other_scales_are_tried():
    truth = planted(np.random.default_rng(0), 60, [10, 14, 20, 28, 40])
    report = anchor_report.examine(truth, dataclasses.replace(D0, anchor_scale=3.5))
    assert list(report.fits) == sorted({*anchor_report.SCALES, 3.5})
    best = max(report.fits, key=lambda scale: report.fits[scale].reached)
    assert best < 3
    assert report.fits[best].mean_iou > report.fits[3.5].mean_iou + 0.02
    # training with that scale really does better on all
    again = anchor_report.examine(truth, dataclasses.replace(D0, anchor_scale=best))
    assert again.fits[best] == report.fits[best]
    assert again.unreached.count == round((1 - again.fits[best].reached) * again.boxes)


# --- data that are not made up ---


def test_coco128(coco128):
    truth = load_coco(coco128 / "instances.json", None)
    report = anchor_report.examine(truth, D0)
    assert (report.images, report.boxes, report.anchors.num_anchors) == (126, 929, 49104)
    assert (report.too_small.count, report.over_limit.count) == (1, 0)
    assert report.lost.count == 12
    assert report.unreached.count == 324
    assert report.ceiling["AP"] == pytest.approx(0.990, abs=1e-3)
    assert report.ceiling["APm"] == report.ceiling["APl"] == pytest.approx(1)
    assert len(report.reasons) == 2


@pytest.mark.parametrize(("split", "without_area"), [("train", 1), ("val", 1), ("test", 0)])
def test_bccd_loses_nothing_but_boxes_without_area(bccd, split, without_area):
    truth = load_coco(bccd / f"instances_{split}.json", None)
    report = anchor_report.examine(truth, D0)
    assert (report.lost.count, report.too_small.count, report.over_limit.count) == (0, 0, 0)
    assert report.reasons == (("1 without area in their image",) if without_area else ())
    assert report.ceiling["AP"] == pytest.approx(1, abs=0 if without_area == 0 else 0.02)
    assert (report.ceiling["AP"] < 0.9995) == bool(without_area)
