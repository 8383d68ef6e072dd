"""Prints what a weights file, a checkpoint or an exported model records about its training.

python tools/describe_weights.py runs/mine                    classes, anchors, recipe, versions, ...
python tools/describe_weights.py runs/mine other.weights.h5   what differs, and what follows from it
python tools/describe_weights.py runs/mine --json             the stored JSON
"""

import json as json_lib
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags

from common import args as shared_flags
from common import errors
from common.labels import LabelMap
from common.training import model_metadata

_ABSENT = "not recorded"
_SECTIONS = ("preprocessing", "anchors", "recipe", "versions", "project", "export", "config")


def describe(metadata: Mapping[str, Any]) -> str:
    """The metadata as lines of a name and a value."""
    rows = {
        "app": metadata.get("app"),
        "model": metadata.get("config", {}).get("model_name"),
        "trained": _trained(metadata),
        "training data": metadata.get("train_data"),
        "evaluation data": metadata.get("eval_data"),
    }
    for section in _SECTIONS:
        values = metadata.get(section, {})
        rows |= {f"{section} {name}": value for name, value in values.items()} or {section: None}
    if "label_map" in metadata:
        label_map = LabelMap.from_json(metadata["label_map"])
        rows["class outputs"] = metadata.get("num_classes", label_map.num_classes)
        classes = zip(label_map.category_ids, label_map.names, strict=True)
        for index, (category_id, name) in enumerate(classes):
            rows[f"class {index}"] = f"category {category_id}, {name}"
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {_text(value)}" for name, value in rows.items())


def _trained(metadata: Mapping[str, Any]) -> str | None:
    state = metadata.get("state", {})  # of a checkpoint
    facts = [
        "step" in state and f"step {state['step']}, {state.get('epoch', 0)} whole epochs",
        "epoch" in metadata and f"epoch {metadata['epoch']}",
        "AP" in metadata and f"AP {100 * metadata['AP']:.1f}",
    ]
    return ", ".join(filter(None, facts)) or None


def _text(value: Any) -> str:
    if value is None:
        return _ABSENT
    return value if isinstance(value, str) else json_lib.dumps(value, ensure_ascii=False)


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_bool("json", False, "Print it as JSON, as it is stored.", flag_values=fv)


def show(*paths: str, json: bool = False) -> None:
    """Prints the metadata of one file or directory, or the differences between two."""
    if not 1 <= len(paths) <= 2:
        raise errors.UserError(
            "name a weights file, a run directory, a checkpoint or an exported model; or two to compare"
        )
    (metadata, file), *others = [model_metadata.find(path) for path in paths]
    if others:
        lines = model_metadata.differences(metadata, others[0][0], ("first", "second"))
        print("\n".join(lines) or "nothing differs")
    elif json:
        print(json_lib.dumps(metadata, indent=2, ensure_ascii=False))
    else:
        print(f"{file}\n{describe(metadata)}")


def main(*paths: str) -> None:
    show(*paths, **shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main, positional=True)
