"""LabelMap: order, look-ups, files, and what is refused."""

import numpy as np
import pytest

from common.errors import UserError
from common.labels import LabelMap, category_faults

CATEGORIES = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 13, "name": "stop sign"}]


@pytest.fixture
def label_map():
    return LabelMap.from_categories(CATEGORIES)


def test_classes_follow_the_ids_not_the_order_of_the_file(label_map):
    assert label_map.category_ids == (1, 13, 90)
    assert label_map.names == ("person", "stop sign", "toothbrush")
    assert label_map.num_classes == 3
    assert label_map == LabelMap.from_categories(reversed(CATEGORIES))
    assert hash(label_map) == hash(LabelMap.from_categories(reversed(CATEGORIES)))
    assert LabelMap.numbered(3) == LabelMap((1, 2, 3), ("1", "2", "3"))


def test_arrays_agree_with_a_dictionary():
    random = np.random.default_rng(0)
    ids = random.choice(100_000, 365, replace=False)
    label_map = LabelMap.from_categories({"id": int(i), "name": f"c{i}"} for i in ids)
    expected = {int(i): rank for rank, i in enumerate(sorted(ids))}
    asked = random.choice(ids, 1000)
    assert label_map.classes_of(asked).tolist() == [expected[int(i)] for i in asked]
    assert label_map.classes_of(asked).dtype == np.int32
    assert label_map.classes_of(np.zeros(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("large", [2**31, 2**53 + 1, 2**63 - 1])
def test_ids_of_any_size_and_names_of_any_letters_in_all_files(tmp_path, large):
    label_map = LabelMap.from_categories([{"id": large, "name": "Körper"}, {"id": 0, "name": 'a "b" {c}'}])
    assert label_map.category_ids == (0, large) and label_map.classes_of([large, 0]).tolist() == [1, 0]
    for unknown in (2, large - 1):
        with pytest.raises(KeyError, match=str(unknown)):
            label_map.classes_of(np.array([0, unknown, large]))
    assert LabelMap.from_json(label_map.to_json()) == label_map
    label_map.save(tmp_path / "labels.json")
    assert LabelMap.load(tmp_path / "labels.json") == label_map
    (tmp_path / "labels.pbtxt").write_text(
        f"item {{id: {large} name: 'Körper'}} item {{id: 0 name: 'a \"b\" {{c}}'}}"
    )
    assert LabelMap.load(tmp_path / "labels.pbtxt") == label_map


def test_a_coco_json_is_a_label_map(drawn):
    assert LabelMap.load(drawn / "instances.json").names == ("car", "cat", "toothbrush")


def test_pbtxt(tmp_path):
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
    label_map = LabelMap.load(tmp_path / "map.pbtxt")
    assert label_map.category_ids == (1, 13, 90)
    assert label_map.names == ("person", "driver's licence", "tooth } brush # not a comment")


def test_all_faults_of_categories_are_named():
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
        ({"id": 7, "name": "c"}, "category id 7 is given twice: 'sound' and 'c'"),
        ({"id": 8, "name": "sound"}, "categories 7 and 8 have the same name 'sound'"),
    ]
    categories = [sound, *(category for category, _ in rows), {"id": 9, "name": "d"}]
    faults = list(category_faults(categories))
    assert len(faults) == len(rows)
    for fault, (_, expected) in zip(faults, rows, strict=True):
        assert fault.startswith(expected)
    assert list(category_faults([sound])) == []
    with pytest.raises(UserError) as error:
        LabelMap.from_categories(categories)
    assert str(error.value) == faults[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no label map"),
        ("{}", "no label map"),
        ('{"categories": [1]}', r"categories\[0\] is 1"),
        ("item { id: 1 name: 'a' } itm { id: 2 }", "item 2 is not understood"),
        ("item { id: 1\n name: 'a' }\nitem { id: 2", "item 2 is not understood"),
        ("item { name: 'a' }", "'a' has id ''"),
        ("", "no categories"),
        (b"\xff\xfe\x00", "labels: 'utf-8' codec can't decode"),
        (None, "labels: No such file"),
    ],
)
def test_refused_files_are_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "labels").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as error:
        LabelMap.load(tmp_path / "labels")
    assert str(tmp_path / "labels") in str(error.value)


def test_differences(label_map):
    assert label_map.differences(label_map) == []
    assert label_map.differences(LabelMap((13,), ("stop sign",))) == []
    found = label_map.differences(LabelMap((1, 2, 13, 91), ("person", "bicycle", "cat", "dog")))
    assert found == [
        "category 2 is 'bicycle', in training it is absent",
        "category 13 is 'cat', in training it is 'stop sign'",
        "category 91 is 'dog', in training it is absent",
    ]
