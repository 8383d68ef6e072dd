"""Tests common/weights/model_metadata.py."""

import dataclasses
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

LABELS = LabelMap((3, 17, 90), ("car", "Katze", "toothbrush"))


@dataclasses.dataclass(frozen=True)
class Config:
    model_name: str = "small"
    image_size: tuple[int, int] = (256, 256)
    nms_iou: float = 0.5
    antialias: bool = True


def make(source=None, recipe=None, **changes):
    """`changes` replaces fields of the model's config."""
    about = {"anchors": {"count": 9}, "preprocessing": {}}
    config = dataclasses.replace(Config(), **changes)
    return model_metadata.make("x", lambda config: about, config, LABELS, 3, source, recipe=recipe)


@pytest.fixture(scope="module")
def made():
    return make()


def save(path, metadata):
    weight_files.save(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), path, metadata)
    return path


@pytest.fixture
def weights(made, tmp_path):
    return save(tmp_path / "best.weights.h5", made | {"epoch": 4, "AP": 0.251})


def test_the_version_is_that_of_the_project():
    assert common.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_flags_of_a_run_are_part_of_it():
    flags = {"batch_size": 4, "freeze": "^backbone", "train_images": "/secret", "init_from": None}
    source = types.SimpleNamespace(fingerprint="f00")
    found = make(source, flags)
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
    assert differences(made, make()) == []
    now = make(image_size=(64, 96), nms_iou=0.6)
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
