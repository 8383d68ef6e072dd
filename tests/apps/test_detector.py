"""Tests detector.py of each app and common/evaluation/image_detector.py against infer.py."""

import concurrent.futures
import importlib
import json

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from common.weights import weight_files
from tests.apps.conftest import one_app, slow_for
from tests.conftest import ROOT
from tests.refusal import refusal
from tests.small_apps import eagerly

IMAGES = ROOT / "examples" / "shapes"


def weights(app):
    return ROOT / app.name / "demo.weights.h5"


@pytest.fixture(scope="module")
def detect(app):
    """The detector of the demo's weights, in batches of four images."""
    with eagerly():
        yield importlib.import_module(f"{app.name}.detector").load(weights(app), batch_size=4)


@slow_for("efficientdet")
def test_python_detector_gives_the_detections_of_infer_py_for_files_and_arrays(
    app, detect, command, tmp_path
):
    Image.open(IMAGES / "000004.jpg").save(tmp_path / "lossless.png")
    files = [*sorted(IMAGES.iterdir()), tmp_path / "lossless.png"]
    flags = ["--batch_size=4", "--nodraw", f"--output_dir={tmp_path}/out"]
    results = command("infer", f"--weights={weights(app)}", f"--images={IMAGES}", *flags)
    detections = detect(files)
    assert len(results) == sum(len(each.scores) for each in detections[:-1]) > 10
    categories = json.loads(weight_files.read_metadata(weights(app))["label_map"])["categories"]
    names = {category["id"]: category["name"] for category in categories}
    for number, (boxes_px, scores, class_names) in enumerate(detections[:-1]):
        expected = [result for result in results if result["image_id"] == number]
        boxes_ltwh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
        np.testing.assert_allclose(boxes_ltwh_px, [result["bbox"] for result in expected], atol=0.02)
        np.testing.assert_allclose(scores, [result["score"] for result in expected], atol=2e-6)
        assert class_names.tolist() == [names[result["category_id"]] for result in expected]

    picture = np.asarray(Image.open(files[-1]))
    as_array, as_batch = detect(picture), detect(np.stack([picture, picture[:, ::-1]]))
    assert [len(as_array), len(as_batch)] == [1, 2]
    for tested in (as_array[0], as_batch[0]):
        np.testing.assert_allclose(tested.boxes_px, detections[-1].boxes_px, atol=0.02)
        np.testing.assert_array_equal(tested.class_names, detections[-1].class_names)
    assert not np.array_equal(as_batch[0].boxes_px, as_batch[1].boxes_px)
    boxes_px, *_ = detect(str(files[0]), 1.0)[0]
    assert boxes_px.shape == (0, 4)
    assert detect([]) == []


@one_app
def test_unusable_image_of_the_python_detector_is_refused_and_the_next_one_is_detected(
    detect, drawn, tmp_path
):
    good, bad = drawn / "images" / "00.jpg", tmp_path / "bad.png"
    png = (drawn / "images" / "11.png").read_bytes()
    middle = len(png) // 2
    contents = {"not an image": b"text", "damaged": png[:middle] + bytes(20) + png[middle + 20 :]}
    for message, content in contents.items():
        bad.write_bytes(content)
        assert refusal(detect, [good, bad]).startswith(f"{bad}: ")
        assert message in refusal(detect, [good, bad])
    assert "is no file: give paths of image files" in refusal(detect, [tmp_path / "missing.jpg"])
    assert "is a directory: give paths of image files" in refusal(detect, drawn)
    for array in (np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3), np.float32), np.zeros((2, 8, 8, 1), "u1")):
        message = f"an array has the shape {array.shape[-3:]} and dtype {array.dtype}: give uint8 (h, w, 3)"
        assert refusal(detect, array).startswith(message)
    for value in ([3], 3):
        assert "an image is a int: give paths" in refusal(detect, value)
    assert refusal(detect, "a" * 5000).endswith("cannot be read: File name too long")
    assert refusal(detect, good, float("nan")) == "score_threshold=nan: give a number from 0 to 1"
    assert len(detect([good])) == 1


@one_app
def test_python_detector_without_weights_or_with_an_impossible_batch_size_is_refused(app, tmp_path):
    load = importlib.import_module(f"{app.name}.detector").load
    with pytest.raises(UserError, match="no such file or run directory"):
        load(tmp_path / "run")
    for batch_size in (0, -1, 2.5):
        message = refusal(load, weights(app), batch_size=batch_size)
        assert message == f"batch_size={batch_size}: give an integer of at least 1"


@one_app
def test_threads_that_share_a_python_detector_wait_for_each_other(detect):
    images = sorted(IMAGES.iterdir())[:2]
    expected = [len(each.scores) for each in detect(images)]
    with eagerly(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(detect, [images] * 8, timeout=60))
    assert [[len(each.scores) for each in result] for result in results] == [expected] * 8
