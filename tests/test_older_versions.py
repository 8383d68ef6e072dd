"""Tests that runs and weights of commit 6eb6d8f can be resumed, loaded and evaluated, with equal numbers.

tests/fixtures/6eb6d8f has the results of the code of commit 6eb6d8f. The script that made them is
tests/fixtures/make_fixture.py of commit 055267a. The files are:

    data/                       16 synthetic images with instances.json, and as TFRecords with indexes
    <app>.tar.xz                runs/<app>: a run of three epochs, which SIGTERM stopped in the second epoch
                                (EfficientDet: COCO files; YOLOv4: TFRecords), with its settings;
                                runs/<app>-whole: the last weights of the same run without a stop;
                                weights/: weights of a longer run, for YOLOv4 also an exported ONNX file
    expected.json               results of the run without a stop, and of eval.py
    fixed.json, fixed.npz       losses, gradients, targets and detections of four models with fixed weights on
                                a fixed batch, the first batches of both loaders, and all settings

Except in tests/fixtures/calculations.py, the tests use only commands and files.

Other processors give sums that differ in the last digits, so there is a tolerance. The order of the images,
the learning rates, and the number of boxes dropped in each epoch must be equal.
"""

import json
import pathlib
import shutil
import tarfile

import numpy as np
import pytest

from tests import small_apps
from tests.common.training.small_model import rows_of
from tests.fixtures import calculations

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "6eb6d8f"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
FIXED = json.loads((FIXTURE / "fixed.json").read_text())
D0 = pytest.param("efficientdet-d0", marks=pytest.mark.slow)
COCO = ("--eval_images=data/images", "--eval_annotations=data/instances.json")
RECORDS = ("--eval_file_pattern=data/records/shapes*.tfrecord",)
# {name of an evaluation: (app, weights, data)}
EVALUATIONS = {
    "efficientdet weights": ("efficientdet", "weights/efficientdet.weights.h5", COCO),
    "yolov4 weights": ("yolov4", "weights/yolov4.weights.h5", RECORDS),
    "yolov4 onnx": ("yolov4", "weights/yolov4.onnx", COCO),
}
# Columns of results.csv whose values must be equal on every processor.
EXACT = ("epoch", "step", "learning_rate", "boxes_dropped", "boxes_truncated", "skipped_steps")
RENAMED = {"boxes_truncated": "boxes_over_limit"}

# The tolerances are about five times the differences that TF_ENABLE_ONEDNN_OPTS=0 makes.
LOSS_RTOL = 2e-5
GRADIENT_RTOL = {"yolov4-tiny": 1e-2}  # at kinks of leaky ReLU or max, rounding changes gradients
OTHER_GRADIENT_RTOL = 1e-3
FIXED_BOX_ATOL, FIXED_SCORE_ATOL = 2e-3, 2e-4  # batch norms of only four images amplify errors
RUN_RTOL = 1e-3
# Tolerances relative to the largest weight of an array. For YOLOv4, CPUs of two makers differed by 9e-3.
WEIGHT_ATOL = {"efficientdet": 1e-3, "yolov4": 2e-2}
SCORE_ATOL, BOX_ATOL_PX, METRIC_ATOL = 2e-5, 1e-2, 1e-6
PIXEL_ATOL = 1e-3  # of block means of normalised pixels; one grey level is 0.004 to 0.017


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Runs can be resumed here, because their paths are relative."""
    directory = tmp_path_factory.mktemp("older")
    shutil.copytree(FIXTURE / "data", directory / "data")
    for archive in FIXTURE.glob("*.tar.xz"):
        with tarfile.open(archive) as file:
            file.extractall(directory)  # trusted, so without `filter`, new in Python 3.11.4
    fields = {
        "efficientdet": "assignment: max_iou\nseparable: true\n",
        "yolov4": "objectness_iou: 0.0\nneighbour_cells: false\n",
    }
    for app, as_then in fields.items():  # fields that nano models got later
        with (directory / "runs" / f"{app}.yaml").open("a") as settings:
            settings.write(as_then)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("app", ["efficientdet", "yolov4"])
def test_a_run_that_was_stopped_in_an_epoch_goes_on_from_the_epoch_before(app, copy, monkeypatch, capfd):
    """A position within an epoch needs the same DALI graph."""
    monkeypatch.chdir(copy)
    module, a = small_apps.parsed(app, f"--flagfile=runs/{app}/flags.txt")
    module.train(a)
    said = capfd.readouterr().err
    assert "resumed after epoch 1 (step 8)\n" in said
    assert said.count("changed: dali_graph; the run continues from an epoch's end, results may differ\n") == 1
    rows = rows_of(copy / "runs" / app)
    header, *wanted_rows = EXPECTED[app]["run"]["results.csv"]
    for name in ("epoch", "step", "learning_rate"):
        assert [row[name] for row in rows] == [values[header.index(name)] for values in wanted_rows]
    assert all(float(row["loss"]) > 0 and row["skipped_steps"] == "0" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("app", ["efficientdet", "yolov4"])
def test_a_run_of_today_ends_as_one_of_then(app, copy, monkeypatch):
    monkeypatch.chdir(copy)
    directory, expected = copy / "runs" / f"{app}-today", EXPECTED[app]["run"]
    module, a = small_apps.parsed(app, f"--flagfile=runs/{app}/flags.txt", f"--output_dir={directory}")
    module.train(a)
    rows = rows_of(directory)
    header, *wanted_rows = expected["results.csv"]
    assert len(rows) == len(wanted_rows) == 3
    for row, values in zip(rows, wanted_rows, strict=True):
        for name, value in zip(header, values, strict=True):
            found = row[RENAMED.get(name, name)]
            if name in EXACT or not value:
                assert found == value, (name, row)
            elif name not in EXPECTED[app]["weights"]["metrics"]:
                assert float(found) == pytest.approx(float(value), rel=RUN_RTOL), (name, row)

    weights = calculations.weights_of(directory / "last.weights.h5")
    wanted = calculations.weights_of(copy / "runs" / f"{app}-whole" / "last.weights.h5")
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = np.abs(weights[name] - value).max() / max(np.abs(value).max(), 1e-2)
        assert difference <= WEIGHT_ATOL[app], name


@pytest.mark.parametrize("name", EVALUATIONS)
def test_weights_and_exported_files_give_the_same_detections(name, copy, monkeypatch):
    monkeypatch.chdir(copy)
    app, weights, data = EVALUATIONS[name]
    output = copy / name.replace(" ", "-")
    words = [f"--weights={weights}", *data, f"--output_dir={output}", "--num_threads=1"]
    module, values = small_apps.flag_values(f"{app}.eval", *words)
    module.evaluate_weights(**values)
    kind = name.split()[1]
    expected = EXPECTED[app][kind]
    found = json.loads((output / "detections.json").read_text())
    assert len(found) == len(expected["detections"]) > 50
    for wanted in expected["detections"]:
        difference, nearest = min((_difference(wanted, other), i) for i, other in enumerate(found))
        assert difference <= 1.001, (wanted, found[nearest])
        del found[nearest]
    metrics = json.loads((output / "metrics.json").read_text())
    for key, value in expected["metrics"].items():
        if key != "per_class":
            assert metrics[key] == pytest.approx(value, abs=METRIC_ATOL, nan_ok=True), key


@pytest.mark.parametrize("model_name", [*calculations.TABLE_MODELS, D0])
def test_a_fixed_batch_gives_the_same_numbers(model_name):
    expected = dict(FIXED[f"table {model_name}"])
    numbers, arrays = calculations.fixed_batch(model_name, expected.pop("config"))
    assert numbers["losses"] == pytest.approx(expected["losses"], rel=LOSS_RTOL)
    tolerance = GRADIENT_RTOL.get(model_name, OTHER_GRADIENT_RTOL)
    assert numbers["gradients"] == pytest.approx(expected["gradients"], rel=tolerance)
    assert numbers["targets"].keys() == expected["targets"].keys()
    for level, sums in expected["targets"].items():
        assert numbers["targets"][level] == pytest.approx(sums, rel=1e-5, abs=1e-5), level
    for part, wanted in _stored(f"table {model_name}").items():
        tolerance = {"boxes": FIXED_BOX_ATOL, "scores": FIXED_SCORE_ATOL, "classes": 0}[part]
        np.testing.assert_allclose(arrays[part], wanted, rtol=0, atol=tolerance, err_msg=part)


@pytest.mark.parametrize("model_name", calculations.BATCH_MODELS)
def test_the_first_batch_is_the_same(model_name, copy):
    expected = FIXED[f"batch {model_name}"]
    image_ids, arrays = calculations.first_batch(model_name, expected["config"], copy / "data")
    assert image_ids == expected["image_ids"]
    wanted = _stored(f"batch {model_name}")
    np.testing.assert_array_equal(arrays["classes"], wanted["classes"])
    np.testing.assert_allclose(arrays["boxes"], wanted["boxes"], rtol=0, atol=1e-5)
    assert np.abs(arrays["images"] - wanted["images"]).mean() <= PIXEL_ATOL


def _stored(prefix: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURE / "fixed.npz") as arrays:
        return {n.removeprefix(f"{prefix} "): arrays[n] for n in arrays.files if n.startswith(f"{prefix} ")}


def _difference(wanted: dict, found: dict) -> float:
    """Returns the difference divided by the tolerance."""
    if any(wanted[name] != found[name] for name in ("image_id", "category_id")):
        return np.inf
    score = abs(wanted["score"] - found["score"]) / SCORE_ATOL
    return max(score, float(np.abs(np.subtract(wanted["bbox"], found["bbox"])).max()) / BOX_ATOL_PX)
