"""Checkpoints: everything that a run needs to go on as if it had never stopped, at any step.

    runs/mine/
        run.json               what this run is (run_directory.py)
        checkpoints/00001200/  everything at step 1200 (run_directory.py)
        best.weights.h5        the weights of the best evaluation (weights.py)
        last.weights.h5        the weights of the last epoch

Each is written beside the old one and renamed into place, with checksums; a damaged checkpoint gives way to
the one before it. Only rank 0 reads and writes: hosts need not share a disk. What the other ranks have of
their own travels to it, and back.
"""

import contextlib
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
from common.files import writing
from common.layers import moving_statistics
from common.training import optimizers, run_directory
from common.training import weights as weight_files

KEEP = 2  # checkpoints; the newest one between two epochs stays anyway
_SHARED = "state"
_OWN = "rank"


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

    Attributes:
        state: counters and other plain values, to be read and changed in place.
        iterators: of the data; their positions are saved. Empty where that is impossible.

    Raises:
        UserError: the directory cannot be written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None,
        *,
        ranks: Ranks,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        averaged: optimizers.AveragedWeights,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any],
        identity: run_directory.Identity | None = None,
    ) -> None:
        self.state = dict(state)
        self.iterators: Sequence[tf.data.Iterator] = ()
        self._ranks, self._optimizer = ranks, optimizer
        self._identity = identity or run_directory.Identity({})
        self._metadata = {**metadata, "identity": dict(self._identity.values)}
        self._metadata |= {"world_size": ranks.world_size, "versions": run_directory.versions()}
        self._variables = [v.value for v in [*model.weights, *optimizer.variables]] + [*averaged.variables]
        self._shared = tf.train.Checkpoint(model=model, optimizer=optimizer, averaged=averaged)
        # Keras' seed generators (dropout, stochastic depth) are no weights: tf.train.Checkpoint misses them.
        weights = {id(weight) for weight in model.weights}
        self._seeds = [variable.value for variable in model.variables if id(variable) not in weights]
        # Rank 0's are among the shared ones.
        statistics = moving_statistics(model) if ranks.rank else []
        self._statistics = [*statistics, *averaged.averages_of(statistics)]
        self._manifest: Mapping[str, Any] | None = None  # of the checkpoint that was found
        self._path: pathlib.Path | None = None
        with ranks.raise_on_any_rank():
            if directory is not None:
                self._directory = pathlib.Path(directory, "checkpoints")
                with writing(directory):
                    self._directory.mkdir(parents=True, exist_ok=True)
                    run_directory.tidy(self._directory)

    def find(self) -> dict[str, Any] | None:
        """Looks for the checkpoint to go on from: the newest.

        Where the run is not quite the one that was saved (another number of ranks, another --freeze), it is
        the newest of an epoch's end.

        Returns:
            The `state` in it, for what must be known before `restore`; None for a new run.

        Raises:
            UserError: there are checkpoints, and none can be used.
        """
        with self._ranks.raise_on_any_rank():
            if self._ranks.rank == 0:
                with writing(self._directory.parent):
                    self._manifest = self._read_newest()
                    if self._manifest and (self.changed() or self._other_ranks()):
                        self._manifest = self._read_newest(boundary=True)
        self._manifest = self._ranks.broadcast_object(self._manifest)
        return self._manifest and self._manifest["state"]

    def changed(self) -> list[str]:
        """The names in the identity that had other values when the checkpoint that was found was saved."""
        if not self._manifest:
            return []
        differences = self._identity.differences(self._manifest.get("identity", {}))
        return sorted({name.partition(".")[0] for name in differences})

    def restore(self, *, with_data: bool = True) -> None:
        """Restores what `find` found.

        With another number of ranks, what each rank had of its own is ignored: all start with the moving
        statistics of rank 0, and their data start where `iterators` are.

        Args:
            with_data: also the positions of `iterators`.

        Raises:
            UserError: it is of another model.
        """
        parts = None
        with self._ranks.raise_on_any_rank():
            if self._ranks.rank == 0:
                before = self._manifest.get("versions", {})
                for name, now in run_directory.versions().items():
                    was = before.get(name, "absent")
                    if was != now:
                        progress.log(f"warning: {name} was {was} and is now {now}: last digits may differ")
                self._read(self._shared, self._path / _SHARED)
                with writing(self._directory.parent):
                    run_directory.remove_newer(self._path)
                parts = [
                    {file.suffix: file.read_bytes() for file in self._path.glob(f"{_OWN}_{rank}.*")}
                    for rank in range(self._manifest["world_size"])
                ]
        self._ranks.broadcast(self._variables)
        parts = self._ranks.broadcast_object(parts)
        with self._ranks.raise_on_any_rank():
            if not self._other_ranks():
                with _in_memory() as prefix:
                    for suffix, content in parts[self._ranks.rank].items():
                        tf.io.write_file(prefix + suffix, content)
                    iterators = self.iterators if with_data else ()
                    self._read(self._own(iterators), prefix, whole=bool(iterators))
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
        with _in_memory() as prefix:
            self._own(self.iterators).write(prefix)
            files = tf.io.gfile.glob(f"{prefix}.*")
            own = {file.removeprefix(prefix): tf.io.read_file(file).numpy() for file in files}
        parts = self._ranks.gather(own)
        problem = None
        if self._ranks.rank == 0:
            try:
                self._write(parts)
            except (OSError, tf.errors.OpError) as error:
                problem = weight_files.reason(error)
                progress.log(
                    f"warning: the checkpoint of step {self.state['step']} cannot be written: {problem}; "
                    "training continues, what was saved before is intact"
                )
        return self._ranks.broadcast_object(problem) is None

    def _own(self, iterators: Sequence[tf.data.Iterator]) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(iterators=list(iterators), seeds=self._seeds, statistics=self._statistics)

    def _other_ranks(self) -> bool:
        return self._manifest["world_size"] != self._ranks.world_size

    def _read_newest(self, *, boundary: bool = False) -> dict[str, Any] | None:
        self._path = run_directory.newest(self._directory, boundary=boundary)
        return self._path and run_directory.read_manifest(self._path)

    def _write(self, parts: Sequence[dict[str, bytes]]) -> None:
        def write_files(directory: pathlib.Path) -> None:
            self._shared.write(str(directory / _SHARED))
            for rank, part in enumerate(parts):
                for suffix, content in part.items():
                    (directory / f"{_OWN}_{rank}{suffix}").write_bytes(content)

        manifest = {**self._metadata, "state": self.state}
        run_directory.write(self._directory, self.state["step"], manifest, write_files)
        try:
            run_directory.prune(self._directory, KEEP)
        except OSError as error:
            progress.log(f"warning: an old checkpoint cannot be removed: {weight_files.reason(error)}")

    def _read(self, checkpoint: tf.train.Checkpoint, prefix: str | os.PathLike, whole: bool = True) -> None:
        """Reads into `checkpoint` all that is in the files; or, if not `whole`, all that it has itself."""
        try:
            status = checkpoint.read(os.fspath(prefix))
            (status.assert_consumed if whole else status.assert_existing_objects_matched)()
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
