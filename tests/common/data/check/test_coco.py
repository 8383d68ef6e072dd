"""COCO jsons without errors: values against plain loops and pycocotools, repairs and warnings."""

import contextlib
import io

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from pycocotools.coco import COCO

from common.args import ImagePolicy
from common.data.coco import load_coco
from common.errors import UserError
from tests.common.coco_documents import LARGE, SMALL, assert_is, changed, draw_images, refused

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


def test_warnings_about_faulty_coco_data_name_each_kind_of_fault_and_its_number(drawn):
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
    # Annotation 1 marks a crowd, so its box is not clipped.
    (["annotations", 1, "bbox"], [0, 0, 25, 10], "box-outside", []),
    (["annotations", 1, "bbox"], [0, 0, 0, 10], "box-empty", ["annotation 5 (image 42) has bbox"]),
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


def test_boxes_outside_their_images_are_named_with_their_files_the_worst_first(json_of):
    boxes = {0: [1, 2, 30, 4], 2: [1, 2, 9998, 9], 3: [-7, 0, 8, 8]}
    document = SMALL
    for row, box in boxes.items():
        document = changed(["annotations", row, "bbox"], box, document)
    assert load_coco(json_of(document)).issues["box-outside"].offenders == [
        "annotation 3 (image 7) has bbox [1.0, 2.0, 9998.0, 9.0] in 30 x 40 pixels of 'sub/b.jpg'",
        "annotation 8 (image 42) has bbox [-7.0, 0.0, 8.0, 8.0] in 20 x 10 pixels of 'a.jpg'",
        "annotation 1 (image 7) has bbox [1.0, 2.0, 30.0, 4.0] in 30 x 40 pixels of 'sub/b.jpg'",
    ]


def of_image(boxes, size=(640, 480), **keys):
    """Returns a document with one image and these boxes. `keys` change all annotations."""
    objects = [
        {"id": i, "image_id": 1, "category_id": 2, "bbox": box} | keys for i, box in enumerate(boxes, 1)
    ]
    image = {"id": 1, "file_name": "a.jpg", "width": size[0], "height": size[1]}
    return SMALL | {"images": [image], "annotations": objects}


@pytest.mark.parametrize(
    ("area", "differs"),
    [(0, True), (1, True), (59, True), (61, False), (14400, False), (122**2, False), (122**2 + 1, True)],
)
def test_area_that_a_box_of_120_pixels_cannot_have_is_reported_and_used(json_of, area, differs):
    annotations = load_coco(json_of(of_image([[0, 0, 120, 120]], area=area)))
    start = f"area {area:g}: annotation 1 (image 1) has bbox [0.0, 0.0, 120.0, 120.0]"
    assert [text.startswith(start) for text in annotations.issues["area-differs"].offenders] == [
        True
    ] * differs
    assert annotations.areas.tolist() == [area]


def test_area_of_a_small_box_may_be_that_of_a_thin_mask(json_of):
    assert not load_coco(json_of(of_image([[0, 0, 32, 32]], area=0.5))).issues["area-differs"].count


def test_image_with_more_than_100_objects_of_a_category_is_reported_with_the_bound_of_its_recall(json_of):
    boxes = [[x, y, 8, 8] for x in range(0, 200, 10) for y in range(0, 150, 10)]  # 300
    document = of_image(boxes)
    text = "image 1 ('a.jpg') has 300 of 'two': recall is at most 0.333"
    assert load_coco(json_of(document)).issues["many-objects"].offenders == [text]
    for row, record in enumerate(document["annotations"]):
        record["category_id"] = 2 if row < 101 else 9
        record["iscrowd"] = int(row >= 202)
    issue = load_coco(json_of(document)).issues["many-objects"]
    assert issue.count == 2 and issue.offenders[0].startswith("image 1 ('a.jpg') has 101 of ")
    document["annotations"][0]["iscrowd"] = 1
    assert load_coco(json_of(document)).issues["many-objects"].count == 1


# --- boxes and categories that are changed ---


def test_repeated_box_is_dropped_and_reported(json_of):
    boxes = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [1, 2, 3, 4.5], [1, 2, 3, 4]]
    annotations = load_coco(json_of(of_image(boxes)))
    assert annotations.boxes_ltwh_px.tolist() == [boxes[0], boxes[1], boxes[3]]
    assert annotations.issues["box-repeated"].offenders == [
        f"annotation {i} (image 1) has bbox [1.0, 2.0, 3.0, 4.0]" for i in (3, 5)
    ]


def test_bad_boxes_after_a_repeated_box_are_reported_with_their_own_annotation_ids(json_of):
    annotations = load_coco(json_of(of_image([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 0, 4]])))
    assert annotations.issues["box-empty"].offenders[0].startswith("annotation 3 ")


def test_boxes_with_ignore_are_crowds_and_reported(json_of):
    document = of_image([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    for an_object, ignore in zip(document["annotations"], (0, 1, None), strict=True):
        an_object["ignore"] = ignore
    annotations = load_coco(json_of(document))
    assert annotations.is_crowd.tolist() == [False, True, False]
    assert annotations.issues["ignored"].offenders == ["annotation 2 (image 1)"]
    assert annotations.ground_truth()["annotations"][1]["iscrowd"] == 1


# Angles in degrees, with boxes worked out by hand; cos 60 = 1 / 2, sin 60 = sqrt(3) / 2.
ROTATED = {
    "quarter turn": (90, [45, 0, 10, 60]),
    "quarter turn back": (-90.0, [45, 0, 10, 60]),
    "half turn": (180.0, [20, 25, 60, 10]),
    "no turn": (0.0, [20, 25, 60, 10]),
    "60 degrees": (60, [50 - 19.330127, 30 - 28.480762, 38.660254, 56.961524]),
    "five quarters": (450, [45, 0, 10, 60]),
    "more than any float": (180 * 10**400 + 90, [45, 0, 10, 60]),
    "text": ("90", [20, 25, 60, 10]),
}


@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("note", [0, float("nan")], ids=["strict json", "json with nan"])
def test_rotated_rectangle_of_cvat_becomes_the_box_around_it(json_of, name, note):
    angle, expected = ROTATED[name]
    # The keys and their order are those of CVAT's export "COCO 1.0" (datumaro, plugins/data_formats/coco).
    keys = {"segmentation": [], "area": 600.0, "iscrowd": 0}
    attributes = {"occluded": False, "rotation": angle}
    document = of_image([[20.0, 25.0, 60.0, 10.0]], **keys, attributes=attributes) | {"info": note}
    annotations = load_coco(json_of(document))
    np.testing.assert_allclose(annotations.boxes_ltwh_px, [expected], atol=2e-6)
    turned = expected != [20, 25, 60, 10]
    assert annotations.issues["box-rotated"].count == turned
    if angle == 90:
        assert annotations.boxes_ltwh_px.tolist() == [expected]
        assert annotations.issues["box-rotated"].offenders == [
            "annotation 1 (image 1) has bbox [20.0, 25.0, 60.0, 10.0] and rotation 90: "
            "[45.0, 0.0, 10.0, 60.0] is used"
        ]


@pytest.mark.parametrize("shape", [[[20, 25, 80, 25, 80, 35]], {"counts": [3, 4], "size": [480, 640]}])
def test_box_of_a_rotated_ellipse_or_polygon_is_used_as_it_is(json_of, shape):
    document = of_image([[20, 25, 60, 10]], segmentation=shape, attributes={"rotation": 30.0})
    annotations = load_coco(json_of(document))
    assert annotations.boxes_ltwh_px.tolist() == [[20, 25, 60, 10]]
    assert not annotations.issues["box-rotated"].count


def with_categories(*categories):
    keys = ("id", "name", "supercategory")
    return SMALL | {"categories": [dict(zip(keys, category, strict=True)) for category in categories]}


def test_root_category_of_roboflow_without_boxes_is_dropped(json_of):
    document = with_categories((0, "my-project", "none"), (2, "cat", "my-project"), (9, "dog", "my-project"))
    annotations = load_coco(json_of(document))
    assert annotations.label_map.categories() == [{"id": 2, "name": "cat"}, {"id": 9, "name": "dog"}]
    assert annotations.issues["root-category"].offenders == ["category 0 ('my-project')"]
    document["annotations"] = [
        *document["annotations"],
        {"image_id": 7, "category_id": 0, "bbox": [1, 2, 3, 4]},
    ]
    assert load_coco(json_of(document)).label_map.names == ("my-project", "cat", "dog")


@pytest.mark.parametrize("group", ["person", "animal"])
def test_category_without_boxes_that_does_not_group_all_others_stays(json_of, group):
    """It may have boxes in the evaluation data."""
    document = with_categories((0, group, group), (2, "cat", "animal"), (9, "dog", None))
    assert load_coco(json_of(document)).label_map.names == (group, "cat", "dog")


def test_integral_floats_as_written_by_pandas_are_integers(json_of):
    def as_floats(record):
        return {key: float(value) if isinstance(value, int) else value for key, value in record.items()}

    document = SMALL | {
        key: list(map(as_floats, SMALL[key])) for key in ("images", "annotations", "categories")
    }
    annotations = load_coco(json_of(document))
    assert_is(annotations, SMALL)
    assert [type(i) for i in annotations.label_map.category_ids] == [int, int]
    categories = SMALL | {"categories": document["categories"]}
    assert_is(load_coco(json_of(categories)), SMALL)


def test_valid_json_with_integral_floats_is_not_read_by_the_slow_parser(json_of, monkeypatch):
    monkeypatch.setattr("common.data.check.coco_parse._load", None)
    document = changed(["images", 0, "width"], 20.0)
    for an_object in document["annotations"]:
        an_object |= {name: float(an_object[name]) for name in ("image_id", "category_id")}
    assert_is(load_coco(json_of(document)), SMALL)


@pytest.mark.parametrize("value", ["7", True, 7.5, -7.0, 1e300, None, [7.0]])
def test_id_that_is_no_integer_is_refused_beside_integral_floats(json_of, value):
    document = changed(["annotations", 0, "image_id"], 7.0)
    assert list(refused(json_of(changed(["annotations", 1, "image_id"], value, document)))) == ["wrong-type"]


# --- EXIF orientation: boxes of the turned image ---


def stored_image(directory, orientation):
    """Writes 40 x 20 stored pixels with a white box at [10, 3, 18, 5]. Returns the turned pixels."""
    stored = np.zeros((20, 40), np.uint8)
    stored[3:8, 10:28] = 255
    image = PIL.Image.fromarray(stored)
    image.getexif()[0x0112] = orientation
    image.save(directory / "a.jpg", exif=image.getexif())
    return np.asarray(PIL.ImageOps.exif_transpose(image))


@pytest.mark.parametrize("size", ["stored", "turned"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_with_exif_orientation_get_the_place_that_pillow_gives_the_pixels(
    json_of, tmp_path, orientation, size
):
    turned = stored_image(tmp_path, orientation)
    rows, columns = np.nonzero(turned)
    box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
    sizes = {"stored": (40, 20), "turned": turned.shape[::-1]}
    document = of_image([list(map(int, box))], sizes[size])
    annotations = load_coco(json_of(document), tmp_path, policy=ImagePolicy(coco_pixels="turned"))
    assert annotations.boxes_ltwh_px.tolist() == [[10, 3, 18, 5]]
    assert annotations.image_sizes.tolist() == [[20, 40]]
    text = f"image 1 ('a.jpg') has EXIF orientation {orientation}"
    assert annotations.issues["box-turned"].offenders == [text] * (orientation > 1)
    assert {issue.kind for issue in annotations.issues} <= {"box-turned"}


def test_boxes_that_fit_only_the_turned_image_stop_until_coco_pixels_is_set(json_of, tmp_path):
    stored_image(tmp_path, 6)
    path = json_of(of_image([[3, 10, 5, 18], [12, 12, 5, 18]], (40, 20)))
    (issue,) = refused(path, tmp_path).values()
    assert issue.line() == (
        "image whose boxes only fit after its EXIF rotation: annotation 1 (image 1) has bbox "
        "[3.0, 10.0, 5.0, 18.0] in 40 x 20 pixels of 'a.jpg'. Set --coco_pixels to turned, or to stored if "
        "boxes refer to the stored pixels"
    )
    annotations = load_coco(path, tmp_path, policy=ImagePolicy(coco_pixels="stored"))
    assert annotations.boxes_ltwh_px.tolist() == [[3, 10, 5, 18], [12, 12, 5, 18]]
    assert annotations.issues["box-outside"].count == 2


def test_size_and_boxes_of_the_turned_image_are_one_fault(json_of, tmp_path):
    stored_image(tmp_path, 6)
    (kind,) = refused(json_of(of_image([[3, 10, 5, 18], [12, 12, 5, 18]], (20, 40))), tmp_path)
    assert kind == "image-turned"


@pytest.mark.parametrize("box", [[3, 3, 10, 10], [3, 3, 30, 10], [3, 3, 10, 18], [3, 3, 38, 30]])
def test_boxes_that_also_fit_the_stored_image_or_neither_do_not_stop(json_of, tmp_path, box):
    stored_image(tmp_path, 6)
    assert load_coco(json_of(of_image([box], (40, 20))), tmp_path).issues["exif-turn"].count == 1


# --- image files ---


@pytest.mark.parametrize("check", ["sample", "none"])
def test_coco_pixels_turned_is_refused_unless_all_images_are_checked(json_of, images, check):
    policy = ImagePolicy(coco_pixels="turned", check=check)
    with pytest.raises(UserError, match="needs the orientation of every image: use --check=all"):
        load_coco(json_of(), images, policy=policy)


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


def test_images_of_the_same_content_under_two_names_are_reported(json_of, tmp_path):
    draw_images(tmp_path)
    (tmp_path / "copy.jpg").write_bytes((tmp_path / "a.jpg").read_bytes())
    more = [{"id": i, "file_name": "copy.jpg", "width": 20, "height": 10} for i in (50, 51)]
    document = SMALL | {"images": [*SMALL["images"], *more]}
    issues = load_coco(json_of(document), tmp_path).issues
    assert issues["repeated-image"].offenders == ["image 42 ('a.jpg') = image 50 ('copy.jpg')"]
    assert issues["repeated-file"].count == 1


def test_images_that_differ_only_between_their_ends_are_no_repetition(json_of, tmp_path):
    pixels = np.zeros((100, 100, 3), np.uint8)
    for name, value in (("a.bmp", 0), ("b.bmp", 9)):
        pixels[50, 50] = value
        PIL.Image.fromarray(pixels).save(tmp_path / name)
    names = {1: "a.bmp", 2: "b.bmp"}
    images = [{"id": i, "file_name": name, "width": 100, "height": 100} for i, name in names.items()]
    document = of_image([[1, 2, 3, 4]]) | {"images": images}
    annotations = load_coco(json_of(document), tmp_path)
    assert annotations.checksums[0] == annotations.checksums[1]
    assert not annotations.issues["repeated-image"].count
