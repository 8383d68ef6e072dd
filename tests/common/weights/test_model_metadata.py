"""Tests model_metadata.py of common/weights and of each app, and tools/describe_weights.py."""

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import tomllib
import types

import keras
import pytest

import common
from common.data.labels import LabelMap
from common.weights import checkpoint_files, model_metadata, weight_files
from common.weights.model_metadata import differences
from tests.conftest import ROOT
from tests.refusal import refusal
from tools import describe_weights

LABELS = LabelMap((3, 17, 90), ("car", "Katze", "toothbrush"))
APPS = {"efficientdet": "efficientdet-nano", "yolov4": "yolov4-nano"}


def of_app(app, **changes):
    """`changes` replaces fields of the model's config."""
    config = importlib.import_module(f"{app}.config").get_config(APPS[app])
    make = importlib.import_module(f"{app}.model_metadata").make_metadata
    return make(dataclasses.replace(config, **changes), LABELS, 3)


@pytest.fixture(scope="module")
def made():
    return of_app("efficientdet")


def save(path, metadata):
    weight_files.save(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), path, metadata)
    return path


@pytest.fixture
def weights(made, tmp_path):
    return save(tmp_path / "best.weights.h5", made | {"epoch": 4, "AP": 0.251})


@pytest.mark.parametrize("app", APPS)
def test_it_holds_what_is_needed_to_run_the_model_elsewhere(app):
    found = of_app(app, image_size=(64, 96))
    config = found["config"]
    assert (found["app"], config["model_name"], config["image_size"]) == (app, APPS[app], [64, 96])
    assert LabelMap.from_json(found["label_map"]) == LABELS
    assert {"python", "tensorflow", "keras", "nvidia-dali-cuda120"} <= found["versions"].keys()
    assert found["project"]["version"] == common.__version__
    pixels = found["preprocessing"]
    assert len(pixels["mean_rgb"]) == len(pixels["stddev_rgb"]) == len(pixels["fill_rgb"]) == 3
    red = {"efficientdet": (123.675, 58.395), "yolov4": (0, 255)}[app]
    assert (pixels["mean_rgb"][0], pixels["stddev_rgb"][0]) == pytest.approx(red)
    # Strides 8 to 64 have 8x12, 4x6, 2x3, 1x2 cells. YOLOv4 has 3 anchors per cell and no stride 64.
    count = {"efficientdet": 96 + 24 + 6 + 2, "yolov4": 3 * (96 + 24 + 6)}[app]
    assert found["anchors"]["count"] == count


def test_the_version_is_that_of_the_project():
    assert common.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_flags_of_a_run_are_part_of_it():
    flags = {"batch_size": 4, "freeze": "^backbone", "train_images": "/secret", "init_from": None}
    source = types.SimpleNamespace(fingerprint="f00")
    config = importlib.import_module("yolov4.config").get_config("yolov4-nano")
    about = {"anchors": {}, "preprocessing": {}}
    found = model_metadata.make("x", lambda config: about, config, LABELS, 3, source, recipe=flags)
    assert found["recipe"] == {"batch_size": 4, "freeze": "^backbone"}
    assert found["train_data"] == "f00"
    assert "eval_data" not in found


def test_weights_and_run_directories(weights, made):
    expected = made | {"epoch": 4, "AP": 0.251}
    assert model_metadata.read(weights) == model_metadata.read(weights.parent) == expected


def test_checkpoints(made, tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    for step in (5, 10):
        manifest = made | {"state": {"step": step, "epoch": 1}}
        checkpoint_files.write(directory, step, manifest, lambda path: None)
    for path, step in ((directory / "00000005", 5), (directory, 10), (tmp_path / "run", 10)):
        assert model_metadata.read(path)["state"]["step"] == step
        assert model_metadata.read(path)["label_map"] == made["label_map"]
    assert re.search(r"^state.step +10$", describe_weights.describe(model_metadata.read(directory)), re.M)
    (directory / "00000010" / "manifest.json").write_text("{}")
    assert "00000010 is damaged: manifest.json" in refusal(model_metadata.read, directory / "00000010")


def test_other_files_are_refused_in_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for path, message in (
        (tmp_path / "nothing", "no such file"),
        (tmp_path / "a.txt", "not written by this project"),
        (tmp_path, "not a run directory, a checkpoint or a saved_model"),
    ):
        assert message in refusal(model_metadata.read, path)


def test_what_differs_is_one_line_with_both_values(made):
    assert differences(made, of_app("efficientdet")) == []
    now = of_app("efficientdet", image_size=(64, 96), nms_iou=0.6)
    now["versions"] = {**now["versions"], "keras": "4.0", "python": "3.0"}
    made = {**made, "versions": {**made["versions"], "horovod": "0.1"}}
    now["versions"]["horovod"] = "0.2"
    now["label_map"] = LabelMap((3, 18), ("car", "dog")).to_json()
    now["project"] = {"commit": "another"}
    keras_version = made["versions"]["keras"]
    assert sorted(differences(made, now)) == [
        "class 1: saved category 17, Katze, now category 18, dog",
        "config.image_size: saved [256, 256], now [64, 96]",
        "config.nms_iou: saved 0.5, now 0.6",
        f"versions.keras: saved {keras_version}, now 4.0",
    ]


def test_a_file_of_an_earlier_version_is_read_and_compared(made):
    old = {name: made[name] for name in ("app", "num_classes", "label_map")}
    old["config"] = {k: v for k, v in made["config"].items() if k != "nms_iou"}
    assert differences(old, made) == differences(made, old) == []
    assert re.search(r"^class 1 +category 17, Katze$", describe_weights.describe(old), re.M)


def test_it_is_printed_for_people_and_for_programs(weights, made, capsys):
    describe_weights.show(str(weights))
    shown = capsys.readouterr().out
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in shown.splitlines())
    assert rows["config.model_name"] == "efficientdet-nano"
    assert (rows["config.image_size"], rows["epoch"], rows["AP"]) == ("[256, 256]", "4", "0.251")
    assert rows["class 2"] == "category 90, toothbrush"
    describe_weights.show(str(weights), json=True)
    assert json.loads(capsys.readouterr().out)["config"] == made["config"]


def test_two_files_are_compared(weights, made, tmp_path, capsys):
    other = save(tmp_path / "other.weights.h5", of_app("efficientdet", nms_iou=0.6))
    describe_weights.show(str(weights), str(other))
    assert capsys.readouterr().out == "config.nms_iou: first 0.5, second 0.6\n"
    describe_weights.show(str(other), str(other))
    assert capsys.readouterr().out == "nothing differs\n"
    assert "give one weights file" in refusal(describe_weights.show)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_tree_has_its_own_commit_and_no_other(tmp_path, monkeypatch):
    outer, inner, worktree = tmp_path / "outer", tmp_path / "outer" / "project", tmp_path / "worktree"
    inner.mkdir(parents=True)
    (outer / "file").touch()

    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y.z", *arguments]
        return subprocess.run(command, cwd=outer, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message=x")
    git("worktree", "add", "--quiet", worktree)
    head = git("rev-parse", "HEAD")

    def commit_of(root):
        monkeypatch.setattr(model_metadata, "ROOT", root)
        return model_metadata.commit.__wrapped__()

    assert commit_of(outer) == commit_of(worktree) == head
    assert commit_of(inner) is None
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))  # as in a git hook of the outer repository
    assert commit_of(inner) is None
    (outer / "file").write_text("changed")
    assert commit_of(outer) == f"{head}+"
