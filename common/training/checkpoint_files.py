"""The directory of checkpoints: which are whole, from which one a run continues, which are removed.

    checkpoints/00001200/
        manifest.json     step, epoch, counters; what the run is; versions of the libraries
        state.*           weights, averages, optimizer, loss scale: the same on all ranks
        rank_0.* ...      what differs between ranks: data position, random seeds, and on ranks above 0
                          moving statistics; by tf.train.Checkpoint, as state.* is
        SHA256SUMS        written last; `sha256sum -c` reads it

The newest is the one that was saved last, whatever its step: a run that went back to the end of an epoch may
save lower steps than before. A checkpoint that replaces one of the same step is called 00001200.new until the
other one is gone, so that at every moment one of them is whole.
"""

import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

from common import progress
from common.errors import UserError
from common.files import remove_directory, remove_unfinished, rename_file, write_directory

MANIFEST = "manifest.json"
_CHECKSUMS = "SHA256SUMS"
_NEW = ".new"
_SERIAL = "serial"  # key of the manifest: counts the saves of a run
_LIBRARIES = ("tensorflow", "keras", "nvidia-dali-cuda120", "numpy", "horovod")


def saved(directory: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints in a directory, in the order in which they were saved; none where it does not exist.

    Those whose manifest is damaged come last.

    Raises:
        OSError: a manifest exists and cannot be read, so the order is unknown.
    """
    numbered = [path for path in directory.glob("*") if path.name.isdecimal()]
    return sorted(numbered, key=lambda path: (_serial(path), int(path.name)))


def newest(directory: pathlib.Path, *, boundary: bool = False) -> pathlib.Path | None:
    """The newest checkpoint that is whole; None where there is none at all.

    Args:
        directory: of the checkpoints.
        boundary: only those that were saved between two epochs.

    Raises:
        UserError: there are some, and none can be used.
        OSError: see `saved`.
    """
    found = saved(directory)
    for path in reversed(found):
        problem = damage(path)
        if problem:
            progress.log(f"checkpoint {path} is damaged ({problem}): trying the one before")
        elif not boundary or at_boundary(path):
            return path
    if found:
        wanted = (
            "whole and saved between two epochs: go on with the flags of before, or" if boundary else "whole:"
        )
        raise UserError(f"no checkpoint in {directory} is {wanted} --overwrite starts anew")
    return None


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """manifest.json of one checkpoint."""
    return json.loads((path / MANIFEST).read_bytes())


def at_boundary(path: pathlib.Path) -> bool:
    """Whether a whole checkpoint was saved between two epochs."""
    return read_manifest(path)["state"].get("step_in_epoch", 0) == 0


def damage(path: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is.

    Asked before TensorFlow reads it, which restores a part of the variables before it meets the damage.
    """
    try:
        expected = (path / _CHECKSUMS).read_text().splitlines(keepends=True)
        found = _checksums(path)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or f"{_CHECKSUMS} is not text"
    different = sorted(line.split()[-1] for line in {*expected} ^ {*found})
    return f"{different[0]} is not as it was written" if different else None


def write(
    directory: pathlib.Path, step: int, manifest: Mapping, writer: Callable[[pathlib.Path], Any]
) -> None:
    """Makes the checkpoint of a step: all of it or nothing. `writer` writes all but manifest and checksums.

    Raises:
        OSError: the disk is full, ...; what was there before is kept.
    """
    serial = 1 + max((s for s in map(_serial, saved(directory)) if math.isfinite(s)), default=0)

    def write_all(temporary: pathlib.Path) -> None:
        writer(temporary)
        (temporary / MANIFEST).write_text(json.dumps({**manifest, _SERIAL: serial}, indent=1))
        (temporary / _CHECKSUMS).write_text("".join(_checksums(temporary)))

    path = directory / f"{step:08d}"
    write_directory(path.with_name(path.name + _NEW), write_all)
    _take_place(path)


def tidy(directory: pathlib.Path) -> None:
    """Removes what a killed process left unfinished, and finishes what it had written."""
    remove_unfinished(directory)
    for path in directory.glob(f"*{_NEW}"):
        if damage(path):
            remove_directory(path)
        else:
            _take_place(path.with_suffix(""))


def prune(directory: pathlib.Path, keep: int) -> None:
    """Removes all but the newest `keep`, at least 1, and the newest that was saved between two epochs.

    Raises:
        OSError: one of them cannot be removed, or nothing is known about them.
    """
    found = [path for path in saved(directory) if math.isfinite(_serial(path))]
    staying = {*found[-keep:], *[path for path in found if at_boundary(path)][-1:]}
    for path in found:
        if path not in staying:
            remove_directory(path)


def remove_newer(path: pathlib.Path) -> None:
    """Removes the checkpoints that were passed over for this one: damaged, or not between two epochs."""
    found = saved(path.parent)
    for newer in found[found.index(path) + 1 :]:
        remove_directory(newer)


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and the libraries that decide what a step computes."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {k: installed[k] for k in _LIBRARIES if k in installed}


def _take_place(path: pathlib.Path) -> None:
    """00001200.new becomes 00001200, whose place it takes."""
    if path.exists():
        remove_directory(path)
    rename_file(path.with_name(path.name + _NEW), path)


def _serial(path: pathlib.Path) -> float:
    """Infinite where it is damaged: such a checkpoint is looked at first, and found so."""
    try:
        return int(read_manifest(path)[_SERIAL])
    except (FileNotFoundError, ValueError, KeyError):
        return math.inf


def _checksums(directory: pathlib.Path) -> list[str]:
    lines = []
    for path in sorted(path for path in directory.iterdir() if path.name != _CHECKSUMS):
        with path.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {path.name}\n")
    return lines
