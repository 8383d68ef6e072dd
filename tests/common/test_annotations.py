"""The strict COCO parser against pycocotools, and against many ways to break a json."""

import contextlib
import copy
import io
import json
import os

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from common.annotations import load_coco
from common.errors import UserError

SMALL = {
    "info": {"year": 2017},
    "images": [
        {"id": 42, "file_name": "a.jpg", "width": 20, "height": 10, "license": 3},
        {"id": 7, "file_name": "sub/b.jpg", "width": 30, "height": 40},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 9, "bbox": [1, 2, 3.5, 4], "area": 12.5, "iscrowd": 0},
        {"id": 5, "image_id": 42, "category_id": 2, "bbox": [0, 0, 20, 10], "area": 99, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 2, "bbox": [0.25, 0, 2, 2], "area": 4, "iscrowd": 0},
    ],
    "categories": [{"id": 9, "name": "nine"}, {"id": 2, "name": "two", "supercategory": "x"}],
}


@pytest.fixture
def small(tmp_path):
    """Writes a variant of SMALL and returns its path."""
    (tmp_path / "images" / "sub").mkdir(parents=True)
    for name in ("a.jpg", "sub/b.jpg"):
        (tmp_path / "images" / name).write_bytes(b"looked at by name only")

    def write(document=SMALL):
        path = tmp_path / "instances.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


def changed(path, value):
    """SMALL with the value at `path` replaced, or removed where `value` is `...`."""
    document = copy.deepcopy(SMALL)
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return document


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


# --- what is read ---


def test_small(small):
    annotations = load_coco(small(), small().parent / "images")
    assert annotations.label_map.category_ids == (2, 9)
    assert annotations.image_ids.tolist() == [42, 7]
    assert annotations.file_names == ["a.jpg", "sub/b.jpg"]
    assert annotations.image_sizes.tolist() == [[10, 20], [40, 30]]
    assert annotations.box_image.tolist() == [0, 1, 1]
    assert annotations.boxes_ltwh_px.tolist() == [[0, 0, 20, 10], [1, 2, 3.5, 4], [0.25, 0, 2, 2]]
    assert annotations.category_ids.tolist() == [2, 9, 2]
    assert annotations.is_crowd.tolist() == [True, False, False]
    assert annotations.areas.tolist() == [99, 12.5, 4]
    assert annotations.row_splits.tolist() == [0, 1, 3]
    assert annotations.origin == str(small())
    targets = annotations.target_boxes
    assert targets.row_splits.tolist() == [0, 0, 2]
    assert targets.classes.tolist() == [1, 0]
    np.testing.assert_allclose(
        targets.boxes,
        [[1 / 30, 2 / 40, 4.5 / 30, 6 / 40], [0.25 / 30, 0, 2.25 / 30, 2 / 40]],
        rtol=1e-6,
    )
    assert (targets.num_clipped, targets.num_dropped, targets.num_crowds) == (0, 0, 1)


@pytest.mark.parametrize(
    "name", ["coco128/instances.json", "bccd/instances_train.json", "drawn/instances.json"]
)
def test_everything_is_what_pycocotools_reads(name, request):
    directory, file = name.split("/")
    path = request.getfixturevalue(directory) / file
    annotations = load_coco(path, path.parent / "images")
    truth = pycoco(json.loads(path.read_text()))
    assert annotations.image_ids.tolist() == [image["id"] for image in truth.dataset["images"]]
    assert annotations.num_boxes == len(truth.anns)
    assert annotations.label_map.category_ids == tuple(sorted(truth.getCatIds()))
    for row, image_id in enumerate(annotations.image_ids.tolist()):
        image = truth.imgs[image_id]
        assert annotations.image_sizes[row].tolist() == [image["height"], image["width"]]
        assert annotations.file_names[row] == image["file_name"]
        objects = truth.loadAnns(truth.getAnnIds(image_id))
        rows = slice(*annotations.row_splits[row : row + 2])
        assert annotations.boxes_ltwh_px[rows].tolist() == [o["bbox"] for o in objects]
        assert annotations.category_ids[rows].tolist() == [o["category_id"] for o in objects]
        assert annotations.is_crowd[rows].tolist() == [bool(o["iscrowd"]) for o in objects]
        assert annotations.areas[rows].tolist() == [o["area"] for o in objects]


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
    ours = coco_stats(load_coco(path, path.parent / "images").ground_truth(), detections)
    assert 0.2 < ours[0] < 0.9
    assert ours.tolist() == coco_stats(original, detections).tolist()


def test_annotation_id_zero_counts(small):
    """pycocotools itself takes id 0 for no match, so the ground truth numbers anew."""
    document = changed(["annotations", 0, "id"], 0)
    perfect = [
        {"image_id": o["image_id"], "category_id": o["category_id"], "bbox": o["bbox"], "score": 1.0}
        for o in document["annotations"]
        if not o["iscrowd"]
    ]
    assert coco_stats(document, perfect)[0] < 0.9
    assert coco_stats(load_coco(small(document), None).ground_truth(), perfect)[0] == pytest.approx(1.0)


def test_defaults_of_missing_keys(small):
    document = copy.deepcopy(SMALL)
    for an_object in document["annotations"]:
        for key in ("id", "iscrowd", "area"):
            del an_object[key]
    annotations = load_coco(small(document), None)
    assert annotations.areas.tolist() == [200, 14, 4]
    assert not annotations.is_crowd.any()
    keys = {key for an_object in annotations.ground_truth()["annotations"] for key in an_object}
    assert keys >= {"id", "iscrowd", "area"}
    assert load_coco(small(changed(["annotations", 1, "iscrowd"], True)), None).is_crowd.sum() == 1


def test_target_boxes_against_a_plain_loop(tmp_path):
    random = np.random.default_rng(3)
    images = [
        {"id": i, "file_name": "x", "width": int(w), "height": int(h)}
        for i, (w, h) in enumerate(random.integers(1, 700, (20, 2)))
    ]
    boxes = random.uniform(-100, 700, (500, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:]) * random.choice([0, 1e-7, 0.01, 1], (500, 2), p=[0.1, 0.1, 0.2, 0.6])
    objects = [
        {
            "image_id": int(random.integers(20)),
            "category_id": int(random.choice([4, 8])),
            "bbox": box.tolist(),
            "iscrowd": int(random.uniform() < 0.1),
        }
        for box in boxes
    ]
    categories = [{"id": 4, "name": "a"}, {"id": 8, "name": "b"}]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": categories}))
    targets = load_coco(path, None).target_boxes

    dropped = 0
    for image in images:
        expected = []
        for o in (o for o in objects if o["image_id"] == image["id"] and not o["iscrowd"]):
            x, y, w, h = o["bbox"]
            left, right = (min(max(v / image["width"], 0), 1) for v in (x, x + w))
            top, bottom = (min(max(v / image["height"], 0), 1) for v in (y, y + h))
            box = np.array([left, top, right, bottom], np.float32)
            if box[2] > box[0] and box[3] > box[1]:
                expected.append([*box, {4: 0, 8: 1}[o["category_id"]]])
            else:
                dropped += 1
        rows = slice(*targets.row_splits[image["id"] : image["id"] + 2])
        assert (
            np.c_[targets.boxes[rows], targets.classes[rows]].tolist()
            == np.reshape(expected, (-1, 5)).tolist()
        )
    assert targets.num_dropped == dropped > 50
    assert targets.num_crowds == sum(o["iscrowd"] for o in objects) > 10


def test_the_fingerprint_is_of_the_content(small, tmp_path):
    original = load_coco(small(), None).fingerprint()
    (tmp_path / "other.json").write_text(json.dumps(SMALL, indent=3))
    assert load_coco(tmp_path / "other.json", None).fingerprint() == original
    for path, value in [
        (["annotations", 0, "bbox"], [1, 2, 3.5, 4.000001]),
        (["annotations", 0, "category_id"], 2),
        (["annotations", 0, "iscrowd"], 1),
        (["annotations", 0, "area"], 12.6),
        (["annotations", 0, "image_id"], 42),
        (["annotations", 1, "image_id"], 7),
        (["images", 0, "file_name"], "b.jpg"),
        (["images", 0, "width"], 21),
        (["categories", 0, "name"], "neun"),
    ]:
        assert load_coco(small(changed(path, value)), None).fingerprint() != original, path


def test_the_summary_counts(drawn):
    summary = load_coco(drawn / "instances.json", drawn / "images").summary()
    assert "12 images (1 without objects)" in summary
    assert "of 3 classes; 1 crowds left out, 1 boxes clipped" in summary
    assert summary.endswith("2 without area dropped")


# --- what is refused ---


def test_a_json_cut_anywhere_is_an_error(small):
    text = json.dumps(SMALL)
    for end in range(len(text)):
        path = small(text[:end])
        with pytest.raises(UserError) as error:
            load_coco(path, None)
        assert str(error.value).startswith(f"annotations {path}: ")
        assert "\n" not in str(error.value)


def test_a_large_json_cut_says_where(coco128, tmp_path):
    text = (coco128 / "instances.json").read_text()
    (tmp_path / "cut.json").write_text(text[:100_000])
    with pytest.raises(UserError, match=r"cut.json: .*100000"):
        load_coco(tmp_path / "cut.json", None)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["images"], ..., "missing required field `images`"),
        (["annotations"], ..., "missing required field `annotations`"),
        (["categories"], ..., "missing required field `categories`"),
        (["images"], [], "`images` is empty"),
        (["annotations"], [], "`annotations` is empty"),
        (["categories"], [], "no categories"),
        (["images"], {}, "images is {}"),
        (["annotations", 1], None, r"annotations\[1\] is None"),
        (["images", 1, "id"], ..., r"images\[1\].*missing required field `id`"),
        (["images", 1, "id"], "7", r"images\[1\].id .id '7'. is '7'"),
        (["images", 1, "id"], 7.5, r"images\[1\].id .id 7.5. is 7.5"),
        (["images", 1, "id"], True, r"images\[1\].id .id True. is True"),
        (["images", 1, "id"], 2**63, r"images\[1\].id .id 9223372036854775808. is 9223372036854775808"),
        (["images", 1, "id"], -7, r"images\[1\].id .id -7. is -7"),
        (["images", 1, "id"], 42, "image id 42 is given more than once"),
        (["images", 1, "width"], ..., r"images\[1\] .id 7.*missing required field `width`"),
        (["images", 1, "width"], 0, r"images\[1\].width .id 7. is 0"),
        (["images", 1, "height"], -3, r"images\[1\].height .id 7. is -3"),
        (["images", 1, "height"], "40", r"images\[1\].height .id 7. is '40'"),
        (["images", 1, "file_name"], "", r"images\[1\].file_name .id 7. is ''"),
        (["images", 1, "file_name"], None, r"images\[1\].file_name .id 7. is None"),
        (["annotations", 2, "image_id"], 8, "annotation 3 has image_id 8"),
        (["annotations", 2, "image_id"], "7", r"annotations\[2\].image_id .id 3. is '7'"),
        (["annotations", 2, "image_id"], ..., r"annotations\[2\] .id 3.*missing required field `image_id`"),
        (["annotations", 2, "category_id"], 3, "annotation 3 has category_id 3"),
        (["annotations", 2, "category_id"], ..., "missing required field `category_id`"),
        (["annotations", 2, "id"], 1, "annotation id 1 is given more than once"),
        (["annotations", 2, "bbox"], ..., "missing required field `bbox`"),
        (["annotations", 2, "bbox"], [1, 2, 3], r"annotations\[2\].bbox .id 3. is \[1, 2, 3\]"),
        (["annotations", 2, "bbox"], [1, 2, 3, 4, 5], r"annotations\[2\].bbox"),
        (["annotations", 2, "bbox"], [1, 2, -3, 4], r"annotations\[2\].bbox\[2\] .id 3. is -3"),
        (["annotations", 2, "bbox"], [1, 2, 3, -4e-9], r"annotations\[2\].bbox\[3\] .id 3. is -4e-09"),
        (["annotations", 2, "bbox"], [1, "2", 3, 4], r"annotations\[2\].bbox\[1\] .id 3. is '2'"),
        (["annotations", 2, "bbox"], [1, None, 3, 4], r"annotations\[2\].bbox\[1\] .id 3. is None"),
        (["annotations", 2, "bbox"], [1, float("nan"), 3, 4], "malformed.*NaN"),
        (["annotations", 2, "bbox"], [1, float("inf"), 3, 4], "malformed.*Infinity"),
        (["annotations", 2, "area"], -1, r"annotations\[2\].area .id 3. is -1"),
        (["annotations", 2, "iscrowd"], 2, r"annotations\[2\].iscrowd .id 3. is 2"),
        (["annotations", 2, "iscrowd"], "0", r"annotations\[2\].iscrowd .id 3. is '0'"),
        (["categories", 0, "id"], 2, "category id 2 is given twice: 'nine' and 'two'"),
        (["categories", 0, "name"], ..., "category 9 has the name None"),
    ],
)
def test_bad_values_are_named(small, path, value, message):
    file = small(changed(path, value))
    with pytest.raises(UserError, match=message) as error:
        load_coco(file, None)
    assert str(error.value).startswith(f"annotations {file}: ")
    assert "\n" not in str(error.value)


def test_numbers_too_large_for_a_float_are_refused(small):
    with pytest.raises(UserError, match="out of range"):
        load_coco(small(json.dumps(SMALL).replace("3.5", "1e999")), None)


@pytest.mark.parametrize("text", ["", "   \n", "[]", "null", "no json at all", '{"images": [}', "\ufeff{}"])
def test_what_is_no_coco_json(small, text):
    with pytest.raises(UserError, match=r"instances.json: "):
        load_coco(small(text), None)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "x.json").write_bytes(json.dumps(SMALL).encode().replace(b"nine", b"n\xff\xfee"))
    with pytest.raises(UserError, match=r"x.json: "):
        load_coco(tmp_path / "x.json", None)


def test_a_missing_json(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json: No such file"):
        load_coco(tmp_path / "nowhere.json", None)
    with pytest.raises(UserError, match="Is a directory"):
        load_coco(tmp_path, None)


def test_missing_image_files_are_counted_and_listed(small):
    images = small().parent / "images"
    (images / "a.jpg").unlink()
    with pytest.raises(UserError, match=r"1 of 2 image files are not in .*images: 'a.jpg' .image 42."):
        load_coco(small(), images)
    with pytest.raises(UserError, match=r"image directory .*nowhere does not exist"):
        load_coco(small(), images / "nowhere")


def test_a_pipe_is_no_image_file(small):
    images = small().parent / "images"
    (images / "a.jpg").unlink()
    os.mkfifo(images / "a.jpg")  # DALI would wait for it for ever
    with pytest.raises(UserError, match=r"'a.jpg'"):
        load_coco(small(), images)


@pytest.mark.parametrize("name", ["../a.jpg", "/etc/passwd", "sub/../../x.jpg", "a\0.jpg", "a\n.jpg"])
def test_files_outside_the_directory_are_refused(small, tmp_path, name):
    with pytest.raises(UserError, match=r"image 7 has file_name .*, which leaves the image directory"):
        load_coco(small(changed(["images", 1, "file_name"], name)), tmp_path / "images")


def test_a_symbolic_link_to_an_image_is_fine(small, tmp_path):
    images = small().parent / "images"
    (images / "a.jpg").rename(tmp_path / "elsewhere.jpg")
    (images / "a.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    assert load_coco(small(), images).num_images == 2
