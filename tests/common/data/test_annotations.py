"""Annotations against plain loops and pycocotools."""

import dataclasses
import json
import warnings

import numpy as np
import pytest

from common.args import ImagePolicy
from common.data.check.issues import Issues
from common.data.coco import load_coco
from common.data.labels import LabelMap
from tests.common.evaluation.reference import by_pycocotools
from tests.common.made_annotations import annotations as make_annotations


@pytest.fixture
def small():
    """Three images with a crowd and two issues. The second image has no boxes."""
    issues = Issues("small", ImagePolicy("skip"))
    issues.add("box-outside", "annotation 1 (image 7) has bbox [1.0]")
    issues.add("image-missing", "image 8")
    rows = [(0, 0, 0, 0, 20, 10), (0, 1, 1, 2, 3.5, 4), (2, 0, 0.25, 0, 2, 2), (2, 1, 0.1, 0, 2, 2)]
    areas = [99, 12.5, 4, 1 / 3]
    annotations = make_annotations([(10, 20), (40, 30), (5, 6)], rows, ("two", "neun 'ä\""), [0], areas)
    names = ["a.jpg", "sub/b\0 .jpg", ""]
    return dataclasses.replace(
        annotations, image_ids=np.array([42, 7, 2**63 - 1]), file_names=names, issues=issues
    )


# --- target boxes ---


def test_target_boxes_of_random_annotations_are_clipped_and_dropped_as_by_a_plain_loop():
    random = np.random.default_rng(3)
    sizes = random.integers(1, 700, (20, 2))
    boxes = random.uniform(-100, 700, (500, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:]) * random.choice([0, 1e-7, 0.01, 1], (500, 2), p=[0.1, 0.1, 0.2, 0.6])
    images = np.sort(random.choice([*range(1, 7), *range(8, 19)], 500))
    crowds = np.flatnonzero(random.uniform(size=500) < 0.1)
    rows = np.c_[images, random.integers(0, 2, 500), boxes]
    annotations = make_annotations(sizes, rows, ("a", "b"), crowds)
    targets = annotations.target_boxes
    assert annotations.row_splits.tolist() == np.searchsorted(images, range(21)).tolist()
    assert len(targets.row_splits) == 21

    dropped = clipped = 0
    for i, (height, width) in enumerate(sizes.tolist()):
        expected = []
        for row in np.flatnonzero((annotations.box_image == i) & ~annotations.is_crowd).tolist():
            x, y, w, h = boxes[row].tolist()
            edges = [x / width, y / height, (x + w) / width, (y + h) / height]
            box = np.array([min(max(edge, 0), 1) for edge in edges], np.float32)
            if box[2] > box[0] and box[3] > box[1]:
                expected.append([*box, annotations.category_ids[row] // 10 - 1])
                clipped += box.tolist() != np.float32(edges).tolist()
            else:
                dropped += 1
        rows = slice(*targets.row_splits[i : i + 2])
        assert np.c_[targets.boxes[rows], targets.classes[rows]].tolist() == expected
    assert targets.num_dropped == dropped > 50
    assert targets.num_clipped == clipped > 50
    assert targets.num_crowds == annotations.is_crowd.sum() > 10


def test_huge_box_is_clipped_without_overflow_and_overhang_by_rounding_does_not_count_as_clipped():
    beyond = np.nextafter(20.0, 21.0)
    boxes = [[1, 2, 1e308, 1e308], [-1e308, -1e300, 1e308, 1e308], [0, 0, beyond, 10], [0, 0, 20.01, 10]]
    rows = [(0, 0, *box) for box in boxes]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped, is_changed, _ = make_annotations([(10, 20)], rows, areas=[0] * 4).clipped_boxes
    np.testing.assert_allclose(clipped, [[0.05, 0.2, 1, 1], [0, 0, 0, 1], *[[0, 0, 1, 1]] * 2], rtol=1e-6)
    assert is_changed.tolist() == [True, True, False, True]


# --- ground truth ---


def test_ground_truth_of_loaded_annotations_gives_the_pycocotools_ap_of_the_original_coco_json(drawn):
    path = drawn / "instances.json"
    original = json.loads(path.read_text())
    random = np.random.default_rng(0)
    detections = [o | {"score": random.uniform()} for o in original["annotations"] if random.uniform() < 0.8]
    for detection in detections:
        detection["bbox"] = (detection["bbox"] * random.uniform(0.95, 1.05, 4)).tolist()
    truths = load_coco(path).ground_truth(), original
    actual, expected = (by_pycocotools(truth, detections)[0] for truth in truths)
    assert 0.2 < expected[0] < 0.9
    assert actual.tolist() == expected.tolist()


def test_ground_truth_of_loaded_annotations_has_the_fields_and_values_of_a_coco_json(small):
    truth = small.ground_truth()
    assert truth["images"][1] == {"id": 7, "file_name": "sub/b\0 .jpg", "height": 40, "width": 30}
    ids = {"id": 2, "image_id": 42, "category_id": 20}
    assert truth["annotations"][1] == ids | {"bbox": [1, 2, 3.5, 4], "area": 12.5, "iscrowd": 0}
    assert truth["annotations"][0]["iscrowd"] == 1
    assert truth["categories"] == [{"id": 10, "name": "two"}, {"id": 20, "name": "neun 'ä\""}]


# --- fingerprint, summary, image names and selection ---


def test_fingerprint_of_annotations_depends_on_every_field_but_origin_and_issues(small):
    changes = {"issues": Issues(""), "label_map": LabelMap((10, 20), ("two", "nine"))}
    changes |= {"file_names": ["a.jpgsub/b\0 .jpg", "", ""]}
    for field in dataclasses.fields(small):
        if field.name == "checksums":
            continue
        value = changes[field.name] if field.name in changes else getattr(small, field.name)[::-1]
        differs = dataclasses.replace(small, **{field.name: value}).fingerprint() != small.fingerprint()
        assert differs == (field.name not in ("origin", "issues")), field.name


def test_summary_of_annotations_counts_images_crowds_and_clipped_and_dropped_boxes(drawn):
    summary = load_coco(drawn / "instances.json").summary()
    assert "12 images (1 without objects)" in summary
    assert "of 3 classes; 1 crowd left out, 1 box clipped" in summary
    assert summary.endswith("2 without area dropped")


def test_image_name_in_messages_has_the_id_and_the_file_name_if_there_is_one(small):
    names = ["image 42 ('a.jpg')", "image 7 ('sub/b\\x00 .jpg')", f"image {2**63 - 1}"]
    assert [small.image_name(row) for row in range(3)] == names


@pytest.mark.parametrize(
    ("images", "boxes"), [([1, 2], [2, 3]), ([], [])], ids=["two images of three", "no image"]
)
def test_selecting_images_of_annotations_keeps_the_boxes_of_these_images_and_all_categories(
    small, images, boxes
):
    selection = small.select(np.isin([0, 1, 2], images))
    truth, expected = selection.ground_truth(), small.ground_truth()
    assert truth["images"] == [expected["images"][i] for i in images]
    objects = [expected["annotations"][i] | {"id": n} for n, i in enumerate(boxes, 1)]
    assert truth["annotations"] == objects
    assert truth["categories"] == expected["categories"]
    assert selection.num_images == len(images) and selection.row_splits[-1] == len(boxes)
    assert len(selection.target_boxes.row_splits) == len(images) + 1
    assert (selection.origin, selection.issues) == (small.origin, small.issues)


def test_box_with_equal_image_category_edges_area_and_mark_is_repeated():
    box = (0, 1, 1, 2, 3.5, 4)
    others = [(1, *box[1:]), (0, 0, *box[2:]), (0, 1, 1, 2, 3.5, 4.0000001), (0, 1, 2, 1, 3.5, 4)]
    rows = [box, *others, box, box, box, box]
    areas = [14, 14, 14, 14, 14, 14, 13, 14, 14]  # row 6 has the same box, but another mask
    annotations = make_annotations([(10, 20)] * 2, rows, crowds=[7], areas=areas)
    order = [0, 2, 3, 4, 5, 6, 7, 8, 1]  # sorted by image
    assert [order[row] for row in np.flatnonzero(annotations.is_repeated)] == [5, 8]
    assert not make_annotations([(10, 20)], []).is_repeated.any()


@pytest.mark.filterwarnings("error")
def test_repeated_boxes_among_many_equal_those_of_a_set():
    rng = np.random.default_rng(0)
    rows = [tuple(row) for row in rng.integers(0, 3, (400, 6)).tolist()] + [(0, 0, *[1e150] * 4)] * 2
    annotations = make_annotations([(10, 20)] * 3, rows)
    fields = zip(annotations.box_image, annotations.category_ids, *annotations.boxes_ltwh_px.T, strict=True)
    seen: set = set()
    expected = [row in seen or seen.add(row) is not None for row in fields]
    assert annotations.is_repeated.tolist() == expected and 50 < sum(expected) < 400
