"""Where each kind of file keeps its passport.

*.weights.h5             the metadata of weights.py
run directory            its best weights, else the last, else the newest checkpoint
checkpoints/00001200     manifest.json
saved_model directory    assets.extra/passport.json
*.onnx                   metadata_props["passport"], at the file's end
*.tflite                 passport.json in the zip archive at the file's end, TensorFlow Lite's own place
                         for such files (https://www.tensorflow.org/lite/models/convert/metadata)

All of them have a checksum, and none is read where it is wrong.
"""

import io
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any

from common.errors import UserError
from common.training import checkpoint_files, metadata_checksum, weights

KEY = "passport"  # of ONNX's metadata_props
FILE = "passport.json"
SAVED_MODEL_FOLDER = "assets.extra"  # TensorFlow leaves it alone: saved_model/README.md
# what zipfile raises for an archive with a flipped bit, beside its own errors
_OF_FLIPPED_BITS = (EOFError, OSError, RuntimeError, ValueError, zlib.error)


def read(path: str | os.PathLike) -> tuple[dict[str, Any], pathlib.Path]:
    """The passport that `path` means, and the file it is in; see passport.read."""
    path = pathlib.Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    if path.is_dir():
        return _read_directory(path)
    if path.suffix == ".onnx":
        return _read_onnx(path), path
    if path.suffix == ".tflite":
        return _read_tflite(path), path
    if path.name.endswith(".h5"):
        return weights.read_metadata(path), path
    raise UserError(
        f"{path} is no file with a passport: need a .weights.h5, .onnx or .tflite file, or a run, checkpoint "
        "or saved_model directory"
    )


def _read_directory(path: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    if (path / "saved_model.pb").exists():
        return _read_saved_model(path)
    if (path / weights.BEST).exists() or (path / weights.LAST).exists():
        file = weights.find(path)
        return weights.read_metadata(file), file
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


def _read_saved_model(path: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    file = path / SAVED_MODEL_FOLDER / FILE
    try:
        text = file.read_text(errors="replace") if file.exists() else None
        return _parse(text, metadata_checksum.directory_body(path, SAVED_MODEL_FOLDER), path), file
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


def _read_onnx(path: pathlib.Path) -> dict[str, Any]:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UserError(f"{path}: reading ONNX files needs the package onnx: pip install onnx") from error
    content = _content(path)
    try:
        model = onnx.ModelProto.FromString(content)
        text = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
        end = onnx_field(text or "")
    except (DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no ONNX file, or is damaged") from error
    return _parse(text, [content.removesuffix(end)], path)


def onnx_field(passport: str) -> bytes:
    """What an ONNX file ends with: of a repeated field, protocol buffers may be continued by bytes alone."""
    import onnx

    model = onnx.ModelProto()
    onnx.helper.set_model_props(model, {KEY: passport})
    return model.SerializeToString()


def _read_tflite(path: pathlib.Path) -> dict[str, Any]:
    content = _content(path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            text = archive.read(FILE).decode(errors="replace")
            end = archive.getinfo(FILE).header_offset
    except (zipfile.BadZipFile, KeyError, *_OF_FLIPPED_BITS):
        text, end = None, 0
    return _parse(text, [content[:end]], path)


def _content(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _parse(text: str | None, body: Iterable[bytes], path: pathlib.Path) -> dict[str, Any]:
    if text is None:
        raise UserError(
            f"{path} has no passport: it is cut short or otherwise damaged, or was not exported by this "
            "project"
        )
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: its passport is no JSON: the file is damaged") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: its passport is no JSON object: the file is damaged")
    if not metadata_checksum.is_whole(found, body):
        raise UserError(
            f"{path} is damaged, or was changed since it was exported: its checksum is wrong; use another "
            "copy, or export it again"
        )
    return found
