"""Tests model_metadata.py with weights files, run directories and checkpoints."""

import dataclasses
import hashlib
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


def make_metadata(source=None, recipe=None, **changes):
    """`changes` replaces fields of the model's config."""
    description = {"anchors": {"count": 9}, "preprocessing": {}}
    config = dataclasses.replace(Config(), **changes)
    return model_metadata.make("x", lambda config: description, config, LABELS, 3, source, recipe=recipe)


@pytest.fixture(scope="module")
def metadata():
    return make_metadata()


def test_package_version_equals_that_in_pyproject():
    assert common.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_metadata_hold_recipe_flags_and_fingerprint_of_training_data():
    flags = {"batch_size": 4, "freeze": "^backbone", "train_images": "/secret", "init_from": None}
    source = types.SimpleNamespace(fingerprint="f00")
    metadata = make_metadata(source, flags)
    assert metadata["recipe"] == {"batch_size": 4, "freeze": "^backbone"}
    assert metadata["train_data"] == "f00"
    assert "eval_data" not in metadata


def test_metadata_are_read_from_weights_file_and_run_directory(metadata, tmp_path):
    metadata = metadata | {"epoch": 4, "AP": 0.251}
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    weight_files.save(model, tmp_path / "best.weights.h5", metadata)
    assert model_metadata.read(tmp_path / "best.weights.h5") == model_metadata.read(tmp_path) == metadata


def test_metadata_are_read_from_checkpoint_and_its_parent_directories(metadata, tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    for step in (5, 10):
        manifest = metadata | {"state": {"step": step, "epoch": 1}}
        checkpoint_files.write(directory, step, manifest, lambda path: None)
    for path, step in ((directory / "00000005", 5), (directory, 10), (tmp_path / "run", 10)):
        assert model_metadata.read(path)["state"]["step"] == step
        assert model_metadata.read(path)["label_map"] == metadata["label_map"]
    (directory / "00000010" / "manifest.json").write_text("{}")
    assert "00000010 is damaged: manifest.json" in refusal(model_metadata.read, directory / "00000010")


@pytest.mark.parametrize("manifest", ["", "{", "[1]", "7", "{}", '{"state": 1}', '{"state": []}'])
def test_checkpoint_with_right_checksums_but_no_state_in_its_manifest_is_damaged(manifest, tmp_path):
    for step in (5, 10):
        checkpoint_files.write(tmp_path, step, {"state": {"step_in_epoch": 0}}, lambda path: None)
    path = tmp_path / "00000010"
    (path / "manifest.json").write_text(manifest)
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    (path / "SHA256SUMS").write_text(f"{digest}  manifest.json\n")
    expected = f"checkpoint {path} is damaged: manifest.json has no state"
    assert refusal(model_metadata.read, path) == expected
    assert checkpoint_files.newest(tmp_path, boundary=True) == tmp_path / "00000005"
    checkpoint_files.prune(tmp_path, keep=1)
    assert checkpoint_files.newest(tmp_path) == tmp_path / "00000005"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such file"),
        ("a.txt", "not written by this project"),
        (".", "not a run directory, a checkpoint or a saved_model"),
    ],
)
def test_model_metadata_of_a_missing_path_a_text_file_or_another_directory_is_refused(
    tmp_path, name, message
):
    (tmp_path / "a.txt").write_text("text")
    assert message in refusal(model_metadata.read, tmp_path / name)


def test_differences_of_saved_and_current_model_metadata_are_listed_with_both_values(metadata):
    assert differences(metadata, make_metadata()) == []
    now = make_metadata(image_size=(64, 96), nms_iou=0.6)
    now["versions"] |= {"keras": "4.0", "python": "3.0", "horovod": "0.2"}
    saved = metadata | {"versions": metadata["versions"] | {"horovod": "0.1"}}
    now["label_map"] = LabelMap((3, 18), ("car", "dog")).to_json()
    now["project"] = {"commit": "another"}
    now["num_classes"] = 2
    keras_version = saved["versions"]["keras"]
    assert sorted(differences(saved, now)) == [
        "class 1: saved category 17, Katze, now category 18, dog",
        "config.image_size: saved [256, 256], now [64, 96]",
        "config.nms_iou: saved 0.5, now 0.6",
        "num_classes: saved 3, now 2",
        f"versions.keras: saved {keras_version}, now 4.0",
    ]


def test_model_metadata_field_present_on_only_one_side_is_not_listed_as_a_difference(metadata):
    old = {name: metadata[name] for name in ("app", "num_classes", "label_map")}
    old["config"] = {name: value for name, value in metadata["config"].items() if name != "nms_iou"}
    assert differences(old, metadata) == differences(metadata, old) == []


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_git_commit_in_metadata_is_that_of_the_project_and_not_of_an_outer_repository(tmp_path, monkeypatch):
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
