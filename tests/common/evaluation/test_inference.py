import json
import os
import re

import pytest

from common.args import InferArgs
from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation.inference import InferenceJob, look_up, read_image_info
from tests.common.training.small_model import full_disk
from tests.refusal import refusal

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))
FOUND = [{"image_id": 1, "category_id": 17, "bbox": [5.0, 6.0, 20.0, 10.0], "score": 0.5}]


@pytest.fixture
def images(drawn, tmp_path):
    content = (drawn / "images" / "00.jpg").read_bytes()
    for name in ("007.jpg", "7.jpg"):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def job(images, output_dir, **options):
    return InferenceJob(InferArgs(images=str(images), output_dir=str(output_dir), **options))


def test_beside_the_images_only_what_replaces_none(images):
    with pytest.raises(UserError, match="has the input files: choose another directory"):
        job(images, images, draw=True)
    before = {path: path.stat().st_mtime_ns for path in images.iterdir()}
    (result,) = job(images, images, draw=False).write(FOUND, LABELS)
    assert result["category_id"] == 17
    (images / "detections.json").unlink()
    assert {path: path.stat().st_mtime_ns for path in images.iterdir()} == before


@pytest.mark.parametrize("draw", [True, False])
def test_a_full_disk_is_one_line_and_earlier_results_stand(images, draw, monkeypatch):
    ready = job(images, images / "out", draw=draw)
    (images / "out" / "detections.json").write_text("earlier")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"^--output_dir=.*: No space left on device$"):
        ready.write(FOUND, LABELS)
    assert os.listdir(images / "out") == ["detections.json"]
    assert (images / "out" / "detections.json").read_text() == "earlier"


def test_two_files_of_one_image_are_refused(images):
    listed = [{"id": 7, "file_name": name} for name in ("007.jpg", "7.jpg")]
    with pytest.raises(UserError, match=r"'007\.jpg' and '7\.jpg' both have the id 7"):
        job(images, images / "out", draw=False, image_info=image_info(images, listed))


def image_info(tmp_path, images, **more):
    path = tmp_path / "image_info.json"
    path.write_text(json.dumps({"info": {"year": 2017}, "images": images, **more}))
    return str(path)


def test_ids_from_an_image_list_without_annotations(tmp_path, capsys):
    images = [{"id": 9, "file_name": "b.jpg", "height": 3, "width": 4}, {"id": 4, "file_name": "a/c.jpg"}]
    categories = [{"id": 3, "name": "car", "supercategory": "vehicle"}, {"id": 17, "name": "cat"}]
    ids, label_map = read_image_info(image_info(tmp_path, images, categories=categories))
    assert label_map.names == ("car", "cat")
    assert look_up(["/data/a/c.jpg", "x/b.jpg"], {**ids, "c.jpg": 1}, "f") == [4, 9]
    assert look_up(["d.jpg", "b.jpg", "e.jpg"], ids, "f") == [None, 9, None]
    messages = capsys.readouterr().err.splitlines()
    assert messages[1] == "f lists 1 of 3 files in --images; 2 are skipped"
    with pytest.raises(UserError, match=r"f lists none of the files in --images \('d\.jpg', \.\.\.\)"):
        look_up(["d.jpg", "e.jpg"], ids, "f")


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
    assert re.search(message, refusal(read_image_info, path))
