"""The directory of one run: the same command resumes it, another one is refused."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from common.args import Args
from common.errors import UserError
from common.files import remove_directory, remove_unfinished, write_bytes

# What a run makes in its directory. --overwrite removes only this, and only where there is a run.json: a
# mistyped directory survives.
_DATA = ("checkpoints", "skipped", "tensorboard", "best.weights.h5", "last.weights.h5", "results.csv")
_TEXTS = ("flags.txt", "init_from.txt", "metrics.json", "detections.json")
_PICTURES = ("first_batch.png", "loss_curves.png", "pr_curves.png")
RUN_FILES = (*_DATA, *_TEXTS, *_PICTURES, "run.json")  # in this order: an interrupted removal can be repeated
OF_RANKS = ("num_replicas", "num_ranks", "steps_per_epoch")  # in the identity, of the ranks
MAY_CHANGE = ("freeze",)
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
        pairs = {}
        for name in sorted(was.keys() | now.keys()):
            default = defaults.get(name, _ABSENT)
            pairs[name] = was.get(name, default), now.get(name, default)
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class RunDirectory:
    """The directory of one run: new, taken up again when it is the same run, or refused.

    Making the object only looks; `claim`, when all else is known to be in order, writes and overwrites.

    Args:
        a: the flags: --output_dir; --overwrite: start anew where another run, or the same, was, and leave
            other files alone.
        identity: of the run. MAY_CHANGE may differ between two sessions of one run, with --elastic OF_RANKS,
            too: it continues, but not bit for bit.

    Attributes:
        path: the directory.
        resumed: whether the same run was here before, and there is a checkpoint from which it continues.

    Raises:
        UserError: the directory holds another run, or files of something else, or cannot be made.
    """

    def __init__(self, a: Args, identity: Identity) -> None:
        self.path = pathlib.Path(a.output_dir)
        self._identity, self._overwrite = identity, a.overwrite
        self._may_change = MAY_CHANGE + OF_RANKS if a.elastic else MAY_CHANGE
        self._file = self.path / "run.json"
        with in_directory(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.resumed = not a.overwrite and any(self.path.glob("checkpoints/[0-9]*"))
            if not self._file.exists():
                self._check_free()
            elif not a.overwrite:
                self._check_same_run()

    def claim(self) -> pathlib.Path:
        """Makes the directory this run's own: removes what it overwrites, writes the identity. The path."""
        with in_directory(self.path):
            remove_unfinished(self.path)
            if self._overwrite and self._file.exists():
                for path in (self.path / name for name in RUN_FILES):
                    if path.is_dir():
                        remove_directory(path)
                    else:
                        path.unlink(missing_ok=True)
            write_bytes(self._file, json.dumps(self._identity.values, indent=2).encode() + b"\n")
        return self.path

    def _check_same_run(self) -> None:
        try:
            found = self._identity.differences(json.loads(self._file.read_bytes()))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self._file} is damaged: --overwrite starts anew") from error
        refused = [_describe(name, *pair) for name, pair in found.items() if name not in self._may_change]
        if refused:
            raise UserError(
                f"--output_dir={self.path} holds another run: {'; '.join(refused)}. Name another one, or "
                "give --overwrite to start anew"
            )

    def _check_free(self) -> None:
        """No run was here: the directory is empty, or with --overwrite nothing in it bears a run's names."""
        files = sorted(path.name for path in self.path.iterdir() if not path.name.startswith("."))
        in_the_way = [name for name in files if name in RUN_FILES or not self._overwrite]
        if in_the_way:
            raise UserError(
                f"--output_dir={self.path} is not a run's (there is no run.json) and not empty "
                f"({', '.join(in_the_way[:3])}): name another one; --overwrite puts a run beside other files"
            )


@contextlib.contextmanager
def in_directory(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of the file system into the UserError of --output_dir."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output_dir={path}: {error.strerror}") from error


def _describe(name: str, was: str, now: str) -> str:
    if max(len(was), len(now)) > _SHOWN_CHARACTERS:
        return f"{name} is not the same"
    return f"{name} was {was} and is now {now}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"config": {"seed": 1}} -> {"config.seed": "1"}; tuples and lists are the same."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value)
    return flat
