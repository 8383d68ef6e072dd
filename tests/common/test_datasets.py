"""Data opened without a data check: the same annotations as with it, and one clear line for bad input."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from common import datasets
from common.annotations import Annotations, read_coco
from common.args import Args
from common.datacheck import datasets as checked
from common.datacheck.coco import load_coco
from common.errors import UserError
from common.labels import LabelMap
from tests.common.coco_documents import LARGE, SMALL, assert_is, changed, write_json


def assert_same(path):
    """The plain reader gives what the strict one gives, to the bit."""
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


@pytest.mark.parametrize(
    "name",
    [
        "coco128/instances.json",
        "bccd/instances_train.json",
        "bccd/instances_val.json",
        "bccd/instances_test.json",
        "drawn/instances.json",
    ],
)
def test_real_data_are_read_as_by_the_strict_reader(name, request):
    directory, file = name.split("/")
    assert_same(request.getfixturevalue(directory) / file)


def gaps():
    document = copy.deepcopy(SMALL)
    for image, image_id in zip(document["images"], (LARGE, 3), strict=True):
        for an_object in document["annotations"]:
            if an_object["image_id"] == image["id"]:
                an_object["image_id"] = -image_id
        image["id"] = image_id
    for an_object in document["annotations"]:
        an_object["image_id"] = abs(an_object["image_id"])
        for key in ("id", "area", "iscrowd"):
            an_object.pop(key, None)
    return document


HARD = {
    "gaps in ids, defaults": gaps(),
    "crowds": changed(["annotations", 0, "iscrowd"], True),
    "an image without boxes": changed(["annotations", 1], ..., changed(["annotations", 3], ...)),
    "no ids": changed(["annotations", 2, "id"], None),
    "a box that reaches outside": changed(["annotations", 0, "bbox"], [-3, 2, 1e308, 1e308]),
    "a box without area": changed(["annotations", 3, "bbox"], [1, 2, 0, 4]),
    "categories in another order": changed(["categories"], SMALL["categories"][::-1]),
    "unused keys": changed(["annotations", 1, "segmentation"], {"counts": "x", "size": [1, 2]}),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_are_read_as_by_the_strict_reader(name, tmp_path):
    assert_is(assert_same(write_json(tmp_path, HARD[name])), HARD[name])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed(["images"], ...), "missing required field `images`"),
        (changed(["images"], []), "length >= 1"),
        (changed(["annotations", 2, "bbox"], [1, 2, 3]), r"annotations\[2\].bbox"),
        (changed(["images", 1, "width"], "9"), r"Expected `int`, got `str` - at `\$.images\[1\].width`"),
        (changed(["annotations", 2, "image_id"], 8), r"annotations\[2\] has image_id 8, which is not in the"),
        (changed(["annotations", 2, "category_id"], 3), r"annotations\[2\] has category_id 3, which is not"),
        (changed(["categories"], []), "no categories"),
        (changed(["categories", 1, "name"], "two"), "same name 'two'"),
        (json.dumps(SMALL)[:-20], "truncated"),
        (b"", "truncated"),
        (b"\x1f\x8b\x08\x00abc", "malformed"),
    ],
)
def test_bad_annotations_are_one_clear_line(document, message, tmp_path):
    path = write_json(tmp_path, document)
    with pytest.raises(UserError, match=message) as error:
        read_coco(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_json_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json: No such file"):
        read_coco(tmp_path / "nowhere.json")


def test_the_functions_of_the_data_check_are_all_there(drawn, capsys):
    given = {
        "train_images": str(drawn / "images"),
        "train_annotations": str(drawn / "instances.json"),
        "eval_images": str(drawn / "images"),
        "eval_annotations": str(drawn / "instances.json"),
    }
    options = {"num_replicas": 2, "max_instances": 100}
    found = datasets.open_datasets(Args(batch_size=6, **given), **options)
    expected = checked.open_datasets(Args(batch_size=6, **given), **options)
    assert [source.fingerprint for source in found] == [source.fingerprint for source in expected]
    assert "training data: 12 images" in capsys.readouterr().err
    assert datasets.open_evaluation(Args(**given), found[0].label_map).size == 12
    assert datasets.open_images(str(drawn / "images")) == checked.open_images(str(drawn / "images"))
    for module in (datasets, checked):
        with pytest.raises(UserError, match=r"12 images.*--batch_size=7 x 2 ranks"):
            module.open_datasets(Args(batch_size=7, **given), **options)
        with pytest.raises(UserError, match="category 3 is 'car', in training it is absent"):
            module.open_evaluation(Args(**given), LabelMap((17,), ("cat",)))
    with pytest.raises(UserError, match=r"x-.: TFRecords need common/datacheck"):
        datasets.open_source(file_pattern="x-*")
    error = RuntimeError("Critical error\n  Error in CPU operator\nmore")
    said = str(datasets.explain(error, found[0], "dali_cpu"))
    assert said == "the loader (dali_cpu) stopped: Error in CPU operator"
