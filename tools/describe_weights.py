"""Prints what a weights file, a checkpoint or an exported model records about its training.

python tools/describe_weights.py runs/mine                    classes, anchors, recipe, versions, ...
python tools/describe_weights.py runs/mine other.weights.h5   what differs, and what follows from it
python tools/describe_weights.py runs/mine --json             the stored JSON
"""

import json
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
from common.training import metadata_files
from common.training.metadata_differences import differences

_ABSENT = "not recorded"


def describe(passport: Mapping[str, Any]) -> str:
    """A passport for people: one fact a line."""
    config = passport.get("config", {})
    rows = [
        ("app", passport.get("app", _ABSENT)),
        ("model", config.get("model_name", _ABSENT)),
        ("trained", _trained(passport)),
        ("image size", "x".join(map(str, config.get("image_size", []))) or _ABSENT),
        *_section("preprocessing", passport),
        *_section("anchors", passport),
        ("training data", passport.get("train_data", _ABSENT)),
        ("evaluation data", passport.get("eval_data") or _ABSENT),
        *_section("recipe", passport),
        *_section("versions", passport),
        *_section("project", passport),
        *_section("export", passport, required=False),
        *_classes(passport),
        *((f"config {name}", _text(value)) for name, value in config.items() if name not in _SHOWN_ABOVE),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


_SHOWN_ABOVE = ("model_name", "image_size")


def _section(name: str, passport: Mapping[str, Any], required: bool = True) -> list[tuple[str, str]]:
    found = passport.get(name)
    if not found:
        return [(name, _ABSENT)] if required else []
    return [(f"{name} {key}", _text(value)) for key, value in found.items()]


def _trained(passport: Mapping[str, Any]) -> str:
    state = passport.get("state", {})  # of a checkpoint
    facts = []
    if "step" in state:
        facts.append(f"step {state['step']}, {state.get('epoch', 0)} whole epochs")
    if "epoch" in passport:
        facts.append(f"epoch {passport['epoch']}")
    if "AP" in passport:
        facts.append(f"AP {100 * passport['AP']:.1f}")
    return ", ".join(facts) or _ABSENT


def _classes(passport: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "label_map" not in passport:
        return [("classes", _ABSENT)]
    label_map = LabelMap.from_json(passport["label_map"])
    rows = passport.get("num_classes", label_map.num_classes)
    surplus = f", {rows - label_map.num_classes} more without a name" if rows > label_map.num_classes else ""
    pairs = zip(label_map.category_ids, label_map.names, strict=True)
    named = [(f"class {index}", f"category {i}, {name}") for index, (i, name) in enumerate(pairs)]
    return [("classes", f"{label_map.num_classes}{surplus}"), *named]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_bool("json", False, "Print it as JSON, as it is stored.", flag_values=fv)


def show(*paths: str, json: bool = False) -> None:
    """Prints the passport of one file or directory, or what differs between two."""
    if not 1 <= len(paths) <= 2:
        raise errors.UserError(
            "name a weights file, a run directory, a checkpoint or an exported model; or two to compare"
        )
    found = [metadata_files.read(path) for path in paths]
    if len(found) == 2:
        print("\n".join(differences(found[0][0], found[1][0], ("first", "second"))) or "nothing differs")
    elif json:
        print(_as_json(found[0][0]))
    else:
        passport, place = found[0]
        print(f"{place}\n{describe(passport)}")


def _as_json(passport: Mapping[str, Any]) -> str:
    return json.dumps(passport, indent=2, ensure_ascii=False)


def main(*paths: str) -> None:
    show(*paths, **shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main, positional=True)
