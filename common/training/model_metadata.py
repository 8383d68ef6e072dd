"""Metadata of weights files, checkpoints and exported models: classes, config, anchors, recipe, versions.

The metadata is a dictionary that JSON can hold. Weights files and the manifests of checkpoints store it as it
is; exported files store it as JSON text where their format has room (metadata_files.py). Files of earlier
versions lack some keys and load all the same.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from common import __version__, errors
from common.labels import LabelMap
from common.progress import log
from common.training import checkpoint_files, metadata_files
from common.training.metadata_differences import differences
from tools.benchmark.environment import commit

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


def make(
    *,
    app: str,
    config: Any,
    label_map: LabelMap,
    num_classes: int,
    anchors: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    train_data: str | None = None,
    eval_data: str | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The passport of a model of this process. Each app's model_metadata.py fills in what is its own.

    Args:
        app: "efficientdet" or "yolov4".
        config: the app's config, a dataclass.
        label_map: of the trained classes.
        num_classes: rows of the class outputs; at least those of the label map.
        anchors: what a box output is relative to, in words and numbers.
        preprocessing: what is done to the pixels of an image before the network sees them.
        train_data, eval_data: fingerprints (Source.fingerprint); None where there are no data.
        recipe: flags of train.py; those of RECIPE_FLAGS are kept.

    Returns:
        What JSON can hold; keys without a value are left out, so that `old | make(...)` keeps what was known.
    """
    known = {
        "app": app,
        "num_classes": num_classes,
        "label_map": label_map.to_json(),
        "config": dataclasses.asdict(config),
        "anchors": dict(anchors),
        "preprocessing": dict(preprocessing),
        "train_data": train_data,
        "eval_data": eval_data,
        "recipe": recipe and _recipe(recipe),
        "versions": checkpoint_files.versions(),
        "project": _project(),
    }
    return json.loads(json.dumps({name: value for name, value in known.items() if value is not None}))


def _recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without the directories of `init_from`: weights are published, where they lay is private."""
    known = {name: given[name] for name in RECIPE_FLAGS if given.get(name) is not None}
    if "init_from" in known:
        known["init_from"] = pathlib.Path(known["init_from"]).name
    return known


@functools.cache
def _project() -> dict[str, str]:
    """Without the commit where the tree is a copy that git does not know."""
    known = {"version": __version__, "commit": commit()}
    return {name: value for name, value in known.items() if value}


def read(path: str | pathlib.Path) -> dict[str, Any]:
    """The passport of a file or directory.

    Args:
        path: a weights file, a run directory (its best weights, else the last, else the newest checkpoint), a
            checkpoint or a directory of them, or an exported model: a saved_model directory, .onnx, .tflite.

    Raises:
        UserError: there is nothing there, it is damaged, or it has no passport of ours.
    """
    return metadata_files.read(path)[0]


def explain(saved: Mapping[str, Any], now: Mapping[str, Any], title: str) -> None:
    """Says under a title what differs between two passports, one line each; nothing where nothing does."""
    found = differences(saved, now)
    if found:
        log(f"{title}:")
    for line in found:
        log(f"  {line}")


def explain_file(path: str | pathlib.Path, now: Mapping[str, Any], title: str) -> None:
    """`explain` for a file that was just loaded; nothing where it is of others and says nothing."""
    try:
        saved = read(path)
    except errors.UserError:
        return
    explain(saved, now, title)
