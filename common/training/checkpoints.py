"""Checkpoints: everything that a run needs to go on as if it had never stopped, at any step.

    runs/mine/
        run.json               what this run is (run_directory.py)
        checkpoints/00001200/  everything at step 1200 (checkpoint_files.py)
        best.weights.h5        the weights of the best evaluation (weights.py)
        last.weights.h5        the weights of the last epoch

Each is written beside the old one and renamed into place, with checksums; a damaged checkpoint gives way to
the one before it. Only rank 0 reads and writes: hosts need not share a disk. What the other ranks have of
their own travels to it, and back.
"""

import contextlib
import errno
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from common import progress
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.layers import moving_statistics
from common.training import checkpoint_files
from common.training import weights as weight_files
from common.training.ema import AveragedWeights
from common.training.run_directory import Identity

_SHARED = "state"
_OWN = "rank"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_Part = dict[str, bytes]  # what tf.train.Checkpoint writes: the end of a file's name -> its content


class Checkpoints:
    """Saves and restores the whole state of a run.

    All ranks make one, and call `find`, `restore` and `save` together. Call `find` before the first `save`.

    Args:
        directory: the run directory; None on all ranks but rank 0.
        ranks: of the run.
        model: a built model.
        optimizer: built for all the variables that ever train.
        averaged: the model's averages.
        state: the values at the start of a new run, as JSON can hold them. It must have a "step"; between two
            epochs its "step_in_epoch" is 0.
        metadata: what the manifest holds besides: that of the weights files, the flags.
        identity: of the run; in the manifest, too.
        keep: how many checkpoints stay; the newest one between two epochs stays anyway.

    Attributes:
        state: counters and other plain values, to be read and changed in place.
        iterators: of the data; their positions are saved. Empty where that is impossible.

    Raises:
        ValueError: the optimizer is not built: a restore would silently leave out its slots.
        UserError: the directory cannot be written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None,
        *,
        ranks: Ranks,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        averaged: AveragedWeights,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any],
        identity: Identity | None = None,
        keep: int = 2,
    ):
        if not optimizer.built:
            raise ValueError("build the optimizer first: optimizer.build(model.trainable_variables)")
        self.state = dict(state)
        self.iterators: Sequence[tf.data.Iterator] = ()
        self._ranks = ranks
        self._identity = identity or Identity({})
        self._metadata = {**metadata, "identity": dict(self._identity.values)}
        self._keep = keep
        self._model = model
        self._optimizer = optimizer
        self._variables = [v.value for v in [*model.weights, *optimizer.variables]] + [*averaged.variables]
        self._shared = tf.train.Checkpoint(model=model, optimizer=optimizer, averaged=averaged)
        # Keras' seed generators (dropout, stochastic depth) are no weights: tf.train.Checkpoint misses them.
        weights = {id(weight) for weight in model.weights}
        self._seeds = [variable.value for variable in model.variables if id(variable) not in weights]
        # Rank 0's are among the shared ones.
        statistics = moving_statistics(model) if ranks.rank else []
        self._statistics = [*statistics, *averaged.averages_of(statistics)]
        self._manifest: Mapping[str, Any] | None = None
        self._path: pathlib.Path | None = None  # of the checkpoint from which the run continues
        self._passed_over: Sequence[pathlib.Path] = ()
        with ranks.raise_on_any_rank():
            if directory is not None:
                self._run_directory = pathlib.Path(directory)
                self._directory = self._run_directory / "checkpoints"
                try:
                    self._directory.mkdir(parents=True, exist_ok=True)
                    checkpoint_files.tidy(self._directory)
                except OSError as error:
                    raise UserError(f"--output_dir={directory}: {error.strerror}") from error

    def find(self, *, boundary: bool = False) -> dict[str, Any] | None:
        """Looks for the checkpoint to go on from.

        Args:
            boundary: restore the newest checkpoint of an epoch's end. So it is when the number of ranks has
                changed.

        Returns:
            The `state` in it, for what must be known before `restore`; None for a new run.

        Raises:
            UserError: there are checkpoints, and none can be used.
        """
        manifest = None
        with self._ranks.raise_on_any_rank():
            if self._ranks.rank == 0:
                manifest = self._look(boundary)
        self._manifest = self._ranks.broadcast_object(manifest)
        return self._manifest and self._manifest["state"]

    def changed(self) -> list[str]:
        """The names in the identity that had other values when the checkpoint that was found was saved."""
        differences = self._identity.differences(self._manifest.get("identity", {}))
        return sorted({name.partition(".")[0] for name in differences})

    def restore(self) -> None:
        """Restores what `find` found.

        With another number of ranks, what each rank had of its own is ignored: all start with the moving
        statistics of rank 0, and their data start where `iterators` are.

        Raises:
            UserError: it is of another model.
        """
        parts = None
        with self._ranks.raise_on_any_rank():
            if self._ranks.rank == 0:
                for difference in checkpoint_files.version_differences(self._manifest):
                    progress.log(f"warning: {difference}: the run continues, but not to the last digit")
                self._read(self._shared, self._path / _SHARED)
                parts = [
                    {file.suffix: file.read_bytes() for file in self._path.glob(f"{_OWN}_{rank}.*")}
                    for rank in range(self._manifest["world_size"])
                ]
        self._ranks.broadcast(self._variables)
        parts = self._ranks.broadcast_object(parts)
        with self._ranks.raise_on_any_rank():
            if len(parts) == self._ranks.world_size:
                with _in_memory() as prefix:
                    for suffix, content in parts[self._ranks.rank].items():
                        tf.io.write_file(prefix + suffix, content)
                    self._read(self._own(), prefix, whole=bool(self.iterators))
        self.state.clear()
        self.state.update(self._manifest["state"])

    def set_updates(self, steps: int) -> None:
        """Makes the learning rate go on from where it is after so many steps; all else stays."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        for optimizer in {id(o): o for o in (self._optimizer, inner)}.values():
            optimizer._iterations.assign(steps)  # with accumulation, `iterations` is another number

    def save(self) -> bool:
        """Writes the checkpoint of `state["step"]`.

        A full disk costs this checkpoint, with one warning, and neither the run nor those before.

        Returns:
            Whether it was written; the same on all ranks.
        """
        parts = self._ranks.gather(self._own_part())
        problem = None
        if self._ranks.rank == 0:
            try:
                self._write(parts)
            except (OSError, tf.errors.OpError) as error:
                problem = weight_files.reason(error)
        problem = self._ranks.broadcast_object(problem)
        if problem and self._ranks.rank == 0:
            progress.log(
                f"warning: the checkpoint of step {self.state['step']} cannot be written: {problem}; "
                "training continues, what was saved before is intact"
            )
        return problem is None

    def _own(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(
            iterators=list(self.iterators), seeds=self._seeds, statistics=self._statistics
        )

    def _own_part(self) -> _Part:
        with _in_memory() as prefix:
            self._own().write(prefix)
            return {
                file.removeprefix(prefix): tf.io.read_file(file).numpy()
                for file in tf.io.gfile.glob(f"{prefix}.*")
            }

    def _look(self, boundary: bool) -> dict[str, Any] | None:
        found = checkpoint_files.newest(self._directory, boundary=boundary)
        if found and not boundary:
            saved_by = checkpoint_files.read_manifest(found.path)["world_size"]
            if saved_by != self._ranks.world_size:
                found = checkpoint_files.newest(self._directory, boundary=True)
        self._path, self._passed_over = found or (None, ())
        return found and checkpoint_files.read_manifest(found.path)

    def _write(self, parts: Sequence[_Part]) -> None:
        manifest = {
            **self._metadata,
            "state": self.state,
            "world_size": self._ranks.world_size,
            "versions": checkpoint_files.versions(),
        }

        def write_files(directory: pathlib.Path) -> None:
            self._shared.write(str(directory / _SHARED))
            for rank, part in enumerate(parts):
                for suffix, content in part.items():
                    (directory / f"{_OWN}_{rank}{suffix}").write_bytes(content)

        def write() -> pathlib.Path:
            return checkpoint_files.write(self._directory, self.state["step"], manifest, write_files)

        try:
            path = write()
        except (OSError, tf.errors.ResourceExhaustedError) as error:
            full = getattr(error, "errno", errno.ENOSPC) in _NO_SPACE
            if not (full and checkpoint_files.make_room(self._directory, self._path)):
                raise
            path = write()
        passed_over = [other for other in self._passed_over if other != path]
        self._path, self._passed_over = path, ()
        try:
            checkpoint_files.prune(self._directory, self._keep, passed_over)
        except OSError as error:
            progress.log(f"warning: an old checkpoint cannot be removed: {weight_files.reason(error)}")

    def _read(self, checkpoint: tf.train.Checkpoint, prefix: str | os.PathLike, whole: bool = True) -> None:
        """Reads into `checkpoint` all that is in the files; or, if not `whole`, all that it has itself."""
        try:
            status = checkpoint.read(os.fspath(prefix))
            if whole:
                status.assert_consumed()
            else:
                status.assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            raise UserError(
                f"the checkpoint of step {self._manifest['state']['step']} does not fit this model: "
                f"{weight_files.reason(error)}"
            ) from error


@contextlib.contextmanager
def _in_memory() -> Iterator[str]:
    """A prefix for files of a tf.train.Checkpoint, in TensorFlow's file system in memory: no disk is full."""
    directory = f"ram://{uuid.uuid4().hex}"
    try:
        yield f"{directory}/part"
    finally:
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rmtree(directory)
