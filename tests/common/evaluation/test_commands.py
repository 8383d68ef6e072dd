import os

import pytest

from common.args import InferArgs
from common.data.check.datasets import open_images
from common.data.labels import LabelMap
from common.errors import UserError
from common.evaluation.commands import Job
from tests.common.training.small_model import full_disk

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))
FOUND = [{"image_id": 1, "category_id": 17, "bbox": [5.0, 6.0, 20.0, 10.0], "score": 0.5}]


@pytest.fixture
def images(drawn, tmp_path):
    content = (drawn / "images" / "00.jpg").read_bytes()
    for name in ("007.jpg", "7.jpg"):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def job(images, output_dir, **options):
    return Job(InferArgs(images=str(images), output_dir=str(output_dir), **options), open_images)


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
    with pytest.raises(UserError, match=r"'007\.jpg' and '7\.jpg' both have the id 7"):
        job(images, images / "out", draw=False, submission=str(images / "a.zip"))
