"""Metadata of weights files, checkpoints and exported models: classes, config, anchors, recipe, versions.

The metadata is a dictionary that JSON can hold. Files of earlier versions lack some keys and load all the
same. Each kind of file has its own place for it:

*.weights.h5             the metadata of weights.py
run directory            its best weights, else the last, else the newest checkpoint
checkpoints/00001200     manifest.json
saved_model directory    assets.extra/passport.json
*.onnx                   metadata_props["passport"], at the file's end
*.tflite                 passport.json in the zip archive at the file's end, TensorFlow Lite's own place
                         for such files (https://www.tensorflow.org/lite/models/convert/metadata)

Weights and checkpoints with a wrong checksum are refused. An exported file with one gives a warning, because
other programs, for example ONNX simplifiers, change such files on purpose.
"""

import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from common import __version__
from common.errors import UserError
from common.labels import LabelMap
from common.progress import log
from common.training import checkpoint_files, weights

if TYPE_CHECKING:
    from common.sources import Source

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Flags of train.py that decide what a run computes and that no field of the config holds.
RECIPE_FLAGS = (
    "batch_size",
    "accumulate_steps",
    "precision",
    "strategy",
    "pipeline_type",
    "init_from",
    "freeze",
    "seed",
)

KEY = "passport"  # the name of the metadata in exported files since the first version
FILE = "passport.json"
SAVED_MODEL_FOLDER = "assets.extra"  # TensorFlow ignores this folder: saved_model/README.md
_CHECKSUM = "sha256"
# What zipfile raises for an archive with a flipped bit.
_BAD_ARCHIVE = (zipfile.BadZipFile, KeyError, EOFError, OSError, RuntimeError, ValueError, zlib.error)

# Fields or how they begin, those of the config without "config.", and what follows where they differ.
_CONSEQUENCES = (
    ("app", "another app's model: its weights cannot be loaded"),
    ("classes", "outputs of classes of the same name can be kept, those of all others start anew"),
    ("category_ids", "the same classes under other ids: detections come out with the ids of now"),
    ("num_classes", "rows of the class outputs without a counterpart start anew"),
    ("train_data", "other images or annotations were trained on"),
    ("eval_data", "AP was measured on other images: the two numbers do not compare"),
    ("versions", "results may differ in their last digits"),
    ("export", "another file format or arithmetic: evaluate it for itself"),
    ("image_size", "it runs, but objects have another size than it learnt: evaluate it first"),
    (
        ("preprocessing", "letterbox", "antialias"),
        "the network sees other pixels than it learnt: AP falls until it is trained on them",
    ),
    (
        ("model_name", "architecture", "backbone", "fpn_", "head_repeats", "width"),
        "another network: weights whose shape differs start anew",
    ),
    (
        ("min_level", "max_level", "num_scales", "aspect_ratios", "anchor", "masks", "scale_xy"),
        "box outputs are relative to other anchors: they must be trained again",
    ),
    (
        ("nms_", "diou_beta", "score_threshold", "max_detections"),
        "other detections from the same outputs: AP was measured with the saved value",
    ),
    ("", "of training alone: no detection changes, further training does"),
)


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
    recipe = {name: recipe[name] for name in RECIPE_FLAGS if recipe.get(name) is not None} if recipe else None
    if recipe and "init_from" in recipe:  # weights are published, names of directories are private
        recipe["init_from"] = pathlib.Path(recipe["init_from"]).name
    known = {
        "app": app,
        "num_classes": num_classes,
        "label_map": label_map.to_json(),
        "config": dataclasses.asdict(config),
        **describe(config),
        "train_data": source and source.fingerprint,
        "eval_data": eval_source and eval_source.fingerprint,
        "recipe": recipe,
        "versions": checkpoint_files.versions(),
        "project": {"version": __version__} | ({"commit": commit()} if commit() else {}),
    }
    return json.loads(json.dumps({name: value for name, value in known.items() if value is not None}))


@functools.cache
def commit() -> str | None:
    """The commit of this tree, with a + where files differ from it; None outside a git checkout."""
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]  # not a repository around this tree
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], **options).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], **options).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """The metadata of a file or directory.

    Args:
        path: a weights file, a run directory (its best weights, else the last, else the newest checkpoint), a
            checkpoint or a directory of them, or an exported model: a saved_model directory, .onnx, .tflite.

    Raises:
        UserError: there is nothing there, it is damaged, or it has no metadata of this project.
    """
    return find(path)[0]


def find(path: str | pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    """The metadata that `path` means, and the file that holds it; see `read`."""
    path = pathlib.Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    try:
        if path.is_dir():
            return _find_in_directory(path)
        if path.suffix == ".onnx":
            return _parse(*_split_onnx(path), path), path
        if path.suffix == ".tflite":
            return _parse(*_split_tflite(path), path), path
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    if path.name.endswith(".h5"):
        return weights.read_metadata(path), path
    raise UserError(
        f"{path} is not a file with metadata: give .weights.h5, .onnx or .tflite file, or a run, checkpoint "
        "or saved_model directory"
    )


def _find_in_directory(path: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    if (path / "saved_model.pb").exists():
        file = path / SAVED_MODEL_FOLDER / FILE
        text = file.read_text(errors="replace") if file.exists() else None
        return _parse(text, directory_body(path), path), file
    if (path / weights.BEST).exists() or (path / weights.LAST).exists():
        file = weights.find(path)
        return weights.read_metadata(file), file
    if not (path / checkpoint_files.MANIFEST).exists():
        found = checkpoint_files.newest(path) or checkpoint_files.newest(path / "checkpoints")
        if not found:
            raise UserError(f"{path} is not a run directory, a checkpoint or a saved_model")
        path = found
    problem = checkpoint_files.damage(path)
    if problem:
        raise UserError(f"checkpoint {path} is damaged: {problem}")
    return checkpoint_files.read_manifest(path), path / checkpoint_files.MANIFEST


def _split_onnx(path: pathlib.Path) -> tuple[str | None, list[bytes]]:
    """(the metadata as text, the bytes before it)."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UserError(f"{path}: reading ONNX files needs the package onnx: pip install onnx") from error
    content = path.read_bytes()
    try:
        model = onnx.ModelProto.FromString(content)
        text = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
        end = onnx_field(text or "")
    except (DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not an ONNX file, or is damaged") from error
    return text, [content.removesuffix(end)]


def _split_tflite(path: pathlib.Path) -> tuple[str | None, list[bytes]]:
    content = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            text = archive.read(FILE).decode(errors="replace")
            return text, [content[: archive.getinfo(FILE).header_offset]]
    except _BAD_ARCHIVE:
        return None, []


def _parse(text: str | None, body: Iterable[bytes], path: pathlib.Path) -> dict[str, Any]:
    if text is None:
        raise UserError(
            f"{path} has no metadata: it is cut short or otherwise damaged, or another project exported it"
        )
    try:
        found = msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: its metadata is not a JSON object: the file is damaged") from error
    expected = found.get(_CHECKSUM)  # files of the first versions have none
    if expected is not None and expected != _digest(found, body):
        log(
            f"warning: {path} was changed since it was exported, its checksum differs: if no program did "
            "that on purpose, the file is damaged"
        )
    return found


def seal(metadata: Mapping[str, Any], body: Iterable[bytes]) -> str:
    """The metadata as JSON text, with a checksum of itself and of the rest of an exported file.

    Args:
        metadata: what JSON can hold.
        body: a saved_model's `directory_body`; of another file what stands before the metadata.
    """
    return json.dumps({**metadata, _CHECKSUM: _digest(metadata, body)})


def directory_body(path: pathlib.Path) -> Iterator[bytes]:
    """Names and contents of all files of a saved_model, but for those of assets.extra."""
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and name.parts[0] != SAVED_MODEL_FOLDER:
            yield name.as_posix().encode()
            yield file.read_bytes()


def onnx_field(metadata: str) -> bytes:
    """The end of an ONNX file: bytes that are appended to a protocol buffer continue its repeated fields."""
    import onnx

    model = onnx.ModelProto()
    onnx.helper.set_model_props(model, {KEY: metadata})
    return model.SerializeToString()


def _digest(metadata: Mapping[str, Any], body: Iterable[bytes]) -> str:
    content = {name: value for name, value in metadata.items() if name != _CHECKSUM}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for part in body:
        digest.update(part)
    return digest.hexdigest()


def explain(saved: Mapping[str, Any], now: Mapping[str, Any], title: str) -> None:
    """Logs the differences of two metadata below a title; nothing where nothing differs."""
    lines = differences(saved, now)
    if lines:
        log("\n  ".join([f"{title}:", *lines]))


def explain_file(path: str | pathlib.Path, now: Mapping[str, Any], title: str) -> None:
    """`explain` for a file that was just loaded; nothing for files of other projects, without metadata."""
    try:
        saved = read(path)
    except UserError:
        return
    explain(saved, now, title)


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], words: tuple[str, str] = ("saved", "now")
) -> list[str]:
    """`config.nms_iou: saved 0.5, now 0.6: ...`, one line for each field that both have and that differs.

    Anchors and resizing follow from the config, whose fields are compared instead.

    Args:
        saved, now: metadata.
        words: what each is called.
    """
    before, after = _flat(saved), _flat(now)
    return [
        f"{field}: {words[0]} {_text(before[field])}, {words[1]} {_text(after[field])}: {_consequence(field)}"
        for field in before
        if field in after and before[field] != after[field]
    ]


def _flat(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Field, or section.field -> value."""
    names = ("app", "num_classes", "train_data", "eval_data")
    fields = {name: metadata[name] for name in names if metadata.get(name) is not None}
    if "label_map" in metadata:
        label_map = LabelMap.from_json(metadata["label_map"])
        fields["classes"] = sorted(label_map.names)
        fields["category_ids"] = dict(sorted(zip(label_map.names, label_map.category_ids, strict=True)))
    for section in ("config", "preprocessing", "versions", "export"):
        fields |= {f"{section}.{name}": value for name, value in metadata.get(section, {}).items()}
    for field, origin in (("resize", "letterbox"), ("antialias", "antialias")):
        if f"config.{origin}" in fields:
            fields.pop(f"preprocessing.{field}", None)
    return fields


def _consequence(field: str) -> str:
    """What follows where a field differs."""
    name = field.removeprefix("config.")
    return next(words for beginnings, words in _CONSEQUENCES if name.startswith(beginnings))


def _text(value: Any) -> str:
    """Short enough for a line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
