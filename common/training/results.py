"""Writes all files of a run except its checkpoints.

    results.csv, tensorboard/, loss_curves.png      values of each epoch and of evaluations within an epoch
    best.weights.h5     the weights of the best evaluation
    last.weights.h5     the weights of the last epoch
    metrics.json, detections.json, pr_curves.png    results of the last evaluation
    detections.png      detections of the last evaluation in some images; also in TensorBoard
    flags.txt           the flags
    first_batch.png     the images and boxes of the first batch; also in TensorBoard

If the disk is full, a file is not written; training continues, and earlier files stay intact.
"""

import csv
import io
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorboard.plugins.image.metadata import create_summary_metadata as image_metadata

from common import progress
from common.args import flagfile
from common.data.sources import Source
from common.evaluation import coco_metrics, drawing
from common.evaluation.coco_metrics import Evaluation
from common.evaluation.evaluate import DETECTIONS, write_evaluation
from common.files import write_bytes
from common.training.checkpoints import RunState
from common.weights import weight_files

SHOW_EVERY = 10  # steps between two updates of the means in the progress bar
LOW_AP = 0.15  # below this AP, the summary says what to look at
_STEPS, _SKIPPED = "steps", "skipped_steps"
_COUNTED = "boxes_"  # scalars whose names begin like this are summed


class EpochLog:
    """Sums the scalars of an epoch's steps on the device, shows a progress bar, measures images per second.

    The log has the mean of each scalar over the steps that were not skipped. Of scalars whose names begin
    with "boxes_", it has the sum.

    Args:
        done: number of steps that were done before the run was stopped.
        totals: what the method `totals` returned before the stop; {} at the start of an epoch.
    """

    def __init__(self, title: str, steps: int, done: int, totals: Mapping[str, float]) -> None:
        self._steps = steps
        self._sums = {name: tf.constant(total, tf.float32) for name, total in totals.items()}
        self._bar = progress.Bar(title, steps, done=done)
        self._shown: dict[str, float] = {}
        self._times: list[tuple[float, int]] = []  # (seconds, step), for images per second

    def add(self, step: int, values: Mapping[str, tf.Tensor], finite: tf.Tensor) -> None:
        """Adds one step. Every SHOW_EVERY steps, waits for the device and updates the displayed means.

        Args:
            step: number of the step in the epoch, from 1.
            finite: whether the step was taken; False if it was skipped.
        """
        count = tf.cast(finite, tf.float32)
        for name, value in {**values, _STEPS: count, _SKIPPED: 1.0 - count}.items():
            self._sums[name] = value + self._sums.get(name, 0.0)
        if step % SHOW_EVERY == 0 or step == self._steps:
            self._shown = self._means()
        self._times.append((time.monotonic(), step))
        self._bar.step(self._shown)

    def restart_clock(self) -> None:
        """Measures images per second anew, starting after the next step."""
        self._times.clear()

    def row(self, batch_size: int, num_replicas: int, *, learning_rate: float) -> dict[str, float]:
        """Returns the epoch's values for results.csv, summed over all replicas."""
        rate = math.nan
        if len(self._times) > 1:
            (start, first), (end, last) = self._times[0], self._times[-1]
            rate = (last - first) * batch_size * num_replicas / (end - start)
        totals = self.totals()
        counts = {name: total * num_replicas for name, total in totals.items() if name.startswith(_COUNTED)}
        measured = {"learning_rate": learning_rate, "images_per_second": rate}
        return self._means() | measured | counts | {_SKIPPED: totals[_SKIPPED]}

    def totals(self) -> dict[str, float]:
        """Returns the sums so far."""
        return {name: float(value) for name, value in self._sums.items()}

    def _means(self) -> dict[str, float]:
        """Returns the means over the steps that were not skipped; NaN if all were skipped."""
        totals = self.totals()
        steps = totals.pop(_STEPS) or math.nan
        names = [name for name in totals if name != _SKIPPED and not name.startswith(_COUNTED)]
        return {name: totals[name] / steps for name in names}


class Results:
    """Writes the files of one run. Only rank 0 has a directory; the other ranks write nothing.

    Args:
        directory: the run directory; None on all ranks but rank 0.
        model: the model whose weights are saved.
        metadata: metadata of the weights files.
        state: the state of the run. Rows after it are removed from results.csv.
        show_batch: called with (images, targets, path=path). Draws the first batch into the file `path`, and
            returns a line for the log.
        source: the evaluation data, of which detections are drawn; None draws none.

    Attributes:
        metadata: the argument.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        model: keras.Model,
        metadata: Mapping[str, Any],
        state: RunState,
        show_batch: Callable[..., str] | None = None,
        source: Source | None = None,
    ) -> None:
        self.metadata = dict(metadata)
        self._directory, self._model, self._state = directory, model, state
        self._show_batch, self._source = show_batch, source
        if directory:
            done = max(state.epoch, state.evaluated)  # fractional within an epoch
            table = directory / "results.csv"
            rows = csv.DictReader(table.read_text().splitlines()) if table.exists() else ()
            self._rows: list[dict[str, Any]] = [row for row in rows if float(row["epoch"]) <= done]
            self._events = tf.summary.create_file_writer(str(directory / "tensorboard"))

    def save_flags(self, flag_values: dict[str, Any]) -> None:
        self._try(lambda path: write_bytes(path / "flags.txt", flagfile(flag_values)))

    def save_first_batch(self, images: Any, targets: Any) -> None:
        """Writes first_batch.png, also to TensorBoard."""
        if show_batch := self._show_batch:

            def save(directory: pathlib.Path) -> None:
                picture = directory / "first_batch.png"
                with drawing.warn_if_undrawable(picture):
                    progress.log(show_batch(images, targets, path=picture))
                    self._show_picture(picture)

            self._try(save)

    def save_row(self, epoch: float, values: Mapping[str, float]) -> None:
        """Adds the values to results.csv, TensorBoard and loss_curves.png.

        Args:
            epoch: number of epochs done: 2 after the second epoch, 1.25 after a quarter of the second epoch.
            values: name -> value; the names become columns. Values that are not finite give empty cells.
        """
        step = self._state.step

        def save(directory: pathlib.Path) -> None:
            texts = {name: f"{value:.6g}" if math.isfinite(value) else "" for name, value in values.items()}
            self._rows.append({"epoch": epoch, "step": step, **texts})
            columns = list(dict.fromkeys(name for row in self._rows for name in row))
            columns.sort(key=lambda name: name in coco_metrics.NAMES)  # the metrics are the last columns
            text = io.StringIO()
            table = csv.DictWriter(text, columns, restval="")
            table.writeheader()
            table.writerows(self._rows)
            write_bytes(directory / "results.csv", text.getvalue().encode())
            with self._events.as_default(step=step):
                for name, value in values.items():
                    tf.summary.scalar(name, value)
            self._events.flush()
            picture = directory / "loss_curves.png"
            with drawing.warn_if_undrawable(picture):
                from common.evaluation import curves  # late, because it imports Matplotlib

                curves.loss_curves(self._rows, picture)

        self._try(save)

    def save_weights(self, name: str, **metadata: Any) -> None:
        progress_made = {"epoch": self._state.epoch + 1, "step": self._state.step}
        metadata = self.metadata | progress_made | metadata
        self._try(lambda path: weight_files.save(self._model, path / name, metadata))

    def save_evaluation(self, evaluation: Evaluation, is_best: bool) -> None:
        """Writes the files of an evaluation and, if it is the best, the weights."""
        if is_best:
            self.save_weights(weight_files.BEST, AP=evaluation.metrics["AP"])

        def save(directory: pathlib.Path) -> None:
            if DETECTIONS in write_evaluation(directory, evaluation, self._source):
                self._show_picture(directory / DETECTIONS)

        self._try(save)

    def print_summary(self, metrics: dict[str, Any] | None) -> None:
        """Prints the metrics of the last evaluation, and what to do with the results."""
        if self._directory:
            output, app = self._directory, self.metadata["app"]
            if metrics is not None:
                print(coco_metrics.format_table(metrics))
                if metrics["AP"] < LOW_AP:
                    pictures = (
                        f"{output / 'first_batch.png'}, the classes above, errors.png of eval.py --errors"
                    )
                    print(
                        f"AP {100 * metrics['AP']:.1f} is low: look at {pictures}; what to try is in "
                        'docs/troubleshooting.md, "Training works, but AP is low"'
                    )
            print(f"results are in {output}; to detect objects:")
            print(f"python {app}/infer.py --weights={output} --images=DIR --output_dir={output}/infer")

    def _show_picture(self, path: pathlib.Path) -> None:
        """Adds a picture to TensorBoard, as a JPEG, because events stay on the disk for each evaluation."""
        pixels = tf.io.decode_png(path.read_bytes(), channels=3)
        height, width, _ = pixels.shape
        values = tf.stack([str(width), str(height), tf.io.encode_jpeg(pixels, quality=80)])
        with self._events.as_default(step=self._state.step):
            tf.summary.write(path.stem, values, metadata=image_metadata("", ""))
        self._events.flush()

    def _try(self, save: Callable[[pathlib.Path], Any]) -> None:
        if self._directory is None:
            return
        try:
            save(self._directory)
        except (OSError, tf.errors.OpError) as error:  # TensorBoard's writer raises OpError
            reason = weight_files.reason(error)
            progress.log(f"warning: {reason}; training continues, earlier files are intact")
