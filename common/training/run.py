"""`Run` is the helper of the loop in each app's train.py: when to save, evaluate, show progress and stop.

Saving, averaging and evaluating are collective operations: every rank calls the methods in the same order.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from common import progress
from common.args import Args
from common.distributed.ranks import Ranks
from common.distributed.start import reproducible, start
from common.errors import StoppedError, UserError
from common.evaluation import coco_metrics
from common.evaluation.coco_metrics import Evaluation
from common.evaluation.evaluate import OnBatch
from common.progress import log
from common.training import optimizers, step_guard
from common.training.checkpoints import Checkpoints, RunState
from common.training.early_stopping import note_metric, out_of_patience
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from common.training.results import EpochLog, Results
from common.training.watchdog import StopSignals, Watchdog
from common.weights import weight_files as weights

LONG_SECONDS = 1800.0  # the watchdog's limit for compiling a step and for scoring an evaluation


def start_process(a: Args) -> Ranks:
    """Connects this process to the other ranks of the run. Call it before TensorFlow runs anything.

    Raises:
        UserError: --output_dir is missing, --compression is used without Horovod, or `start`
            raises an error.
    """
    if not a.output_dir:
        raise UserError("--output_dir is missing: give a directory for checkpoints and results")
    if a.compression != "none" and a.strategy != "horovod":
        raise UserError(f"--compression={a.compression} needs Horovod: add --strategy=horovod")
    reproducible()
    ranks = start(strategy=a.strategy, compression=a.compression)
    with ranks.raise_on_any_rank():
        coco_metrics.check_backend(a.coco_backend)
    progress.be_quiet(ranks.rank > 0)
    keras.utils.set_random_seed(a.seed)
    keras.mixed_precision.set_global_policy(a.precision)
    return ranks


class Run:
    """What the loop of train.py calls: it counts steps, saves, evaluates and stops, on all ranks together.

    Args:
        model: the model that is trained.
        optimizer: its optimizer.
        ema: the moving averages of its weights, which are evaluated and saved.
        state: the state of the run, which the methods change.
        feed: the training data.
        checkpoints: where `state`, the variables and the place in the data are saved.
        results: the other files of the run.

    Attributes:
        state: the argument.
        metrics: metrics of the last evaluation.
    """

    def __init__(
        self,
        a: Args,
        ranks: Ranks,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        ema: AveragedWeights,
        state: RunState,
        feed: InputFeed,
        checkpoints: Checkpoints,
        results: Results,
    ) -> None:
        self.state = state
        self.metrics: dict[str, Any] | None = None
        self._a, self._ranks, self._model, self._optimizer, self._ema = a, ranks, model, optimizer, ema
        self._feed, self._checkpoints, self._results = feed, checkpoints, results
        results.save_flags(dataclasses.asdict(a))
        self._guard = step_guard.StepGuard(ranks, limit=a.max_skipped_steps)
        self._compiled, self._saved = False, True

    def __enter__(self) -> "Run":
        self._exit_stack = contextlib.ExitStack()
        self._signals = self._exit_stack.enter_context(StopSignals(quiet=self._ranks.rank > 0))
        self._watchdog = self._exit_stack.enter_context(
            Watchdog(self._ranks, step_timeout=self._a.step_timeout)
        )
        self._exit_stack.callback(self._feed.close)  # runs first on exit
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the run. After an error, makes no collective call, because other ranks may be gone.

        Raises:
            UserError: training is done, but its last checkpoint could not be written.
        """
        self._exit_stack.__exit__(kind, error, trace)
        if error is None:
            self._results.print_summary(self.metrics)
            self._ranks.close()
            self._require_saved()

    @property
    def stop_requested(self) -> tf.Tensor:
        """1.0 after this rank has received a signal, else 0.0."""
        return tf.constant(1.0 if self._signals.received else 0.0)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yields the number (from 1) of each remaining epoch, until --patience is exceeded."""
        self._num_epochs = num_epochs
        state, patience = self.state, self._a.patience
        end = None if state.step_in_epoch else out_of_patience(state, patience)
        if end or state.epoch >= num_epochs:
            why = end or f"epoch {state.epoch} was the last"
            log(f"{self._a.output_dir}: {why}; nothing left to train")
            path = pathlib.Path(self._a.output_dir, "metrics.json")
            self.metrics = json.loads(path.read_text()) if path.exists() else None
            return
        while state.epoch < num_epochs and not end:
            epoch = state.epoch + 1
            if state.step_in_epoch == 0:
                self._feed.begin_epoch()
            title = f"epoch {epoch}/{num_epochs}"
            self._epoch = EpochLog(title, self._feed.steps_per_epoch, state.step_in_epoch, state.totals)
            self._scores: dict[str, float] = {}
            yield epoch
            end = out_of_patience(state, patience)
        if end:
            log(end)

    def epoch_is_unfinished(self) -> bool:
        """Whether steps or an evaluation are left in this epoch."""
        return self._is_within_epoch() or self.is_evaluation_due()

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yields (images, targets) of each step up to the next evaluation or the end of the epoch.

        Raises:
            UserError: the loader stopped, for example at a damaged image.
        """
        while self._is_within_epoch() and not self.is_evaluation_due():
            self._beat("training", 0.0 if self._compiled else LONG_SECONDS)
            images, targets = next(self._feed)
            if self.state.step == 0:
                self._results.save_first_batch(self._ranks.first(images), self._ranks.first(targets))
            if not self._compiled:
                progress.show_until_next("compiling the training step")
            yield images, targets

    def after_step(self, result: step_guard.StepResult, targets: Any) -> None:
        """Counts a step, checks its result, shows progress, and saves when a checkpoint is due.

        Raises:
            UserError: too many steps in a row were skipped, or a stopped run cannot be saved.
            StoppedError: any rank has received a signal; everything is saved.
        """
        state, a = self.state, self._a
        self._compiled = True
        state.step += 1
        state.step_in_epoch += 1
        self._guard.check(state.step, result, targets)
        self._epoch.add(state.step_in_epoch, result.values, result.finite)
        if self._guard.stop:
            self._save()
            self._require_saved()
            raise StoppedError(self._signals.message(state.step))
        if a.save_every and state.step % a.save_every == 0 and self._is_within_epoch():
            self._save()

    def is_evaluation_due(self) -> bool:
        """Whether to evaluate now: by --eval_every_steps, --eval_every, or because the run ends.

        False if the evaluation at this step is already saved.
        """
        state, a = self.state, self._a
        saved = state.evaluated == self._progress()
        if saved or "eval_data" not in self._results.metadata or not state.step_in_epoch:
            return False
        by_steps = bool(a.eval_every_steps) and state.step % a.eval_every_steps == 0
        if by_steps or self._is_within_epoch():
            return by_steps
        epoch = state.epoch + 1
        return epoch == self._num_epochs or bool(a.eval_every and epoch % a.eval_every == 0)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[OnBatch]:
        """Gives the model the averaged weights. Yields a function that the evaluation calls after each batch.

        Raises:
            StoppedError: any rank has received a signal; all steps are saved.
        """
        if self._is_within_epoch():
            log("")  # ends the line of the progress bar
        self._save()  # the run may be stopped in the evaluation

        def on_batch(done: int, total: int) -> None:
            self._beat("evaluating", LONG_SECONDS if done == total else 0.0)
            if self._signals.agreed(self._ranks):
                self._require_saved()
                raise StoppedError(self._signals.message(self.state.step))

        self._beat("evaluating", LONG_SECONDS)
        with self._ema.swapped_in(self._ranks):  # on every rank
            yield on_batch
        if self._is_within_epoch():
            self._epoch.restart_clock()
            self._save()  # so that a resumed run does not evaluate again

    def save_evaluation(self, evaluation: Evaluation) -> None:
        """Saves the files and metrics of an evaluation, and the weights if they are the best."""
        state, self.metrics = self.state, evaluation.metrics
        state.evaluated = self._progress()
        is_best = note_metric(state, self.metrics["AP"], self._results.metadata.get("eval_data"))
        self._results.save_evaluation(evaluation, is_best)
        scores = {name: self.metrics[name] for name in coco_metrics.NAMES}
        if self._is_within_epoch():
            when = f"step {state.step}"
            self._results.save_row(self._progress(), scores)
        else:
            when = f"epoch {state.epoch + 1}"
            self._scores = scores  # `end_epoch` adds them to the epoch's row
        log(f"{when}: AP {100 * scores['AP']:.1f}, AP50 {100 * scores['AP50']:.1f}")

    def end_epoch(self) -> None:
        """Writes the epoch's row, weights and checkpoint."""
        state, epoch = self.state, self.state.epoch + 1
        replicas, rate = self._ranks.num_replicas, optimizers.last_learning_rate(self._optimizer)
        self._guard.check_weights(self._model, self._optimizer, state.step)
        row = self._epoch.row(self._a.batch_size, replicas, learning_rate=rate) | self._scores
        with self._ema.swapped_in(self._ranks):  # on every rank
            self._results.save_row(epoch, row)
            self._results.save_weights(weights.LAST)
        state.epoch, state.step_in_epoch = epoch, 0
        self._save()

    def _is_within_epoch(self) -> bool:
        return self.state.step_in_epoch < self._feed.steps_per_epoch

    def _progress(self) -> float:
        """Returns the number of epochs done, for example 1.25 after a quarter of the second epoch."""
        return round(self.state.epoch + self.state.step_in_epoch / self._feed.steps_per_epoch, 6)

    def _beat(self, doing: str, at_least: float = 0.0) -> None:
        self._watchdog.beat(doing, epoch=self.state.epoch + 1, step=self.state.step, at_least=at_least)

    def _save(self) -> None:
        """Writes a checkpoint. All ranks call this together.

        Raises:
            UserError: the data in a bucket have changed, so the last steps are worthless. Nothing is written.
        """
        state = self.state
        self._beat("saving")
        self._feed.check_unchanged()
        self._guard.check_weights(self._model, self._optimizer, state.step)
        state.totals = self._epoch.totals() if state.step_in_epoch else {}
        self._saved = self._checkpoints.save(state, self._feed.iterators)

    def _require_saved(self) -> None:
        """Raises UserError on all ranks if the last checkpoint was not written."""
        if not self._saved:
            raise UserError(
                f"the last checkpoint could not be saved: make room in {self._a.output_dir} and try again"
            )
