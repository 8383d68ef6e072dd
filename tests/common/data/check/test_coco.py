"""COCO jsons without errors: values against plain loops and pycocotools, repairs and warnings."""

import contextlib
import io

import numpy as np
import pytest
from pycocotools.coco import COCO

from common.data.check.coco import load_coco
from tests.common.coco_documents import LARGE, SMALL, assert_is, changed, refused

# --- the content that is read ---


def test_load_coco_gives_the_values_of_the_json_in_their_types(json_of, images):
    annotations = load_coco(json_of(), images)
    assert_is(annotations, SMALL)
    assert annotations.areas.tolist() == [99, 30, 12.5, 4]
    assert annotations.origin == str(json_of())
    assert annotations.image_sizes.dtype == np.int32
    for column in (annotations.image_ids, annotations.box_image, annotations.category_ids):
        assert column.dtype == np.int64
    assert annotations.boxes_ltwh_px.dtype == annotations.areas.dtype == np.float64


@pytest.mark.parametrize("name", ["coco128/instances", "bccd/instances_train", "drawn/instances"])
def test_load_coco_of_real_data_gives_the_values_that_pycocotools_reads(name, request):
    directory, file = name.split("/")
    path = request.getfixturevalue(directory) / f"{file}.json"
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(path)
    assert_is(load_coco(path), truth.dataset)


def test_synthetic_coco_data_give_exactly_their_expected_warnings(drawn):
    issues = load_coco(drawn / "instances.json", drawn / "images").issues
    single = ("box-outside", "large-id", "category-order", "crowd", "image-without-boxes")
    assert {issue.kind: issue.count for issue in issues} == dict.fromkeys(single, 1) | {"box-empty": 2}


def test_missing_area_of_an_annotation_is_that_of_its_box_and_missing_iscrowd_is_false(json_of):
    bare = [{key: o[key] for key in ("image_id", "category_id", "bbox")} for o in SMALL["annotations"]]
    annotations = load_coco(json_of(SMALL | {"annotations": bare}))
    assert annotations.areas.tolist() == [200, 30, 14, 4]
    assert not annotations.is_crowd.any()
    assert load_coco(json_of(changed(["annotations", 3, "iscrowd"], True))).is_crowd.sum() == 2
    for key in ("id", "area"):
        assert load_coco(json_of(changed(["annotations", 3, key], None))).areas[1] == 30


@pytest.mark.parametrize(("large", "count"), [(2**31 - 1, 0), (2**31, 2), (LARGE, 2)])
def test_image_and_category_ids_above_int32_in_a_coco_json_are_read_and_reported_as_large(
    json_of, large, count
):
    document = changed(["images", 0, "id"], large)
    document["categories"][1]["id"] = large
    for an_object in document["annotations"]:
        an_object["image_id"] = {42: large}.get(an_object["image_id"], 7)
        an_object["category_id"] = {9: large}.get(an_object["category_id"], 2)
    annotations = load_coco(json_of(document))
    assert_is(annotations, document)
    assert annotations.label_map.classes_of([large]) == [1]
    assert annotations.target_boxes.classes.tolist() == [0, 1, 0]
    offenders = [f"image {large} ('a.jpg')", f"category {large} ('nine')"][:count]
    assert annotations.issues["large-id"].offenders == offenders


# --- repairs and warnings ---

FIRST, LAST = "annotation 1 (image 7) has bbox [", "annotation 8 (image 42) has bbox ["


ODD_VALUES = [
    (["annotations", 0, "bbox"], [28.5, 2, 3, 4], "box-outside", [f"{FIRST}28.5, 2.0, 3.0, 4.0] in 30"]),
    (["annotations", 0, "bbox"], [-0.01, 2, 3, 4], "box-outside", [f"{FIRST}-0.01, "]),
    (["annotations", 0, "bbox"], [1, 2, 1e308, 1e308], "box-outside", [f"{FIRST}1.0, 2.0, 1e+308"]),
    (["annotations", 3, "bbox"], [1, 2, 0, 4], "box-empty", [f"{LAST}1.0, 2.0, 0.0, 4.0] in 20 x 10"]),
    (["annotations", 3, "bbox"], [1, 2, 3, 0], "box-empty", [f"{LAST}1.0, 2.0, 3.0, 0.0]"]),
    (["annotations", 3, "bbox"], [20, 2, 3, 4], "box-empty", [f"{LAST}20.0, "]),
    # Annotation 1 marks a crowd, so its box is not reported.
    (["annotations", 1, "bbox"], [0, 0, 25, 10], "box-outside", []),
    (["annotations", 1, "bbox"], [0, 0, 0, 10], "box-empty", []),
    (["annotations", 0, "iscrowd"], 1, "crowd", ["annotation 5 (image 42) has bbox", FIRST]),
    (["annotations", 3, "image_id"], 7, "image-without-boxes", ["image 42 ('a.jpg')"]),
    (["annotations", 3, "bbox"], [1, 2, 0, 4], "image-without-boxes", ["image 42 ('a.jpg')"]),
]


@pytest.mark.parametrize(
    ("path", "value", "kind", "offenders"),
    ODD_VALUES,
    ids=[f"{kind} {path[1:]} {value}" for path, value, kind, _ in ODD_VALUES],
)
def test_unusual_value_in_a_coco_json_is_read_unchanged_and_reported_without_stopping_training(
    json_of, path, value, kind, offenders
):
    document = changed(path, value)
    annotations = load_coco(json_of(document))
    assert_is(annotations, document)
    issue = annotations.issues[kind]
    assert issue.count == len(offenders) and not issue.stops
    assert all(text.startswith(start) for text, start in zip(issue.offenders, offenders, strict=True))


# --- image files ---


def test_file_name_outside_the_image_directory_is_refused_under_policy_skip_too(json_of, images):
    stopping = refused(json_of(changed(["images", 1, "file_name"], "../a.jpg")), images, on_bad_image="skip")
    assert list(stopping) == ["path-leaves-directory"]


def test_policy_skip_that_leaves_out_all_images_with_boxes_is_refused(json_of, images):
    document = changed(["images", 1, "file_name"], "nowhere.jpg")
    document["annotations"] = document["annotations"][:3]
    assert list(refused(json_of(document), images, on_bad_image="skip")) == ["no-boxes"]


def test_image_file_above_max_megapixels_of_the_policy_is_refused(json_of, images):
    stopping = refused(json_of(), images, max_megapixels=0.0005)
    assert list(stopping) == ["image-too-large"]
    assert stopping["image-too-large"].offenders[0].startswith("image 7 ('sub/b.jpg')")
