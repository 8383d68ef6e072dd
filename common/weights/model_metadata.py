"""Metadata of weights files, checkpoints and exported models: classes, config, anchors, recipe, versions.

The metadata is a dictionary of JSON values. Where each kind of file stores it:

*.weights.h5             in an HDF5 dataset of the file (weight_files.py)
run directory            in its best weights, else in its last weights, else in its newest checkpoint
checkpoints/00001200     manifest.json
saved_model directory    assets.extra/metadata.json
*.onnx                   metadata_props["metadata"]
*.tflite                 metadata.json in the zip archive at the file's end, where TensorFlow Lite expects
                         such files (https://www.tensorflow.org/lite/models/convert/metadata)
*.plan                   in the *.onnx file next to the *.plan, from which the *.plan was built

Weights and checkpoints with a wrong checksum are refused. Exported files have no checksum.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import platform
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from common import __version__
from common.data.labels import LabelMap
from common.errors import UserError
from common.weights import checkpoint_files
from common.weights import weight_files as weights

if TYPE_CHECKING:
    from common.data.sources import Source

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Flags of train.py that affect the result of a run and are not fields of the config.
RECIPE_FLAGS: tuple[str, ...] = ("batch_size", "accumulate_steps", "precision", "strategy", "pipeline_type")
RECIPE_FLAGS += ("init_from", "freeze", "freeze_batch_norm", "seed")
# `differences` compares only fields whose names begin with one of these.
COMPARED: tuple[str, ...] = ("app", "num_classes", "train_data", "eval_data", "class ")
COMPARED += ("config.", "preprocessing.", "versions.", "export.")
_LIBRARIES = ("tensorflow", "keras", "nvidia-dali-cuda120", "numpy", "horovod")
UNIMPORTANT = ("python", "horovod")  # `versions` that do not affect results
KEY = "metadata"  # the metadata's key in exported files
FILE = "metadata.json"
SAVED_MODEL_FOLDER = "assets.extra"  # TensorFlow ignores this folder: saved_model/README.md


def make(
    app: str,
    describe: Callable[[Any], dict[str, Any]],
    config: Any,
    label_map: LabelMap,
    num_classes: int,
    source: "Source | None" = None,
    eval_source: "Source | None" = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Makes the metadata of a model in memory; each app's model_metadata.py supplies the first two arguments.

    Args:
        describe: called with the config. Returns a dict with two keys: `anchors` tells what box outputs are
            relative to, `preprocessing` how pixels are processed before the network.
        config: the current config of the model, a dataclass.
        num_classes: number of class outputs, at least the number of classes in `label_map`.
        source, eval_source: the training and evaluation data, if known.
        recipe: flags of train.py. Only the flags in RECIPE_FLAGS are kept.

    Returns:
        A dict of JSON values, without the keys that have no value.
    """
    recipe = {name: recipe[name] for name in RECIPE_FLAGS if recipe.get(name) is not None} if recipe else {}
    if "init_from" in recipe:  # without directories, because weights may be published
        recipe["init_from"] = pathlib.Path(recipe["init_from"]).name
    description = describe(config)
    pixels = {"color": "RGB, 0 to 255", "network_sees": "(pixel - mean) / stddev"}
    known = {
        "app": app,
        "num_classes": num_classes,
        "label_map": label_map.to_json(),
        "config": dataclasses.asdict(config),
        "anchors": description["anchors"],
        "preprocessing": pixels | {"antialias": config.antialias} | description["preprocessing"],
        "train_data": source and source.fingerprint,
        "eval_data": eval_source and eval_source.fingerprint,
        "recipe": recipe or None,
        "versions": versions(),
        "project": {"version": __version__} | ({"commit": commit()} if commit() else {}),
    }
    return json.loads(json.dumps({name: value for name, value in known.items() if value is not None}))


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that can affect a step."""
    installed = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[library] = importlib.metadata.version(library)
    return installed


@functools.cache
def commit() -> str | None:
    """Returns the commit of this checkout, with a + for changed files; None without git."""
    # Given both paths, git does not search parent directories for another repository.
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    describe = [*git, "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads the metadata of a file or directory.

    Args:
        path: a weights file, a run directory, a checkpoint, a directory of checkpoints, a saved_model
            directory, or an .onnx, .tflite or .plan file.

    Raises:
        UserError: the path does not exist, is damaged, or has no metadata of this project.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if is_exported(path):
        return _read_exported(path)
    if not path.is_dir() or (path / weights.BEST).exists() or (path / weights.LAST).exists():
        return weights.read_metadata(weights.find(path))
    if (path / checkpoint_files.MANIFEST).exists():
        if problem := checkpoint_files.damage(path):
            raise UserError(f"checkpoint {path} is damaged: {problem}")
        return checkpoint_files.read_manifest(path)
    checkpoint = checkpoint_files.newest(path) or checkpoint_files.newest(path / "checkpoints")
    if not checkpoint:
        raise UserError(f"{path} is not a run directory, a checkpoint or a saved_model")
    return checkpoint_files.read_manifest(checkpoint)


def is_exported(path: pathlib.Path) -> bool:
    """Returns whether a path is a file of an exported format, or a saved_model directory."""
    return path.suffix in (".onnx", ".tflite", ".plan") or (path / "saved_model.pb").is_file()


def _read_exported(path: pathlib.Path) -> dict[str, Any]:
    if path.suffix == ".plan":
        path = path.with_suffix(".onnx")
        if not path.exists():
            raise UserError(f"{path} is missing. The .plan file needs its metadata: copy both files")
    try:
        if path.is_dir():
            text = (path / SAVED_MODEL_FOLDER / FILE).read_bytes()
        elif path.suffix == ".onnx":
            import onnx

            text = {entry.key: entry.value for entry in onnx.load(path).metadata_props}[KEY]
        else:
            with zipfile.ZipFile(path) as archive:
                text = archive.read(FILE)
        return dict(json.loads(text))
    except ImportError as error:
        raise UserError(f"{path}: reading ONNX files needs the package onnx: pip install onnx") from error
    except Exception as error:  # the packages raise many classes for damaged files
        raise UserError(f"{path} has no metadata: it is damaged, or another project wrote it") from error


def differences(saved: Mapping, now: Mapping, words: tuple[str, str] = ("saved", "now")) -> list[str]:
    """Returns a line, such as `config.nms_iou: saved 0.5, now 0.6`, for each field whose two values differ.

    Args:
        words: the words before the two values in each line.
    """
    before, after = fields(saved), fields(now)
    return [
        f"{field}: {words[0]} {before[field]}, {words[1]} {after[field]}"
        for field in before
        if field.startswith(COMPARED)
        and field.removeprefix("versions.") not in UNIMPORTANT
        and field in after
        and before[field] != after[field]
    ]


def fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata as a flat dict. Each class is one entry: "class 0" -> "category 3, car"."""
    flat = flatten(metadata)
    if "label_map" in metadata:
        label_map = LabelMap.from_json(flat.pop("label_map"))
        classes = zip(label_map.category_ids, label_map.names, strict=True)
        flat |= {f"class {i}": f"category {id_}, {name}" for i, (id_, name) in enumerate(classes)}
    return flat


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens mappings: {"config": {"seed": 1}, "app": "a"} -> {"config.seed": 1, "app": "a"}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping)
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if inside else {name: value}
    return flat
