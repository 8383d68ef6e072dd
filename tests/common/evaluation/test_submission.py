import json
import operator
import re
import zipfile

import pytest
from pycocotools.coco import COCO

from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation import submission
from common.evaluation.commands import look_up
from tests.refusal import refusal

CATEGORIES = [{"id": 3, "name": "car", "supercategory": "vehicle"}, {"id": 17, "name": "cat"}]


def image_info(tmp_path, images, **more):
    path = tmp_path / "image_info.json"
    path.write_text(json.dumps({"info": {"year": 2017}, "images": images, **more}))
    return str(path)


def detection(image_id, score, category_id=17):
    return {"image_id": image_id, "category_id": category_id, "bbox": [1.25, 2, 30.5, 40], "score": score}


@pytest.mark.parametrize("suffix", [".json", ".zip"])
def test_the_best_hundred_of_each_image_with_its_own_id(tmp_path, suffix):
    path = tmp_path / f"detections_test-dev2017_ours_results{suffix}"
    ids = (5_000_000_007, 42)
    found = [detection(ids[i], (s + i) / 1000) | {"file_name": "x"} for s in range(130) for i in (0, 1)]
    assert submission.write(str(path), found) == 200
    written = tmp_path / "detections_test-dev2017_ours_results.json"
    if suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            assert archive.namelist() == [written.name]
            archive.extractall(tmp_path)
    truth = COCO()
    truth.dataset = {"images": [{"id": i} for i in ids], "annotations": [], "categories": CATEGORIES}
    truth.createIndex()
    assert len(truth.loadRes(str(written)).getAnnIds(imgIds=[42])) == 100
    best = [detection(ids[i], (s + i) / 1000) for s in range(30, 130) for i in (0, 1)]
    order = operator.itemgetter("image_id", "score")
    assert sorted(json.loads(written.read_text()), key=order) == sorted(best, key=order)


def test_ids_from_an_image_list_without_annotations(tmp_path, capsys):
    images = [{"id": 9, "file_name": "b.jpg", "height": 3, "width": 4}, {"id": 4, "file_name": "a/c.jpg"}]
    known, categories = submission.read_image_info(image_info(tmp_path, images, categories=CATEGORIES))
    assert categories.names == ("car", "cat")
    assert look_up(["/data/a/c.jpg", "x/b.jpg"], {**known, "c.jpg": 1}, "f") == [4, 9]
    assert look_up(["d.jpg", "b.jpg", "e.jpg"], known, "f") == [None, 9, None]
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "f lists 1 of 3 files in --images; 2 are skipped"
    with pytest.raises(UserError, match=r"f lists none of the files in --images \('d\.jpg', \.\.\.\)"):
        look_up(["d.jpg", "e.jpg"], known, "f")


def test_categories_must_be_those_of_the_list():
    categories = LabelMap.from_categories(CATEGORIES)
    submission.check_categories(categories, LabelMap((17,), ("cat",)), "f")
    with pytest.raises(UserError, match="in the weights, category 17 is 'dog', in f it is 'cat'"):
        submission.check_categories(categories, LabelMap((17,), ("dog",)), "f")
    with pytest.raises(UserError, match="category 1 is 'cat', in f it is absent"):
        submission.check_categories(categories, LabelMap((1,), ("cat",)), "f")


def test_ids_from_names_that_are_numbers():
    assert submission.ids_by_name(["000000000139.jpg", "d/7.png"]) == [139, 7]
    with pytest.raises(UserError, match=r"'frog\.jpg' is not a number: give --image_info=FILE"):
        submission.ids_by_name(["1.jpg", "frog.jpg"])


BAD_LISTS = [
    ('{"images": [{"id": "1", "file_name": "a.jpg"}]}', r"is not a json with COCO's images: .*id"),
    ('{"images": [{"id": 1}]}', "file_name"),
    ("[1, 2", "is not a json"),
    (None, "No such file"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LISTS)
def test_a_bad_image_list_is_one_line(tmp_path, text, message):
    path = tmp_path / "info.json"
    if text is not None:
        path.write_text(text)
    assert re.search(message, refusal(submission.read_image_info, path))


def test_bad_places(tmp_path):
    assert "must end in .json or .zip" in refusal(submission.check_path, str(tmp_path / "results.txt"), [])
    with pytest.raises(UserError, match=r"the directory /nowhere is missing"):
        submission.check_path("/nowhere/detections_test-dev2017_x_results.zip", [])
    submission.check_path(str(tmp_path / "mine.zip"), [])
    others = [tmp_path / "x.json", tmp_path / "d" / ".." / "info.json"]
    with pytest.raises(UserError, match=r"info\.json would overwrite another file of this run"):
        submission.check_path(str(tmp_path / "info.json"), others)
