"""What a run leaves besides its checkpoints: results.csv, weights files, evaluations, the first batch.

    best.weights.h5     the weights of the best evaluation
    last.weights.h5     the weights of the last epoch

A full disk costs the file that was to be written, neither the run nor what was saved before.
"""

import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from common import progress
from common.args import flagfile
from common.errors import UserError
from common.evaluation.evaluate import Evaluation, write_evaluation
from common.files import write_bytes
from common.training import weights as weight_files
from common.training.fine_tuning import Report
from common.training.train_log import RunLog


class Results:
    """Writes the files of one run. Only rank 0 has a directory; on the others nothing is written.

    Args:
        directory: the run directory; None on all ranks but rank 0.
        model: whose weights are saved.
        metadata: of the weights files.
        done_epochs: see RunLog.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        model: keras.Model,
        metadata: Mapping[str, Any],
        done_epochs: float = 0,
    ) -> None:
        self._directory = directory
        self._model = model
        self._metadata = dict(metadata)
        self._log = RunLog(directory, done_epochs) if directory else None

    def save_row(self, epoch: float, step: int, values: Mapping[str, float]) -> None:
        """A row of results.csv; see RunLog.add."""
        self._try(lambda path: self._log.add(epoch, step, values))

    def save_last(self, epoch: int, step: int) -> None:
        """The model's present weights as last.weights.h5."""
        about = self._metadata | {"epoch": epoch, "step": step}
        self._try(lambda path: weight_files.save(self._model, path / weight_files.LAST, about))

    def save_evaluation(self, evaluation: Evaluation, epoch: int, step: int) -> None:
        """The evaluation's files; the model's weights as best.weights.h5, if they are the best so far."""
        score = evaluation.metrics["AP"]
        about = self._metadata | {"epoch": epoch, "step": step, "AP": score}
        self._try(lambda path: save_best(self._model, path / weight_files.BEST, score, about))
        self._try(lambda path: write_evaluation(path, *evaluation))

    def save_start(self, flag_values: dict[str, Any], init_report: Report | None) -> None:
        """flags.txt; and init_from.txt, what was taken from --init_from."""
        self._try(lambda path: write_bytes(path / "flags.txt", flagfile(flag_values)))
        if init_report:
            self._try(lambda path: init_report.save(path / "init_from.txt"))

    def save_first_batch(self, show_batch: Callable[..., str], images: Any, targets: Any) -> None:
        """first_batch.png, which `show_batch(images, targets, path=path)` draws and describes in one line."""
        self._try(lambda path: progress.log(show_batch(images, targets, path=path / "first_batch.png")))

    def _try(self, save: Callable[[pathlib.Path], Any]) -> None:
        if self._directory is None:
            return
        try:
            save(self._directory)
        except (OSError, tf.errors.OpError) as error:  # TensorBoard's writer is TensorFlow's
            reason = weight_files.reason(error)
            progress.log(f"warning: {reason}; training continues, what was saved before is intact")


def save_best(model: keras.Model, path: pathlib.Path, metric: float, metadata: Mapping[str, Any]) -> bool:
    """Writes the model's weights to `path` if `metric` is higher than that of the file there.

    The metric travels in the file, so the two cannot disagree. One that is not finite is never the best. One
    that was measured on other data (`metadata["eval_data"]`) is not comparable, and its file is replaced.

    Returns:
        Whether the weights were written.

    Raises:
        OSError: they could not be written; the old file is kept.
    """
    if not math.isfinite(metric):
        return False
    if path.exists():
        try:
            best = weight_files.read_metadata(path)
            if best.get("eval_data") == metadata.get("eval_data") and metric <= best["metric"]:
                return False
        except UserError as error:
            print(f"{error}; it is replaced", file=sys.stderr)
    weight_files.save(model, path, {**metadata, "metric": float(metric)})
    return True
