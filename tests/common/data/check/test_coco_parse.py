"""COCO jsons with faults: each is named, and a json that is read has the values of the json module."""

import contextlib
import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.data.check.issues import DataError
from common.data.coco import load_coco
from tests.common.coco_documents import LARGE, SMALL, assert_is, changed, refused

NAN, INF = float("nan"), float("inf")
IMAGE_HAS = "image 7 ('sub/b.jpg') has"
OBJECT_HAS = "annotation 3 (image 7) has"


def steps(path):
    return [int(step) if step.isdigit() else step for step in path.split(".")]


# --- jsons with one fault ---


ONE_FAULT = [
    ("images", ..., "missing-key", "the file has no list `images`"),
    ("images", {}, "wrong-type", "`images` is {}"),
    ("images", NAN, "wrong-type", "`images` is nan"),
    ("images", [], "no-images", "`images` is empty"),
    ("annotations", [], "no-boxes", "`annotations` is empty"),
    ("categories", [], "bad-category", "no categories"),
    ("annotations.1", None, "wrong-type", "annotations[1] is None"),
    ("images.1.id", ..., "missing-key", "images[1] (no id, 'sub/b.jpg') has no id"),
    ("images.1.id", "7", "wrong-type", "images[1] (id '7', 'sub/b.jpg') has id '7': expected `int`"),
    ("images.1.id", 7.5, "wrong-type", "images[1] (id 7.5, 'sub/b.jpg') has id 7.5"),
    ("images.1.id", 2.0**54, "wrong-type", "images[1] (id 1.8014398509481984e+16, 'sub/b.jpg') has id"),
    ("images.1.id", -7, "wrong-type", "images[1] (id -7, 'sub/b.jpg') has id -7: expected `int` >= 0"),
    ("images.1.id", NAN, "wrong-type", "images[1] (id nan, 'sub/b.jpg') has id nan"),
    ("images.1.id", True, "wrong-type", "images[1] (id True, 'sub/b.jpg') has id True"),
    ("images.1.id", LARGE + 1, "wrong-type", f"image {LARGE + 1} ('sub/b.jpg') has id {LARGE + 1}"),
    ("images.1.width", 0, "wrong-type", f"{IMAGE_HAS} width 0: expected `int` >= 1"),
    ("images.1.width", 2**31, "wrong-type", f"{IMAGE_HAS} width 2147483648: expected `int` <= 2147483647"),
    ("images.1.file_name", ..., "missing-key", "image 7 has no file_name"),
    ("images.1.file_name", "", "wrong-type", "image 7 ('') has file_name ''"),
    ("annotations.2.image_id", ..., "missing-key", "annotation 3 has no image_id"),
    ("annotations.2.image_id", "7", "wrong-type", "annotation 3 (image '7') has image_id '7': expected"),
    ("annotations.2.image_id", -INF, "wrong-type", "annotation 3 (image -inf) has image_id -inf"),
    ("annotations.2.bbox", "1,2,3,4", "wrong-type", f"{OBJECT_HAS} bbox '1,2,3,4'"),
    ("annotations.2.bbox", [1, 2, 3, 4, 5], "box-length", f"{OBJECT_HAS} bbox [1, 2, 3, 4, 5]"),
    ("annotations.2.bbox", [1, 2, 3, -4e-9], "box-negative", f"{OBJECT_HAS} bbox [1.0, 2.0, 3.0, -4"),
    ("annotations.2.bbox", [1, "2", 3, 4], "wrong-type", f"{OBJECT_HAS} bbox [1, '2', 3, 4]"),
    ("annotations.2.bbox", [1, 2, "\ud800", 4], "wrong-type", f"{OBJECT_HAS} bbox [1, 2, '\\ud800', 4]"),
    ("annotations.2.bbox", [1, True, 3, 4], "wrong-type", f"{OBJECT_HAS} bbox [1, True, 3, 4]"),
    ("annotations.2.bbox", [-INF, 2, 3, 4], "box-not-finite", f"{OBJECT_HAS} bbox [-inf, 2, 3, 4]"),
    ("annotations.2.bbox", NAN, "wrong-type", f"{OBJECT_HAS} bbox nan"),
    ("annotations.2.bbox", [1, 2, 3, NAN], "box-not-finite", f"{OBJECT_HAS} bbox [1, 2, 3, nan]"),
    ("annotations.2.bbox", [1, 2, 10**400, 4], "box-not-finite", f"{OBJECT_HAS} bbox [1, 2, 1000"),
    ("annotations.2.area", -1, "wrong-type", f"{OBJECT_HAS} area -1"),
    ("annotations.2.area", NAN, "wrong-type", f"{OBJECT_HAS} area nan: a finite number is needed"),
    ("annotations.2.iscrowd", 2, "wrong-type", f"{OBJECT_HAS} iscrowd 2"),
    ("annotations.2.iscrowd", 0.5, "wrong-type", f"{OBJECT_HAS} iscrowd 0.5"),
    ("annotations.2.ignore", 2, "wrong-type", f"{OBJECT_HAS} ignore 2: 0 or 1 is needed"),
    ("annotations.2.ignore", "no", "wrong-type", f"{OBJECT_HAS} ignore 'no': 0 or 1 is needed"),
    ("categories.0", 2, "bad-category", "categories[0] is 2"),
]


@pytest.mark.parametrize(
    ("path", "value", "kind", "offender"),
    ONE_FAULT,
    ids=[f"{path} is {value}"[:50] for path, value, *_ in ONE_FAULT],
)
def test_coco_json_with_one_fault_gives_one_issue_that_names_the_faulty_entry(
    json_of, path, value, kind, offender
):
    stopping = refused(json_of(changed(steps(path), value)))
    assert list(stopping) == [kind]
    assert stopping[kind].count == 1
    assert stopping[kind].offenders[0].startswith(offender)
    assert len(stopping[kind].offenders[0]) < 300


@pytest.mark.parametrize(
    ("box", "kind", "shown"),
    [([1, 2, -3, 4], "box-negative", "[1.0, 2.0, -3.0, 4.0]"), ([1, 2, 3], "box-length", "[1, 2, 3]")],
)
def test_bad_box_of_an_annotation_without_id_is_named_by_its_position(json_of, box, kind, shown):
    document = changed(steps("annotations.2"), {"image_id": 7, "category_id": 2, "bbox": box})
    assert refused(json_of(document))[kind].offenders == [f"annotations[2] (no id, image 7) has bbox {shown}"]


# --- jsons with many faults ---


def test_every_fault_of_a_coco_json_with_many_faults_is_listed(json_of, images):
    document = copy.deepcopy(SMALL)
    document["images"] += [
        {"id": "11", "file_name": "c.jpg", "width": 5, "height": 5},
        {"id": 12, "file_name": "../d.jpg", "width": 5, "height": 5},
        {"id": 13, "file_name": "e.jpg", "height": 5},
        {"id": 13, "file_name": "f.jpg", "width": 5, "height": "5"},
    ]
    boxes = ([1, 2, -3, 4], [1, 2, 3], [1, 2, 3, NAN], [19, 2, 3, 4])
    changes = [{"bbox": box} for box in boxes]
    changes += [{"bbox": [1, 2, 3, "4"], "category_id": None}, {"category_id": 5, "id": 1}]
    changes += [{"image_id": i} for i in (14, 15, 16)]
    sound = {"image_id": 42, "category_id": 2, "bbox": [1, 2, 3, 4]}
    document["annotations"] += [{"id": i} | sound | change for i, change in enumerate(changes, 20)]
    document["categories"] += [{"id": 9, "name": "again"}, {"id": 10}]
    stopping = refused(json_of(document), images)
    names = {kind: [text.split(" has ")[0] for text in issue.offenders] for kind, issue in stopping.items()}
    missing = [text.split(")")[0] for text in names.pop("image-missing")]
    assert missing == ["images[2] (no id, 'c.jpg'", "image 13 ('e.jpg'", "image 13 ('f.jpg'"]
    twice = "annotation 24 (image 42)"
    assert names == {
        "missing-key": ["image 13 ('e.jpg')"],
        "wrong-type": ["images[2] (id '11', 'c.jpg')", "image 13 ('f.jpg')", twice, twice],
        "repeated-image-id": ["image 13 is given 2 times: 'e.jpg', 'f.jpg'"],
        "repeated-annotation-id": ["annotation 1 is given 2 times: annotations[0], annotations[9]"],
        "bad-category": ["category id 9 is given twice: 'nine' and 'again'", "category 10"],
        "unknown-image": [f"annotation {i + 12} (image {i})" for i in (14, 15, 16)],
        "box-length": ["annotation 21 (image 42)"],
        "box-not-finite": ["annotation 22 (image 42)"],
        "box-negative": ["annotation 20 (image 42)"],
        "path-leaves-directory": [f"image 12 ('../d.jpg'): it is not below {images}"],
    }


def test_missing_or_empty_file_name_in_a_json_is_not_also_reported_as_a_missing_image(json_of, images):
    document = changed(["images", 0, "width"], ..., changed(["images", 1, "height"], 41))
    stopping = refused(json_of(document), images)
    assert set(stopping) == {"missing-key", "image-size-differs"}
    (offender,) = stopping["image-size-differs"].offenders
    assert offender.startswith("image 7 ('sub/b.jpg') is ")
    document = changed(["images", 0, "file_name"], ..., changed(["images", 1, "file_name"], ""))
    assert set(refused(json_of(document), images)) == {"missing-key", "wrong-type"}


def test_annotation_of_an_unknown_image_or_category_is_reported_but_not_of_one_with_invalid_id(json_of):
    document = changed(["images", 1, "id"], "7")
    assert list(refused(json_of(document))) == ["wrong-type"]
    document["annotations"][3]["image_id"] = 8
    assert set(refused(json_of(document))) == {"wrong-type", "unknown-image"}
    document = changed(["categories", 0, "id"], 9)
    assert list(refused(json_of(document))) == ["bad-category"]
    document["annotations"][0]["category_id"] = 3
    assert set(refused(json_of(document))) == {"bad-category", "unknown-category"}


# --- files that are not valid json ---


@pytest.mark.parametrize("area", [12.5, NAN], ids=["strict json", "json with nan"])
def test_coco_json_truncated_anywhere_is_refused_and_mostly_reported_as_truncated(json_of, area):
    text = json.dumps(changed(["annotations", 0, "area"], area))
    kinds = [kind for stop in range(0, len(text), 7) for kind in refused(json_of(text[:stop]))]
    assert len(kinds) == len(range(0, len(text), 7))
    assert kinds[0] == "file-empty" and set(kinds[1:]) <= {"file-truncated", "json-malformed"}
    assert kinds.count("file-truncated") > 0.95 * len(kinds)


INVALID_FILES = {
    "blank": (b" \n\t", "file-empty", "3 bytes"),
    "text": (b"no json at all", "json-malformed", "at byte 0, near 'no json at all'"),
    "bracket without a value": (b'{"images": [}', "json-malformed", """at byte 12, near '{"images": [}'"""),
    "two objects": (b'{"images": []} {}', "json-malformed", "Extra data at byte 15"),
    "misspelt nan": (b'{"images": [NaN, Nan]}', "json-malformed", """at byte 17, near '{"images": [NaN, """),
    "byte order mark only": ("\ufeff".encode(), "file-empty", "3 bytes"),
    "two byte order marks": ("\ufeff\ufeff{}".encode(), "json-malformed", "BOM"),
    "non-ascii before the error": ('{"ä": }'.encode(), "json-malformed", "at byte 7, near"),
    "utf-16 with mark": (
        "\ufeff{}".encode("utf-16-be"),
        "json-utf-16",
        "6 bytes and begins with fe ff 00 7b",
    ),
    "utf-16-le": (json.dumps(SMALL).encode("utf-16-le"), "json-utf-16", "begins with 7b 00 22 00"),
    "utf-16-be": (json.dumps(SMALL).encode("utf-16-be"), "json-utf-16", "begins with 00 7b 00 22"),
    "utf-32": (json.dumps(SMALL).encode("utf-32"), "json-malformed", "at byte 0"),
    "other keys": (b'{"a": 1, "\xff": 2}', "missing-key", "the file has no list `images`"),
    "truncated in a text after nan": (
        b'{"x": NaN, "a": [1, "b',
        "file-truncated",
        'it ends after 22 bytes with \'{"x": NaN, ',
    ),
    "truncated": (
        json.dumps(SMALL)[:300],
        "file-truncated",
        f"after 300 bytes with {json.dumps(SMALL)[260:300]!r}",
    ),
    "nested too deeply": (b'{"x": ' + b"[" * 100_000, "json-malformed", "nested too deeply"),
    "list": (b"[]", "wrong-type", "the file begins with '[]': an object with three lists is needed"),
}


@pytest.mark.parametrize(("content", "kind", "reason"), INVALID_FILES.values(), ids=INVALID_FILES)
def test_file_that_is_no_coco_json_is_refused_with_the_reason(json_of, content, kind, reason):
    stopping = refused(json_of(content))
    assert list(stopping) == [kind]
    assert reason in stopping[kind].offenders[0]


@pytest.mark.parametrize("content", [b"", b" \n\t"], ids=["no byte", "blank"])
def test_message_about_an_empty_file_has_its_size_and_no_first_bytes(json_of, content):
    (issue,) = refused(json_of(content)).values()
    text = f"it has {len(content)} bytes. Copy or write it again, or remove it"
    assert issue.line() == f"empty file: {text}"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000], ids=["inf", "-inf", "5000 digits"])
def test_coco_box_side_too_large_for_float64_is_reported_as_not_finite(json_of, number):
    (kind,) = stopping = refused(json_of(json.dumps(SMALL).replace("3.5", number)))
    assert kind == "box-not-finite"
    assert stopping[kind].offenders[0].startswith("annotation 1 (image 7) has bbox [1, 2, ")


@pytest.mark.parametrize("literal", ["NaN", "-Infinity"])
def test_nan_and_infinity_in_unused_keys_are_ignored(json_of, literal):
    document = changed(["info"], {"a": "NaN", "b": "an NaN", "c": "NaN, Infinity"})
    text = json.dumps(changed(["annotations", 3, "segmentation"], [[77, 0], [77]], document))
    assert_is(load_coco(json_of(text.replace("77", literal))), document)


NOT_UTF_8 = {"byte": b"\xff", "surrogate": b"\xed\xa0\x80", "escaped surrogate": b"\\ud800"}


@pytest.mark.parametrize("text", NOT_UTF_8.values(), ids=NOT_UTF_8)
def test_json_text_that_is_not_utf_8_is_refused_in_a_file_name_and_ignored_in_unused_keys(json_of, text):
    content = json.dumps(SMALL).encode()
    (offender,) = refused(json_of(content.replace(b"sub/b.jpg", b"sub/" + text)))["wrong-type"].offenders
    assert offender.startswith("image 7 ('sub/\\ud") and "UTF-8" in offender
    assert_is(load_coco(json_of(content.replace(b"2017", b'"' + text + b'"'))), SMALL)


@pytest.mark.parametrize("literal", ["2017", "NaN"], ids=["strict json", "json with nan"])
def test_coco_json_with_a_byte_order_mark_is_read(json_of, literal):
    assert_is(load_coco(json_of("\ufeff" + json.dumps(SMALL).replace("2017", literal))), SMALL)


@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
def test_top_level_list_that_a_json_has_twice_is_reported(json_of, key):
    for content in ([], SMALL[key]):
        (issue,) = refused(json_of(f'{{"{key}": {json.dumps(content)}, {json.dumps(SMALL)[1:]}')).values()
        assert issue.kind == "repeated-key"
        assert issue.offenders == [f"the file has 2 lists `{key}`"]


def test_each_repeated_top_level_list_of_a_json_is_reported_with_its_number_of_occurrences(json_of):
    text = json.dumps(SMALL)
    (issue,) = refused(json_of(f'{{"images": [], "images": 1, {text[1:]}')).values()
    assert issue.offenders == ["the file has 3 lists `images`"]
    (issue,) = refused(json_of(f"{text[:-1]}, {text[1:]}")).values()
    assert [text.split("`")[1] for text in issue.offenders] == ["images", "annotations", "categories"]


def test_repeated_unused_keys_of_a_json_are_ignored(json_of):
    unused = {"annotations": [], "images": '"images": []', "categories": {"categories": []}}
    text = json.dumps(changed(["info"], [unused, unused, "annotations"]))
    assert_is(load_coco(json_of(f'{{"info": 1, "Images": [], "": 2, "": 3, {text[1:]}')), SMALL)


# --- boxes in the wrong unit ---

FRACTIONS = [[0.05, 0.1, 0.2, 0.9], [0, 0, 1, 1], [0.5, 0.5, 0.52, 0.5], [-0.01, 0, 0.3, 0.3]]


def with_boxes(boxes):
    document = copy.deepcopy(SMALL)
    for an_object, box in zip(document["annotations"], boxes, strict=True):
        an_object["bbox"] = box
    return document


def test_boxes_that_are_all_fractions_of_the_image_are_refused_as_not_in_pixels(json_of):
    document = with_boxes(FRACTIONS)
    (issue,) = refused(json_of(document)).values()
    assert (issue.kind, issue.count) == ("boxes-not-in-pixels", 4)
    assert issue.offenders[::3] == [
        "annotation 1 (image 7) has bbox [0.05, 0.1, 0.2, 0.9] in 30 x 40 pixels of 'sub/b.jpg'",
        "annotation 8 (image 42) has bbox [-0.01, 0.0, 0.3, 0.3] in 20 x 10 pixels of 'a.jpg'",
    ]
    document["annotations"] = document["annotations"][:1]
    assert list(refused(json_of(document))) == ["boxes-not-in-pixels"]


def test_coco_boxes_in_fractions_of_the_image_are_reported_along_with_nan_and_negative_boxes(json_of):
    stopping = refused(json_of(with_boxes([*FRACTIONS[:2], [20, 10, -8, 5], [1, 2, NAN, 4]])))
    counts = {"box-not-finite": 1, "box-negative": 1, "boxes-not-in-pixels": 2}
    assert {kind: issue.count for kind, issue in stopping.items()} == counts


@pytest.mark.parametrize("box", [[0, 0, 1, 2], [0.5, 0.9, 0.6, 0.1], [-2, 0, 2.5, 1], [0, -1.5, 1, 1]])
def test_boxes_below_one_pixel_are_read_as_pixels_if_any_box_exceeds_one_pixel(json_of, box):
    document = with_boxes([*FRACTIONS[:3], box])
    assert_is(load_coco(json_of(document)), document)


def test_boxes_that_fill_one_pixel_images_are_read_as_pixels_and_not_as_fractions(json_of):
    document = with_boxes([[0, 0, 1, 1]] * 4)
    for row in range(2):
        document["images"][row] |= {"width": 1, "height": 1}
    assert_is(load_coco(json_of(document)), document)


def test_boxes_within_one_pixel_without_area_are_reported_as_no_boxes_and_not_as_fractions(json_of):
    assert list(refused(json_of(with_boxes([[0, 0, 0, 1], [0, 0, 1, 0]] * 2)))) == ["no-boxes"]


CORNERS, INSIDE = [60, 50, 90, 70], [10, 10, 20, 20]


# (number of copies of CORNERS, number of copies of INSIDE, one more box, whether the json is refused)
CORNERS_OR_PIXELS = {
    "half of 16 reach outside": (7, 8, CORNERS, True),
    "half of 17 reach outside": (7, 9, CORNERS, False),
    "7 of 8 reach outside": (7, 0, INSIDE, False),
    "last box outside by 1.5": (7, 0, [10, 10, 91.5, 20], True),
    "last box outside by 1": (7, 0, [10, 10, 91, 71], False),
    "last corners outside by 1": (8, 0, [-1, -1, 101, 81], True),
    "last left corner outside by 1.5": (8, 0, [-1.5, 5, 90, 20], False),
    "last bottom corner outside by 1.5": (8, 0, [5, 5, 20, 81.5], False),
    "last right corner equal to left": (8, 0, [20, 5, 20, 30], False),
}


@pytest.mark.parametrize(
    ("num_corners", "num_inside", "last", "is_refused"), CORNERS_OR_PIXELS.values(), ids=CORNERS_OR_PIXELS
)
def test_boxes_are_refused_as_xyxy_if_all_are_valid_as_xyxy_and_half_leave_the_image_as_xywh(
    json_of, num_corners, num_inside, last, is_refused
):
    boxes = [*[CORNERS] * num_corners, *[INSIDE] * num_inside, last]
    image = {"id": 7, "file_name": "a.jpg", "width": 100, "height": 80}
    # Different areas: no box repeats another one.
    objects = [{"image_id": 7, "category_id": 2, "bbox": box, "area": area} for area, box in enumerate(boxes)]
    document = SMALL | {"images": [image], "annotations": objects}
    if is_refused:
        (issue,) = refused(json_of(document)).values()
        assert (issue.kind, issue.count) == ("boxes-of-corners", 8)
    else:
        assert_is(load_coco(json_of(document)), document)


# --- paths that are no json file ---


def test_json_that_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    (offender,) = refused(tmp_path / "nowhere.json")["file-unreadable"].offenders
    assert offender == "No such file or directory"
    (tmp_path / "link.json").symlink_to("link.json")
    assert list(refused(tmp_path / "link.json")) == ["file-unreadable"]


def test_missing_json_and_missing_image_directory_are_reported_together(tmp_path):
    stopping = refused(tmp_path / "nowhere.json", tmp_path / "nowhere")
    assert set(stopping) == {"file-unreadable", "no-image-directory"}


# --- random changes: the json is refused or read correctly ---

NUMBERS = (0, -1, 1, 2, 7, 9, 42, 2**31, LARGE, LARGE + 1, 10**30, 1.5, -0.0, 1e300, NAN, INF)
OTHER_VALUES = (..., None, True, "", "7", "\ud800", "a.jpg", "ä" * 300, [], {}, [[[]]], [{}])
BOXES = ([1, 2, 3], [1, 2, 3, 4], [0, 0, -1, 1], [15, 5, 20, 20], [0, 0, 0, 0], [0, 0, 1, 1])
VALUES = st.sampled_from([*NUMBERS, *OTHER_VALUES, *BOXES, [1, 2, 3, "4"], [1, 2, NAN, 4]])
BYTES = st.sampled_from(
    [b"NaN", b"Infinity", b"-", b"null", b"1e999", b'"', b"[", b"}", b"\\u", b"0", b"\xff"]
)
# derandomize: a failure in CI can be repeated
FIXED = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from paths(child, (*path, key))


def read_or_refused(path):
    try:
        return load_coco(path)
    except DataError as error:
        assert error.issues[0].stopping
        return None


@FIXED
@given(st.lists(st.tuples(st.sampled_from(sorted(paths(SMALL), key=str)), VALUES), min_size=1, max_size=3))
def test_json_with_random_values_is_refused_or_equals_plain_loops(json_of, changes):
    document = SMALL
    for path, value in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            document = changed(path, value, document)
    annotations = read_or_refused(json_of(document))
    if annotations is not None:
        assert_is(annotations, document)


@FIXED
@given(data=st.data())
def test_json_with_random_bytes_is_refused_or_equals_the_json_module(json_of, data):
    content = bytearray(json.dumps(SMALL).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        end = min(begin + data.draw(st.sampled_from([0, 1, 1, 2, 8, 100])), len(content))
        content[begin:end] = data.draw(st.one_of(st.binary(max_size=3), BYTES))
    annotations = read_or_refused(json_of(bytes(content)))
    if annotations is not None:
        assert_is(annotations, json.loads(bytes(content).decode("utf-8", "replace")))
