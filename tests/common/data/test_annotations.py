import dataclasses
import itertools
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
from tests.common.made_annotations import annotations as made
from tests.refusal import refusal


@pytest.fixture
def small():
    """Three images with a crowd and two issues. The second image has no boxes."""
    issues = Issues("small", ImagePolicy("skip"))
    issues.add("box-outside", "annotation 1 (image 7) has bbox [1.0]")
    issues.add("image-missing", "image 8")
    rows = [(0, 0, 0, 0, 20, 10), (0, 1, 1, 2, 3.5, 4), (2, 0, 0.25, 0, 2, 2), (2, 1, 0.1, 0, 2, 2)]
    found = made([(10, 20), (40, 30), (5, 6)], rows, ("two", "neun 'ä\""), [0], [99, 12.5, 4, 1 / 3])
    names = ["a.jpg", "sub/b\0 .jpg", ""]
    return dataclasses.replace(found, image_ids=np.array([42, 7, 2**63 - 1]), file_names=names, issues=issues)


# --- target boxes ---


def test_target_boxes_against_a_plain_loop():
    random = np.random.default_rng(3)
    sizes = random.integers(1, 700, (20, 2))
    boxes = random.uniform(-100, 700, (500, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:]) * random.choice([0, 1e-7, 0.01, 1], (500, 2), p=[0.1, 0.1, 0.2, 0.6])
    images = np.sort(random.choice([*range(1, 7), *range(8, 19)], 500))
    crowds = np.flatnonzero(random.uniform(size=500) < 0.1)
    rows = np.c_[images, random.integers(0, 2, 500), boxes]
    annotations = made(sizes, rows, ("a", "b"), crowds)
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


def test_huge_boxes_are_clipped_without_a_warning_and_rounding_is_no_clipping():
    beyond = np.nextafter(20.0, 21.0)
    boxes = [[1, 2, 1e308, 1e308], [-1e308, -1e300, 1e308, 1e308], [0, 0, beyond, 10], [0, 0, 20.01, 10]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped, changed, _ = made([(10, 20)], [(0, 0, *box) for box in boxes], areas=[0] * 4).clipped_boxes
    np.testing.assert_allclose(clipped, [[0.05, 0.2, 1, 1], [0, 0, 0, 1], *[[0, 0, 1, 1]] * 2], rtol=1e-6)
    assert changed.tolist() == [True, True, False, True]


# --- ground truth ---


def test_pycocotools_judges_our_ground_truth_like_the_original(drawn):
    path = drawn / "instances.json"
    original = json.loads(path.read_text())
    random = np.random.default_rng(0)
    detections = [o | {"score": random.uniform()} for o in original["annotations"] if random.uniform() < 0.8]
    for detection in detections:
        detection["bbox"] = (detection["bbox"] * random.uniform(0.95, 1.05, 4)).tolist()
    truths = load_coco(path).ground_truth(), original
    ours, theirs = (by_pycocotools(truth, detections)[0] for truth in truths)
    assert 0.2 < ours[0] < 0.9
    assert ours.tolist() == theirs.tolist()


def test_the_ground_truth_has_everything(small):
    truth = small.ground_truth()
    assert truth["images"][1] == {"id": 7, "file_name": "sub/b\0 .jpg", "height": 40, "width": 30}
    ids = {"id": 2, "image_id": 42, "category_id": 20}
    assert truth["annotations"][1] == ids | {"bbox": [1, 2, 3.5, 4], "area": 12.5, "iscrowd": 0}
    assert truth["annotations"][0]["iscrowd"] == 1
    assert truth["categories"] == [{"id": 10, "name": "two"}, {"id": 20, "name": "neun 'ä\""}]


# --- fingerprint, summary and image names ---


def test_the_fingerprint_is_of_the_content(small):
    others = {"issues": Issues(""), "label_map": LabelMap((10, 20), ("two", "nine"))}
    others |= {"file_names": ["a.jpgsub/b\0 .jpg", "", ""]}
    for field in dataclasses.fields(small):
        value = others[field.name] if field.name in others else getattr(small, field.name)[::-1]
        is_other = dataclasses.replace(small, **{field.name: value}).fingerprint() != small.fingerprint()
        assert is_other == (field.name not in ("origin", "issues")), field.name


def test_the_summary_counts(drawn):
    summary = load_coco(drawn / "instances.json").summary()
    assert "12 images (1 without objects)" in summary
    assert "of 3 classes; 1 crowds left out, 1 boxes clipped" in summary
    assert summary.endswith("2 without area dropped")


def test_image_names(small):
    names = ["image 42 ('a.jpg')", "image 7 ('sub/b\\x00 .jpg')", f"image {2**63 - 1}"]
    assert [small.image_name(row) for row in range(3)] == names


# --- select, which keeps some of the images ---


@pytest.mark.parametrize("kept", [[1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]])
def test_select(small, kept):
    kept = np.array(kept, np.bool_)
    selected = small.select(kept)
    whole = small.ground_truth()
    part = selected.ground_truth()
    assert part["images"] == list(itertools.compress(whole["images"], kept))
    expected = [o for o in whole["annotations"] if o["image_id"] in small.image_ids[kept]]
    assert [o | {"id": 0} for o in part["annotations"]] == [o | {"id": 0} for o in expected]
    assert part["categories"] == whole["categories"]
    assert np.all(np.diff(selected.box_image) >= 0) and selected.row_splits[-1] == len(expected)
    assert selected.num_images == kept.sum() and len(selected.target_boxes.row_splits) == kept.sum() + 1
    assert (selected.origin, selected.issues) == (small.origin, small.issues)


# --- read_coco, which reads without a check ---


def assert_same(path):
    """Compares read_coco, which checks nothing, with load_coco."""
    plain, strict = read_coco(path), load_coco(path)
    for field in dataclasses.fields(Annotations):
        found, expected = getattr(plain, field.name), getattr(strict, field.name)
        if isinstance(expected, np.ndarray):
            assert found.dtype == expected.dtype, field.name
            np.testing.assert_array_equal(found, expected)
        elif field.name != "issues":
            assert found == expected, field.name
    assert not plain.issues and plain.fingerprint() == strict.fingerprint()
    return plain


@pytest.mark.parametrize("name", ["coco128", "drawn"])
def test_real_data_are_read_as_by_the_strict_reader(name, request):
    assert_same(request.getfixturevalue(name) / "instances.json")


# SMALL with other image ids and without the optional keys
IDS = {42: LARGE, 7: 3}
GAPS = SMALL | {
    "images": [image | {"id": IDS[image["id"]]} for image in SMALL["images"]],
    "annotations": [
        {"image_id": IDS[o["image_id"]], "category_id": o["category_id"], "bbox": o["bbox"]}
        for o in SMALL["annotations"]
    ],
}
HARD = {
    "gaps in ids, defaults": GAPS,
    "crowds": changed(["annotations", 0, "iscrowd"], True),
    "no ids": changed(["annotations", 2, "id"], None),
    "a box that reaches outside": changed(["annotations", 0, "bbox"], [-3, 2, 1e308, 1e308]),
    "unused keys": changed(["annotations", 1, "segmentation"], {"counts": "x", "size": [1, 2]}),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_are_read_as_by_the_strict_reader(name, tmp_path):
    content = b"\xef\xbb\xbf" + json.dumps(HARD[name]).encode()  # with a byte order mark
    assert_is(assert_same(write_json(tmp_path, content)), HARD[name])


BAD = [
    (changed(["images"], ...), "missing required field `images`"),
    (changed(["images"], []), "length >= 1"),
    (changed(["annotations", 2, "bbox"], [1, 2, 3]), r"annotations\[2\].bbox"),
    (changed(["images", 1, "width"], "9"), r"Expected `int`, got `str` - at `\$.images\[1\].width`"),
    (changed(["annotations", 2, "image_id"], 8), r"annotations\[2\] has an unknown image_id: 8"),
    (changed(["annotations", 2, "category_id"], 3), r"annotations\[2\] has an unknown category_id: 3"),
    (changed(["categories"], []), "no categories"),
    (changed(["categories", 1, "name"], "two"), "same name 'two'"),
    (json.dumps(SMALL)[:-20], "truncated"),
    (b"", "truncated"),
    (b"\x1f\x8b\x08\x00abc", "malformed"),
]


@pytest.mark.parametrize(("document", "message"), BAD)
def test_bad_annotations_are_one_clear_line(document, message, tmp_path):
    path = write_json(tmp_path, document)
    said = refusal(read_coco, path)
    assert said.startswith(str(path)) and re.search(message, said)
    assert "nowhere.json: No such file" in refusal(read_coco, tmp_path / "nowhere.json")
