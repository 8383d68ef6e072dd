"""The directory of one run: the same command resumes it, another one is refused. The files of checkpoints.

    run.json                  what the run is: its Identity
    checkpoints/00001200/
        manifest.json         step, epoch, counters; what the run is; versions of the libraries
        state.*               weights, averages, optimizer, loss scale: the same on all ranks
        rank_0.* ...          what differs between ranks: data position, random seeds, and on ranks above 0
                              moving statistics; by tf.train.Checkpoint, as state.* is
        SHA256SUMS            written last; `sha256sum -c` reads it

The newest checkpoint is the one that was saved last, at any step: a run that went back to the end of an
epoch may save lower steps than before. A step that is saved again, as before and after an evaluation, has
another directory (00001200.7, the seventh save of the run), so that no save replaces what it may not reach.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
import platform
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from common import files, progress
from common.args import Args
from common.errors import UserError

if TYPE_CHECKING:
    from common.distributed.ranks import Ranks

# What a run makes in its directory. --overwrite removes only this, and only where there is a run.json: a
# mistyped directory survives.
RUN = "run.json"
_DATA = ("checkpoints", "skipped", "tensorboard", "best.weights.h5", "last.weights.h5", "results.csv")
_TEXTS = ("flags.txt", "init_from.txt", "metrics.json", "detections.json")
_PICTURES = ("first_batch.png", "loss_curves.png", "pr_curves.png")
RUN_FILES = (*_DATA, *_TEXTS, *_PICTURES, RUN)  # in this order: an interrupted removal can be repeated
IDENTITY_FLAGS = ("batch_size", "accumulate_steps", "precision", "freeze", "freeze_batch_norm", "seed")
MAY_CHANGE = ("freeze", "freeze_batch_norm", "dali_graph")
MAY_CHANGE_IF_ELASTIC = (*MAY_CHANGE, "num_replicas", "num_ranks", "steps_per_epoch")
_SHOWN_CHARACTERS = 60

MANIFEST = "manifest.json"
_CHECKSUMS = "SHA256SUMS"
# The step; then the serial if another save of this step was there (6eb6d8f: .new).
_NAME = re.compile(r"\d+(\.\d+|\.new)?")
_SERIAL = "serial"  # key of the manifest: counts the saves of a run
_LIBRARIES = ("tensorflow", "keras", "nvidia-dali-cuda120", "numpy", "horovod")
UNIMPORTANT = ("python", "horovod")  # of `versions`: another one changes no result, so nothing reports it


@dataclasses.dataclass(frozen=True)
class Identity:
    """What makes two runs different: config, data, batch size, seed, ...

    Attributes:
        values: name -> value, in JSON's types; those of a mapping are compared name by name.
        defaults: "config.name", or the name of a flag -> the value of runs that were saved before there was
            this field or flag, so that a new one with its default does not invalidate them.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        a: Args,
        ranks: "Ranks",
        config: Any,
        metadata: Mapping[str, Any],
        *,
        may_change: Collection[str],
        **others: Any,
    ) -> "Identity":
        """That of a run with these flags, ranks, config without the fields that `may_change`, and others.

        `metadata` is that of the weights files: it has the config in JSON's types.
        """
        fields = [field for field in dataclasses.fields(config) if field.name not in may_change]
        values = {
            "config": {field.name: metadata["config"][field.name] for field in fields},
            "data": metadata.get("train_data", "synthetic"),
            "num_replicas": ranks.num_replicas,
            "num_ranks": ranks.world_size,
            **{name: metadata[name] for name in ("app", "num_classes", "label_map")},
            **{name: getattr(a, name) for name in IDENTITY_FLAGS},
            **others,
        }
        defaults = {f"config.{f.name}": f.default for f in fields if f.default is not dataclasses.MISSING}
        return cls(values, json.loads(json.dumps(defaults | {"freeze_batch_norm": False})))

    def differences(self, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Name -> (what it was in `saved`, what it is now); names inside a mapping have dots."""
        was, now = {**self.defaults, **flatten(saved)}, flatten(self.values)
        names = sorted(was.keys() | now.keys())
        pairs = {name: (was.get(name, "absent"), now.get(name, "absent")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"config": {"seed": 1}, "app": "a"} -> {"config.seed": 1, "app": "a"}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping)
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if inside else {name: value}
    return flat


def check(a: Args, ranks: "Ranks", identity: Identity) -> bool:
    """Whether this run was in --output_dir before and left a checkpoint. Only looks; see `claim`.

    All ranks call it together. Only rank 0 reads the directory: hosts need not share a disk.

    Args:
        a: the flags: --output_dir; --overwrite: start anew where another run, or the same, was, and leave
            other files alone.
        ranks: of the run.
        identity: of the run. MAY_CHANGE may differ between two sessions of one run: it continues, but not
            bit for bit.

    Raises:
        UserError: the directory holds another run, or files of something else, or cannot be made; or the
            ranks differ in flags or data.
    """
    with ranks.raise_on_any_rank():
        differing = identity.differences(ranks.broadcast_object(identity.values))
        if differing:  # other data on one host would train unnoticed
            raise UserError(
                f"rank {ranks.rank} and rank 0 do not have the same {', '.join(differing)}: give all ranks "
                "the same flags and the same data"
            )
        resumed = ranks.rank == 0 and _check_directory(a, identity)
    return ranks.broadcast_object(resumed)


def _check_directory(a: Args, identity: Identity) -> bool:
    directory = files.make_output_directory(a.output_dir)
    with files.user_errors(f"--output_dir={directory}"):
        if not (directory / RUN).exists():
            _check_free(directory, a.overwrite)
        elif not a.overwrite:
            _check_same_run(directory / RUN, identity, MAY_CHANGE_IF_ELASTIC if a.elastic else MAY_CHANGE)
        return not a.overwrite and any(directory.glob("checkpoints/[0-9]*"))


def claim(a: Args, identity: Identity) -> pathlib.Path:
    """Makes --output_dir this run's, when all else is known to be in order.

    Removes what it overwrites, and writes the identity.

    Returns:
        The directory.
    """
    directory = pathlib.Path(a.output_dir)
    with files.user_errors(f"--output_dir={directory}"):
        files.remove_unfinished(directory)
        if a.overwrite and (directory / RUN).exists():
            for path in (directory / name for name in RUN_FILES):
                if path.is_dir():
                    files.remove_directory(path)
                else:
                    path.unlink(missing_ok=True)
        content = json.dumps(identity.values, indent=2).encode() + b"\n"
        if not (directory / RUN).exists() or (directory / RUN).read_bytes() != content:
            files.write_bytes(directory / RUN, content)
    return directory


def _check_same_run(file: pathlib.Path, identity: Identity, may_change: Collection[str]) -> None:
    try:
        found = identity.differences(json.loads(file.read_bytes()))
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged: --overwrite starts anew") from error
    refused = []
    for name, (was, now) in found.items():
        if name not in may_change:
            long = max(len(str(was)), len(str(now))) > _SHOWN_CHARACTERS
            refused.append(f"{name} is not the same" if long else f"{name} was {was} and is now {now}")
    if refused:
        raise UserError(
            f"--output_dir={file.parent} holds another run: {'; '.join(refused)}. Name another one, or "
            "give --overwrite to start anew"
        )


def _check_free(directory: pathlib.Path, overwrite: bool) -> None:
    """No run was here: the directory is empty, or with --overwrite nothing in it bears a run's names."""
    names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    in_the_way = [name for name in names if name in RUN_FILES or not overwrite]
    if in_the_way:
        raise UserError(
            f"--output_dir={directory} is not the directory of a run (run.json is missing) and not empty "
            f"({', '.join(in_the_way[:3])}): name another one; --overwrite puts a run beside other files"
        )


def saved(directory: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints in a directory, in the order in which they were saved; none where it does not exist.

    Those whose manifest is damaged come last.

    Raises:
        OSError: a manifest exists and cannot be read, so the order is unknown.
    """
    found = [path for path in directory.glob("[0-9]*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_serial)


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
        wanted = "whole and saved between two epochs: use the flags of before, or" if boundary else "whole:"
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
    files.write_directory(path.with_suffix(f".{serial}") if path.exists() else path, write_all)


def prune(directory: pathlib.Path, keep: int) -> None:
    """Removes all but the newest `keep`, at least 1, and the newest that was saved between two epochs.

    Raises:
        OSError: one of them cannot be removed, or nothing is known about them.
    """
    found = [path for path in saved(directory) if math.isfinite(_serial(path))]
    staying = {*found[-keep:], *[path for path in found if at_boundary(path)][-1:]}
    for path in found:
        if path not in staying:
            files.remove_directory(path)


def remove_newer(path: pathlib.Path) -> None:
    """Removes the checkpoints that were passed over for this one: damaged, or not between two epochs."""
    found = saved(path.parent)
    for newer in found[found.index(path) + 1 :]:
        files.remove_directory(newer)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a step computes."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {k: installed[k] for k in _LIBRARIES if k in installed}


def _serial(path: pathlib.Path) -> float:
    """Infinite where it is damaged: such a checkpoint is examined first, and rejected."""
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
