"""Annotations: target boxes against a plain loop, ground truth against pycocotools, and what is stored."""

import contextlib
import copy
import dataclasses
import io
import json
import warnings

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.annotations import Annotations, clip_boxes
from common.datacheck.coco import load_coco
from common.datacheck.issues import Issues
from common.labels import LabelMap


@pytest.fixture
def small():
    """Three images, the second without boxes; a crowd; issues of each severity that may be there."""
    issues = Issues("small")
    issues.add("box-outside", "annotation 1 (image 7) has bbox [1.0]")
    issues.add_many("crowd", 5000, (f"annotation {i}" for i in range(5000)))
    issues.add("image-missing", "image 8")
    issues.skip_images()
    return Annotations(
        label_map=LabelMap((2, 9), ("two", "neun 'ä\"")),
        image_ids=np.array([42, 7, 2**63 - 1]),
        file_names=["a.jpg", "sub/b\0 .jpg", ""],
        image_sizes=np.array([[10, 20], [40, 30], [5, 6]], np.int32),
        box_image=np.array([0, 0, 2, 2]),
        boxes_ltwh_px=np.array([[0, 0, 20, 10], [1, 2, 3.5, 4], [0.25, 0, 2, 2], [0.1, 0, 2, 2]]),
        category_ids=np.array([2, 9, 2, 9]),
        is_crowd=np.array([True, False, False, False]),
        areas=np.array([99, 12.5, 4, 1 / 3]),
        origin="small.json",
        issues=issues,
    )


def pycoco(document):
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = copy.deepcopy(document)
        coco.createIndex()
    return coco


def coco_stats(ground_truth, detections):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = pycoco(ground_truth)
        evaluation = COCOeval(truth, truth.loadRes(copy.deepcopy(detections)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


# --- target boxes ---


def test_target_boxes(small):
    targets = small.target_boxes
    assert small.row_splits.tolist() == [0, 2, 2, 4]
    assert targets.row_splits.tolist() == [0, 1, 1, 3]
    assert targets.classes.tolist() == [1, 0, 1]
    np.testing.assert_allclose(
        targets.boxes,
        [[1 / 20, 2 / 10, 4.5 / 20, 6 / 10], [0.25 / 6, 0, 2.25 / 6, 2 / 5], [0.1 / 6, 0, 2.1 / 6, 2 / 5]],
        rtol=1e-6,
    )
    assert (targets.num_clipped, targets.num_dropped, targets.num_crowds) == (0, 0, 1)


def test_target_boxes_against_a_plain_loop():
    random = np.random.default_rng(3)
    sizes = random.integers(1, 700, (20, 2))
    boxes = random.uniform(-100, 700, (500, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:]) * random.choice([0, 1e-7, 0.01, 1], (500, 2), p=[0.1, 0.1, 0.2, 0.6])
    annotations = Annotations(
        label_map=LabelMap((4, 8), ("a", "b")),
        image_ids=np.arange(20),
        file_names=[""] * 20,
        image_sizes=sizes.astype(np.int32),
        box_image=np.sort(random.integers(0, 20, 500)),
        boxes_ltwh_px=boxes,
        category_ids=random.choice([4, 8], 500),
        is_crowd=random.uniform(size=500) < 0.1,
        areas=np.ones(500),
        origin="",
    )
    targets = annotations.target_boxes

    dropped = clipped = 0
    for i, (height, width) in enumerate(sizes.tolist()):
        expected = []
        for row in np.flatnonzero((annotations.box_image == i) & ~annotations.is_crowd).tolist():
            x, y, w, h = boxes[row].tolist()
            edges = [x / width, y / height, (x + w) / width, (y + h) / height]
            box = np.array([min(max(edge, 0), 1) for edge in edges], np.float32)
            if box[2] > box[0] and box[3] > box[1]:
                expected.append([*box, {4: 0, 8: 1}[int(annotations.category_ids[row])]])
                clipped += box.tolist() != np.float32(edges).tolist()
            else:
                dropped += 1
        rows = slice(*targets.row_splits[i : i + 2])
        assert (
            np.c_[targets.boxes[rows], targets.classes[rows]].tolist()
            == np.reshape(expected, (-1, 5)).tolist()
        )
    assert targets.num_dropped == dropped > 50
    assert targets.num_clipped == clipped > 50
    assert targets.num_crowds == annotations.is_crowd.sum() > 10


def test_huge_boxes_are_clipped_without_a_warning():
    boxes = np.array([[1, 2, 1e308, 1e308], [-1e308, -1e300, 1e308, 1e308], [1e308, 1, 1e308, 1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped, changed = clip_boxes(boxes, np.array([[10, 20]] * 3))
    np.testing.assert_allclose(clipped, [[0.05, 0.2, 1, 1], [0, 0, 0, 1], [1, 0.1, 1, 0.2]], rtol=1e-6)
    assert changed.tolist() == [True] * 3


def test_rounding_is_no_reaching_outside():
    beyond = np.nextafter(640.0, 700.0)
    _, changed = clip_boxes(np.array([[0, 0, beyond, 480], [0, 0, 640.01, 480]]), np.array([[480, 640]] * 2))
    assert changed.tolist() == [False, True]


# --- ground truth ---


@pytest.mark.parametrize("name", ["coco128/instances.json", "bccd/instances_val.json"])
def test_pycocotools_judges_our_ground_truth_like_the_original(name, request):
    directory, file = name.split("/")
    path = request.getfixturevalue(directory) / file
    original = json.loads(path.read_text())
    random = np.random.default_rng(0)
    detections = [
        {
            "image_id": o["image_id"],
            "category_id": o["category_id"],
            "bbox": (np.array(o["bbox"]) * random.uniform(0.9, 1.1, 4)).tolist(),
            "score": random.uniform(),
        }
        for o in original["annotations"]
        if random.uniform() < 0.8
    ]
    ours = coco_stats(load_coco(path).ground_truth(), detections)
    assert 0.2 < ours[0] < 0.9
    assert ours.tolist() == coco_stats(original, detections).tolist()


def test_annotation_id_zero_counts(small):
    """pycocotools itself takes id 0 for no match, so the ground truth numbers from 1."""
    truth = small.ground_truth()
    perfect = [
        {"image_id": o["image_id"], "category_id": o["category_id"], "bbox": o["bbox"], "score": 1.0}
        for o in truth["annotations"]
        if not o["iscrowd"]
    ]
    assert coco_stats(truth, perfect)[0] == pytest.approx(1.0)
    for number, an_object in enumerate(truth["annotations"], -1):
        an_object["id"] = number
    assert coco_stats(truth, perfect)[0] < 0.9


def test_the_ground_truth_has_everything(small):
    truth = small.ground_truth()
    assert truth["images"][1] == {"id": 7, "file_name": "sub/b\0 .jpg", "height": 40, "width": 30}
    assert truth["annotations"][1] == {
        "id": 2,
        "image_id": 42,
        "category_id": 9,
        "bbox": [1, 2, 3.5, 4],
        "area": 12.5,
        "iscrowd": 0,
    }
    assert truth["annotations"][0]["iscrowd"] == 1
    assert truth["categories"] == [{"id": 2, "name": "two"}, {"id": 9, "name": "neun 'ä\""}]


# --- names and numbers ---


def test_the_fingerprint_is_of_the_content(small):
    original = small.fingerprint()
    assert dataclasses.replace(small, origin="elsewhere", issues=Issues("")).fingerprint() == original
    for name, value in [
        ("label_map", LabelMap((2, 9), ("two", "nine"))),
        ("file_names", ["a.jpg", "b.jpg", ""]),
        ("image_ids", np.array([42, 8, 9])),
        ("image_sizes", np.array([[10, 21], [40, 30], [5, 6]], np.int32)),
        ("box_image", np.array([0, 0, 1, 2])),
        ("boxes_ltwh_px", small.boxes_ltwh_px + 1e-6),
        ("category_ids", np.array([2, 9, 9, 9])),
        ("is_crowd", np.array([True, True, False, False])),
        ("areas", small.areas + 1e-6),
    ]:
        assert dataclasses.replace(small, **{name: value}).fingerprint() != original, name


def test_the_summary_counts(drawn):
    summary = load_coco(drawn / "instances.json").summary()
    assert "12 images (1 without objects)" in summary
    assert "of 3 classes; 1 crowds left out, 1 boxes clipped" in summary
    assert summary.endswith("2 without area dropped")


def test_image_names(small):
    assert [small.image_name(row) for row in range(3)] == [
        "image 42 ('a.jpg')",
        "image 7 ('sub/b\\x00 .jpg')",
        f"image {2**63 - 1}",
    ]


# --- some of the images ---


@pytest.mark.parametrize("kept", [[1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 0, 0]])
def test_select(small, kept):
    kept = np.array(kept, np.bool_)
    selected = small.select(kept)
    whole = small.ground_truth()
    part = selected.ground_truth()
    assert part["images"] == [image for image, keep in zip(whole["images"], kept, strict=True) if keep]
    ids = {image["id"] for image in part["images"]}
    expected = [o for o in whole["annotations"] if o["image_id"] in ids]
    assert [o | {"id": 0} for o in part["annotations"]] == [o | {"id": 0} for o in expected]
    assert part["categories"] == whole["categories"]
    assert np.all(np.diff(selected.box_image) >= 0) and selected.row_splits[-1] == len(expected)
    assert selected.num_images == kept.sum() and len(selected.target_boxes.row_splits) == kept.sum() + 1
    assert (selected.origin, selected.issues) == (small.origin, small.issues)
