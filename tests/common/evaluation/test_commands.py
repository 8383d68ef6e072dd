"""Where infer.py's results may go, and what a full disk costs. No network: detections are given."""

import errno
import os

import numpy as np
import pytest

from common.args import InferArgs
from common.datacheck.coco import load_coco
from common.datacheck.datasets import open_images
from common.errors import UserError
from common.evaluation.commands import Job
from common.labels import LabelMap

LABELS = LabelMap((3, 17, 90), ("car", "cat", "toothbrush"))
FOUND = [{"image_id": 1, "category_id": 17, "bbox": [5.0, 6.0, 20.0, 10.0], "score": 0.5}]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    cv2 = pytest.importorskip("cv2")
    path = tmp_path_factory.mktemp("clip") / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"FFV1"), 5, (96, 64))
    for level in (10, 200):
        writer.write(np.full((64, 96, 3), level, np.uint8))
    writer.release()
    return path


@pytest.fixture(params=["images", "video"])
def images(request, drawn):
    return drawn / "images" if request.param == "images" else request.getfixturevalue("clip")


def open_it(images, output_dir, **options):
    args = InferArgs(images=str(images), output_dir=str(output_dir), **options)
    return Job(args, open_images, load_coco)


def test_beside_the_images_only_what_replaces_none(images):
    directory = images if images.is_dir() else images.parent
    with pytest.raises(UserError, match="holds the images: pictures would replace them"):
        open_it(images, directory, draw=True)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    written = directory / "detections.json"
    try:
        (result,) = open_it(images, directory, draw=False).write(FOUND, LABELS)
        assert result["category_id"] == 17
        assert {path: path.stat().st_mtime_ns for path in directory.iterdir() if path != written} == before
    finally:
        written.unlink(missing_ok=True)


@pytest.mark.parametrize("draw", [True, False])
def test_a_full_disk_is_one_line_and_earlier_results_stand(images, draw, tmp_path, monkeypatch):
    job = open_it(images, tmp_path, draw=draw)
    (tmp_path / "detections.json").write_text("earlier")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"^--output_dir=.*: No space left on device$"):
        job.write(FOUND, LABELS)
    assert [path.name for path in tmp_path.iterdir()] == ["detections.json"]
    assert (tmp_path / "detections.json").read_text() == "earlier"


def test_two_files_of_one_image_are_refused(drawn, tmp_path):
    image = next((drawn / "images").glob("*.jpg")).read_bytes()
    for name in ("007.jpg", "7.jpg"):
        (tmp_path / name).write_bytes(image)
    with pytest.raises(UserError, match=r"'007\.jpg' and '7\.jpg' are both image 7"):
        open_it(tmp_path, tmp_path / "out", draw=False, submission=str(tmp_path / "a.zip"))
