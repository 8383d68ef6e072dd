"""COCO jsons in which anything is changed: each is refused, or read as it is."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.datacheck.coco import load_coco
from common.datacheck.issues import DataError
from tests.common.coco_documents import LARGE, SMALL, assert_is, changed, write_json


@pytest.fixture
def small(tmp_path):
    """Writes a variant of SMALL and returns its path."""
    return lambda document=SMALL: write_json(tmp_path, document)


VALUES = st.one_of(
    st.sampled_from(
        [..., None, True, 0, -1, 1, 2, 7, 9, 42, 2**31, LARGE, LARGE + 1, 10**30, 1.5, -0.0, 1e300, "", "7"]
    ),
    st.sampled_from(
        [
            [],
            {},
            [1, 2, 3],
            [1, 2, 3, 4],
            [0, 0, -1, 1],
            [15, 5, 20, 20],
            [0, 0, 0, 0],
            [0, 0, 1, 1],
            [1, 2, 3, "4"],
        ]
    ),
    st.sampled_from(
        [float("nan"), float("inf"), [1, 2, float("nan"), 4], "\ud800", "a.jpg", "ä" * 300, [[[]]], [{}]]
    ),
)


def paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from paths(child, (*path, key))


def is_sound(document):
    """The rules, once more and plainly."""

    def integer(value, low, high=LARGE):
        return type(value) is int and low <= value <= high

    def number(value):
        return type(value) in (int, float) and abs(value) <= 1.7e308

    def text(value):
        return isinstance(value, str) and value and "\ud800" not in value

    try:
        images, objects, categories = (document[key] for key in ("images", "annotations", "categories"))
        if not (isinstance(images, list) and isinstance(objects, list) and isinstance(categories, list)):
            return False
        image_ids = [image["id"] for image in images]
        category_ids = [category["id"] for category in categories]
        names = [category["name"] for category in categories]
        object_ids = [o["id"] for o in objects if o.get("id") is not None]
        boxes = [o["bbox"] for o in objects]
        return bool(
            all(integer(i, 0) for i in image_ids + category_ids + object_ids)
            and all(len(set(column)) == len(column) for column in (image_ids, category_ids, object_ids))
            and all(map(text, names))
            and len(set(names)) == len(names)
            and all(text(image["file_name"]) for image in images)
            and all(integer(image[side], 1, 2**31 - 1) for image in images for side in ("width", "height"))
            and all(integer(o["image_id"], 0) and o["image_id"] in image_ids for o in objects)
            and all(integer(o["category_id"], 0) and o["category_id"] in category_ids for o in objects)
            and all(isinstance(box, list) and len(box) == 4 and all(map(number, box)) for box in boxes)
            and all(box[2] >= 0 and box[3] >= 0 for box in boxes)
            and all(
                type(o.get("iscrowd", 0)) in (int, bool) and o.get("iscrowd", 0) in (0, 1) for o in objects
            )
            and all(o.get("area") is None or (number(o["area"]) and o["area"] >= 0) for o in objects)
            and not all_are_fractions(images, objects)
            and has_target(images, objects)
        )
    except (KeyError, TypeError, AttributeError):
        return False


def all_are_fractions(images, objects):
    larger = {image["id"] for image in images if min(image["width"], image["height"]) > 1}
    boxes = [o["bbox"] for o in objects if o["image_id"] in larger]
    reach = [max(abs(left), abs(top), left + w, top + h) for left, top, w, h in boxes]
    return all(edge <= 1.05 for edge in reach) and any(w > 0 and h > 0 for _, _, w, h in boxes)


def has_target(images, objects):
    sizes = {image["id"]: (image["width"], image["height"]) for image in images}
    for o in objects:
        edges = [
            [np.float32(min(max(v / size, 0), 1)) for v in (start, start + length)]
            for start, length, size in zip(o["bbox"], o["bbox"][2:], sizes[o["image_id"]], strict=False)
        ]
        if not o.get("iscrowd") and all(first < last for first, last in edges):
            return True
    return False


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(sorted(paths(SMALL), key=str)), VALUES), min_size=1, max_size=3
    )
)
def test_any_values_are_refused_or_read(small, changes):
    document = SMALL
    for path, value in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            document = changed(path, value, document)
    path = small(document)
    try:
        annotations = load_coco(path)
    except DataError as error:
        assert not is_sound(document), str(error)
        assert error.issues[0].stopping
    else:
        assert is_sound(document)
        assert_is(annotations, document)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_are_refused_or_read(small, data):
    content = bytearray(json.dumps(SMALL).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        end = min(begin + data.draw(st.sampled_from([0, 1, 1, 2, 8, 100])), len(content))
        content[begin:end] = data.draw(
            st.one_of(
                st.binary(max_size=3),
                st.sampled_from(
                    [b"NaN", b"Infinity", b"-", b"null", b"1e999", b'"', b"[", b"}", b"\\u", b"0", b"\xff"]
                ),
            )
        )
    path = small(bytes(content))
    try:
        annotations = load_coco(path)
    except DataError as error:
        assert error.issues[0].stopping
    else:
        assert_is(annotations, json.loads(bytes(content).decode("utf-8", "replace")))
