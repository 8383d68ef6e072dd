import re

import numpy as np
import pytest

from common.data.labels import LabelMap, category_faults
from tests.refusal import refusal

CATEGORIES = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 13, "name": "stop sign"}]
LABEL_MAP = LabelMap.from_categories(CATEGORIES)


def test_class_indices_of_unsorted_categories_are_in_the_order_of_their_ids():
    assert LabelMap((1, 13, 90), ("person", "stop sign", "toothbrush")) == LABEL_MAP
    assert LABEL_MAP.num_classes == 3
    reversed_map = LabelMap.from_categories(reversed(CATEGORIES))
    assert reversed_map == LABEL_MAP and hash(reversed_map) == hash(LABEL_MAP)


def test_numbered_label_map_of_3_classes_has_category_ids_and_names_1_to_3():
    assert LabelMap.numbered(3) == LabelMap((1, 2, 3), ("1", "2", "3"))


def test_class_indices_of_random_category_ids_equal_a_numpy_binary_search():
    random = np.random.default_rng(0)
    ids = random.choice(100_000, 365, replace=False)
    label_map = LabelMap.from_categories({"id": int(i), "name": f"c{i}"} for i in ids)
    category_ids = random.choice(ids, 1000)
    classes = label_map.classes_of(category_ids)
    np.testing.assert_array_equal(classes, np.searchsorted(np.sort(ids), category_ids))
    assert classes.dtype == np.int32
    assert label_map.classes_of(np.zeros(0, np.int64)).shape == (0,)


def test_largest_category_id_and_non_ascii_names_survive_json_and_pbtxt(tmp_path):
    largest = 2**63 - 1
    label_map = LabelMap.from_categories([{"id": largest, "name": "Körper"}, {"id": 0, "name": 'a "b" {c}'}])
    assert label_map.category_ids == (0, largest) and label_map.classes_of([largest, 0]).tolist() == [1, 0]
    text = f"item {{id: {largest} name: 'Körper'}} item {{id: 0 name: 'a \"b\" {{c}}'}}"
    (tmp_path / "labels.pbtxt").write_text(text, "utf-8-sig")
    label_map.save(tmp_path / "labels.json")
    for path in tmp_path.iterdir():
        assert LabelMap.load(path) == label_map


@pytest.mark.parametrize("unknown", [2, 2**63 - 2])
def test_class_of_unknown_category_id_raises_key_error_with_the_id(unknown):
    label_map = LabelMap((0, 2**63 - 1), ("a", "b"))
    with pytest.raises(KeyError, match=str(unknown)):
        label_map.classes_of(np.array([0, unknown, 2**63 - 1]))


def test_label_map_pbtxt_with_comments_quotes_and_display_names_is_read(tmp_path):
    (tmp_path / "map.pbtxt").write_text(
        """# a comment with item { id: 99 }
        item { name: "/m/01g317" id: 1 display_name: "person" }
        item { id: 90, name: 'tooth } brush # not a comment' }  # trailing
        item: {
          id: 13
          name: 'driver\\'s licence'
        }
        """
    )
    names = ("person", "driver's licence", "tooth } brush # not a comment")
    label_map = LabelMap.load(tmp_path / "map.pbtxt")
    assert label_map == LabelMap((1, 13, 90), names)
    assert label_map.aliases == ("/m/01g317", *names[1:])


def test_every_invalid_entry_of_a_list_of_categories_is_named():
    sound = {"id": 7, "name": "sound"}
    rows = [
        (None, "categories[1] is None: it needs"),
        ({"id": "1", "name": "a"}, "category 'a' has id '1': ids are integers from 0 to 9223372036854775807"),
        ({"id": True, "name": "a"}, "category 'a' has id True: "),
        ({"id": 1.0, "name": "a"}, "category 'a' has id 1.0: "),
        ({"id": -1, "name": "b"}, "category 'b' has id -1: "),
        ({"id": 2**63, "name": "a"}, "category 'a' has id 9223372036854775808: "),
        ({"name": "a"}, "category 'a' has id None: "),
        ({"id": 2, "name": 5}, "category 2 has the name 5: names are non-empty strings in UTF-8"),
        ({"id": 2}, "category 2 has the name None: "),
        ({"id": 2, "name": ""}, "category 2 has the name '': "),
        ({"id": 2, "name": "\ud800"}, "category 2 has the name '\\ud800': "),
        (
            {"id": 2, "name": "a\0b"},
            "category 2 has the name 'a\\x00b': names are non-empty",
        ),
        ({"id": 7, "name": "c"}, "category id 7 is given twice: 'sound' and 'c'"),
        ({"id": 8, "name": "sound"}, "categories 7 and 8 have the same name 'sound'"),
    ]
    categories = [sound, *(category for category, _ in rows), {"id": 9, "name": "d"}]
    faults = list(category_faults(categories))
    for fault, (_, expected) in zip(faults, rows, strict=True):
        assert fault.startswith(expected)
    assert faults[0] in refusal(LabelMap.from_categories, categories)


BAD_FILES = [
    (b"{", "not a label map"),
    (b"{}", "not a label map"),
    (b'{"categories": [1]}', r"categories\[0\] is 1"),
    (b"item { id: 1 name: 'a' } itm { id: 2 }", "item 2 cannot be parsed"),
    (b"item { id: 1\n name: 'a' }\nitem { id: 2", "item 2 cannot be parsed"),
    (b"item { name: 'a' }", "'a' has id ''"),
    (b"", "no categories"),
    (b"\xff\xfe\x00", "it is not text in UTF-8: save it as UTF-8"),
    (None, "No such file"),
]


@pytest.mark.parametrize(("content", "reason"), BAD_FILES)
def test_bad_label_map_file_is_refused_with_path_and_reason(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "labels").write_bytes(content)
    assert re.search(f"label map {tmp_path}/labels: .*{reason}", refusal(LabelMap.load, tmp_path / "labels"))


def test_differences_of_label_maps_name_each_missing_or_renamed_category():
    assert LABEL_MAP.differences(LABEL_MAP) == LABEL_MAP.differences(LabelMap((13,), ("stop sign",))) == []
    other = LabelMap((1, 2, 13, 91), ("person", "bicycle", "cat", "dog"))
    assert LABEL_MAP.differences(other) == [
        "category 2 is 'bicycle', in training it is absent",
        "category 13 is 'cat', in training it is 'stop sign'",
        "category 91 is 'dog', in training it is absent",
    ]
