"""The directory of one run: the same command resumes it, another one is refused."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import UserError
from common.files import remove_directory, remove_unfinished, write_bytes

# What a run makes in its directory. --overwrite removes this and no more, and only where run.json says that a
# run made it: a mistyped directory survives.
RUN_FILES = (
    "best.weights.h5",
    "last.weights.h5",
    "checkpoints",
    "detections.json",
    "first_batch.png",
    "flags.txt",
    "init_from.txt",
    "loss_curves.png",
    "metrics.json",
    "pr_curves.png",
    "results.csv",
    "skipped",
    "tensorboard",
    "run.json",  # the last: while it stands, an interrupted removal can be repeated
)
_ABSENT = "absent"
_SHOWN_CHARACTERS = 60


def make_output_directory(path: str | os.PathLike) -> pathlib.Path:
    """Makes a directory for results, before the work whose results go there; UserError where that fails."""
    try:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir={path}: {error.strerror}") from error
    return pathlib.Path(path)


@contextlib.contextmanager
def writing(directory: str | os.PathLike) -> Iterator[None]:
    """Around the writing of results: UserError where it fails, for example because the disk is full."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output_dir={directory}: {error.strerror or error}") from error


class RunDirectory:
    """The directory of one run: new, taken up again when it is the same run, or refused.

    Making the object only looks; `claim`, when all else is known to be in order, writes and overwrites.

    Args:
        path: the directory.
        identity: what makes two runs different (config, data, batch size, seed, ...), as JSON can hold it.
        overwrite: start anew where another run, or the same, was; other files are left alone.
        may_change: keys of the identity that may differ between two sittings of one run.

    Attributes:
        path: the directory.
        resumed: whether the same run was here before and goes on.
        changed: those of `may_change` that do differ: the run goes on, but not exactly.

    Raises:
        UserError: the directory holds another run, or files of something else, or cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        identity: Mapping[str, Any],
        overwrite: bool = False,
        may_change: Sequence[str] = (),
    ):
        self.path = pathlib.Path(path)
        self.changed: list[str] = []
        self._may_change = tuple(may_change)
        self._file = self.path / "run.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.resumed = self._file.exists() and not overwrite
            if self.resumed:
                self._check_same_run(identity)
            elif not self._file.exists():
                self._check_free(overwrite)
        except OSError as error:
            raise UserError(f"--output_dir={self.path}: {error.strerror}") from error
        self._identity = dict(identity)
        self._overwrite = overwrite

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint from which the same run goes on."""
        return self.resumed and any((self.path / "checkpoints").glob("[0-9]*"))

    def claim(self) -> pathlib.Path:
        """Makes the directory this run's own: removes what it overwrites, writes the identity. The path."""
        try:
            remove_unfinished(self.path)
            if self._overwrite:
                self._remove_run()
            if not self.resumed or self.changed:
                write_bytes(self._file, json.dumps(self._identity, indent=2).encode() + b"\n")
        except OSError as error:
            raise UserError(f"--output_dir={self.path}: {error.strerror}") from error
        return self.path

    def _check_same_run(self, identity: Mapping[str, Any]) -> None:
        try:
            existing = _flatten(json.loads(self._file.read_bytes()))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self._file} is damaged: --overwrite starts anew") from error
        wanted = _flatten(identity)
        differences = []
        for key in sorted(existing.keys() | wanted.keys()):
            was, now = existing.get(key, _ABSENT), wanted.get(key, _ABSENT)
            if was != now and key in self._may_change:
                self.changed.append(key)
            elif was != now and key == "data":  # two fingerprints would tell nobody anything
                differences.append("the training data are not the same")
            elif was != now:
                was, now = _shorten(was, now)
                differences.append(f"{key} was {was} and is now {now}")
        if differences:
            raise UserError(
                f"--output_dir={self.path} holds another run: {'; '.join(differences)}. Name another one, or "
                "give --overwrite to start anew"
            )

    def _check_free(self, overwrite: bool) -> None:
        """No run was here: the directory is empty, or with --overwrite nothing in it bears a run's names."""
        files = sorted(path.name for path in self.path.iterdir() if not path.name.startswith("."))
        if files and not overwrite:
            raise UserError(
                f"--output_dir={self.path} is no run directory and not empty ({', '.join(files[:3])}): name "
                "another one, or give --overwrite to put a run beside these files"
            )
        ours = [name for name in files if name in RUN_FILES]
        if ours:
            raise UserError(
                f"--output_dir={self.path} holds {', '.join(ours[:3])} that no run of ours made (there is no "
                "run.json): name another directory"
            )

    def _remove_run(self) -> None:
        if not self._file.exists():
            return
        for path in (self.path / name for name in RUN_FILES):
            if path.is_dir():
                remove_directory(path)
            else:
                path.unlink(missing_ok=True)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"config": {"seed": 1}} -> {"config.seed": "1"}; tuples and lists are the same."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value)
    return flat


def _shorten(was: str, now: str) -> tuple[str, str]:
    """Two different values, short enough for one line: of long ones the part around the first difference."""
    if max(len(was), len(now)) <= _SHOWN_CHARACTERS:
        return was, now
    pairs = enumerate(zip(was, now, strict=False))
    parting = next((place for place, (a, b) in pairs if a != b), min(len(was), len(now)))
    start = max(parting - _SHOWN_CHARACTERS // 3, 0)

    def part(text: str) -> str:
        end = start + _SHOWN_CHARACTERS
        return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")

    return part(was), part(now)
