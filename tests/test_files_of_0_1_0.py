"""Tests that the run, weights, exported file and records written by 0.1.0 can be used, with equal results.

tests/fixtures/make_fixture.py wrote the files and describes them. The tests use only commands and files. Sums
differ in the last digits between processors, so there are tolerances. Epochs, steps and learning rates are
equal.
"""

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest

from common.data.open import open_source
from tests.common.training.small_model import weights_of
from tests.small_apps import flag_values, parsed

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "0.1.0"
EXACT = ("epoch", "step", "learning_rate", "boxes_dropped", "boxes_over_limit", "skipped_steps")
COCO = ("--eval_images=data/images", "--eval_annotations=data/instances.json")
RECORDS = ("--eval_file_pattern=data/shapes-*.tfrecord",)
SCORE_ATOL, BOX_ATOL_PX, METRIC_ATOL = 1e-4, 0.05, 1e-6
RUN_RTOL = 1e-3
WEIGHT_RTOL = 1e-2  # of the sum of an array's absolute values


@pytest.fixture(scope="module")
def expected():
    return json.loads((FIXTURE / "expected.json").read_text())


@pytest.fixture
def copy(tmp_path, monkeypatch) -> pathlib.Path:
    """The paths in flags.txt are relative, so that the run can be resumed in a copy."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_written_by_version_0_1_0_resumes_within_its_epoch(copy, expected, capfd):
    (checkpoint,) = (copy / "run/checkpoints").iterdir()
    step = int(checkpoint.name.partition(".")[0])
    module, a = parsed("yolov4", "--flagfile=run/flags.txt")
    module.train(a)
    assert f"(step {step})" in capfd.readouterr().err
    resumed = list(csv.DictReader((copy / "run/results.csv").read_text().splitlines()))
    uninterrupted = list(csv.DictReader(expected["results"]))
    for row, expected_row in zip(resumed, uninterrupted, strict=True):
        for name, value in expected_row.items():
            if name in EXACT or not value:
                assert row[name] == value, (name, row)
            elif name not in {"images_per_second", *expected["metrics"]}:
                assert float(row[name]) == pytest.approx(float(value), rel=RUN_RTOL), (name, row)
    arrays = weights_of(copy / "run/last.weights.h5")
    assert arrays.keys() == expected["weights"].keys()
    for name, (total, absolute) in expected["weights"].items():
        sums = arrays[name].sum(), np.abs(arrays[name]).sum()
        assert sums == pytest.approx((total, absolute), rel=0, abs=WEIGHT_RTOL * absolute + 1e-6), name


@pytest.mark.parametrize(
    ("weights", "data"),
    [("run", COCO), ("run/best.weights.h5", RECORDS), ("weights.onnx", COCO)],
    ids=["run", "weights-and-records", "onnx"],
)
def test_weights_written_by_version_0_1_0_give_the_same_detections(copy, expected, weights, data):
    module, values = flag_values(
        "yolov4.eval", f"--weights={weights}", *data, "--output_dir=out", "--num_threads=1"
    )
    module.evaluate_weights(module.EvalArgs(**values))
    metrics = json.loads((copy / "out/metrics.json").read_text())
    for name, value in expected["metrics"].items():
        if name != "per_class":
            assert metrics[name] == pytest.approx(value, abs=METRIC_ATOL, nan_ok=True), name
    detections = json.loads((copy / "out/detections.json").read_text())
    for expected_detection in expected["detections"]:
        distances = [distance(expected_detection, detection) for detection in detections]
        assert min(distances) <= 1, expected_detection
        del detections[int(np.argmin(distances))]


def distance(one: dict, other: dict) -> float:
    """Returns the largest difference, divided by its tolerance."""
    if any(one[name] != other[name] for name in ("image_id", "category_id")):
        return np.inf
    boxes = np.abs(np.subtract(one["bbox"], other["bbox"])).max() / BOX_ATOL_PX
    return max(float(boxes), abs(one["score"] - other["score"]) / SCORE_ATOL)


def test_tfrecords_written_by_version_0_1_0_have_the_images_and_boxes_of_the_coco_json(copy):
    records = open_source(file_pattern="data/shapes-*.tfrecord")
    coco = open_source(images="data/images", annotations="data/instances.json")
    assert records.label_map == coco.label_map
    rows = [records.annotations.image_ids.tolist().index(i) for i in coco.annotations.image_ids.tolist()]
    for coco_row, row in enumerate(rows):
        assert records.encoded(row) == coco.encoded(coco_row)
        boxes, expected = boxes_of(records.annotations, row), boxes_of(coco.annotations, coco_row)
        np.testing.assert_allclose(boxes, expected, atol=1e-6)


def boxes_of(annotations, row: int) -> np.ndarray:
    """Returns (N, 5): the boxes of an image, ltrb, and their category ids."""
    of_image = slice(*annotations.row_splits[row : row + 2])
    boxes, category_ids = annotations.clipped_boxes[0][of_image], annotations.category_ids[of_image]
    return np.concatenate([boxes, category_ids[:, np.newaxis]], axis=1)
