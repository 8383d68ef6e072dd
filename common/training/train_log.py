"""What a run leaves behind to look at: results.csv, TensorBoard events, loss_curves.png. One row an epoch."""

import csv
import math
import pathlib
from collections.abc import Mapping

import tensorflow as tf

from common.evaluation import drawing
from common.files import write_file


class Totals:
    """Sums of what the steps of one epoch say, on the device; they can be saved in the middle of the epoch.

    Args:
        saved: what `to_json` gave in another sitting; {} at the start of an epoch.
    """

    def __init__(self, saved: Mapping[str, float]) -> None:
        self._sums = {name: tf.constant(value, tf.float32) for name, value in saved.items()}

    def add(self, values: Mapping[str, tf.Tensor], counts: tf.Tensor) -> None:
        """Adds one step's scalars. `counts` is whether the step was taken: means are over such steps."""
        taken = tf.cast(counts, tf.float32)
        for name, value in {**values, _STEPS: taken, _SKIPPED: 1.0 - taken}.items():
            self._sums[name] = value + self._sums.get(name, 0.0)

    def mean(self, name: str) -> float:
        """Mean over the steps that were taken; NaN where there is none."""
        steps = float(self._sums[_STEPS])
        return float(self._sums[name]) / steps if steps else math.nan

    def sum(self, name: str) -> float:
        return float(self._sums[name])

    def to_json(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._sums.items()}


_STEPS = "steps"
_SKIPPED = "skipped_steps"


class RunLog:
    """Appends one row an epoch and redraws the curves.

    Args:
        directory: the run directory.
        done_epochs: epochs that the resumed run has behind it; rows beyond them (written by a run that was
            stopped between its row and its checkpoint) are dropped, so that no epoch stands twice.
    """

    def __init__(self, directory: pathlib.Path, done_epochs: int):
        self._csv = directory / "results.csv"
        self._curves = directory / "loss_curves.png"
        self._rows = [row for row in self._read() if int(row["epoch"]) <= done_epochs]
        self._events = tf.summary.create_file_writer(str(directory / "tensorboard"))

    def add(self, epoch: int, step: int, values: dict[str, float]) -> None:
        """Records one epoch (1-based) that ended at `step`. Non-finite values stay empty in the table."""
        row = {"epoch": epoch, "step": step}
        row |= {name: f"{value:.6g}" if math.isfinite(value) else "" for name, value in values.items()}
        self._rows.append(row)
        columns = list(dict.fromkeys(name for row in self._rows for name in row))

        def write(path: pathlib.Path) -> None:
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, columns, restval="")
                table.writeheader()
                table.writerows(self._rows)

        write_file(self._csv, write)
        with self._events.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._events.flush()
        drawing.loss_curves(self._csv, self._curves)

    def _read(self) -> list[dict]:
        if not self._csv.exists():
            return []
        with self._csv.open(newline="") as file:
            return list(csv.DictReader(file))
