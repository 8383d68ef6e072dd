"""The directory of one run: the same command resumes it, another one is refused."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from common.errors import UserError
from common.files import remove_directory, remove_unfinished, write_bytes

# What a run makes in its directory. --overwrite removes only this, and only where there is a run.json: a
# mistyped directory survives.
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
    "run.json",  # the last: until then an interrupted removal can be repeated
)
_ABSENT = "absent"
_SHOWN_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class Identity:
    """What makes two runs different: config, data, batch size, seed, ...

    Attributes:
        values: name -> value, as JSON can hold it; mappings inside are compared name by name.
        defaults: values assumed for names that an older run lacks, so that a new field of the config with
            its default does not invalidate older runs.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, may_change: Collection[str], **others: Any) -> "Identity":
        """That of a run with this config, a dataclass, without the fields that `may_change`; and `others`."""
        fields = [field for field in dataclasses.fields(config) if field.name not in may_change]
        values = {field.name: getattr(config, field.name) for field in fields}
        defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        return cls({"config": values, **others}, {"config": defaults})

    def extended(self, **others: Any) -> "Identity":
        """This one and more values."""
        return dataclasses.replace(self, values={**self.values, **others})

    def differences(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Name -> (what it was in `saved`, what it is now), as JSON; names inside a mapping have dots."""
        was, now, defaults = (_flatten(values) for values in (saved, self.values, self.defaults))
        pairs = {
            name: (was.get(name, defaults.get(name, _ABSENT)), now.get(name, defaults.get(name, _ABSENT)))
            for name in sorted(was.keys() | now.keys())
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class RunDirectory:
    """The directory of one run: new, taken up again when it is the same run, or refused.

    Making the object only looks; `claim`, when all else is known to be in order, writes and overwrites.

    Args:
        path: the directory.
        identity: of the run.
        overwrite: start anew where another run, or the same, was; other files are left alone.
        may_change: keys of the identity that may differ between two sessions of one run.

    Attributes:
        path: the directory.
        resumed: whether the same run was here before and continues.
        changed: those of `may_change` that differ: the run continues, but not bit for bit.

    Raises:
        UserError: the directory holds another run, or files of something else, or cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        identity: Identity,
        overwrite: bool = False,
        may_change: Sequence[str] = (),
    ):
        self.path = pathlib.Path(path)
        self.changed: list[str] = []
        self._identity = identity
        self._may_change = tuple(may_change)
        self._file = self.path / "run.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.resumed = self._file.exists() and not overwrite
            if self.resumed:
                self._check_same_run()
            elif not self._file.exists():
                self._check_free(overwrite)
        except OSError as error:
            raise UserError(f"--output_dir={self.path}: {error.strerror}") from error
        self._overwrite = overwrite

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint from which the same run continues."""
        return self.resumed and any((self.path / "checkpoints").glob("[0-9]*"))

    def claim(self) -> pathlib.Path:
        """Makes the directory this run's own: removes what it overwrites, writes the identity. The path."""
        try:
            remove_unfinished(self.path)
            if self._overwrite:
                self._remove_run()
            if not self.resumed or self.changed:
                write_bytes(self._file, json.dumps(self._identity.values, indent=2).encode() + b"\n")
        except OSError as error:
            raise UserError(f"--output_dir={self.path}: {error.strerror}") from error
        return self.path

    def _check_same_run(self) -> None:
        try:
            existing = json.loads(self._file.read_bytes())
            found = self._identity.differences(existing)
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self._file} is damaged: --overwrite starts anew") from error
        self.changed = [name for name in found if name in self._may_change]
        differences = []
        for name, (was, now) in found.items():
            if name == "data":  # two fingerprints would tell the reader nothing
                differences.append("the training data are not the same")
            elif name not in self._may_change:
                differences.append("{} was {} and is now {}".format(name, *_shorten(was, now)))
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
