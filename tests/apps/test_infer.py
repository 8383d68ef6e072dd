"""Tests infer.py of each app with images, ids of COCO and a video."""

import json
import re

import numpy as np
import PIL.Image
import pytest
from pycocotools.coco import COCO

from tests.apps.conftest import one_app
from tests.refusal import refusal
from tests.small_apps import eagerly


@pytest.fixture
def infer(trained, command, tmp_path):
    def run(images, *flags: str):
        output = [] if any("--output_dir" in flag for flag in flags) else [f"--output_dir={tmp_path}/out"]
        with eagerly():
            return command("infer", f"--weights={trained}", f"--images={images}", *output, *flags)

    return run


def read(path):
    return json.loads(path.read_text())


def test_infer_py_with_annotations_draws_ground_truth_and_detections_side_by_side(infer, drawn, tmp_path):
    flags = [f"--annotations={drawn}/instances.json", "--score_threshold=0.05", "--batch_size=5"]
    results = infer(f"{drawn}/images", *flags)
    truth, written = read(drawn / "instances.json"), read(tmp_path / "out" / "detections.json")
    assert len(written) == len(results)
    names = {image["id"]: image["file_name"] for image in truth["images"]}
    assert all(names[result["image_id"]] == result["file_name"] for result in written)
    assert all(result["score"] >= 0.05 for result in written)
    for image in truth["images"]:
        stem = image["file_name"].rpartition(".")[0]
        picture = PIL.Image.open(tmp_path / "out" / f"{stem}.png")
        assert picture.width > 2 * image["width"]
    assert (tmp_path / "out" / "contact_sheet.png").exists()


@one_app
def test_detections_have_the_ids_of_image_info_and_are_read_by_pycocotools(infer, drawn, tmp_path, capsys):
    document = read(drawn / "instances.json")
    del document["annotations"]
    del document["images"][3]
    for i, image in enumerate(document["images"]):
        image["id"] = 5_000_000_140 - 7 * i  # as text, "105" would come before "63"
    (tmp_path / "info.json").write_text(json.dumps(document))
    flags = [f"--image_info={tmp_path}/info.json", "--batch_size=2", "--nodraw"]
    results = infer(f"{drawn}/images", *flags, "--score_threshold=0")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"detections.json", "image_info.json"}
    listed = read(tmp_path / "out" / "image_info.json")
    assert listed["categories"] == sorted(document["categories"], key=lambda category: category["id"])
    keys = ("id", "file_name", "height", "width")
    images = [{key: image[key] for key in keys} for image in document["images"]]
    assert listed["images"] == sorted(images, key=lambda image: image["file_name"])
    assert re.search(r"^11 images in \d+\.\d s, compiling included", capsys.readouterr().out, re.MULTILINE)
    names = {image["id"]: image["file_name"] for image in document["images"]}
    assert results
    assert all(names[result["image_id"]] == result["file_name"] for result in results)
    assert {result["category_id"] for result in results} <= {3, 17, 90}
    written = read(tmp_path / "out" / "detections.json")
    assert sorted(map(str, written)) == sorted(map(str, [dict(sorted(result.items())) for result in results]))
    ids = [result["image_id"] for result in written]
    assert ids == sorted(ids)
    truth = COCO()
    truth.dataset = {"images": document["images"], "annotations": [], "categories": document["categories"]}
    truth.createIndex()
    loaded = truth.loadRes(str(tmp_path / "out" / "detections.json"))
    assert [row["bbox"] for row in loaded.dataset["annotations"]] == [row["bbox"] for row in written]

    threshold = sorted(result["score"] for result in results)[len(results) // 2]
    confident = infer(f"{drawn}/images", *flags, f"--score_threshold={threshold}")
    assert 0 < len(confident) < len(results)
    assert confident == [result for result in results if result["score"] >= threshold]


@pytest.fixture(scope="module")
def clip(drawn, tmp_path_factory):
    """A directory with a video of seven frames, clip.avi, and its decoded frames as images."""
    cv2 = pytest.importorskip("cv2")
    directory = tmp_path_factory.mktemp("clip")
    (directory / "frames").mkdir()
    code = cv2.VideoWriter_fourcc(*"FFV1")
    writer = cv2.VideoWriter(str(directory / "clip.avi"), code, 5, (96, 64))
    for file in sorted((drawn / "images").iterdir())[:7]:
        writer.write(np.asarray(PIL.Image.open(file).convert("RGB").resize((96, 64)))[..., ::-1].copy())
    writer.release()
    capture = cv2.VideoCapture(str(directory / "clip.avi"))
    for number in range(7):
        cv2.imwrite(str(directory / "frames" / f"{number}.png"), capture.read()[1])
    return directory


@one_app
def test_detections_in_a_video_equal_those_in_its_frames(infer, clip, tmp_path, capsys):
    import cv2

    flags = ["--score_threshold=0", "--batch_size=4"]
    (tmp_path / "video").mkdir()
    (tmp_path / "video" / "image_info.json").write_text("of earlier images")
    results = infer(clip / "clip.avi", *flags, f"--output_dir={tmp_path}/video")
    assert not (tmp_path / "video" / "image_info.json").exists()
    assert "detections in 7 frames: see " in capsys.readouterr().out
    expected = infer(clip / "frames", *flags, "--pipeline_type=tensorflow", "--nodraw")
    assert len(results) == len(expected) > 0
    for a, b in zip(results, expected, strict=True):
        assert a["image_id"] == a["frame"] == b["image_id"]
        assert a["category_id"] == b["category_id"]
        np.testing.assert_allclose(a["bbox"], b["bbox"], atol=0.02)
        assert a["seconds"] == pytest.approx(a["frame"] / 5)
    assert read(tmp_path / "video" / "detections.json")[0]["file_name"] == "clip.avi"
    capture = cv2.VideoCapture(str(tmp_path / "video" / "clip.mp4"))
    frames = [capture.read()[1] for _ in range(7)]
    assert frames[6].shape == (64, 96, 3)
    assert not capture.read()[0]
    first = results[0]["frame"]
    undrawn = cv2.imread(str(clip / "frames" / f"{first}.png"))
    assert np.abs(frames[first].astype(int) - undrawn).max() > 100
    assert not list((tmp_path / "video").glob(".tmp-*"))
    assert "has the input files" in refusal(infer, clip / "clip.avi", f"--output_dir={clip}")


@one_app
def test_image_info_with_other_categories_than_the_weights_is_refused(infer, drawn, tmp_path):
    document = read(drawn / "instances.json")
    next(category for category in document["categories"] if category["id"] == 3)["name"] = "bus"
    (tmp_path / "other.json").write_text(json.dumps(document))
    message = refusal(infer, f"{drawn}/images", f"--image_info={tmp_path}/other.json")
    assert re.search(r"category 3 is 'car', in .*other\.json it is 'bus'", message)
