"""What a run leaves behind to look at: results.csv, TensorBoard events, loss_curves.png. One row an epoch."""

import csv
import math
import pathlib

import tensorflow as tf

from common import atomic, drawing


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

        atomic.write(self._csv, write)
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
