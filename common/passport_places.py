"""Where each kind of file keeps its passport.

*.weights.h5             the metadata of weight_files.py
run directory            its best weights, else the last, else the newest checkpoint
checkpoints/00001200     manifest.json
saved_model directory    assets.extra/passport.json
*.onnx                   metadata_props["passport"]
*.tflite                 passport.json in the zip archive at the file's end, TensorFlow Lite's own place
                         for such files (https://www.tensorflow.org/lite/models/convert/metadata)
"""

import json
import os
import pathlib
import zipfile
from typing import Any

from common import checkpoint_files, weight_files
from common.errors import UserError

KEY = "passport"  # of ONNX's metadata_props
FILE = "passport.json"
SAVED_MODEL_FOLDER = "assets.extra"  # TensorFlow leaves it alone: saved_model/README.md


def read(path: str | os.PathLike) -> tuple[dict[str, Any], pathlib.Path]:
    """The passport that `path` means, and the file it is in; see passport.read."""
    path = pathlib.Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if path.is_dir():
        return _read_directory(path)
    if path.suffix == ".onnx":
        return _parse(_onnx_text(path), path), path
    if path.suffix == ".tflite":
        return _parse(_zip_text(path), path), path
    if path.name.endswith(".h5"):
        return weight_files.read_metadata(path), path
    raise UserError(
        f"{path} is no file with a passport: need a .weights.h5, .onnx or .tflite file, or a run, checkpoint "
        "or saved_model directory"
    )


def _read_directory(path: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    if (path / "saved_model.pb").exists():
        file = path / SAVED_MODEL_FOLDER / FILE
        return _parse(file.read_text(errors="replace") if file.exists() else None, path), file
    if (path / weight_files.BEST).exists() or (path / weight_files.LAST).exists():
        file = weight_files.find(path)
        return weight_files.read_metadata(file), file
    if (path / checkpoint_files.MANIFEST).exists():
        return _read_checkpoint(path)
    for directory in (path, path / "checkpoints"):
        found = checkpoint_files.newest(directory)
        if found:
            return _read_checkpoint(found.path)
    raise UserError(f"{path} is no run directory, no checkpoint and no saved_model")


def _read_checkpoint(path: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    problem = checkpoint_files.damage(path)
    if problem:
        raise UserError(f"checkpoint {path} is damaged: {problem}")
    manifest = checkpoint_files.read_manifest(path)
    return manifest, path / checkpoint_files.MANIFEST


def _onnx_text(path: pathlib.Path) -> str | None:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UserError(f"{path}: reading ONNX files needs the package onnx: pip install onnx") from error
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise UserError(f"{path} is no ONNX file, or is damaged") from error
    return next((entry.value for entry in model.metadata_props if entry.key == KEY), None)


def _zip_text(path: pathlib.Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(FILE).decode(errors="replace")
    except (zipfile.BadZipFile, KeyError):
        return None


def _parse(text: str | None, path: pathlib.Path) -> dict[str, Any]:
    if text is None:
        raise UserError(f"{path} has no passport: it was not exported by this project")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: its passport is no JSON: the file is damaged") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: its passport is no JSON object: the file is damaged")
    return found
