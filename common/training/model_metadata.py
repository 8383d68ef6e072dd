"""Metadata of weights files, checkpoints and exported models: classes, config, anchors, recipe, versions.

The metadata is a dictionary that JSON can hold. Files of earlier versions lack some keys and load all the
same. Each kind of file has its own place for it:

*.weights.h5             the metadata of weights.py
run directory            its best weights, else the last, else the newest checkpoint
checkpoints/00001200     manifest.json
saved_model directory    assets.extra/passport.json
*.onnx                   metadata_props["passport"]
*.tflite                 passport.json in the zip archive at the file's end, TensorFlow Lite's own place
                         for such files (https://www.tensorflow.org/lite/models/convert/metadata)
*.plan                   those of the *.onnx file beside it, from which it was built

Weights and checkpoints with a wrong checksum are refused. Exported files have no checksum.
"""

import dataclasses
import functools
import json
import pathlib
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from common import __version__
from common.errors import UserError
from common.labels import LabelMap
from common.training import run_directory, weights

if TYPE_CHECKING:
    from common.datasets import Source

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Flags of train.py that decide what a run computes and that no field of the config holds.
RECIPE_FLAGS: tuple[str, ...] = ("batch_size", "accumulate_steps", "precision", "strategy", "pipeline_type")
RECIPE_FLAGS += ("init_from", "freeze", "freeze_batch_norm", "seed")
# How the names of the `fields` begin that `differences` compares. The anchors follow from the config.
COMPARED: tuple[str, ...] = ("app", "num_classes", "train_data", "eval_data", "class ")
COMPARED += ("config.", "preprocessing.", "versions.", "export.")
KEY = "passport"  # the name of the metadata in exported files since the first version
FILE = "passport.json"
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
    """The metadata of a model of this process; each app's model_metadata.py gives the first two arguments.

    Args:
        app: "efficientdet" or "yolov4".
        describe: config -> `anchors` (what a box output is relative to) and `preprocessing` (what is done to
            the pixels of an image before the network sees them), in words and numbers.
        config: of the model as it runs, a dataclass.
        label_map: of the trained classes.
        num_classes: rows of the class outputs; at least those of the label map.
        source, eval_source: the data, where they are known.
        recipe: flags of train.py; those of RECIPE_FLAGS are kept.

    Returns:
        What JSON can hold; keys without a value are left out, so that `old | make(...)` keeps what was known.
    """
    recipe = {name: recipe[name] for name in RECIPE_FLAGS if recipe.get(name) is not None} if recipe else {}
    if "init_from" in recipe:  # weights are published, names of directories are private
        recipe["init_from"] = pathlib.Path(recipe["init_from"]).name
    about = describe(config)
    pixels = {"color": "RGB, 0 to 255", "network_sees": "(pixel - mean) / stddev"}
    known = {
        "app": app,
        "num_classes": num_classes,
        "label_map": label_map.to_json(),
        "config": dataclasses.asdict(config),
        "anchors": about["anchors"],
        "preprocessing": pixels | {"antialias": config.antialias} | about["preprocessing"],
        "train_data": source and source.fingerprint,
        "eval_data": eval_source and eval_source.fingerprint,
        "recipe": recipe or None,
        "versions": run_directory.versions(),
        "project": {"version": __version__} | ({"commit": commit()} if commit() else {}),
    }
    return json.loads(json.dumps({name: value for name, value in known.items() if value is not None}))


@functools.cache
def commit() -> str | None:
    """The commit of this tree, with a + where tracked files differ from it; None outside a git checkout."""
    # The two paths keep git from a repository around this tree.
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    describe = [*git, "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """The metadata of a file or directory.

    Args:
        path: a weights file, a run directory (its best weights, else the last, else the newest checkpoint), a
            checkpoint or a directory of them, or an exported model: a saved_model directory, .onnx,
            .tflite, .plan.

    Raises:
        UserError: there is nothing there, it is damaged, or it has no metadata of this project.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if is_exported(path):
        return _read_exported(path)
    if not path.is_dir() or (path / weights.BEST).exists() or (path / weights.LAST).exists():
        return weights.read_metadata(weights.find(path))
    if (path / run_directory.MANIFEST).exists():
        problem = run_directory.damage(path)
        if problem:
            raise UserError(f"checkpoint {path} is damaged: {problem}")
        return run_directory.read_manifest(path)
    found = run_directory.newest(path) or run_directory.newest(path / "checkpoints")
    if not found:
        raise UserError(f"{path} is not a run directory, a checkpoint or a saved_model")
    return run_directory.read_manifest(found)


def is_exported(path: pathlib.Path) -> bool:
    """Whether a path names a file of an exported format, or a saved_model directory."""
    return path.suffix in (".onnx", ".tflite", ".plan") or (path / "saved_model.pb").is_file()


def _read_exported(path: pathlib.Path) -> dict[str, Any]:
    if path.suffix == ".plan":
        path = path.with_suffix(".onnx")
        if not path.exists():
            raise UserError(f"{path} is missing: it holds the classes of the .plan file beside it")
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
    """`config.nms_iou: saved 0.5, now 0.6`, one line for each field that both have and that differs.

    Args:
        saved, now: metadata.
        words: what each is called.
    """
    before, after = fields(saved), fields(now)
    return [
        f"{field}: {words[0]} {before[field]}, {words[1]} {after[field]}"
        for field in before
        if field.startswith(COMPARED)
        and field.removeprefix("versions.") not in run_directory.UNIMPORTANT
        and field in after
        and before[field] != after[field]
    ]


def fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """All values by name: "app", "config.nms_iou", and of each class "class 0": "category 3, car"."""
    found = run_directory.flatten(metadata)
    if "label_map" in metadata:
        label_map = LabelMap.from_json(found.pop("label_map"))
        classes = zip(label_map.category_ids, label_map.names, strict=True)
        found |= {f"class {i}": f"category {id_}, {name}" for i, (id_, name) in enumerate(classes)}
    return found
