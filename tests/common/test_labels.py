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


def test_arrays_agree_with_a_dictionary():
    random = np.random.default_rng(0)
    ids = random.choice(100_000, 365, replace=False)
    label_map = LabelMap.from_categories({"id": int(i), "name": f"c{i}"} for i in ids)
    expected = {int(i): rank for rank, i in enumerate(sorted(ids))}
    asked = random.choice(ids, 1000)
    assert label_map.classes_of(asked).tolist() == [expected[int(i)] for i in asked]
    assert label_map.classes_of(asked).dtype == np.int32
    assert label_map.classes_of(np.zeros(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("category_id", [0, 2, 12, 91])
def test_an_unknown_id_is_an_error_everywhere(label_map, category_id):
    with pytest.raises(KeyError, match=str(category_id)):
        label_map.classes_of(np.array([1, category_id, 90]))


def test_json_keeps_everything(tmp_path):
    label_map = LabelMap.from_categories([{"id": 0, "name": "Körper"}, {"id": 7, "name": 'a "b" {c}'}])
    assert LabelMap.from_json(label_map.to_json()) == label_map
    label_map.save(tmp_path / "labels.json")
    assert LabelMap.load(tmp_path / "labels.json") == label_map


def test_a_coco_json_is_a_label_map(drawn):
    assert LabelMap.load(drawn / "instances.json").names == ("car", "cat", "toothbrush")


def test_pbtxt(tmp_path):
    (tmp_path / "map.pbtxt").write_text(
        """# a comment with item { id: 99 }
        item {
          name: "/m/01g317"
          id: 1
          display_name: "person"
        }
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


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        ([], "no categories"),
        ([{"id": 1, "name": "a"}, {"id": 1, "name": "b"}], "id 1 is given twice: 'a' and 'b'"),
        ([{"id": 1, "name": "a"}, {"id": 4, "name": "a"}], "categories 1 and 4 have the same name 'a'"),
        ([{"id": "1", "name": "a"}], "'a' has id '1'"),
        ([{"id": True, "name": "a"}], "'a' has id True"),
        ([{"id": 1.0, "name": "a"}], "'a' has id 1.0"),
        ([{"id": -1, "name": "a"}], "'a' has id -1"),
        ([{"id": 2**63, "name": "a"}], "'a' has id 9223372036854775808"),
        ([{"name": "a"}], "'a' has id None"),
        ([{"id": 1}], "category 1 has the name None"),
        ([{"id": 1, "name": ""}], "category 1 has the name ''"),
        ([{"id": 1, "name": "\ud800"}], "category 1 has the name '.ud800': .* in UTF-8"),
    ],
)
def test_refused_categories(categories, message):
    with pytest.raises(UserError, match=message):
        LabelMap.from_categories(categories)


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
    ],
)
def test_refused_files_are_named(tmp_path, text, message):
    (tmp_path / "labels").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        LabelMap.load(tmp_path / "labels")
    assert str(tmp_path / "labels") in str(error.value)


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json: No such file"):
        LabelMap.load(tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary: 'utf-8' codec can't decode"):
        LabelMap.load(tmp_path / "binary")


def test_differences(label_map):
    assert label_map.differences(label_map) == []
    assert label_map.differences(LabelMap((13,), ("stop sign",))) == []
    found = label_map.differences(LabelMap((1, 2, 13, 91), ("person", "bicycle", "cat", "dog")))
    assert len(found) == 3
    assert found[0] == "category 2 is 'bicycle', in training it is absent"
    assert found[1] == "category 13 is 'cat', in training it is 'stop sign'"
    assert found[2].startswith("category 91 is 'dog'")


@pytest.mark.parametrize("large", [2**31, 2**53 + 1, 2**63 - 1])
def test_ids_of_any_size(tmp_path, large):
    label_map = LabelMap.from_categories([{"id": large, "name": "b"}, {"id": 3, "name": "a"}])
    assert label_map.category_ids == (3, large) and label_map.classes_of([large]) == [1]
    assert label_map.classes_of(np.array([large, 3, large])).tolist() == [1, 0, 1]
    with pytest.raises(KeyError, match=str(large - 1)):
        label_map.classes_of(np.array([large - 1]))
    label_map.save(tmp_path / "labels.json")
    assert LabelMap.load(tmp_path / "labels.json") == label_map
    (tmp_path / "labels.pbtxt").write_text(f"item {{ id: {large} name: 'b' }} item {{ id: 3 name: 'a' }}")
    assert LabelMap.load(tmp_path / "labels.pbtxt") == label_map


def test_all_faults_of_categories_are_named():
    sound = {"id": 7, "name": "sound"}
    categories = [
        sound,
        None,
        {"id": "1", "name": "a"},
        {"id": -1, "name": "b"},
        {"id": 2, "name": 5},
        {"id": 7, "name": "c"},
        {"id": 8, "name": "sound"},
        {"id": 9, "name": "d"},
    ]
    faults = list(category_faults(categories))
    assert [fault.split(":")[0] for fault in faults] == [
        "categories[1] is None",
        "category 'a' has id '1'",
        "category 'b' has id -1",
        "category 2 has the name 5",
        "category id 7 is given twice",
        "categories 7 and 8 have the same name 'sound'",
    ]
    assert list(category_faults([sound])) == []
    with pytest.raises(UserError) as error:
        LabelMap.from_categories(categories)
    assert str(error.value) == faults[0]


def test_numbered():
    assert LabelMap.numbered(3) == LabelMap((1, 2, 3), ("1", "2", "3"))
