"""COCO jsons that are refused: every fault that is looked for, alone and together."""

import copy
import json
import os
import pathlib

import pytest

from common.datacheck.coco import load_coco
from common.datacheck.issues import DataError
from tests.common.coco_documents import (
    LARGE,
    SMALL,
    assert_is,
    changed,
    draw_images,
    found_beside,
    refused,
    write_json,
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def small(tmp_path):
    """Writes a variant of SMALL and returns its path."""
    return lambda document=SMALL: write_json(tmp_path, document)


# --- what is refused: one fault ---


@pytest.mark.parametrize(
    ("path", "value", "kind", "offender"),
    [
        (["images"], ..., "missing-key", "the file has no list `images`"),
        (["annotations"], ..., "missing-key", "the file has no list `annotations`"),
        (["categories"], ..., "missing-key", "the file has no list `categories`"),
        (["images"], {}, "wrong-type", "`images` is {}"),
        (["annotations"], "none", "wrong-type", "`annotations` is 'none'"),
        (["categories"], None, "wrong-type", "`categories` is None"),
        (["annotations"], [], "no-boxes", "`annotations` is empty"),
        (["categories"], [], "bad-category", "there are no categories"),
        (["annotations", 1], None, "wrong-type", "annotations[1] is None"),
        (["images", 1], [7], "wrong-type", "images[1] is [7]"),
        (["images", 1, "id"], ..., "missing-key", "images[1] (no id, 'sub/b.jpg') has no id"),
        (
            ["images", 1, "id"],
            "7",
            "wrong-type",
            "images[1] (id '7', 'sub/b.jpg') has id '7': expected `int`",
        ),
        (["images", 1, "id"], 7.5, "wrong-type", "images[1] (id 7.5, 'sub/b.jpg') has id 7.5"),
        (["images", 1, "id"], 7.0, "wrong-type", "images[1] (id 7.0, 'sub/b.jpg') has id 7.0"),
        (["images", 1, "id"], True, "wrong-type", "images[1] (id True, 'sub/b.jpg') has id True"),
        (["images", 1, "id"], None, "wrong-type", "images[1] (id None, 'sub/b.jpg') has id None"),
        (["images", 1, "id"], LARGE + 1, "wrong-type", f"image {LARGE + 1} ('sub/b.jpg') has id {LARGE + 1}"),
        (
            ["images", 1, "id"],
            -7,
            "wrong-type",
            "images[1] (id -7, 'sub/b.jpg') has id -7: expected `int` >= 0",
        ),
        (["images", 1, "id"], 42, "repeated-image-id", "image 42 is given 2 times: 'a.jpg', 'sub/b.jpg'"),
        (["images", 1, "width"], ..., "missing-key", "image 7 ('sub/b.jpg') has no width"),
        (["images", 1, "width"], 0, "wrong-type", "image 7 ('sub/b.jpg') has width 0: expected `int` >= 1"),
        (["images", 1, "height"], -3, "wrong-type", "image 7 ('sub/b.jpg') has height -3"),
        (["images", 1, "height"], "40", "wrong-type", "image 7 ('sub/b.jpg') has height '40'"),
        (["images", 1, "height"], 2**31, "wrong-type", "image 7 ('sub/b.jpg') has height 2147483648"),
        (["images", 1, "file_name"], ..., "missing-key", "image 7 has no file_name"),
        (["images", 1, "file_name"], "", "wrong-type", "image 7 ('') has file_name ''"),
        (["images", 1, "file_name"], None, "wrong-type", "image 7 (None) has file_name None"),
        (
            ["annotations", 2, "image_id"],
            8,
            "unknown-image",
            "annotation 3 (image 8) has image_id 8, which no image has",
        ),
        (
            ["annotations", 2, "image_id"],
            LARGE,
            "unknown-image",
            f"annotation 3 (image {LARGE}) has image_id {LARGE}",
        ),
        (
            ["annotations", 2, "image_id"],
            "7",
            "wrong-type",
            "annotation 3 (image '7') has image_id '7': expected `int`, got `str`",
        ),
        (["annotations", 2, "image_id"], ..., "missing-key", "annotation 3 has no image_id"),
        (
            ["annotations", 2, "category_id"],
            3,
            "unknown-category",
            "annotation 3 (image 7) has category_id 3, which no category has",
        ),
        (["annotations", 2, "category_id"], 2.0, "wrong-type", "annotation 3 (image 7) has category_id 2.0"),
        (["annotations", 2, "category_id"], -2, "wrong-type", "annotation 3 (image 7) has category_id -2"),
        (["annotations", 2, "category_id"], ..., "missing-key", "annotation 3 (image 7) has no category_id"),
        (
            ["annotations", 2, "id"],
            1,
            "repeated-annotation-id",
            "annotation 1 is given 2 times: annotations[0], annotations[2]",
        ),
        (["annotations", 2, "id"], "3", "wrong-type", "annotations[2] (id '3', image 7) has id '3'"),
        (["annotations", 2, "bbox"], ..., "missing-key", "annotation 3 (image 7) has no bbox"),
        (["annotations", 2, "bbox"], None, "wrong-type", "annotation 3 (image 7) has bbox None"),
        (["annotations", 2, "bbox"], "1,2,3,4", "wrong-type", "annotation 3 (image 7) has bbox '1,2,3,4'"),
        (["annotations", 2, "bbox"], [], "box-length", "annotation 3 (image 7) has bbox []"),
        (["annotations", 2, "bbox"], [1, 2, 3], "box-length", "annotation 3 (image 7) has bbox [1, 2, 3]"),
        (
            ["annotations", 2, "bbox"],
            [1, 2, 3, 4, 5],
            "box-length",
            "annotation 3 (image 7) has bbox [1, 2, 3, 4, 5]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, 2, -3, 4],
            "box-negative",
            "annotation 3 (image 7) has bbox [1.0, 2.0, -3.0, 4.0]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, 2, 3, -4e-9],
            "box-negative",
            "annotation 3 (image 7) has bbox [1.0, 2.0, 3.0, -4e-09]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, "2", 3, 4],
            "wrong-type",
            "annotation 3 (image 7) has bbox [1, '2', 3, 4]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, None, 3, 4],
            "wrong-type",
            "annotation 3 (image 7) has bbox [1, None, 3, 4]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, True, 3, 4],
            "wrong-type",
            "annotation 3 (image 7) has bbox [1, True, 3, 4]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, float("nan"), 3, 4],
            "box-not-finite",
            "annotation 3 (image 7) has bbox [1, nan, 3, 4]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, 2, float("inf"), 4],
            "box-not-finite",
            "annotation 3 (image 7) has bbox [1, 2, inf, 4]",
        ),
        (
            ["annotations", 2, "bbox"],
            [float("-inf"), 2, 3, 4],
            "box-not-finite",
            "annotation 3 (image 7) has bbox [-inf, 2, 3, 4]",
        ),
        (
            ["annotations", 2, "bbox"],
            [1, 2, 10**400, 4],
            "box-not-finite",
            "annotation 3 (image 7) has bbox [1, 2, 1000",
        ),
        (["annotations", 2, "area"], -1, "wrong-type", "annotation 3 (image 7) has area -1"),
        (["annotations", 2, "area"], "4", "wrong-type", "annotation 3 (image 7) has area '4'"),
        (["annotations", 2, "area"], float("nan"), "wrong-type", "annotation 3 (image 7) has area nan"),
        (["annotations", 2, "area"], float("inf"), "wrong-type", "annotation 3 (image 7) has area inf"),
        (["annotations", 2, "iscrowd"], 2, "wrong-type", "annotation 3 (image 7) has iscrowd 2"),
        (["annotations", 2, "iscrowd"], "0", "wrong-type", "annotation 3 (image 7) has iscrowd '0'"),
        (["categories", 0], 2, "bad-category", "categories[0] is 2"),
        (["categories", 0, "id"], 9, "bad-category", "category id 9 is given twice: 'two' and 'nine'"),
        (["categories", 0, "id"], "2", "bad-category", "category 'two' has id '2'"),
        (["categories", 0, "id"], -2, "bad-category", "category 'two' has id -2"),
        (["categories", 0, "id"], LARGE + 1, "bad-category", f"category 'two' has id {LARGE + 1}"),
        (["categories", 0, "id"], ..., "bad-category", "category 'two' has id None"),
        (["categories", 1, "name"], ..., "bad-category", "category 9 has the name None"),
        (["categories", 1, "name"], "two", "bad-category", "categories 2 and 9 have the same name 'two'"),
    ],
)
def test_one_fault_is_one_issue(small, path, value, kind, offender):
    file = small(changed(path, value))
    stopping = refused(file)
    assert list(stopping) == [kind]
    assert stopping[kind].count == 1
    assert stopping[kind].offenders[0].startswith(offender)
    assert len(stopping[kind].offenders[0]) < 300
    assert found_beside(file) <= {"crowd"}


def test_all_faults_of_one_record_are_listed(small):
    document = changed(["annotations", 2], {"id": -3, "category_id": "2", "bbox": [1, 2], "area": {}})
    stopping = refused(small(document))
    assert {kind: issue.count for kind, issue in stopping.items()} == {
        "missing-key": 1,
        "wrong-type": 3,
        "box-length": 1,
    }
    for issue in stopping.values():
        assert all(text.startswith("annotations[2] (id -3) has ") for text in issue.offenders)


def test_offenders_without_ids_are_named_by_their_place(small):
    document = changed(["annotations", 2, "bbox"], [1, 2, -3, 4])
    del document["annotations"][2]["id"]
    expected = "annotations[2] (no id, image 7) has bbox [1.0, 2.0, -3.0, 4.0]"
    assert refused(small(document))["box-negative"].offenders == [expected]
    document["annotations"][2]["bbox"] = [1, 2, 3]
    expected = "annotations[2] (no id, image 7) has bbox [1, 2, 3]"
    assert refused(small(document))["box-length"].offenders == [expected]


def test_no_images(small):
    stopping = refused(small(changed(["images"], [])))
    assert list(stopping) == ["no-images"]
    assert set(refused(small(changed(["annotations"], [], changed(["images"], []))))) == {
        "no-images",
        "no-boxes",
    }


def test_nothing_but_crowds_and_empty_boxes(small):
    document = changed(["annotations", 0, "bbox"], [1, 2, 0, 4])
    for an_object in document["annotations"][1:]:
        an_object["iscrowd"] = 1
    stopping = refused(small(document))
    assert list(stopping) == ["no-boxes"] and "none of 4 boxes" in stopping["no-boxes"].offenders[0]


# --- what is refused: everything at once ---


def test_every_fault_is_listed(small, images):
    document = copy.deepcopy(SMALL)
    document["images"] += [
        {"id": "11", "file_name": "c.jpg", "width": 5, "height": 5},
        {"id": 12, "file_name": "../d.jpg", "width": 5, "height": 5},
        {"id": 13, "file_name": "e.jpg", "height": 5},
        {"id": 13, "file_name": "f.jpg", "width": 5, "height": "5"},
    ]
    for i, change in enumerate(
        [
            {"bbox": [1, 2, -3, 4]},
            {"bbox": [1, 2, -3, -4]},
            {"bbox": [1, 2, 3]},
            {"bbox": [1, 2, 3, float("nan")]},
            {"bbox": [1, 2, 3, "4"], "category_id": None},
            {"image_id": 14},
            {"image_id": 15},
            {"image_id": 16},
            {"category_id": 5, "id": 1},
            {"bbox": [19, 2, 3, 4]},
        ],
        20,
    ):
        document["annotations"].append(
            {"id": i, "image_id": 42, "category_id": 2, "bbox": [1, 2, 3, 4]} | change
        )
    document["categories"] += [{"id": 9, "name": "again"}, {"id": 10}]
    path = small(document)
    stopping = refused(path, images)
    assert {kind: issue.offenders for kind, issue in stopping.items()} == {
        "missing-key": ["image 13 ('e.jpg') has no width"],
        "wrong-type": [
            "images[2] (id '11', 'c.jpg') has id '11': expected `int`, got `str`",
            "image 13 ('f.jpg') has height '5': expected `int`, got `str`",
            "annotation 24 (image 42) has category_id None: expected `int`, got `null`",
            "annotation 24 (image 42) has bbox [1, 2, 3, '4']: expected `float`, got `str`",
        ],
        "repeated-image-id": ["image 13 is given 2 times: 'e.jpg', 'f.jpg'"],
        "repeated-annotation-id": ["annotation 1 is given 2 times: annotations[0], annotations[12]"],
        "bad-category": [
            "category id 9 is given twice: 'nine' and 'again'",
            "category 10 has the name None: names are non-empty strings in UTF-8",
        ],
        "unknown-image": [
            f"annotation {i + 11} (image {i}) has image_id {i}, which no image has" for i in (14, 15, 16)
        ],
        "box-length": ["annotation 22 (image 42) has bbox [1, 2, 3]"],
        "box-not-finite": ["annotation 23 (image 42) has bbox [1, 2, 3, nan]"],
        "box-negative": [
            "annotation 20 (image 42) has bbox [1.0, 2.0, -3.0, 4.0]",
            "annotation 21 (image 42) has bbox [1.0, 2.0, -3.0, -4.0]",
        ],
        "path-leaves-directory": [f"image 12 ('../d.jpg'): it is not below {images}"],
        "image-missing": stopping["image-missing"].offenders,
    }
    missing = stopping["image-missing"].offenders
    assert [text.split(")")[0] + ")" for text in missing] == [
        "images[2] (no id, 'c.jpg')",
        "image 13 ('e.jpg')",
        "image 13 ('f.jpg')",
    ]
    with pytest.raises(DataError) as error:
        load_coco(path, images)
    assert str(error.value).startswith(f"{len(stopping)} kinds of faults")


def test_image_files_are_looked_at_as_far_as_they_are_known(small, images):
    document = changed(["images", 0, "width"], ..., changed(["images", 1, "height"], 41))
    stopping = refused(small(document), images)
    assert set(stopping) == {"missing-key", "image-size-differs"}
    assert [text.split(" is ")[0] for text in stopping["image-size-differs"].offenders] == [
        "image 7 ('sub/b.jpg')"
    ]
    document = changed(["images", 0, "file_name"], ..., changed(["images", 1, "file_name"], ""))
    assert set(refused(small(document), images)) == {"missing-key", "wrong-type"}


def test_a_lost_id_is_one_fault(small):
    """What refers to a record whose own id is unusable is no second fault, but further unknown ids are."""
    document = changed(["images", 1, "id"], "7")
    assert list(refused(small(document))) == ["wrong-type"]
    document["annotations"][3]["image_id"] = 8
    assert set(refused(small(document))) == {"wrong-type", "unknown-image"}
    document = changed(["categories", 0, "id"], 9)
    assert list(refused(small(document))) == ["bad-category"]
    document["annotations"][0]["category_id"] = 3
    assert set(refused(small(document))) == {"bad-category", "unknown-category"}


def test_all_offenders_are_counted(small):
    document = copy.deepcopy(SMALL)
    document["annotations"] = [
        {"id": i // 2, "image_id": 7, "category_id": "2", "bbox": [0, 0, -1, 1]} for i in range(3000)
    ]
    stopping = refused(small(document))
    assert stopping["repeated-annotation-id"].count == 1500
    for kind in ("wrong-type", "box-negative"):
        assert stopping[kind].count == 3000 and len(stopping[kind].offenders) == 1000


# --- what is no json ---


def test_a_json_cut_anywhere_is_an_error(small):
    for text in (json.dumps(SMALL), json.dumps(changed(["annotations", 0, "area"], float("nan")))):
        kinds = []
        for end in range(len(text)):
            (kind,) = refused(small(text[:end]))
            kinds.append(kind)
        assert kinds[0] == "json-empty" and set(kinds[1:]) <= {"json-truncated", "json-malformed"}
        assert kinds.count("json-truncated") > 0.98 * len(text)


def test_a_truncated_json_says_where_it_ends(coco128, tmp_path):
    text = (coco128 / "instances.json").read_text()
    (tmp_path / "cut.json").write_text(text[:100_000])
    (offender,) = refused(tmp_path / "cut.json")["json-truncated"].offenders
    assert offender == f"it ends after 100000 bytes with {text[99_960:100_000]!r}"


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", "json-empty", "0 bytes"),
        (b" \n\t", "json-empty", "3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "json-lfs-pointer", "bytes"),
        (b"\x1f\x8b\x08\x00abc", "json-gzip", "7 bytes"),
        (b"no json at all", "json-malformed", "at byte 0, near 'no json at all'"),
        (b'{"images": [}', "json-malformed", """at byte 12, near '{"images": [}'"""),
        (b'{"images": []} {}', "json-malformed", "Extra data at byte 15"),
        (b'{"images": [], "annotations": [1, 2,]}', "json-malformed", "at byte 36"),
        ("\ufeff".encode(), "json-empty", "3 bytes"),
        ("\ufeff\ufeff{}".encode(), "json-malformed", "BOM"),
        ("{}".encode("utf-16"), "json-utf-16", "6 bytes and begins with ff fe 7b 00"),
        ("\ufeff{}".encode("utf-16-be"), "json-utf-16", "6 bytes and begins with fe ff 00 7b"),
        (json.dumps(SMALL).encode("utf-16-le"), "json-utf-16", "begins with 7b 00 22 00"),
        (json.dumps(SMALL).encode("utf-16-be"), "json-utf-16", "begins with 00 7b 00 22"),
        (json.dumps(SMALL).encode("utf-32"), "json-malformed", "at byte 0"),
        (b'{"a": 1, "\xff": 2}', "missing-key", "the file has no list `images`"),
        (b'{"images": [NaN, Nan]}', "json-malformed", """at byte 17, near '{"images": [NaN, """),
        (b'{"x": NaN, "images": [1, "ab', "json-truncated", "28 bytes"),
        (b'{"x": -NaN}', "json-malformed", "at byte 6, near"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "json-malformed", "at byte 0"),
        (b"{" + bytes(50), "json-malformed", "at byte 1"),
        (b'{"x": ' + b"[" * 100_000, "json-malformed", "nested too deeply"),
        (b'{"x": [NaN, ' + b"[" * 100_000, "json-malformed", "nested too deeply"),
        (b"[]", "wrong-type", "the file begins with '[]': an object of three lists is needed"),
        (b"null", "wrong-type", "the file begins with 'null'"),
        (b"[NaN]", "wrong-type", "the file begins with '[NaN]'"),
        (b"NaN", "wrong-type", "the file begins with 'NaN'"),
    ],
)
def test_what_is_no_json(small, content, kind, words):
    stopping = refused(small(content))
    assert list(stopping) == [kind]
    assert words in stopping[kind].offenders[0]


@pytest.mark.parametrize("number", ["1e999", "9" * 400, "9" * 5000, "-1e999"])
def test_numbers_that_are_too_large(small, number):
    (kind,) = stopping = refused(small(json.dumps(SMALL).replace("3.5", number)))
    assert kind == "box-not-finite"
    assert stopping[kind].offenders[0].startswith("annotation 1 (image 7) has bbox [1, 2, ")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_of_pythons_json(small, literal):
    """Wherever one stands it is reported, unless nobody looks there. In strings they mean nothing."""
    document = changed(["info"], {"a": "NaN", "b": "an NaN", "c": "NaN, Infinity"})
    text = json.dumps(changed(["annotations", 3, "segmentation"], [[77, 0], [77]], document))
    assert_is(load_coco(small(text.replace("77", literal))), document)
    value = repr(float(literal))
    for path, kind, offender in [
        (["images"], "wrong-type", f"`images` is {value}"),
        (["images", 1], "wrong-type", f"images[1] is {value}"),
        (["images", 1, "id"], "wrong-type", f"images[1] (id {value}, 'sub/b.jpg') has id {value}"),
        (["images", 1, "file_name"], "wrong-type", f"image 7 ({value}) has file_name {value}"),
        (["images", 1, "width"], "wrong-type", f"image 7 ('sub/b.jpg') has width {value}"),
        (["annotations", 2, "image_id"], "wrong-type", f"annotation 3 (image {value}) has image_id {value}"),
        (["annotations", 2, "iscrowd"], "wrong-type", f"annotation 3 (image 7) has iscrowd {value}"),
        (["annotations", 2, "bbox"], "wrong-type", f"annotation 3 (image 7) has bbox {value}"),
        (
            ["annotations", 2, "bbox", 3],
            "box-not-finite",
            f"annotation 3 (image 7) has bbox [0.25, 0, 2, {value}]",
        ),
        (["categories", 1], "bad-category", f"categories[1] is {value}"),
        (["categories", 1, "id"], "bad-category", f"category 'nine' has id {value}"),
        (["categories", 1, "name"], "bad-category", f"category 9 has the name {value}"),
    ]:
        stopping = refused(small(changed(path, float(literal), document)))
        assert list(stopping) == [kind]
        assert stopping[kind].offenders[0].startswith(offender)


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text(small, bad):
    text = json.dumps(SMALL).encode()
    (offender,) = refused(small(text.replace(b"sub/b.jpg", b"sub/" + bad)))["wrong-type"].offenders
    assert offender.startswith("image 7 ('sub/\\udc") and "UTF-8" in offender
    (offender,) = refused(small(text.replace(b"nine", b"n" + bad)))["bad-category"].offenders
    assert offender.startswith("category 9 has the name 'n\\udc") and "UTF-8" in offender
    assert_is(load_coco(small(text.replace(b"2017", b'"' + bad + b'"'))), SMALL)
    stopping = refused(small(text.replace(b"2017", b"NaN").replace(b"b.jpg", bad).replace(b"nine", bad)))
    assert set(stopping) == {"wrong-type", "bad-category"}
    (offender,) = refused(small(text.replace(b"3.5", b'"' + bad + b'"')))["wrong-type"].offenders
    assert offender.startswith("annotation 1 (image 7) has bbox [1, 2, '\\udc")


def test_half_a_surrogate_pair_is_no_text(small):
    text = json.dumps(SMALL).replace("sub/b.jpg", "sub/\\ud800 .jpg").replace("nine", "\\ud800")
    assert set(refused(small(text))) == {"wrong-type", "bad-category"}


@pytest.mark.parametrize("literal", ["2017", "NaN"])
def test_a_byte_order_mark_is_no_matter(small, literal):
    assert_is(load_coco(small("\ufeff" + json.dumps(SMALL).replace("2017", literal))), SMALL)


# --- what would be lost ---


@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
@pytest.mark.parametrize("literal", ["2017", "NaN"])
def test_a_list_given_twice(small, key, literal):
    """Also where nothing is in the other one."""
    text = json.dumps(SMALL).replace("2017", literal)
    for more in ([], SMALL[key]):
        (issue,) = refused(small(f'{{"{key}": {json.dumps(more)}, {text[1:]}')).values()
        assert issue.kind == "repeated-key"
        assert issue.offenders == [f"the file has 2 lists `{key}`"]
    (issue,) = refused(small(f'{{"{key}": [], "{key}": 1, {text[1:]}')).values()
    assert issue.offenders == [f"the file has 3 lists `{key}`"]


def test_all_lists_given_twice_are_named(small):
    text = json.dumps(SMALL)
    (issue,) = refused(small(f"{text[:-1]}, {text[1:]}")).values()
    assert [text.split("`")[1] for text in issue.offenders] == ["images", "annotations", "categories"]


def test_keys_that_nobody_needs_may_be_repeated(small):
    """And those of the lists may stand elsewhere, as text or in what is skipped."""
    skipped = {"annotations": [], "images": '"images": []', "categories": {"categories": []}}
    text = json.dumps(changed(["info"], [skipped, skipped, "annotations"]))
    assert_is(load_coco(small(f'{{"info": 1, "Images": [], "": 2, "": 3, {text[1:]}')), SMALL)


# --- boxes in the wrong unit ---

FRACTIONS = [[0.05, 0.1, 0.2, 0.9], [0, 0, 1, 1], [0.5, 0.5, 0.52, 0.5], [-0.01, 0, 0.3, 0.3]]


def with_boxes(boxes, document=SMALL):
    for row, box in enumerate(boxes):
        document = changed(["annotations", row, "bbox"], box, document)
    return document


def test_boxes_that_are_fractions(small):
    stopping = refused(small(with_boxes(FRACTIONS)))
    assert list(stopping) == ["boxes-not-in-pixels"]
    assert stopping["boxes-not-in-pixels"].offenders == [
        "annotation 1 (image 7) has bbox [0.05, 0.1, 0.2, 0.9] in 30 x 40 pixels",
        "annotation 5 (image 42) has bbox [0.0, 0.0, 1.0, 1.0] in 20 x 10 pixels",
        "annotation 3 (image 7) has bbox [0.5, 0.5, 0.52, 0.5] in 30 x 40 pixels",
        "annotation 8 (image 42) has bbox [-0.01, 0.0, 0.3, 0.3] in 20 x 10 pixels",
    ]
    # One is enough, and what else is wrong hides nothing.
    document = with_boxes(FRACTIONS)
    document["annotations"] = document["annotations"][:1]
    assert list(refused(small(document))) == ["boxes-not-in-pixels"]
    # Boxes that nobody can use say nothing about the unit of the others.
    stopping = refused(small(with_boxes([*FRACTIONS[:2], [20, 10, -8, 5], [1, 2, float("nan"), 4]])))
    assert {kind: issue.count for kind, issue in stopping.items()} == {
        "box-not-finite": 1,
        "box-negative": 1,
        "boxes-not-in-pixels": 2,
    }


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("box", [[0, 0, 1, 2], [0.5, 0.9, 0.6, 0.1], [-2, 0, 2.5, 1], [0, -1.5, 1, 1]])
def test_one_box_of_more_than_a_pixel_is_in_pixels(small, row, box):
    boxes = [*FRACTIONS]
    boxes[row] = box
    assert_is(load_coco(small(with_boxes(boxes))), with_boxes(boxes))


def test_small_boxes_that_are_no_fractions(small):
    """Of images of one pixel, or without any area."""
    document = with_boxes([[0, 0, 1, 1]] * 4)
    for row in range(2):
        document["images"][row] |= {"width": 1, "height": 1}
    assert_is(load_coco(small(document)), document)
    assert list(refused(small(with_boxes([[0, 0, 0, 1], [0, 0, 1, 0]] * 2)))) == ["no-boxes"]


# --- what is no file ---


def test_a_missing_json(tmp_path):
    (offender,) = refused(tmp_path / "nowhere.json")["json-unreadable"].offenders
    assert offender == "No such file or directory"
    (tmp_path / "link.json").symlink_to("link.json")
    assert list(refused(tmp_path / "link.json")) == ["json-unreadable"]
    assert set(refused(tmp_path / "nowhere.json", tmp_path / "nowhere")) == {
        "json-unreadable",
        "no-image-directory",
    }


@pytest.mark.timeout(20)
def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "directory"),
        (tmp_path / "pipe", "pipe"),
        (pathlib.Path("/dev/null"), "device"),
    ):
        (offender,) = refused(path)["json-not-a-file"].offenders
        assert words in offender
