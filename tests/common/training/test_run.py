"""Tests run.py, the loop of train.py, and input_feed.py."""

import functools
import os
import pathlib
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.args import Args
from common.distributed.ranks import Ranks
from common.errors import StoppedError, UserError
from common.evaluation import coco_metrics, curves, drawing
from common.evaluation.coco_metrics import Evaluation
from common.training import run as run_module
from common.training import step_guard
from common.training.checkpoints import Checkpoints, Identity, RunState, check_directory, claim_directory
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from common.training.results import EpochLog, Results
from common.training.run import Run, start_process
from common.training.watchdog import Watchdog
from common.weights import checkpoint_files, model_metadata
from common.weights import weight_files as weights
from tests.common.training.small_model import assert_same, full_disk, rows_of, values

pytestmark = pytest.mark.timeout(120)  # an error in the training loop may make it endless
STEPS = 4  # in an epoch


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Drawing takes most of the time."""
    for name in ("loss_curves", "pr_curves"):
        monkeypatch.setattr(curves, name, lambda *_: None)


class Loader:
    """Rows of numbers in place of images. `sign` may change by epoch."""

    source, pipeline_type, steps_per_epoch = None, "tensorflow", 3

    def __init__(self, opened_loaders, saveable, device_index=0, seed=0, sign=1.0):
        self.saveable, self._seed, self._sign = saveable, seed, sign
        self._opened_loaders = opened_loaders

    def iterator(self):
        self._opened_loaders.append((self._seed, self._sign))

        def example(number):
            image = tf.cast([number, number % 5, 1], tf.float32)
            return self._sign * image / 12, {"image_ids": number, "boxes": tf.ones([2])}

        return iter(tf.data.Dataset.range(12).shuffle(12, self._seed).repeat().map(example).batch(2))


class Session:
    """One process of a run.

    Args:
        saveable: whether checkpoints save the positions of the iterators.
        sign_change: the loaders have another sign in the epoch after this number of epochs.
        aps: AP of the evaluation in each epoch; by default, the AP is computed from the weights.

    Attributes:
        image_ids: the image ids of each step.
        opened_loaders: (seed, sign) of each loader.
    """

    def __init__(self, directory, *, saveable=True, sign_change=None, epochs=3, aps=None, **flags):
        self.image_ids, self.opened_loaders = [], []
        self.a = Args(output_dir=str(directory), batch_size=2, **flags)
        self.ranks = start_process(self.a)
        self._saveable, self._sign_change, self._epochs, self._aps = saveable, sign_change, epochs, aps
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1, name="head")]
        self.model = keras.Sequential([keras.Input((3,)), *layers])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
        self.optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)

    def train(self):
        metadata = {"app": "a", "eval_data": "f00"}
        identity = Identity({"batch_size": 2, "freeze": self.a.freeze, "steps_per_epoch": STEPS})
        check_directory(self.a, self.ranks, identity)
        directory = claim_directory(self.a, self.ranks, identity)
        self.ema = AveragedWeights(self.model, 0.9)
        trained = self.ranks, self.model, self.optimizer, self.ema
        checkpoints = Checkpoints(directory, *trained, metadata=metadata, identity=identity)
        self.state = checkpoints.find() or RunState()
        open_loader = functools.partial(Loader, self.opened_loaders, self._saveable)
        feed = InputFeed(self.ranks, open_loader, self._epoch_options, self.state, STEPS, self._epochs)
        checkpoints.restore(self.state, feed.iterators)
        results = Results(directory, self.model, metadata, self.state, self._show_batch)
        parts = self.ranks, self._gradients, self._update, self.model
        step = step_guard.guarded_step(*parts, xla=False, every_gradient=True)
        with Run(self.a, *trained, self.state, feed, checkpoints, results) as run:
            for epoch in run.epochs(self._epochs):
                assert epoch == self.state.epoch + 1
                while run.epoch_is_unfinished():
                    for images, targets in run.batches():
                        self.image_ids.append(tuple(targets["image_ids"].numpy()))
                        run.after_step(step(images, targets, run.stop_requested), targets)
                    if run.is_evaluation_due():
                        with run.evaluating() as on_batch:
                            on_batch(1, 2)
                            run.save_evaluation(self._evaluation())
                run.end_epoch()
        return run.metrics

    def train_until_interrupted(self, owner, name, replacement):
        """Trains with another method of a class. The method interrupts the training."""
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, replacement)
            self.train()

    def train_until(self, step):
        """Interrupts the training before the step after this one."""
        beat = Watchdog.beat

        def interrupted_beat(watchdog, doing, **place):
            if place["step"] == step and doing == "training":
                raise KeyboardInterrupt
            beat(watchdog, doing, **place)

        self.train_until_interrupted(Watchdog, "beat", interrupted_beat)

    def _epoch_options(self, epochs_done):
        return {"seed": epochs_done, "sign": -1.0 if epochs_done == self._sign_change else 1.0}

    def _show_batch(self, images, targets, path):
        drawing.save_png(np.zeros((4, 6, 3), np.uint8), path)
        return f"boxes in {path.name}: {len(targets['boxes'])}"

    def _gradients(self, images, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(images, training=True) - 1.0) ** 2)
        return tape.gradient(loss, self.model.trainable_variables), {"loss": loss}

    def _update(self, gradients, condition):
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.ema.update()

    def _evaluation(self):
        number = float(np.tanh(np.abs(np.asarray(self.model.weights[-2])).sum()))
        ap = self._aps[self.state.epoch] if self._aps else number
        return Evaluation({**dict.fromkeys(coco_metrics.NAMES, ap), "per_class": {}}, [], {})


def assert_same_runs(session, reference):
    """Compares the weights, the rows of results.csv and the last states."""
    assert_same(values(session.model), values(reference.model))
    directory, expected = (pathlib.Path(each.a.output_dir) for each in (session, reference))
    for row, expected_row in zip(rows_of(directory), rows_of(expected), strict=True):
        for name in ("epoch", "step", "loss", "AP"):
            assert row[name] == expected_row[name]
    assert state_of(directory) == state_of(expected)


def state_of(directory):
    """Returns the state in the newest checkpoint."""
    return model_metadata.read(directory / "checkpoints")["state"]


# --- the files and the log of a run ---


def test_training_loop_writes_results_csv_best_and_last_weights_flags_txt_and_a_checkpoint(tmp_path, capfd):
    metrics = Session(tmp_path, eval_every=2).train()
    rows = rows_of(tmp_path)
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "4"), ("2", "8"), ("3", "12")]
    assert [bool(row["AP"]) for row in rows] == [False, True, True]
    rates = [0.1 * 0.9 ** (n / 3) for n in (3, 7, 11)]  # at each epoch's last step, counted from 0
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(rates)
    assert float(rows[-1]["AP"]) == pytest.approx(metrics["AP"], rel=1e-5)
    output = capfd.readouterr()
    assert "boxes in first_batch.png: 2\n" in output.err and output.err.count("first_batch") == 1
    assert f"epoch 3: AP {100 * metrics['AP']:.1f}, AP50 {100 * metrics['AP']:.1f}\n" in output.err
    assert f"results are in {tmp_path}; " in output.out and "AP50" in output.out
    assert f"\npython a/infer.py --weights={tmp_path} --images=" in output.out
    assert "--eval_every=2" in (tmp_path / "flags.txt").read_text().splitlines()
    last = weights.read_metadata(tmp_path / weights.LAST)
    assert (last["app"], last["epoch"], last["step"]) == ("a", 3, 12)
    aps = [float(row["AP"] or 0) for row in rows]
    assert weights.read_metadata(tmp_path / weights.BEST)["epoch"] == 1 + int(np.argmax(aps))
    assert (state_of(tmp_path)["step"], state_of(tmp_path)["epoch"]) == (12, 3)


def test_best_and_last_weights_files_of_a_training_run_hold_the_ema_weights(tmp_path):
    session = Session(tmp_path, epochs=1)
    session.train()
    with session.ema.swapped_in():
        averages = values(session.model)
    assert not np.array_equal(averages[-2], values(session.model)[-2])
    for name in (weights.LAST, weights.BEST):
        weights.load(session.model, tmp_path / name)
        assert_same(values(session.model), averages)


def test_batch_with_nan_pixels_is_skipped_and_training_continues(tmp_path, monkeypatch, capfd):
    next_batch = InputFeed.__next__

    def poisoned_batch(feed):
        images, targets = next_batch(feed)
        return (images * np.nan if session.state.step == 2 else images), targets

    monkeypatch.setattr(InputFeed, "__next__", poisoned_batch)
    session = Session(tmp_path, epochs=1)
    session.train()
    assert "step 3 is skipped: the loss is not finite; image ids" in capfd.readouterr().err
    (row,) = rows_of(tmp_path)
    assert float(row["skipped_steps"]) == 1 and np.isfinite(float(row["loss"]))


def test_watchdog_allows_more_time_while_the_training_step_compiles_and_metrics_are_computed(
    tmp_path, monkeypatch
):
    beats, beat = [], Watchdog.beat

    def recorded_beat(watchdog, doing, *, epoch=0, step=0, at_least=0.0):
        beats.append((doing, epoch, step, at_least))
        beat(watchdog, doing, epoch=epoch, step=step, at_least=at_least)

    monkeypatch.setattr(Watchdog, "beat", recorded_beat)
    Session(tmp_path, epochs=1).train()
    long = run_module.LONG_SECONDS
    assert long == 1800
    assert beats == [
        ("training", 1, 0, long),
        *(("training", 1, step, 0.0) for step in (1, 2, 3)),
        ("saving", 1, 4, 0.0),
        ("evaluating", 1, 4, long),
        ("evaluating", 1, 4, 0.0),
        ("saving", 2, 4, 0.0),
    ]


# --- when a run evaluates, and when it ends ---


def test_evaluations_by_steps_and_by_epochs_get_result_rows_with_their_step_and_epoch(
    tmp_path, monkeypatch, capfd
):
    restarts = []
    monkeypatch.setattr(EpochLog, "restart_clock", lambda log: restarts.append(log))
    Session(tmp_path, eval_every_steps=3, eval_every=2).train()
    assert len(restarts) == 3  # the clock excludes the evaluations after steps 3, 6 and 9
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if row["AP"]] == ["3", "6", "8", "9", "12"]  # 8 and 12 end epochs
    assert [row["epoch"] for row in rows] == ["0.75", "1", "1.5", "2", "2.25", "3"]
    assert [row["step"] for row in rows if row["loss"]] == ["4", "8", "12"]
    assert "step 6: AP" in capfd.readouterr().err


def test_evaluation_by_steps_that_falls_on_the_end_of_an_epoch_is_done(tmp_path):
    Session(tmp_path, eval_every_steps=4, eval_every=0).train()
    assert [row["step"] for row in rows_of(tmp_path) if row["AP"]] == ["4", "8", "12"]


def test_run_ended_by_early_stopping_continues_only_with_more_patience(tmp_path, capfd):
    options = {"epochs": 5, "aps": [0.1, 0.3, 0.2, 0.3, 0.4]}
    Session(tmp_path, **options, patience=2).train()
    assert "ends after epoch 4: 2 evaluations without a better AP than 30.0" in capfd.readouterr().err
    assert len(rows_of(tmp_path)) == 4
    assert weights.read_metadata(tmp_path / weights.BEST)["epoch"] == 2
    again = Session(tmp_path, **options, patience=2)
    assert again.train()["AP"] == 0.3
    assert again.image_ids == [] and "nothing left to train" in capfd.readouterr().err
    Session(tmp_path, **options).train()
    assert "epoch 5: AP 40.0" in capfd.readouterr().err


def test_resuming_a_finished_run_trains_no_step_and_returns_its_metrics(tmp_path, capfd):
    metrics = Session(tmp_path, epochs=1).train()
    again = Session(tmp_path, epochs=1)
    assert again.train()["AP"] == pytest.approx(metrics["AP"], abs=1e-6)
    assert again.image_ids == []
    assert f"{tmp_path}: epoch 1 was the last; nothing left to train" in capfd.readouterr().err


# --- resuming ---


FEEDS = {
    "saved positions": (True, 3, [(0, 1.0), (2, -1.0)]),
    "pass shorter than an epoch": (False, 3, [(0, 1.0), (1, 1.0), (2, -1.0)]),
    "pass longer than an epoch": (False, 6, [(0, 1.0), (2, -1.0)]),
}


@pytest.mark.parametrize(("saveable", "steps_of_a_pass", "loaders"), FEEDS.values(), ids=FEEDS)
def test_run_resumed_within_epochs_equals_an_uninterrupted_run(
    tmp_path, monkeypatch, saveable, steps_of_a_pass, loaders, capfd
):
    monkeypatch.setattr(Loader, "steps_per_epoch", steps_of_a_pass)
    options = {"saveable": saveable, "sign_change": 2, "save_every": 2, "eval_every": 0}
    uninterrupted = Session(tmp_path / "uninterrupted", **options)
    uninterrupted.train()
    assert "from epoch 3 on, the loaders use sign=-1.0" in capfd.readouterr().err
    assert uninterrupted.opened_loaders == loaders
    resumed_at = 0
    for interrupted_at, saved_at in ((5, 4), (7, 6), (11, 10)):
        session = Session(tmp_path / "resumed", **options)
        session.train_until(interrupted_at)
        assert session.image_ids == uninterrupted.image_ids[resumed_at:interrupted_at]
        resumed_at = saved_at
    resumed = Session(tmp_path / "resumed", **options)
    resumed.train()
    assert resumed.image_ids == uninterrupted.image_ids[10:]
    assert "resumed after epoch 2 and 2 steps (step 10)" in capfd.readouterr().err
    assert_same_runs(resumed, uninterrupted)


def test_evaluations_within_an_epoch_are_neither_repeated_nor_lost_by_resuming(tmp_path):
    options = {"eval_every_steps": 3, "eval_every": 2, "patience": 9, "save_every": 0}
    uninterrupted = Session(tmp_path / "uninterrupted", **options)
    uninterrupted.train()
    save_row, directory = Results.save_row, tmp_path / "resumed"

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupt_after_saving(results, epoch, row):
        save_row(results, epoch, row)
        if epoch == 1.5:
            raise KeyboardInterrupt

    Session(directory, **options).train_until_interrupted(AveragedWeights, "swapped_in", interrupt)
    assert not (directory / "results.csv").exists()
    Session(directory, **options).train_until_interrupted(Results, "save_row", interrupt_after_saving)
    assert [row["step"] for row in rows_of(directory)] == ["3", "4", "6"]
    Session(directory, **options).train_until(7)
    resumed = Session(directory, **options)
    resumed.train()
    assert_same_runs(resumed, uninterrupted)


def test_run_with_another_freeze_flag_resumes_from_the_last_complete_epoch(tmp_path, capfd):
    flags = {"save_every": 2, "eval_every": 0}
    Session(tmp_path, **flags).train_until(7)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 6]
    capfd.readouterr()
    Session(tmp_path, **flags, freeze="x").train()
    output = capfd.readouterr().err
    assert "resumed after epoch 1 (step 4)\n" in output
    assert "  changed: freeze; the run continues from an epoch's end, results may differ\n" in output
    assert [row["step"] for row in rows_of(tmp_path)] == ["4", "8", "12"]


def test_overwrite_starts_the_run_anew(tmp_path):
    Session(tmp_path, epochs=1).train()
    session = Session(tmp_path, epochs=1, overwrite=True)
    session.train()
    assert len(session.image_ids) == 4
    assert [row["step"] for row in rows_of(tmp_path)] == ["4"]


# --- signals and errors ---


def signal_in_step_5(monkeypatch):
    check = step_guard.StepGuard.check

    def signalled_check(guard, step, *arguments):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        check(guard, step, *arguments)

    monkeypatch.setattr(step_guard.StepGuard, "check", signalled_check)


def signal_in_evaluation(monkeypatch):
    beat = Watchdog.beat

    def signalled_beat(watchdog, doing, **place):
        beat(watchdog, doing, **place)
        if doing == "evaluating":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Watchdog, "beat", signalled_beat)


def test_signal_in_a_step_stops_the_run_after_saving_the_next_step(tmp_path, monkeypatch):
    signal_in_step_5(monkeypatch)
    with pytest.raises(StoppedError, match="stopped by SIGTERM; saved after step 6"):
        Session(tmp_path, save_every=0).train()
    assert state_of(tmp_path)["step"] == 6


def test_signal_in_an_evaluation_stops_the_run_at_the_next_batch(tmp_path, monkeypatch):
    signal_in_evaluation(monkeypatch)
    with pytest.raises(StoppedError, match="stopped by SIGTERM; saved after step 4"):
        Session(tmp_path, save_every=0).train()
    assert state_of(tmp_path)["step"] == 4


@pytest.mark.parametrize("signal_in", [signal_in_step_5, signal_in_evaluation])
def test_stopped_run_whose_checkpoint_cannot_be_saved_does_not_say_that_it_is_saved(
    signal_in, tmp_path, monkeypatch
):
    signal_in(monkeypatch)
    monkeypatch.setattr(checkpoint_files, "write", full_disk)
    with pytest.raises(UserError, match=r"^the last checkpoint could not be saved"):
        Session(tmp_path, save_every=0).train()


def test_loader_error_in_training_is_a_user_error_that_names_the_loader(tmp_path, monkeypatch):
    def damaged_iterator(loader):
        yield tf.ones([2, 3]), {"image_ids": tf.range(2), "boxes": tf.ones([2, 2])}
        raise tf.errors.UnknownError(None, None, "a damaged image")

    monkeypatch.setattr(Loader, "iterator", damaged_iterator)
    with pytest.raises(UserError, match=r"the loader \(tensorflow\) stopped: a damaged image"):
        Session(tmp_path, saveable=False).train()


def test_run_whose_last_checkpoint_cannot_be_saved_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "write", full_disk)
    with pytest.raises(UserError, match=r"^the last checkpoint could not be saved: make room in .*"):
        Session(tmp_path, epochs=1).train()


# --- start_process ---


def test_training_without_the_flag_output_dir_is_refused():
    with pytest.raises(UserError, match=r"^--output_dir is missing: give a directory"):
        start_process(Args())


def test_gradient_compression_without_horovod_is_refused():
    with pytest.raises(UserError, match=r"^--compression=fp16 needs Horovod: add --strategy"):
        start_process(Args(output_dir="x", compression="fp16"))


def test_starting_a_training_process_sets_the_random_seed_and_the_precision_policy():
    try:
        start_process(Args(output_dir="x", seed=7, precision="mixed_bfloat16"))
        assert keras.mixed_precision.dtype_policy().name == "mixed_bfloat16"
        expected = np.asarray(keras.random.normal((3,)))
        assert isinstance(start_process(Args(output_dir="x", seed=7)), Ranks)
        assert_same([np.asarray(keras.random.normal((3,)))], [expected])
    finally:
        keras.mixed_precision.set_global_policy("float32")
