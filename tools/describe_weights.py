"""Prints what a weights file, a checkpoint or an exported model records about its training.

python tools/describe_weights.py runs/mine                    classes, anchors, recipe, versions, ...
python tools/describe_weights.py runs/mine other.weights.h5   the differences
python tools/describe_weights.py runs/mine --json             the stored JSON
"""

import json as json_lib
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args as shared_flags
from common import errors
from common.weights import model_metadata


def describe(metadata: Mapping[str, Any]) -> str:
    rows = model_metadata.fields(metadata)
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_bool("json", False, "Print the metadata as JSON, as it is stored.", flag_values=fv)


def show(*paths: str, json: bool = False) -> None:
    """Prints the metadata of one file, or the differences between two."""
    if not 1 <= len(paths) <= 2:
        raise errors.UserError("give one weights file, run, checkpoint or exported model; or two to compare")
    try:
        metadata, *others = map(model_metadata.read, paths)
    except OSError as error:
        raise errors.UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    if others:
        lines = model_metadata.differences(metadata, others[0], ("first", "second"))
        print("\n".join(lines) or "nothing differs")
    elif json:
        print(json_lib.dumps(metadata, indent=2, ensure_ascii=False))
    else:
        print(describe(metadata))


def main(*paths: str) -> None:
    show(*paths, **shared_flags.values(flags.FLAGS, define_flags))


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main, positional=True)
