"""What a run logs: results.csv, TensorBoard events, loss_curves.png. One row an epoch or evaluation."""

import csv
import math
import pathlib
import time
from collections.abc import Mapping

import tensorflow as tf

from common.evaluation import coco_metrics, drawing
from common.files import write_file
from common.progress import Bar

SHOW_EVERY = 10  # steps
_STEPS, _SKIPPED = "steps", "skipped_steps"
_COUNTED = "boxes_"  # how the names of counts begin: their sum is logged; of other scalars the mean
_RENAMED = {"boxes_truncated": "boxes_over_limit"}  # in checkpoints and logs of earlier versions


class EpochLog:
    """One epoch: sums of its steps' scalars, kept on the device; its progress bar; its rate.

    All scalars that the training step returns are logged by name: the mean over the steps that were taken,
    and of those whose names begin with "boxes_" the sum.

    Args:
        title: of the progress bar.
        steps: of the epoch.
        done: steps that were done before the run was stopped.
        totals: what `totals` gave then; {} at the start of an epoch.
    """

    def __init__(self, title: str, steps: int, done: int, totals: Mapping[str, float]) -> None:
        self._steps = steps
        self._sums = {_RENAMED.get(name, name): tf.constant(v, tf.float32) for name, v in totals.items()}
        self._bar = Bar(title, steps, done=done)
        self._shown: dict[str, float] = {}
        self.restart_clock()

    def add(self, step: int, values: Mapping[str, tf.Tensor], finite: tf.Tensor) -> bool:
        """Adds one step. Every SHOW_EVERY steps it shows the means, which waits for the device.

        Args:
            step: its number in the epoch, from 1.
            values: its scalars.
            finite: whether it was taken.

        Returns:
            Whether it has waited.
        """
        taken = tf.cast(finite, tf.float32)
        for name, value in {**values, _STEPS: taken, _SKIPPED: 1.0 - taken}.items():
            self._sums[name] = value + self._sums.get(name, 0.0)
        show = step % SHOW_EVERY == 0 or step == self._steps
        if show:
            self._shown = self._means()
        self._last = time.monotonic(), step
        self._first = self._first or self._last
        self._bar.step(self._shown)
        return show

    def restart_clock(self) -> None:
        """The rate is that of the steps from here on, without the next one, which may compile."""
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def row(self, batch_size: int, num_replicas: int, *, learning_rate: float) -> dict[str, float]:
        """What results.csv has of the epoch. Counts and the rate are those of all replicas."""
        rate = math.nan
        if self._first != self._last:
            seconds, steps = (last - first for first, last in zip(self._first, self._last, strict=True))
            rate = steps * batch_size * num_replicas / seconds
        counts = {
            name: float(value) * num_replicas
            for name, value in self._sums.items()
            if name.startswith(_COUNTED)
        }
        skipped = {_SKIPPED: float(self._sums[_SKIPPED])}
        return self._means() | {"learning_rate": learning_rate, "images_per_second": rate} | counts | skipped

    def totals(self) -> dict[str, float]:
        """What a checkpoint within the epoch holds."""
        return {name: float(value) for name, value in self._sums.items()}

    def clear(self) -> None:
        """The epoch has ended."""
        self._sums = {}

    def _means(self) -> dict[str, float]:
        """NaN where no step was taken."""
        steps = float(self._sums[_STEPS])
        other = (_STEPS, _SKIPPED)
        names = [name for name in self._sums if name not in other and not name.startswith(_COUNTED)]
        return {name: float(self._sums[name]) / steps if steps else math.nan for name in names}


class RunLog:
    """Appends rows and redraws the curves.

    Args:
        directory: the run directory.
        done_epochs: epochs that a resumed run has done, fractional after an evaluation within one. Later rows
            (of a run that was stopped between its row and its checkpoint) are dropped: no epoch has two.
    """

    def __init__(self, directory: pathlib.Path, done_epochs: float):
        self._csv = directory / "results.csv"
        self._curves = directory / "loss_curves.png"
        self._rows = [row for row in self._read() if float(row["epoch"]) <= done_epochs]
        self._events = tf.summary.create_file_writer(str(directory / "tensorboard"))

    def add(self, epoch: float, step: int, values: Mapping[str, float]) -> None:
        """Records what is known at `step`. Values that are not finite stay empty in the table.

        Args:
            epoch: epochs done: 2 for the second one, 1.25 for an evaluation after a quarter of it.
            step: number of the step.
            values: name -> value; the names become columns.
        """
        row = {"epoch": epoch, "step": step}
        row |= {name: f"{value:.6g}" if math.isfinite(value) else "" for name, value in values.items()}
        self._rows.append(row)
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        columns.sort(
            key=lambda name: name in coco_metrics.NAMES
        )  # the metrics last, also where they are first

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
            return [{_RENAMED.get(k, k): v for k, v in row.items()} for row in csv.DictReader(file)]
