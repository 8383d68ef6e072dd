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


def test_run_written_by_0_1_0_resumes_within_its_epoch(copy, expected, capfd):
    (checkpoint,) = (copy / "run/checkpoints").iterdir()
    step = int(checkpoint.name.partition(".")[0])
    module, a = parsed("yolov4", "--flagfile=run/flags.txt")
    module.train(a)
    assert f"(step {step})" in capfd.readouterr().err
    rows, whole = ((list(csv.DictReader(lines))) for lines in (_lines(copy), expected["results"]))
    assert len(rows) == len(whole)
    for row, other in zip(rows, whole, strict=True):
        for name, value in other.items():
            if name in EXACT or not value:
                assert row[name] == value, (name, row)
            elif name not in {"images_per_second", *expected["metrics"]}:
                assert float(row[name]) == pytest.approx(float(value), rel=RUN_RTOL), (name, row)
    arrays = weights_of(copy / "run/last.weights.h5")
    assert arrays.keys() == expected["weights"].keys()
    for name, (total, absolute) in expected["weights"].items():
        found = arrays[name].sum(), np.abs(arrays[name]).sum()
        assert found == pytest.approx((total, absolute), rel=0, abs=WEIGHT_RTOL * absolute + 1e-6), name


def _lines(copy: pathlib.Path) -> list[str]:
    return (copy / "run/results.csv").read_text().splitlines()


@pytest.mark.parametrize(
    ("weights", "data"),
    [("run", COCO), ("run/best.weights.h5", RECORDS), ("weights.onnx", COCO)],
    ids=["run", "weights-and-records", "onnx"],
)
def test_files_written_by_0_1_0_give_the_same_detections(copy, expected, weights, data):
    module, values = flag_values(
        "yolov4.eval", f"--weights={weights}", *data, "--output_dir=out", "--num_threads=1"
    )
    module.evaluate_weights(module.EvalArgs(**values))
    metrics = json.loads((copy / "out/metrics.json").read_text())
    for name, value in expected["metrics"].items():
        if name != "per_class":
            assert metrics[name] == pytest.approx(value, abs=METRIC_ATOL, nan_ok=True), name
    detections = json.loads((copy / "out/detections.json").read_text())
    for wanted in expected["detections"]:
        distances = [_distance(wanted, detection) for detection in detections]
        assert min(distances) <= 1, wanted
        del detections[int(np.argmin(distances))]


def _distance(one: dict, other: dict) -> float:
    """Returns the largest difference, divided by its tolerance."""
    if any(one[name] != other[name] for name in ("image_id", "category_id")):
        return np.inf
    boxes = np.abs(np.subtract(one["bbox"], other["bbox"])).max() / BOX_ATOL_PX
    return max(float(boxes), abs(one["score"] - other["score"]) / SCORE_ATOL)


def test_records_written_by_0_1_0_hold_the_json(copy):
    records = open_source(file_pattern="data/shapes-*.tfrecord")
    coco = open_source(images="data/images", annotations="data/instances.json")
    assert records.label_map == coco.label_map
    rows = [records.annotations.image_ids.tolist().index(i) for i in coco.annotations.image_ids.tolist()]
    for row, other in enumerate(rows):
        assert records.encoded(other) == coco.encoded(row)
    boxes = [
        _boxes(source.annotations, order) for source, order in ((records, rows), (coco, range(len(rows))))
    ]
    np.testing.assert_allclose(*boxes, atol=1e-6)


def _boxes(annotations, order) -> np.ndarray:
    """Returns the boxes, ltrb, and category ids of the images in this order."""
    splits, table = annotations.row_splits, annotations.clipped_boxes[0]
    table = np.concatenate([table, annotations.category_ids[:, np.newaxis]], axis=1)
    return np.concatenate([table[splits[row] : splits[row + 1]] for row in order])
