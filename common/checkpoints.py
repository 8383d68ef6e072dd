"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    runs/mine/
        run.json               what this run is (run_directory.py)
        checkpoints/00001200/  everything at step 1200: model, averages, optimizer, data position, counters
        best.weights.h5        the weights of the best evaluation (weight_files.py)
        last.weights.h5        the weights of the last epoch

Each is written beside the old one and renamed into place, with checksums; a damaged checkpoint gives way to
the one before it.
"""

import hashlib
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from common import atomic, progress, weight_files
from common.errors import UserError


def keep_going(save: Callable[..., Any], *arguments: Any) -> None:
    """Calls `save(*arguments)`; a full disk costs this save, never the run nor what was saved before."""
    try:
        save(*arguments)
    except OSError as error:
        progress.say(f"warning: {error}; training goes on, what was saved before stands")


def read_state(directory: str | os.PathLike) -> dict[str, Any] | None:
    """`state` of the checkpoint that `restore_latest` would take; None where there is none.

    For what must be known before the objects can be made that are to be restored.
    """
    saved = _saved(pathlib.Path(directory) / "checkpoints")
    path = next((path for path in reversed(saved) if _is_whole(path)), None)
    if path is None:
        return None
    reader = tf.train.load_checkpoint(str(path / "state"))
    (key,) = [key for key in reader.get_variable_to_shape_map() if key.startswith("state/")]
    return json.loads(reader.get_tensor(key))


class Checkpoints:
    """Saves and restores the whole state of a run, and keeps the best and the last weights.

    `state` is a dict of counters and other plain values that JSON can hold. It must have a "step"; a restore
    updates it. It is part of the checkpoint, so it can never be of another step than the weights.

    Args:
        directory: the run directory.
        model: a built model.
        optimizer: built for the model's trainable variables.
        averaged: an averaging.AveragedWeights, or None.
        iterator: a saveable tf.data iterator (a DALIDataset's on a CPU is one), or None: the data start anew.
        state: the values at the start of a new run.
        keep: how many checkpoints stay.

    Raises:
        ValueError: the optimizer is not built: a restore would silently leave out its slots.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        averaged: tf.Module | None = None,
        iterator: tf.data.Iterator | None = None,
        state: Mapping[str, Any],
        keep: int = 2,
    ):
        if not optimizer.built:
            raise ValueError("build the optimizer first: optimizer.build(model.trainable_variables)")
        self._run_directory = pathlib.Path(directory)
        self._directory = self._run_directory / "checkpoints"
        self._directory.mkdir(parents=True, exist_ok=True)
        atomic.remove_unfinished(self._directory)
        self._keep = keep
        self._model = model
        self._state = _JsonState(state)
        # Keras' seed generators (dropout, stochastic depth) are no weights: tf.train.Checkpoint misses them.
        weights = {id(weight) for weight in model.weights}
        seeds = [variable.value for variable in model.variables if id(variable) not in weights]
        optional = {"averaged": averaged, "iterator": iterator}
        self._checkpoint = tf.train.Checkpoint(
            state=self._state,
            model=model,
            optimizer=optimizer,
            seeds=seeds,
            **{name: part for name, part in optional.items() if part is not None},
        )

    @property
    def state(self) -> dict[str, Any]:
        """Counters and other plain values, to be read and changed in place."""
        return self._state.values

    @property
    def iterator(self) -> tf.data.Iterator | None:
        """The data iterator that is saved; a run that changes its loader sets another one."""
        return getattr(self._checkpoint, "iterator", None)

    @iterator.setter
    def iterator(self, iterator: tf.data.Iterator) -> None:
        self._checkpoint.iterator = iterator

    def save(self) -> None:
        """Writes the checkpoint of `state["step"]` and removes all but the newest `keep`.

        Raises:
            OSError: it could not be written (disk full, ...); the checkpoints before it stand.
        """
        path = self._directory / f"{self.state['step']:08d}"
        try:
            atomic.write_directory(path, self._write)
            for old in _saved(self._directory)[: -self._keep]:
                atomic.remove_directory(old)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(f"{path} cannot be written: {weight_files.reason(error)}") from error

    def restore_latest(self) -> bool:
        """Restores the newest checkpoint that is whole; False where there is none at all.

        Raises:
            UserError: all checkpoints are damaged, or they are of another model.
        """
        saved = _saved(self._directory)
        for path in reversed(saved):
            if not _is_whole(path):
                print(f"checkpoint {path} is damaged: trying the one before", file=sys.stderr)
                continue
            try:
                self._checkpoint.read(str(path / "state")).assert_consumed()
                return True
            except (AssertionError, ValueError) as error:
                raise UserError(
                    f"checkpoint {path} does not fit this model: {weight_files.reason(error)}"
                ) from error
        if saved:
            raise UserError(f"all checkpoints in {self._directory} are damaged: --overwrite starts anew")
        return False

    def save_last(self, metadata: Mapping[str, Any]) -> None:
        """Writes the model's present weights to last.weights.h5; OSError where that fails."""
        weight_files.save(self._model, self._run_directory / weight_files.LAST, metadata)

    def save_best(self, metric: float, metadata: Mapping[str, Any]) -> bool:
        """Writes the model's present weights to best.weights.h5 if `metric` is higher than that file's own.

        The metric travels in the file, so the two cannot disagree. One that is not finite is never the best,
        and one that was measured on other data (`metadata["eval_data"]`) is no rival.

        Returns:
            Whether the weights were written.

        Raises:
            OSError: they could not be written; the old file stands.
        """
        path = self._run_directory / weight_files.BEST
        if not math.isfinite(metric):
            return False
        if path.exists():
            try:
                best = weight_files.read_metadata(path)
                if best.get("eval_data") == metadata.get("eval_data") and metric <= best["metric"]:
                    return False
            except UserError as error:
                print(f"{error}; it is replaced", file=sys.stderr)
        weight_files.save(self._model, path, {**metadata, "metric": float(metric)})
        return True

    def _write(self, directory: pathlib.Path) -> None:
        self._checkpoint.write(str(directory / "state"))
        (directory / _CHECKSUMS).write_text(_checksums(directory))


def _saved(directory: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints in a directory, oldest first; none where it does not exist."""
    numbered = [path for path in directory.glob("*") if path.name.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name))


_CHECKSUMS = "SHA256SUMS"  # `sha256sum -c` understands it


def _checksums(directory: pathlib.Path) -> str:
    files = sorted(path for path in directory.iterdir() if path.name != _CHECKSUMS)
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def _is_whole(directory: pathlib.Path) -> bool:
    """Asked before TensorFlow reads it, which restores a part of the variables before it meets the damage."""
    checksums = directory / _CHECKSUMS
    return checksums.exists() and checksums.read_bytes() == _checksums(directory).encode()


class _JsonState(tf.train.experimental.PythonState):
    """Plain Python values as one more entry of a tf.train.Checkpoint."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__()
        self.values = dict(values)

    def serialize(self) -> str:
        return json.dumps(self.values)

    def deserialize(self, string_value: str) -> None:
        self.values.clear()
        self.values.update(json.loads(string_value))
