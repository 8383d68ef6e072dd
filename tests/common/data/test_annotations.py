"""Annotations against plain loops and pycocotools, and read_coco against the reader of the data check."""

import dataclasses
import json
import re
import warnings

import numpy as np
import pytest

from common.args import ImagePolicy
from common.data.annotations import Annotations, read_coco
from common.data.check.coco import load_coco
from common.data.check.issues import Issues
from common.data.labels import LabelMap
from tests.common.coco_documents import LARGE, SMALL, assert_is, changed, write_json
from tests.common.evaluation.reference import by_pycocotools
from tests.common.made_annotations import annotations as make_annotations
from tests.refusal import refusal


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
        value = changes[field.name] if field.name in changes else getattr(small, field.name)[::-1]
        differs = dataclasses.replace(small, **{field.name: value}).fingerprint() != small.fingerprint()
        assert differs == (field.name not in ("origin", "issues")), field.name


def test_summary_of_annotations_counts_images_crowds_and_clipped_and_dropped_boxes(drawn):
    summary = load_coco(drawn / "instances.json").summary()
    assert "12 images (1 without objects)" in summary
    assert "of 3 classes; 1 crowds left out, 1 boxes clipped" in summary
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


# --- read_coco, which reads without a check ---


@pytest.mark.parametrize("data_set", ["coco128", "drawn"])
def test_read_coco_equals_load_coco_in_all_fields_but_issues(data_set, request):
    path = request.getfixturevalue(data_set) / "instances.json"
    plain, checked = read_coco(path), load_coco(path)
    for field in dataclasses.fields(Annotations):
        actual, expected = getattr(plain, field.name), getattr(checked, field.name)
        if isinstance(expected, np.ndarray):
            assert actual.dtype == expected.dtype, field.name
            np.testing.assert_array_equal(actual, expected)
        elif field.name != "issues":
            assert actual == expected, field.name
    assert not plain.issues and plain.fingerprint() == checked.fingerprint()


NEW_IDS = {42: LARGE, 7: 3}
IDS_WITH_GAPS = SMALL | {
    "images": [image | {"id": NEW_IDS[image["id"]]} for image in SMALL["images"]],
    "annotations": [
        {"image_id": NEW_IDS[o["image_id"]], "category_id": o["category_id"], "bbox": o["bbox"]}
        for o in SMALL["annotations"]
    ],
}


def test_read_coco_of_a_json_with_byte_order_mark_equals_plain_loops(tmp_path):
    content = b"\xef\xbb\xbf" + json.dumps(IDS_WITH_GAPS).encode()
    assert_is(read_coco(write_json(tmp_path, content)), IDS_WITH_GAPS)


BAD_DOCUMENTS = {
    "no images key": (changed(["images"], ...), "missing required field `images`"),
    "no images": (changed(["images"], []), "length >= 1"),
    "box of three": (changed(["annotations", 2, "bbox"], [1, 2, 3]), r"annotations\[2\].bbox"),
    "text as width": (changed(["images", 1, "width"], "9"), r"`str` - at `\$.images\[1\].width`"),
    "unknown image": (changed(["annotations", 2, "image_id"], 8), r"\[2\] has an unknown image_id: 8"),
    "unknown category": (changed(["annotations", 2, "category_id"], 3), r"\[2\] .* unknown category_id: 3"),
    "no categories": (changed(["categories"], []), "no categories"),
    "truncated": (json.dumps(SMALL)[:-20], "truncated"),
    "gzip": (b"\x1f\x8b\x08\x00abc", "malformed"),
}


@pytest.mark.parametrize(("document", "reason"), BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
def test_read_coco_of_bad_json_is_refused_with_a_one_line_message_of_file_and_reason(
    document, reason, tmp_path
):
    path = write_json(tmp_path, document)
    message = refusal(read_coco, path)
    assert message.startswith(str(path)) and re.search(reason, message)


def test_read_coco_of_missing_json_names_the_file(tmp_path):
    assert "nowhere.json: No such file" in refusal(read_coco, tmp_path / "nowhere.json")
