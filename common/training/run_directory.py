"""Manages a run's directory. Repeating a command resumes its run.

run.json                  the Identity of the run
checkpoints/              see common/weights/checkpoint_files.py
"""

import dataclasses
import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from common import files
from common.args import Args
from common.data.loader import LOADER_VERSION
from common.data.sources import FIRST_IMAGES, Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.weights.model_metadata import flatten

# --overwrite removes only these files, and only if there is a run.json.
RUN = "run.json"
_DATA = ("checkpoints", "tensorboard", "best.weights.h5", "last.weights.h5", "results.csv")
_TEXTS = ("flags.txt", "init_from.txt", "metrics.json", "detections.json", "errors.json")
_EVALUATION = ("pr_curves.png", "detections.png", "errors.png", "confusion_matrix.png")
_PICTURES = ("first_batch.png", "loss_curves.png", *_EVALUATION)
RUN_FILES = (*_DATA, *_TEXTS, *_PICTURES, RUN)  # in the order of removal
IDENTITY_FLAGS = ("batch_size", "accumulate_steps", "precision", "freeze", "freeze_batch_norm", "seed")
LOOP_FLAGS = ("shuffle", "eval_every", "eval_every_steps", "patience", "save_every", "max_skipped_steps")
MAY_CHANGE = ("freeze", "freeze_batch_norm", "loader_version")
# A resumed run may have another number of ranks, and then another number of steps per epoch.
RESHARDED = ("num_replicas", "num_ranks", "steps_per_epoch")
_CHECKPOINTS = "checkpoints/[0-9]*"
_SHOWN_CHARACTERS = 60
DATA_SUMMARY = "data_summary"  # key of run.json


@dataclasses.dataclass(frozen=True)
class Identity:
    """The values that tell one run from another: config, data, batch size, seed, ...

    Attributes:
        values: name -> JSON value; mappings are compared key by key.
        defaults: name of a flag or "config.<field>" -> the value for runs that were saved before the flag or
            field existed.
        of_all_ranks: like `values`, but only equal on all ranks: a resumed run may change them.
        data_summary: `Source.summary` of the training data, for messages; not compared.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_all_ranks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        a: Args,
        ranks: Ranks,
        config: Any,
        metadata: Mapping[str, Any],
        *,
        may_change: Collection[str],
        source: Source | None = None,
        **others: Any,
    ) -> "Identity":
        """Makes the identity of a run.

        Args:
            metadata: the metadata of the weights files.
            may_change: names of the config fields that are not part of the identity.
            source: the training data, if they are not synthetic.
            others: name -> value, such as steps_per_epoch=1000; added to the identity.
        """
        fields = [field for field in dataclasses.fields(config) if field.name not in may_change]
        values = {
            "config": {field.name: metadata["config"][field.name] for field in fields},
            "data": metadata.get("train_data", "synthetic"),
            "num_replicas": ranks.num_replicas,
            "num_ranks": ranks.world_size,
            "loader_version": LOADER_VERSION,
            **{name: metadata[name] for name in ("app", "num_classes", "label_map")},
            **{name: getattr(a, name) for name in IDENTITY_FLAGS},
            **others,
        }
        defaults = {f"config.{f.name}": f.default for f in fields if f.default is not dataclasses.MISSING}
        of_all_ranks = {"config": metadata["config"], "eval_data": metadata.get("eval_data")}
        of_all_ranks |= {name: getattr(a, name) for name in LOOP_FLAGS}
        defaults = json.loads(json.dumps(defaults | {"freeze_batch_norm": False}))
        return cls(values, defaults, of_all_ranks, source.summary() if source else {})

    def differences(self, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns name -> (saved value, present value) of differing values."""
        was, now = {**self.defaults, **flatten(saved)}, flatten(self.values)
        names = sorted(was.keys() | now.keys())
        pairs = {name: (was.get(name, "absent"), now.get(name, "absent")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check(a: Args, ranks: Ranks, identity: Identity) -> bool:
    """Makes and checks --output_dir; returns whether it has a checkpoint of this run. Writes no files.

    All ranks call it together. Only rank 0 reads the directory, so hosts need not share a disk.

    Args:
        identity: the identity of the run. Values in MAY_CHANGE and the number of replicas may differ from the
            last session.

    Raises:
        UserError: the directory holds another run or other files, or cannot be made; or the ranks differ in
            flags or data.
    """
    with ranks.raise_on_any_rank():
        local = Identity({**identity.values, **identity.of_all_ranks})
        if differing := local.differences(ranks.broadcast_object(local.values)):
            names = ", ".join(differing)
            raise UserError(f"ranks 0 and {ranks.rank} differ in {names}: give all the same flags and data")
        resumed = ranks.rank == 0 and _check_directory(a, identity)
    return ranks.broadcast_object(resumed)


def _check_directory(a: Args, identity: Identity) -> bool:
    directory = files.make_output_directory(a.output_dir)
    with files.user_errors(f"--output_dir={directory}"):
        if a.overwrite and a.init_from and directory.resolve() in pathlib.Path(a.init_from).resolve().parents:
            raise UserError(
                f"--init_from={a.init_from} is in --output_dir, which --overwrite empties: copy the file to "
                "another directory, or choose another --output_dir"
            )
        if not (directory / RUN).exists():
            _check_free(directory, a.overwrite)
        elif not a.overwrite:
            _check_same_run(directory / RUN, identity)
        return not a.overwrite and any(directory.glob(_CHECKPOINTS))


def claim(a: Args, ranks: Ranks, identity: Identity) -> pathlib.Path | None:
    """Takes over --output_dir for this run, after all other checks. All ranks call it together.

    With --overwrite, removes the files of the old run. Writes run.json, unless there are checkpoints: then
    `Checkpoints.restore` writes it.

    Returns:
        The directory on rank 0, None on the other ranks, which write no files.
    """
    with ranks.raise_on_any_rank():
        return _claim_directory(a, identity) if ranks.rank == 0 else None


def _claim_directory(a: Args, identity: Identity) -> pathlib.Path:
    directory = pathlib.Path(a.output_dir)
    with files.user_errors(f"--output_dir={directory}"):
        files.remove_unfinished(directory)
        if a.overwrite and (directory / RUN).exists():
            for path in (directory / name for name in RUN_FILES):
                if path.is_dir():
                    files.remove_directory(path)
                else:
                    path.unlink(missing_ok=True)
        if not any(directory.glob(_CHECKPOINTS)):
            write_identity(directory, identity)
    return directory


def write_identity(directory: pathlib.Path, identity: Identity) -> None:
    """Writes run.json if its content changes."""
    summary = {DATA_SUMMARY: identity.data_summary} if identity.data_summary else {}
    content = json.dumps({**identity.values, **summary}, indent=2).encode() + b"\n"
    if not (directory / RUN).exists() or (directory / RUN).read_bytes() != content:
        files.write_bytes(directory / RUN, content)


def _check_same_run(file: pathlib.Path, identity: Identity) -> None:
    try:
        saved = json.loads(file.read_bytes())
        data_summary = saved.pop(DATA_SUMMARY, {})
        differences = identity.differences(saved)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is damaged: give --overwrite to start anew") from error
    may_change = {*MAY_CHANGE, *(RESHARDED if "num_replicas" in differences else ())}
    refused = []
    for name, (was, now) in differences.items():
        if name == "data":
            refused.append(_data_difference(data_summary, identity.data_summary))
        elif name not in may_change:
            long = max(len(str(was)), len(str(now))) > _SHOWN_CHARACTERS
            refused.append(f"{name} is not the same" if long else f"{name} was {was} and is now {now}")
    if refused:
        raise UserError(
            f"--output_dir={file.parent} holds another run: {'; '.join(refused)}. Choose another directory "
            f"(--init_from={file.parent} starts from the weights of this run), or give --overwrite to start "
            "anew"
        )


def _data_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a text about the difference between two data sets, from their summaries."""
    if not was or not now:  # synthetic data, or a run that an earlier version started
        return "data is not the same"
    parts = [f"{was[key]} -> {now[key]} {key}" for key in ("images", "boxes") if was[key] != now[key]]
    before, after = (", ".join(summary[FIRST_IMAGES]) for summary in (was, now))
    if before != after:
        parts.append(f"{FIRST_IMAGES} {before} -> {after}")
    equal = "the same numbers of images and boxes, but other images, boxes or classes"
    return f"data is not the same ({'; '.join(parts) or equal})"


def _check_free(directory: pathlib.Path, overwrite: bool) -> None:
    """Raises UserError if `directory` holds files. With `overwrite`, only files in RUN_FILES count."""
    names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    if in_the_way := [name for name in names if name in RUN_FILES or not overwrite]:
        raise UserError(
            f"--output_dir={directory} holds files ({', '.join(in_the_way[:3])}), but no run.json, so it is "
            "not the directory of a run: choose another directory. With --overwrite, a run can start beside "
            "other files, if it does not write files with the same names"
        )
