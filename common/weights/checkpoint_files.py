"""Reads and writes the files of checkpoints, and finds the newest undamaged one.

    checkpoints/00001200/
        manifest.json         step, epoch, counters; the Identity of the run; versions of the libraries
        state.*               weights, averages, optimizer, loss scale: the same on all ranks
        rank_0.*, rank_1.*    of each rank: its position in the data, its random seeds, its moving
                              statistics (those of rank 0 are in state.*)
        SHA256SUMS            written last; `sha256sum -c` reads it

tf.train.Checkpoint writes state.* and rank_*.

The newest checkpoint is the one that was saved last, at any step. If a step is saved again, the new
checkpoint gets another directory: 00001200.7 for the seventh save of the run.
"""

import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from common import files, progress
from common.errors import UserError

MANIFEST = "manifest.json"
_CHECKSUMS = "SHA256SUMS"
# Name of a checkpoint's directory: its step, and a serial number if that step was saved before.
_NAME = re.compile(r"\d+(\.\d+)?")
_SERIAL = "serial"  # key in the manifest: 7 for the seventh checkpoint that the run has saved


def saved(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints in a directory in the order of saving, those with a damaged manifest last.

    Raises:
        OSError: a manifest exists but cannot be read, so the order is unknown.
    """
    paths = [path for path in directory.glob("[0-9]*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=_serial)


def newest(directory: pathlib.Path, *, boundary: bool = False) -> pathlib.Path | None:
    """Returns the newest undamaged checkpoint; None if the directory has no checkpoints.

    Args:
        boundary: whether to consider only checkpoints that were saved between two epochs.

    Raises:
        UserError: there are checkpoints, but none can be used.
        OSError: see `saved`.
    """
    paths = saved(directory)
    for path in reversed(paths):
        if problem := damage(path):
            progress.log(f"checkpoint {path} is damaged ({problem}): trying the one before it")
        elif not boundary or at_boundary(path):
            return path
    if paths and boundary:
        raise UserError(
            f"{directory} has no undamaged checkpoint from an epoch's end, which changed flags or another "
            "number of ranks need: use the old ones, or give --overwrite to start anew"
        )
    if paths:
        raise UserError(f"{directory} has no undamaged checkpoint: give --overwrite to start anew")
    return None


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_bytes())


def at_boundary(path: pathlib.Path) -> bool:
    """Whether an undamaged checkpoint was saved between two epochs."""
    return _state(path).get("step_in_epoch") == 0


def damage(path: pathlib.Path) -> str | None:
    """Returns what is wrong with a checkpoint's files; None if all files are right."""
    try:
        expected = (path / _CHECKSUMS).read_text().splitlines(keepends=True)
        actual = _checksums(path)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or f"{_CHECKSUMS} is not text"
    different = sorted(line.split()[-1] for line in {*expected} ^ {*actual})
    if different:
        return f"{different[0]} is not as it was written"
    return None if _state(path) else f"{MANIFEST} has no state"


def write(
    directory: pathlib.Path, step: int, manifest: Mapping, writer: Callable[[pathlib.Path], Any]
) -> None:
    """Writes a checkpoint, completely or not at all. `writer` writes all files but manifest and checksums.

    Raises:
        OSError: the disk is full, ...; older checkpoints are kept.
    """
    serial = 1 + max((s for s in map(_serial, saved(directory)) if math.isfinite(s)), default=0)

    def write_all(temporary: pathlib.Path) -> None:
        writer(temporary)
        (temporary / MANIFEST).write_text(json.dumps({**manifest, _SERIAL: serial}, indent=1))
        (temporary / _CHECKSUMS).write_text("".join(_checksums(temporary)))

    path = directory / f"{step:08d}"
    files.write_directory(path.with_suffix(f".{serial}") if path.exists() else path, write_all)


def prune(directory: pathlib.Path, keep: int) -> None:
    """Removes all checkpoints except the newest `keep` (at least 1) and the newest one between two epochs.

    Raises:
        OSError: a checkpoint cannot be removed, or a manifest cannot be read.
    """
    paths = [path for path in saved(directory) if math.isfinite(_serial(path))]
    staying = {*paths[-keep:], *[path for path in paths if at_boundary(path)][-1:]}
    for path in [path for path in paths if path not in staying]:
        files.remove_directory(path)


def newer_than(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints that were saved after `path`, and those with a damaged manifest."""
    paths = saved(path.parent)
    return paths[paths.index(path) + 1 :]


def _state(path: pathlib.Path) -> dict[str, Any]:
    """Returns the state in a checkpoint's manifest, {} if it has none."""
    try:
        return dict(read_manifest(path)["state"])
    except (ValueError, KeyError, TypeError):
        return {}


def _serial(path: pathlib.Path) -> float:
    """Returns a checkpoint's serial number; infinity if its manifest is damaged."""
    try:
        return int(read_manifest(path)[_SERIAL])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return math.inf


def _checksums(directory: pathlib.Path) -> list[str]:
    lines = []
    for path in sorted(path for path in directory.iterdir() if path.name != _CHECKSUMS):
        with path.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {path.name}\n")
    return lines
