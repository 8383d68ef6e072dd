"""Tests eval.py and predict.py of each app, and how common/ loads trained weights and opens detectors."""

import json
import os
import shutil

import numpy as np
import pytest

from common.errors import UserError
from common.evaluation import coco_metrics
from common.evaluation.evaluate import Evaluation, evaluate
from tests.apps.conftest import coco_flags, one_app
from tests.common.training.small_model import full_disk, rows_of
from tests.refusal import refusal
from tests.small_apps import eagerly


@pytest.fixture(scope="module")
def run_eval(trained, drawn, command):
    """Gives run_eval(output_dir, "--errors", ...), which runs eval.py on the trained weights."""

    def run(output_dir, *flags: str):
        arguments = [f"--weights={trained}", f"--output_dir={output_dir}", *coco_flags(drawn, "eval")]
        return command("eval", *arguments, *flags)

    return run


@pytest.fixture(scope="module")
def evaluated(run_eval, tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluated")
    run_eval(directory, "--pipeline_type=dali_cpu")
    return directory


def read(directory, name="detections.json"):
    return json.loads((directory / name).read_text())


def test_eval_py_gives_the_best_ap_of_training_and_writes_boxes_in_pixels_of_the_images(
    trained, drawn, evaluated
):
    best = max(float(row["AP"]) for row in rows_of(trained))
    assert read(evaluated, "metrics.json")["AP"] == pytest.approx(best, abs=1e-5)
    images = read(drawn, "instances.json")["images"]
    sizes = {image["id"]: (image["width"], image["height"]) for image in images}
    results = read(evaluated)
    assert results
    for result in results:
        width, height = sizes[result["image_id"]]
        x, y, w, h = result["bbox"]
        assert result["category_id"] in (3, 17, 90)
        assert -0.01 <= x <= x + w <= width + 0.01
        assert -0.01 <= y <= y + h <= height + 0.01


@one_app
def test_eval_py_run_twice_on_the_same_weights_writes_files_with_the_same_bytes(
    run_eval, evaluated, tmp_path
):
    run_eval(tmp_path, "--pipeline_type=dali_cpu")
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"metrics.json", "detections.json"}
    for name in names:
        assert (evaluated / name).read_bytes() == (tmp_path / name).read_bytes()


@one_app
def test_errors_flag_of_eval_py_counts_errors_above_errors_min_score_and_writes_two_pictures(
    run_eval, tmp_path, capsys
):
    run_eval(tmp_path, "--errors", "--errors_min_score=0.02")
    counts = read(tmp_path, "errors.json")["counts"]
    missed, results = counts.pop("missed"), [r for r in read(tmp_path) if r["score"] >= 0.02]
    assert 0 <= len(results) - sum(counts.values()) <= 5
    assert f"missed {missed:15d}" in capsys.readouterr().out
    assert (tmp_path / "confusion_matrix.png").exists() and (tmp_path / "errors.png").exists()


@one_app
def test_errors_min_score_without_errors_is_refused(command):
    message = refusal(command, "eval", "--weights=no such file", "--errors_min_score=0.5")
    assert message == "--errors_min_score=0.5 has no effect without --errors: add it"


@one_app
def test_missing_coco_backend_is_refused_before_the_weights_are_read(command, drawn, monkeypatch):
    monkeypatch.setattr(coco_metrics, "FASTER_VERSION", "0.0")
    with pytest.raises(UserError, match=r"pip install faster-coco-eval==0\.0"):
        command("eval", "--weights=no such file", "--coco_backend=faster", *coco_flags(drawn, "eval"))


def test_network_output_of_nan_is_refused_with_the_image_id(app, trained, source):
    model, config, labels, _ = app.load_trained(trained)
    detect = app.package.predict.make_detect(model, config)
    options = {"source": source, "config": config, "training": False, "with_targets": False}
    loader = app.make_loader("dali_cpu", batch_size=5, **options)
    bias = [weight for weight in model.weights if weight.path.endswith("/bias")][-1]
    bias.assign(np.full(bias.shape, np.nan))
    with pytest.raises(UserError, match=r"image 10 is not finite"), eagerly():
        evaluate(detect, loader, labels)


@one_app
def test_annotations_with_other_categories_than_the_weights_are_refused(trained, drawn, command, tmp_path):
    data = shutil.copytree(drawn, tmp_path / "renamed")
    document = read(data, "instances.json")
    next(c for c in document["categories"] if c["id"] == 17)["name"] = "giraffe"
    (data / "instances.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"17.*giraffe"):
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}/out", *coco_flags(data, "eval"))


def test_hparams_that_change_the_trained_network_are_refused(app, run_eval, tmp_path):
    name, value = {"efficientdet": ("anchor_scale", "6"), "yolov4": ("width", "1")}[app.name]
    with pytest.raises(UserError, match=rf"'{name}' cannot be changed here.*nms_method"):
        run_eval(tmp_path, f"--hparams={name}={value}")


@one_app
def test_synthetic_loader_is_refused_for_evaluation(run_eval, tmp_path):
    assert "synthetic" in refusal(run_eval, tmp_path, "--pipeline_type=synthetic")


@one_app
def test_output_dir_below_a_file_is_refused(run_eval, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output_dir=.*file"):
        run_eval(tmp_path / "file" / "x")


@one_app
def test_eval_py_on_a_full_disk_is_a_user_error_and_the_earlier_detections_file_stays(
    app, run_eval, tmp_path, monkeypatch
):
    (tmp_path / "detections.json").write_text("earlier")
    evaluation = Evaluation({**dict.fromkeys(coco_metrics.NAMES, 0.5), "per_class": {}}, [], {})
    monkeypatch.setattr(app.package.eval, "evaluate", lambda *_, **__: evaluation)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"^--output_dir=.*: No space left on device$"):
        run_eval(tmp_path)
    assert (tmp_path / "detections.json").read_text() == "earlier"
