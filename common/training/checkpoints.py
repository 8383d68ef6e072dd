"""Saves and restores checkpoints: the complete state from which a run continues as if it had never stopped.

    runs/mine/
        run.json               what this run is: its Identity
        checkpoints/00001200/  everything at step 1200 (common/weights/checkpoint_files.py)
        best.weights.h5        the weights of the best evaluation (common/weights/weight_files.py)
        last.weights.h5        the weights of the last epoch

run.json tells whether a command may continue the run in this directory, and the manifest of each checkpoint
tells whether the run can continue exactly there:

    check_directory(a, ranks, identity)                # before the model is built; refuses another run
    directory = claim_directory(a, ranks, identity)
    checkpoints = Checkpoints(directory, ranks, model, optimizer, ema, ...)
    state = checkpoints.find() or RunState()
    feed = InputFeed(ranks, ..., state, ...)           # opens the data at that place
    checkpoints.restore(state, feed.iterators)

If a checkpoint is damaged, the one before it is used. Only rank 0 reads and writes files, so hosts need not
share a disk.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from common import files, progress
from common.args import SHUFFLES, Args
from common.data.loader import LOADER_VERSION
from common.data.sources import FIRST_IMAGES, Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.hparams import Config
from common.layers import moving_statistics, random_states
from common.training.ema import AveragedWeights
from common.weights import checkpoint_files, model_metadata, weight_files
from common.weights.model_metadata import flatten

KEEP = 2  # newest checkpoints; the newest one from the end of an epoch is also kept
_SHARED = "state"
_LOCAL = "rank"

# --- what a run is ---

RUN = "run.json"
IDENTITY_FLAGS = ("batch_size", "accumulate_steps", "precision", "freeze", "freeze_batch_norm", "seed")
LOOP_FLAGS = ("shuffle", "eval_every", "eval_every_steps", "patience", "save_every", "max_skipped_steps")
LOADER = "loader_version"
MAY_CHANGE = ("freeze", "freeze_batch_norm", LOADER)
# With another number of replicas, a resumed run may also have other numbers of ranks and of steps per epoch.
RESHARDED = ("num_replicas", "num_ranks", "steps_per_epoch")
_SHOWN_CHARACTERS = 60
DATA_SUMMARY = "data_summary"  # key of run.json


@dataclasses.dataclass(frozen=True)
class Identity:
    """The values that tell one run from another: config, data, batch size, seed, ...

    Attributes:
        values: name -> JSON value; mappings are compared key by key.
        defaults: "config.<field>" -> the value for runs that an earlier version saved, without the field.
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
            "data": metadata.get("train_data", "synthetic"),  # Source.fingerprint: of names and boxes
            "num_replicas": ranks.num_replicas,
            "num_ranks": ranks.world_size,
            LOADER: LOADER_VERSION,
            **{name: metadata[name] for name in ("app", "num_classes", "label_map")},
            **{name: getattr(a, name) for name in IDENTITY_FLAGS},
            **others,
        }
        defaults = {f"config.{f.name}": f.default for f in fields if f.default is not dataclasses.MISSING}
        of_all_ranks = {"config": metadata["config"], "eval_data": metadata.get("eval_data")}
        of_all_ranks |= {name: getattr(a, name) for name in LOOP_FLAGS}
        summary = source.summary() if source else {}
        return cls(values, json.loads(json.dumps(defaults)), of_all_ranks, summary)

    def differences(self, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns name -> (saved value, present value) of differing values."""
        was, now = {**self.defaults, **flatten(saved)}, flatten(self.values)
        names = sorted(was.keys() | now.keys())
        pairs = {name: (was.get(name, "absent"), now.get(name, "absent")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def changes(self, saved: Mapping[str, Any]) -> "Changes":
        """Compares this run with a saved identity: that of run.json, or that of a checkpoint's manifest."""
        data_summary = saved.get(DATA_SUMMARY, {})
        differences = self.differences({name: saved[name] for name in saved if name != DATA_SUMMARY})
        may_change = {*MAY_CHANGE, *(RESHARDED if "num_replicas" in differences else ())}
        refused = []
        for name, (was, now) in differences.items():
            if name == "data":
                refused.append(_data_difference(data_summary, self.data_summary))
            elif name not in may_change:
                long = max(len(str(was)), len(str(now))) > _SHOWN_CHARACTERS
                refused.append(f"{name} is not the same" if long else f"{name} was {was} and is now {now}")
        names = sorted({name.partition(".")[0] for name in differences})
        resharded = not differences.keys().isdisjoint(RESHARDED)
        return Changes(names, refused, resharded, data_continues=not resharded and LOADER not in differences)

    def write(self, directory: pathlib.Path) -> None:
        """Writes run.json if its content changes."""
        summary = {DATA_SUMMARY: self.data_summary} if self.data_summary else {}
        content = json.dumps({**self.values, **summary}, indent=2).encode() + b"\n"
        if not (directory / RUN).exists() or (directory / RUN).read_bytes() != content:
            files.write_bytes(directory / RUN, content)


class Changes(NamedTuple):
    """What has changed since an identity was saved, and what follows.

    Attributes:
        names: the values that differ. If there are any, the run continues from the end of an epoch.
        refused: a text for each difference with which the run cannot continue.
        resharded: whether the number of ranks or replicas differs. Then an epoch may have another number of
            steps, and nothing is restored that each rank has saved for itself.
        data_continues: whether the saved positions in the data are valid. If not, the next epoch reads its
            data from the start.
    """

    names: Sequence[str] = ()
    refused: Sequence[str] = ()
    resharded: bool = False
    data_continues: bool = True


def _data_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a text about the difference between two data sets, from their summaries."""
    if not was or not now:  # data of one of them are synthetic
        return "data is not the same"
    parts = [f"{was[key]} -> {now[key]} {key}" for key in ("images", "boxes") if was[key] != now[key]]
    before, after = (", ".join(summary[FIRST_IMAGES]) for summary in (was, now))
    if before != after:
        parts.append(f"{FIRST_IMAGES} {before} -> {after}")
    equal = "the same numbers of images and boxes, but other images, boxes or classes"
    return f"data is not the same ({'; '.join(parts) or equal})"


# --- the defaults of the version that started a run ---


def choose_config(a: Args, ranks: Ranks, configs: Sequence[Config], may_change: Collection[str]) -> Config:
    """Returns the first config that is the one in run.json, or configs[0] if there is none.

    Args:
        configs: what the flags give with the defaults of this version and, after it, of earlier versions.
        may_change: names of the config fields that are not part of the identity.
    """
    is_resumed = ranks.rank == 0 and not a.overwrite
    index = ranks.broadcast_object(_index_in_run_json(a, configs, may_change) if is_resumed else 0)
    if index:
        pairs = zip(vars(configs[index]).items(), vars(configs[0]).values(), strict=True)
        text = ", ".join(f"{name}={value}" for (name, value), present in pairs if value != present)
        progress.log(f"this run keeps the defaults of the version that started it: {text}")
    return configs[index]


def _index_in_run_json(a: Args, configs: Sequence[Any], may_change: Collection[str]) -> int:
    try:
        config_of_run = json.loads((pathlib.Path(a.output_dir) / RUN).read_bytes())["config"]
        for index, config in enumerate(configs):
            fields = [field for field in dataclasses.fields(config) if field.name not in may_change]
            values = {field.name: getattr(config, field.name) for field in fields}
            # A run of an earlier version lacks newer fields.
            saved = {field.name: config_of_run.get(field.name, field.default) for field in fields}
            values, saved = json.loads(json.dumps([values, saved]))  # tuples become lists
            if values == saved:
                return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no run, or a damaged one
        pass
    return 0  # if this is another run, check_directory says so


# --- the run directory ---

# --overwrite removes only these files, and only if there is a run.json.
_DATA = ("checkpoints", "tensorboard", "best.weights.h5", "last.weights.h5", "results.csv")
_TEXTS = ("flags.txt", "init_from.txt", "metrics.json", "detections.json", "errors.json")
_EVALUATION = ("pr_curves.png", "detections.png", "errors.png", "confusion_matrix.png")
_PICTURES = ("first_batch.png", "loss_curves.png", *_EVALUATION)
RUN_FILES = (*_DATA, *_TEXTS, *_PICTURES, RUN)  # in the order of removal
_CHECKPOINTS = "checkpoints/[0-9]*"


def check_directory(a: Args, ranks: Ranks, identity: Identity) -> bool:
    """Makes and checks --output_dir; returns whether it has a checkpoint of this run. Writes no files.

    All ranks call it together. Only rank 0 reads the directory, so hosts need not share a disk.

    Args:
        identity: the identity of the run. `Identity.changes` decides which values may differ from the last
            session.

    Raises:
        UserError: the directory holds another run or other files, or cannot be made; or the ranks differ in
            flags or data.
    """
    with ranks.raise_on_any_rank():
        local = Identity({**identity.values, **identity.of_all_ranks})
        if differing := local.differences(ranks.broadcast_object(local.values)):
            names = ", ".join(differing)
            raise UserError(f"ranks 0 and {ranks.rank} differ in {names}: give all the same flags and data")
        resumed = ranks.rank == 0 and _check_on_rank_0(a, identity)
    return ranks.broadcast_object(resumed)


def _check_on_rank_0(a: Args, identity: Identity) -> bool:
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


def claim_directory(a: Args, ranks: Ranks, identity: Identity) -> pathlib.Path | None:
    """Takes over --output_dir for this run, after all other checks. All ranks call it together.

    With --overwrite, removes the files of the old run. Writes run.json, unless there are checkpoints: then
    `Checkpoints.restore` writes it.

    Returns:
        The directory on rank 0, None on the other ranks, which write no files.
    """
    with ranks.raise_on_any_rank():
        return _claim_on_rank_0(a, identity) if ranks.rank == 0 else None


def _claim_on_rank_0(a: Args, identity: Identity) -> pathlib.Path:
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
            identity.write(directory)
    return directory


def _check_same_run(file: pathlib.Path, identity: Identity) -> None:
    try:
        refused = identity.changes(json.loads(file.read_bytes())).refused
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: give --overwrite to start anew") from error
    if refused:
        raise UserError(
            f"--output_dir={file.parent} holds another run: {'; '.join(refused)}. Choose another directory "
            f"(--init_from={file.parent} starts from the weights of this run), or give --overwrite to start "
            "anew"
        )


def _check_free(directory: pathlib.Path, overwrite: bool) -> None:
    """Raises UserError if `directory` holds files. With `overwrite`, only files in RUN_FILES count."""
    names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    if in_the_way := [name for name in names if name in RUN_FILES or not overwrite]:
        raise UserError(
            f"--output_dir={directory} holds files ({', '.join(in_the_way[:3])}), but no run.json, so it is "
            "not the directory of a run: choose another directory. With --overwrite, a run can start beside "
            "other files, if it does not write files with the same names"
        )


# --- where a run is ---


@dataclasses.dataclass
class RunState:
    """What a checkpoint stores besides variables. All values are plain: they are saved as JSON.

    Attributes:
        epoch: number of epochs done.
        step: number of training steps done.
        step_in_epoch: number of steps done in the present epoch; 0 between two epochs.
        totals: sums of the present epoch's scalars (EpochLog); {} between two epochs.
        loader_options: the options of the open loaders, such as their seed; {} before they are opened.
        batches_read: number of batches read from the open loaders.
        evaluated: epochs done at the last evaluation, such as 1.25; 0 without one.
        best_ap: AP of the best evaluation; None without one.
        best_eval_data: fingerprint of the data of that evaluation.
        evaluations_since_best: number of evaluations after the best one.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    loader_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    batches_read: int = 0
    evaluated: float = 0.0
    best_ap: float | None = None
    best_eval_data: str | None = None
    evaluations_since_best: int = 0

    def choose_shuffle(self, flag: str | None) -> str:
        """Returns the value of --shuffle, or by default the one that the run has used, or else "global"."""
        return flag or self.loader_options.get("shuffle", SHUFFLES[0])

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: str) -> "RunState":
        """Returns the state that a checkpoint stores.

        Args:
            values: name of a field -> its value.
            origin: name of the checkpoint for the message.

        Raises:
            UserError: the fields are not those of this version.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if differing := sorted(names ^ values.keys()):
            raise UserError(
                f"{origin} is of another version of this project, whose state differs in "
                f"{', '.join(differing)}. Continue with that version, or give --overwrite to start anew"
            )
        return cls(**values)


# --- find, restore and save ---


class Checkpoints:
    """Saves and restores the whole state of a run.

    Each rank has a Checkpoints object. All ranks call `find`, `restore` or `save` together, and `find` first.

    Args:
        directory: the run directory; None on all ranks but rank 0.
        optimizer: an optimizer that was built before layers were frozen.
        ema: the moving averages of the model's weights.
        metadata: the metadata of the weights files and the flags, for the manifest.
        identity: the identity of the run, for the manifest.

    Raises:
        UserError: the directory cannot be written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None,
        ranks: Ranks,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        ema: AveragedWeights,
        *,
        metadata: Mapping[str, Any],
        identity: Identity,
    ) -> None:
        self._checkpoint: tuple[str, dict[str, Any]] | None = None  # to restore: its name and its manifest
        self._changes = Changes()  # of the identity, since that checkpoint
        self._superseded: list[pathlib.Path] = []  # newer checkpoints, which the next `save` removes
        self._ranks, self._optimizer, self._identity = ranks, optimizer, identity
        self._metadata = {**metadata, "identity": dict(identity.values)}
        self._metadata |= {"world_size": ranks.world_size, "versions": model_metadata.versions()}
        self._variables = [v.value for v in [*model.weights, *optimizer.variables]] + [*ema.variables]
        self._shared = tf.train.Checkpoint(model=model, optimizer=optimizer, averaged=ema)
        self._seeds = random_states(model)  # tf.train.Checkpoint(model=...) does not save the seeds
        # `_shared` saves the statistics of the first replica of rank 0. All other replicas save theirs here.
        statistics = moving_statistics(model)
        statistics += ema.averages_of(statistics)
        of_replicas = [getattr(each, "values", (each,)) for each in statistics]  # of a mirrored variable
        first = 0 if ranks.rank else 1
        self._statistics = [value for values in of_replicas for value in values[first:]]
        with ranks.raise_on_any_rank():
            if directory is not None:
                self._directory = pathlib.Path(directory, "checkpoints")
                with files.user_errors(f"--output_dir={directory}"):
                    self._directory.mkdir(parents=True, exist_ok=True)
                    files.remove_unfinished(self._directory)

    def find(self) -> RunState | None:
        """Finds the newest checkpoint that this run can continue from: the last saved, at any step.

        `check_directory` has already refused other runs.
        If the identity has changed, only checkpoints from the end of an epoch are considered.

        Rank 0 reads the files and sends them to the other ranks.

        Returns:
            The state in the checkpoint; None for a new run. It has no `loader_options` if the loaders or the
            number of ranks have changed: the next epoch then reads its data from the start. If the number of
            ranks has changed, `step` is that of a run whose epochs all had the present number of steps, so
            the learning rate continues at the same epoch.

        Raises:
            UserError: there are checkpoints, but none can be used.
        """
        checkpoint = None
        with self._ranks.raise_on_any_rank():
            if self._ranks.rank == 0:
                with files.user_errors(f"--output_dir={self._directory.parent}"):
                    checkpoint = self._newest(boundary=False)
                    if checkpoint and self._identity.changes(checkpoint[1]["identity"]).names:
                        checkpoint = self._newest(boundary=True)
        self._checkpoint = self._ranks.broadcast_object(checkpoint)
        if self._checkpoint is None:
            return None
        name, manifest = self._checkpoint
        self._changes = self._identity.changes(manifest["identity"])
        with self._ranks.raise_on_any_rank():
            state = RunState.from_json(manifest["state"], f"checkpoint {name}")
        if self._changes.resharded:
            state.step = state.epoch * self._identity.values["steps_per_epoch"]
        if not self._changes.data_continues:
            state.loader_options, state.batches_read = {}, 0
        return state

    def restore(self, state: RunState, iterators: Sequence[Iterator]) -> None:
        """Restores all variables and the positions of the iterators. Does nothing in a new run.

        If the loaders or the number of ranks have changed, the iterators stay where they are. If the number
        of ranks has changed, all ranks get the moving statistics of rank 0.

        Args:
            state: the state that `find` returned.
            iterators: iterators of the data; empty if they cannot be saved.

        Raises:
            UserError: the checkpoint belongs to another model.
        """
        if self._checkpoint is None:
            return
        parts: list[dict[str, bytes]] = []
        name, manifest = self._checkpoint
        with self._ranks.raise_on_any_rank():
            if self._ranks.rank == 0:
                for library, now in model_metadata.versions().items():
                    was = manifest.get("versions", {}).get(library, "absent")
                    if was != now and library not in model_metadata.UNIMPORTANT:
                        progress.log(f"warning: {library} was {was} and is now {now}: results may differ")
                path = self._directory / name
                self._read(self._shared, path / _SHARED, manifest["state"]["step"])
                with files.user_errors(f"--output_dir={self._directory.parent}"):
                    self._superseded = checkpoint_files.newer_than(path)
                files_of = [path.glob(f"{_LOCAL}_{rank}.*") for rank in range(manifest["world_size"])]
                parts = [{file.suffix: file.read_bytes() for file in paths} for paths in files_of]
        self._ranks.broadcast(self._variables)
        parts = self._ranks.broadcast_object(parts)
        if self._changes.resharded:
            inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
            for optimizer in {self._optimizer, inner}:
                # `_iterations` counts batches, `iterations` counts updates.
                optimizer._iterations.assign(state.step)
        else:
            continues = self._changes.data_continues
            with self._ranks.raise_on_any_rank(), _in_memory() as prefix:
                for suffix, content in parts[self._ranks.rank].items():
                    tf.io.write_file(prefix + suffix, content)
                part = self._local(iterators if continues else ())
                self._read(part, prefix, state.step, all_of_it=continues)
        with self._ranks.raise_on_any_rank():  # only now: a start that is refused changes no file
            if self._ranks.rank == 0:
                with files.user_errors(f"--output_dir={self._directory.parent}"):
                    self._identity.write(self._directory.parent)
        within = f" and {progress.counted(state.step_in_epoch, 'step')}" if state.step_in_epoch else ""
        progress.log(f"resumed after epoch {state.epoch}{within} (step {state.step})")
        if self._changes.names:
            names = ", ".join(self._changes.names)
            progress.log(f"  changed: {names}; the run continues from an epoch's end, results may differ")
        if self._superseded:
            names = ", ".join(path.name for path in self._superseded)
            progress.log(f"  the next checkpoint replaces {names}")

    def save(self, state: RunState, iterators: Sequence[Iterator]) -> bool:
        """Writes the checkpoint of `state.step`. If the disk is full, logs a warning and writes nothing.

        Args:
            iterators: iterators of the data; empty if they cannot be saved.

        Returns:
            Whether the checkpoint was written; the same on all ranks.
        """
        with _in_memory() as prefix:
            self._local(iterators).write(prefix)
            names = tf.io.gfile.glob(f"{prefix}.*")
            part = {name.removeprefix(prefix): tf.io.read_file(name).numpy() for name in names}
        parts = self._ranks.gather(part)
        problem = None
        if self._ranks.rank == 0:
            try:
                self._write(state, parts)
            except (OSError, tf.errors.OpError) as error:
                problem = weight_files.reason(error)
                progress.log(
                    f"warning: the checkpoint of step {state.step} cannot be written: {problem}; "
                    "training continues, earlier checkpoints are intact"
                )
        return self._ranks.broadcast_object(problem) is None

    def _local(self, iterators: Sequence[Iterator]) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(iterators=list(iterators), seeds=self._seeds, statistics=self._statistics)

    def _newest(self, *, boundary: bool) -> tuple[str, dict[str, Any]] | None:
        path = checkpoint_files.newest(self._directory, boundary=boundary)
        return (path.name, checkpoint_files.read_manifest(path)) if path else None

    def _write(self, state: RunState, parts: Sequence[dict[str, bytes]]) -> None:
        def write_files(directory: pathlib.Path) -> None:
            self._shared.write(str(directory / _SHARED))
            for rank, part in enumerate(parts):
                for suffix, content in part.items():
                    (directory / f"{_LOCAL}_{rank}{suffix}").write_bytes(content)

        manifest = {**self._metadata, "state": dataclasses.asdict(state)}
        checkpoint_files.write(self._directory, state.step, manifest, write_files)
        try:
            for path in self._superseded:
                files.remove_directory(path)
            self._superseded = []
            checkpoint_files.prune(self._directory, KEEP)
        except OSError as error:
            progress.log(f"warning: an old checkpoint cannot be removed: {weight_files.reason(error)}")

    def _read(
        self, checkpoint: tf.train.Checkpoint, prefix: str | os.PathLike, step: int, all_of_it: bool = True
    ) -> None:
        try:
            status = checkpoint.read(os.fspath(prefix))
            if all_of_it:
                status.assert_consumed()
            status.assert_existing_objects_matched().expect_partial()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            reason = weight_files.reason(error)
            raise UserError(f"the checkpoint of step {step} does not fit this model: {reason}") from error


@contextlib.contextmanager
def _in_memory() -> Iterator[str]:
    """Yields a path prefix in TensorFlow's in-memory file system."""
    directory = f"ram://{uuid.uuid4().hex}"
    try:
        yield f"{directory}/part"
    finally:
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rmtree(directory)
