"""Tests eval.py and predict.py of each app, and trained.py and detectors.py of common/training."""

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
from tests.small_apps import eagerly


@pytest.fixture(scope="module")
def evaluation(trained, drawn, command):
    def run(output_dir, *flags: str):
        given = [f"--weights={trained}", f"--output_dir={output_dir}", *coco_flags(drawn, "eval")]
        return command("eval", *given, *flags)

    return run


@pytest.fixture(scope="module")
def evaluated(evaluation, tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluated")
    evaluation(directory, "--pipeline_type=dali_cpu")
    return directory


def read(directory, name="detections.json"):
    return json.loads((directory / name).read_text())


def test_evaluation_is_that_of_training_and_in_original_pixels(trained, drawn, evaluated):
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
def test_evaluation_twice_gives_the_same_bytes(evaluation, evaluated, tmp_path):
    evaluation(tmp_path, "--pipeline_type=dali_cpu")
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"metrics.json", "detections.json"}
    for name in names:
        assert (evaluated / name).read_bytes() == (tmp_path / name).read_bytes()


@one_app
def test_errors_by_kind_are_those_of_the_detections(evaluation, tmp_path, capsys):
    evaluation(tmp_path, "--errors", "--errors_min_score=0.02")
    counts = read(tmp_path, "errors.json")["counts"]
    missed, kept = counts.pop("missed"), [r for r in read(tmp_path) if r["score"] >= 0.02]
    assert 0 <= len(kept) - sum(counts.values()) <= 5 and f"missed {missed:15d}" in capsys.readouterr().out
    assert (tmp_path / "confusion_matrix.png").exists() and (tmp_path / "errors.png").exists()


@one_app
def test_a_missing_backend_is_said_before_the_work(command, drawn, monkeypatch):
    monkeypatch.setattr(coco_metrics, "FASTER_VERSION", "0.0")
    with pytest.raises(UserError, match=r"pip install faster-coco-eval==0\.0"):
        command("eval", "--weights=no such file", "--coco_backend=faster", *coco_flags(drawn, "eval"))


def test_every_image_once_and_an_error_where_the_network_gives_nan(app, trained, source):
    model, config, labels, _ = app.load_trained(trained)
    options = {"source": source, "config": config, "training": False, "with_targets": False}
    loader, detect = app.make_loader("dali_cpu", batch_size=5, **options), app.make_detect(model, config)
    with eagerly():
        results = evaluate(detect, loader, labels).results
    keys = [(r["image_id"], r["category_id"], tuple(r["bbox"]), r["score"]) for r in results]
    assert len(keys) == len(set(keys))
    assert {r["image_id"] for r in results} <= set(source.annotations.image_ids.tolist())
    per_image = np.unique([r["image_id"] for r in results], return_counts=True)[1]
    assert per_image.max() <= config.max_detections

    bias = [weight for weight in model.weights if weight.path.endswith("/bias")][-1]
    bias.assign(np.full(bias.shape, np.nan))
    with pytest.raises(UserError, match=r"image 10 is not finite"), eagerly():
        evaluate(detect, loader, labels)


@one_app
def test_other_categories_are_refused(trained, drawn, command, tmp_path):
    data = shutil.copytree(drawn, tmp_path / "renamed")
    document = read(data, "instances.json")
    next(c for c in document["categories"] if c["id"] == 17)["name"] = "giraffe"
    (data / "instances.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"17.*giraffe"):
        command("eval", f"--weights={trained}", f"--output_dir={tmp_path}/out", *coco_flags(data, "eval"))


def test_what_was_trained_cannot_be_changed_by_hparams(app, evaluation, tmp_path):
    name, value = app.own_hparam
    with pytest.raises(UserError, match=rf"'{name}' cannot be changed here.*nms_method"):
        evaluation(tmp_path, f"--hparams={name}={value}")


REFUSED = [("x", ["--pipeline_type=synthetic"], "synthetic"), ("file/x", [], r"--output_dir=.*file")]


@one_app
@pytest.mark.parametrize("output, flags, message", REFUSED)
def test_it_is_refused_before_the_work(evaluation, tmp_path, output, flags, message):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        evaluation(tmp_path / output, *flags)


@one_app
def test_full_disk_is_one_line_and_earlier_results_stand(app, evaluation, tmp_path, monkeypatch):
    (tmp_path / "detections.json").write_text("earlier")
    found = Evaluation({**dict.fromkeys(coco_metrics.NAMES, 0.5), "per_class": {}}, [], {})
    monkeypatch.setattr(app.entry("eval")[0], "evaluate", lambda *_, **__: found)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"^--output_dir=.*: No space left on device$"):
        evaluation(tmp_path)
    assert (tmp_path / "detections.json").read_text() == "earlier"
