"""What a file of weights, a checkpoint or an exported model says about itself.

    python common/passport.py runs/mine                    prints it: classes, anchors, recipe, versions, ...
    python common/passport.py runs/mine other.weights.h5   what differs, and what follows from it
    python common/passport.py runs/mine --json             as it is stored

A passport is a dictionary that JSON can hold. In weights files and in the manifest of a checkpoint it is the
metadata; exported files carry it as JSON text under their own format's roof: see passport_places.py. Files of
earlier versions lack some of it, and load all the same.
"""

import dataclasses
import functools
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

from common import __version__, checkpoint_files, errors, passport_places
from common import flags as shared_flags
from common.bench.facts import commit
from common.labels import LabelMap
from common.passport_differences import differences
from common.progress import say

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
_ABSENT = "not recorded"


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
    """The passport of a model of this process. Each app's passport.py fills in what is its own.

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
    return passport_places.read(path)[0]


def explain(saved: Mapping[str, Any], now: Mapping[str, Any], title: str) -> None:
    """Says under a title what differs between two passports, one line each; nothing where nothing does."""
    found = differences(saved, now)
    if found:
        say(f"{title}:")
    for line in found:
        say(f"  {line}")


def explain_file(path: str | pathlib.Path, now: Mapping[str, Any], title: str) -> None:
    """`explain` for a file that was just loaded; nothing where it is of others and says nothing."""
    try:
        saved = read(path)
    except errors.UserError:
        return
    explain(saved, now, title)


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
    found = [passport_places.read(path) for path in paths]
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
