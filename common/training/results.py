"""What a run leaves besides its checkpoints.

    results.csv, tensorboard/, loss_curves.png      of each epoch, and each evaluation within one
    best.weights.h5     the weights of the best evaluation
    last.weights.h5     the weights of the last epoch
    metrics.json, detections.json, pr_curves.png    of the last evaluation
    flags.txt, first_batch.png
    skipped/step_00000123.npz   what tools/replay_step.py needs to run a skipped step again

A full disk costs the file that was to be written, neither the run nor what was saved before.
"""

import csv
import io
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from common import progress
from common.args import flagfile
from common.distributed.ranks import Ranks
from common.evaluation import coco_metrics, drawing
from common.evaluation.coco_metrics import Evaluation
from common.evaluation.evaluate import write_evaluation
from common.files import write_bytes
from common.training import weights as weight_files

T = TypeVar("T")
SHOW_EVERY = 10  # steps
KEPT_STEPS = 2  # files of skipped steps: the newest
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
        self._bar = progress.Bar(title, steps, done=done)
        self._shown: dict[str, float] = {}
        self._times: list[tuple[float, int]] = []  # seconds and number of the steps that the rate is of

    def add(self, step: int, values: Mapping[str, tf.Tensor], finite: tf.Tensor) -> None:
        """Adds one step. Every SHOW_EVERY steps it shows the means, which waits for the device.

        Args:
            step: its number in the epoch, from 1.
            values: its scalars.
            finite: whether it was taken.
        """
        taken = tf.cast(finite, tf.float32)
        for name, value in {**values, _STEPS: taken, _SKIPPED: 1.0 - taken}.items():
            self._sums[name] = value + self._sums.get(name, 0.0)
        if step % SHOW_EVERY == 0 or step == self._steps:
            self._shown = self._means()
        self._times.append((time.monotonic(), step))
        self._bar.step(self._shown)

    def restart_clock(self) -> None:
        """The rate is that of the steps from here on, without the next one, which may compile."""
        self._times.clear()

    def row(self, batch_size: int, num_replicas: int, *, learning_rate: float) -> dict[str, float]:
        """What results.csv has of the epoch. Counts and the rate are those of all replicas."""
        rate = math.nan
        if len(self._times) > 1:
            (start, first), (end, last) = self._times[0], self._times[-1]
            rate = (last - first) * batch_size * num_replicas / (end - start)
        totals = self.totals()
        counts = {name: total * num_replicas for name, total in totals.items() if name.startswith(_COUNTED)}
        measured = {"learning_rate": learning_rate, "images_per_second": rate}
        return self._means() | measured | counts | {_SKIPPED: totals[_SKIPPED]}

    def totals(self) -> dict[str, float]:
        """What a checkpoint within the epoch holds."""
        return {name: float(value) for name, value in self._sums.items()}

    def _means(self) -> dict[str, float]:
        """NaN where no step was taken."""
        totals = self.totals()
        steps = totals.pop(_STEPS) or math.nan
        names = [name for name in totals if name != _SKIPPED and not name.startswith(_COUNTED)]
        return {name: totals[name] / steps for name in names}


class Results:
    """Writes the files of one run. Only rank 0 has a directory; on the others nothing is written.

    Args:
        directory: the run directory; None on all ranks but rank 0.
        model: whose weights are saved.
        metadata: of the weights files.
        state: of the checkpoint. Rows of results.csv that are later (of a run that was stopped between its
            row and its checkpoint) are dropped, so that none is repeated.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        model: keras.Model,
        metadata: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        self._directory, self._model, self._metadata = directory, model, dict(metadata)
        self._state = state
        if directory:
            done = max(state["epoch"], state.get("evaluated", 0))  # fractional after an evaluation within one
            self._rows = [r for r in _read_rows(directory / "results.csv") if float(r["epoch"]) <= done]
            self._events = tf.summary.create_file_writer(str(directory / "tensorboard"))

    def save_flags(self, flag_values: dict[str, Any]) -> None:
        """flags.txt."""
        self._try(lambda path: write_bytes(path / "flags.txt", flagfile(flag_values)))

    def save_first_batch(self, show_batch: Callable[..., str], images: Any, targets: Any) -> None:
        """first_batch.png, which `show_batch(images, targets, path=path)` draws and describes in one line."""
        self._try(lambda path: progress.log(show_batch(images, targets, path=path / "first_batch.png")))

    def save_row(self, epoch: float, values: Mapping[str, float]) -> None:
        """A row of results.csv, in TensorBoard and the curves, too.

        Args:
            epoch: epochs done: 2 for the second one, 1.25 for an evaluation after a quarter of it.
            values: name -> value; the names become columns. Values that are not finite stay empty.
        """
        step = self._state["step"]

        def save(directory: pathlib.Path) -> None:
            texts = {name: f"{value:.6g}" if math.isfinite(value) else "" for name, value in values.items()}
            self._rows.append({"epoch": epoch, "step": step, **texts})
            write_bytes(directory / "results.csv", self._table().encode())
            with self._events.as_default(step=step):
                for name, value in values.items():
                    tf.summary.scalar(name, value)
            self._events.flush()
            drawing.loss_curves(self._rows, directory / "loss_curves.png")

        self._try(save)

    def save_weights(self, name: str, **metadata: Any) -> None:
        """The model's present weights."""
        about = {"epoch": self._state["epoch"] + 1, "step": self._state["step"], **metadata}
        self._try(lambda path: weight_files.save(self._model, path / name, self._metadata | about))

    def save_evaluation(self, evaluation: Evaluation, is_best: bool) -> None:
        """The evaluation's files; if it is the best so far, the model's weights."""

        def save(directory: pathlib.Path) -> None:
            if is_best:
                self.save_weights(weight_files.BEST, AP=evaluation.metrics["AP"])
            write_evaluation(directory, *evaluation)

        self._try(save)

    def save_skipped(self, ranks: Ranks, step: int, images: Any, targets: Any) -> str | None:
        """The batch of a skipped step, and the weights that it met; all ranks call it together.

        On a GPU a result is read some steps later, so the weights include the updates that were made since.

        Args:
            ranks: of the run.
            step: its number.
            images, targets: of one replica in this step; None on ranks whose batch is not the one.

        Returns:
            The file, on rank 0; None elsewhere, and where it could not be written.
        """
        content = None
        if images is not None:
            arrays: dict[str, Any] = {f"target/{k}": np.asarray(v) for k, v in targets.items()}
            variables = enumerate(self._model.variables)
            arrays |= {f"weight/{i:05d}": tf.convert_to_tensor(v.value).numpy() for i, v in variables}
            text = json.dumps({**self._metadata, "step": step, "rank": ranks.rank})
            stream = io.BytesIO()
            np.savez(stream, metadata=text, images=np.asarray(images), **arrays)
            content = stream.getvalue()
        contents = [found for found in ranks.gather(content) if found is not None]

        def save(directory: pathlib.Path) -> str:
            path = directory / "skipped" / f"step_{step:08d}.npz"
            path.parent.mkdir(exist_ok=True)
            write_bytes(path, contents[0])
            for old in sorted(path.parent.glob("step_*.npz"))[:-KEPT_STEPS]:
                old.unlink()
            return str(path)

        return self._try(save)

    def _table(self) -> str:
        """results.csv, the metrics in its last columns."""
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        columns.sort(key=lambda name: name in coco_metrics.NAMES)
        text = io.StringIO()
        table = csv.DictWriter(text, columns, restval="")
        table.writeheader()
        table.writerows(self._rows)
        return text.getvalue()

    def _try(self, save: Callable[[pathlib.Path], T]) -> T | None:
        if self._directory is None:
            return None
        try:
            return save(self._directory)
        except (OSError, tf.errors.OpError) as error:  # TensorBoard's writer is TensorFlow's
            reason = weight_files.reason(error)
            progress.log(f"warning: {reason}; training continues, what was saved before is intact")
            return None


def note_metric(state: dict[str, Any], metric: float, eval_data: str | None = None) -> bool:
    """Remembers one evaluation, for the best weights and --patience.

    Args:
        state: of the checkpoint, changed in place: `best_metric` and `without_gain`, evaluations since then.
        metric: higher is better; a value that is not finite never counts as better.
        eval_data: fingerprint of the data. Metrics of other data do not compare: this one is then the best.

    Returns:
        Whether it is the best so far.
    """
    comparable = state.get("eval_data", eval_data) == eval_data
    best = state.get("best_metric", -math.inf) if comparable else -math.inf
    gain = math.isfinite(metric) and metric > best
    if gain:
        state.update(best_metric=float(metric), without_gain=0, eval_data=eval_data)
    else:
        state["without_gain"] = state.get("without_gain", 0) + 1
    return gain


def out_of_patience(state: Mapping[str, Any], patience: int) -> str | None:
    """Why the run ends, once `patience` evaluations in a row brought nothing better; 0: it never does."""
    without_gain = state.get("without_gain", 0)
    if not 0 < patience <= without_gain:
        return None
    best = 100 * state.get("best_metric", math.nan)
    return (
        f"ends after epoch {state['epoch']}: {without_gain} evaluations without a better AP than {best:.1f} "
        f"(--patience={patience}); the best weights are kept"
    )


def _read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{_RENAMED.get(k, k): v for k, v in row.items()} for row in csv.DictReader(file)]
