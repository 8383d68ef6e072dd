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
from common.evaluation import coco_metrics, drawing
from common.evaluation.coco_metrics import Evaluation
from common.training import run as run_module
from common.training import run_directory, step_guard
from common.training.checkpoints import Checkpoints, RunState
from common.training.ema import AveragedWeights
from common.training.input_feed import InputFeed
from common.training.results import EpochLog, Results
from common.training.run import Run, start_process
from common.training.watchdog import Watchdog
from common.weights import checkpoint_files, model_metadata
from common.weights import weight_files as weights
from tests.common.training.small_model import assert_same, full_disk, rows_of, values

pytestmark = pytest.mark.timeout(120)  # an error in the training loop may make it endless
STEPS = 4


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Drawing takes most of the time."""
    for name in ("loss_curves", "pr_curves"):
        monkeypatch.setattr(drawing, name, lambda *_: None, raising=False)  # copied apps may lack it


class Loader:
    """Rows of numbers in place of images. `sign` may change by epoch."""

    source, pipeline_type, steps_per_epoch = None, "tensorflow", 3

    def __init__(self, opened, saveable, device_index=0, seed=0, sign=1.0):
        self.saveable, self._opened, self._seed, self._sign = saveable, opened, seed, sign

    def iterator(self):
        self._opened.append((self._seed, self._sign))

        def example(number):
            image = tf.cast([number, number % 5, 1], tf.float32)
            return self._sign * image / 12, {"image_ids": number, "boxes": tf.ones([2])}

        return iter(tf.data.Dataset.range(12).shuffle(12, self._seed).repeat().map(example).batch(2))


class Session:
    """One process of a run. `seen` has the image ids of each step."""

    def __init__(self, directory, *, saveable=True, turn=None, epochs=3, aps=None, **flags):
        self.seen, self.opened = [], []
        self.a = Args(output_dir=str(directory), batch_size=2, **flags)
        self.ranks = start_process(self.a)
        self._saveable, self._turn, self._epochs, self._aps = saveable, turn, epochs, aps
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1, name="head")]
        self.model = keras.Sequential([keras.Input((3,)), *layers])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
        self.optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)

    def train(self):
        metadata = {"app": "a", "eval_data": "f00"}
        identity = run_directory.Identity(
            {"batch_size": 2, "freeze": self.a.freeze, "steps_per_epoch": STEPS}
        )
        run_directory.check(self.a, self.ranks, identity)
        directory = run_directory.claim(self.a, self.ranks, identity)
        self.ema = AveragedWeights(self.model, 0.9)
        trained = self.ranks, self.model, self.optimizer, self.ema
        checkpoints = Checkpoints(directory, *trained, metadata=metadata, identity=identity)
        self.state = checkpoints.find() or RunState()
        open_loader = functools.partial(Loader, self.opened, self._saveable)
        feed = InputFeed(self.ranks, open_loader, self._epoch_options, self.state, STEPS, self._epochs)
        checkpoints.restore(self.state, feed.iterators)
        results = Results(directory, self.model, metadata, self.state, self._show_batch)
        parts = self.ranks, self._gradients, self._update, self.model
        step = step_guard.guarded_step(*parts, updated=(), xla=False, every_gradient=True)
        with Run(self.a, *trained, self.state, feed, checkpoints, results) as run:
            for epoch in run.epochs(self._epochs):
                assert epoch == self.state.epoch + 1
                while run.epoch_is_unfinished():
                    for images, targets in run.batches():
                        self.seen.append(tuple(targets["image_ids"].numpy()))
                        run.after_step(step(images, targets, run.stop_requested), targets)
                    if run.is_evaluation_due():
                        with run.evaluating() as on_batch:
                            on_batch(1, 2)
                            run.save_evaluation(self._evaluation())
                run.end_epoch()
        return run.metrics

    def _epoch_options(self, epochs_done):
        return {"seed": epochs_done, "sign": -1.0 if epochs_done == self._turn else 1.0}

    def _show_batch(self, images, targets, path):
        return f"boxes in {path.name}: {len(targets['boxes'])}"

    def _gradients(self, images, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(images, training=True) - 1.0) ** 2)
        return tape.gradient(loss, self.model.trainable_variables), {"loss": loss}

    def _update(self, gradients):
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.ema.update()

    def _evaluation(self):
        """Its AP is the epoch's value in `aps`, or computed from weights."""
        number = float(np.tanh(np.abs(np.asarray(self.model.weights[-2])).sum()))
        ap = self._aps[self.state.epoch] if self._aps else number
        return Evaluation({**dict.fromkeys(coco_metrics.NAMES, ap), "per_class": {}}, [], {})


def interrupt_at_step(monkeypatch, number):
    beat = Watchdog.beat

    def interrupted(self, doing, *, epoch=0, step=0, at_least=0.0):
        if step == number and doing == "training":
            raise KeyboardInterrupt
        beat(self, doing, epoch=epoch, step=step, at_least=at_least)

    monkeypatch.setattr(Watchdog, "beat", interrupted)


def assert_same_runs(one, other):
    assert_same(values(one.model), values(other.model))
    paths = [pathlib.Path(session.a.output_dir) for session in (one, other)]
    for read in (log_of, state_of):
        assert read(paths[0]) == read(paths[1])


def log_of(directory):
    return [[row[name] for name in ("epoch", "step", "loss", "AP")] for row in rows_of(directory)]


def state_of(directory):
    return model_metadata.read(directory / "checkpoints")["state"]


def test_run_writes_rows_weights_flags_and_checkpoint(tmp_path, capfd):
    session = Session(tmp_path, eval_every=2)
    metrics = session.train()
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
    state = model_metadata.read(tmp_path / "checkpoints")["state"]
    assert (state["step"], state["epoch"]) == (12, 3)

    again = Session(tmp_path, eval_every=2)
    assert again.train()["AP"] == pytest.approx(metrics["AP"], abs=1e-6)
    assert again.seen == []
    assert f"{tmp_path}: all 3 epochs are done; nothing left to train" in capfd.readouterr().err


def test_weights_files_hold_the_averaged_weights(tmp_path):
    session = Session(tmp_path, epochs=1)
    session.train()
    with session.ema.swapped_in():
        averages = values(session.model)
    assert not np.array_equal(averages[-2], values(session.model)[-2])
    for name in (weights.LAST, weights.BEST):
        weights.load(session.model, tmp_path / name)
        assert_same(values(session.model), averages)


def test_evaluations_within_an_epoch_are_neither_repeated_nor_lost_by_resuming(tmp_path, monkeypatch, capfd):
    flags = {"eval_every_steps": 3, "eval_every": 2, "patience": 9, "save_every": 0}
    unbroken, restarts = Session(tmp_path / "unbroken", **flags), []
    with monkeypatch.context() as patch:
        patch.setattr(EpochLog, "restart_clock", lambda log: restarts.append(log))
        unbroken.train()
    assert len(restarts) == 3  # the clock excludes the evaluations after steps 3, 6 and 9
    rows = rows_of(tmp_path / "unbroken")
    assert [row["step"] for row in rows if row["AP"]] == ["3", "6", "8", "9", "12"]  # 8 and 12 end epochs
    assert [row["epoch"] for row in rows] == ["0.75", "1", "1.5", "2", "2.25", "3"]
    assert [row["step"] for row in rows if row["loss"]] == ["4", "8", "12"]
    assert "step 6: AP" in capfd.readouterr().err

    broken, save_row = tmp_path / "broken", Results.save_row

    def in_evaluation(self, *arguments):
        raise KeyboardInterrupt

    def after_evaluation(self, epoch, values):
        save_row(self, epoch, values)
        if epoch == 1.5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AveragedWeights, "swapped_in", in_evaluation)
        Session(broken, **flags).train()
    assert not (broken / "results.csv").exists()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Results, "save_row", after_evaluation)
        Session(broken, **flags).train()
    assert [row["step"] for row in rows_of(broken)] == ["3", "4", "6"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at_step(patch, 7)
        Session(broken, **flags).train()
    resumed = Session(broken, **flags)
    resumed.train()
    assert_same_runs(unbroken, resumed)


def test_evaluations_by_steps_may_end_an_epoch(tmp_path):
    Session(tmp_path, eval_every_steps=4, eval_every=0).train()
    assert [row["step"] for row in rows_of(tmp_path) if row["AP"]] == ["4", "8", "12"]


@pytest.mark.parametrize(("saveable", "steps_of_a_pass"), [(True, 3), (False, 3), (False, 6)])
def test_run_stopped_within_an_epoch_sees_the_images_of_an_unbroken_run(
    tmp_path, monkeypatch, saveable, steps_of_a_pass, capfd
):
    monkeypatch.setattr(Loader, "steps_per_epoch", steps_of_a_pass)
    flags = {"saveable": saveable, "turn": 2, "save_every": 2, "eval_every": 0}
    unbroken = Session(tmp_path / "unbroken", **flags)
    unbroken.train()
    assert "from epoch 3 on, the loaders use sign=-1.0" in capfd.readouterr().err
    second = [] if saveable or steps_of_a_pass > STEPS else [(1, 1.0)]
    assert unbroken.opened == [(0, 1.0), *second, (2, -1.0)]
    done = 0
    for stop, saved in ((5, 4), (7, 6), (11, 10)):
        broken = Session(tmp_path / "broken", **flags)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_at_step(patch, stop)
            broken.train()
        assert broken.seen == unbroken.seen[done:stop]
        done = saved
    resumed = Session(tmp_path / "broken", **flags)
    resumed.train()
    assert resumed.seen == unbroken.seen[10:]
    assert "resumed after epoch 2 and 2 steps (step 10)" in capfd.readouterr().err
    assert_same_runs(unbroken, resumed)


def test_run_with_another_freeze_resumes_from_the_last_whole_epoch(tmp_path, monkeypatch, capfd):
    flags = {"save_every": 2, "eval_every": 0}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at_step(patch, 7)
        Session(tmp_path, **flags).train()
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 6]
    capfd.readouterr()
    Session(tmp_path, **flags, freeze="x").train()
    output = capfd.readouterr().err
    assert "resumed after epoch 1 (step 4)\n" in output
    assert "  changed: freeze; the run continues from an epoch's end, results may differ\n" in output
    assert [row["step"] for row in rows_of(tmp_path)] == ["4", "8", "12"]


def test_run_that_patience_ended_is_not_continued(tmp_path, capfd):
    flags = {"epochs": 9, "aps": [0.1, 0.3, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4]}
    Session(tmp_path, **flags, patience=2).train()
    assert "ends after epoch 4: 2 evaluations without a better AP than 30.0" in capfd.readouterr().err
    assert len(rows_of(tmp_path)) == 4
    assert weights.read_metadata(tmp_path / weights.BEST)["epoch"] == 2
    again = Session(tmp_path, **flags, patience=2)
    assert again.train()["AP"] == 0.3
    assert again.seen == [] and "nothing left to train" in capfd.readouterr().err
    Session(tmp_path, **flags | {"epochs": 5}).train()
    assert "epoch 5: AP 40.0" in capfd.readouterr().err


def test_overwrite_starts_anew(tmp_path):
    Session(tmp_path, epochs=2).train()
    session = Session(tmp_path, epochs=1, overwrite=True)
    session.train()
    assert len(session.seen) == 4
    assert [row["step"] for row in rows_of(tmp_path)] == ["4"]


def test_batch_that_is_not_finite_is_skipped_and_training_continues(tmp_path, monkeypatch, capfd):
    following = InputFeed.__next__

    def poisoned(self):
        images, targets = following(self)
        return (images * np.nan if session.state.step == 2 else images), targets

    monkeypatch.setattr(InputFeed, "__next__", poisoned)
    session = Session(tmp_path, epochs=1)
    session.train()
    assert "step 3 is skipped: the loss is not finite; image ids" in capfd.readouterr().err
    (row,) = rows_of(tmp_path)
    assert float(row["skipped_steps"]) == 1 and np.isfinite(float(row["loss"]))


@pytest.mark.parametrize("saveable", [True, False])
def test_error_of_a_loader_is_explained(tmp_path, monkeypatch, saveable):
    def damaged(self):
        raise tf.errors.UnknownError(None, None, "a damaged image")
        yield

    monkeypatch.setattr(Loader, "iterator", damaged)
    with pytest.raises(UserError, match=r"the loader \(tensorflow\) stopped: a damaged image"):
        Session(tmp_path, saveable=saveable).train()


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_signal_stops_a_run_after_saving_everything(tmp_path, monkeypatch, where):
    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    session = Session(tmp_path, save_every=0)
    if where == "step":
        check = step_guard.StepGuard.check

        def stopped_at_step_5(self, step, *arguments):
            if step == 5:
                stop()
            check(self, step, *arguments)

        monkeypatch.setattr(step_guard.StepGuard, "check", stopped_at_step_5)
    else:
        monkeypatch.setattr(Session, "_evaluation", stop)
        beat = Watchdog.beat

        def stopped(self, doing, **at):
            beat(self, doing, **at)
            if doing == "evaluating":
                stop()

        monkeypatch.setattr(Watchdog, "beat", stopped)
    step = 6 if where == "step" else 4  # a signal in step 5 stops all ranks after step 6
    with pytest.raises(StoppedError, match=f"stopped by SIGTERM; saved after step {step}"):
        session.train()
    assert state_of(tmp_path)["step"] == step


def test_run_whose_last_checkpoint_cannot_be_saved_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "write", full_disk)
    with pytest.raises(UserError, match=r"^the last checkpoint could not be saved: make room in .*"):
        Session(tmp_path, epochs=1).train()


def test_compiling_and_scoring_have_a_longer_time_limit(tmp_path, monkeypatch):
    beats, beat = [], Watchdog.beat

    def noted(self, doing, *, epoch=0, step=0, at_least=0.0):
        beats.append((doing, epoch, step, at_least))
        beat(self, doing, epoch=epoch, step=step, at_least=at_least)

    monkeypatch.setattr(Watchdog, "beat", noted)
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


def test_missing_output_dir_is_refused():
    with pytest.raises(UserError, match=r"^--output_dir is missing: give a directory"):
        start_process(Args())


def test_compression_without_horovod_is_refused():
    with pytest.raises(UserError, match=r"^--compression=fp16 needs Horovod: add --strategy"):
        start_process(Args(output_dir="x", compression="fp16"))


def test_start_process_sets_seed_and_precision():
    try:
        start_process(Args(output_dir="x", seed=7, precision="mixed_bfloat16"))
        assert keras.mixed_precision.dtype_policy().name == "mixed_bfloat16"
        first = np.asarray(keras.random.normal((3,)))
        assert isinstance(start_process(Args(output_dir="x", seed=7)), Ranks)
        assert_same([np.asarray(keras.random.normal((3,)))], [first])
    finally:
        keras.mixed_precision.set_global_policy("float32")
