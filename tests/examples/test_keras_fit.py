"""Tests that examples/keras_fit.py, with fit_model.py of each app, trains like train.py.

Run as a program, this file writes the losses of both loops.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from common.distributed.horovod import HorovodRanks
from common.training import run
from common.training.checkpoints import Checkpoints
from common.training.run import Run
from tests.apps.conftest import coco_flags
from tests.common.training.small_model import rows_of, weights_of
from tests.conftest import ROOT
from tests.distributed import launching
from tests.distributed.test_train_on_ranks import PLAIN
from tests.refusal import refusal
from tests.small_apps import IMAGES, TINY, eagerly, flag_values, parsed, training_flags

CHANGES_FOR_YOLOV4 = {
    "efficientdet": "yolov4",
    "FitModel(network, config, ranks)": "FitModel(network, config)",
    ", num_epochs\n": "\n",
    "num_epochs(config, batch_size, steps)": "config.epochs",
}


def example_for(app):
    """Returns keras_fit.py as a module. For YOLOv4, it is changed as its docstring describes."""
    source = (ROOT / "examples/keras_fit.py").read_text()
    for old, new in CHANGES_FOR_YOLOV4.items() if app == "yolov4" else ():
        assert old in source
        source = source.replace(old, new)
    example = types.ModuleType("examples.keras_fit")
    example.__package__ = "examples"
    exec(compile(source, "keras_fit.py", "exec"), example.__dict__)
    return example


def test_stopped_and_resumed_keras_fit_has_the_losses_and_weights_of_train_py(drawn, tmp_path, monkeypatch):
    """Each batch is the entire data set, so the order of the images does not matter."""
    app, output_dir = "efficientdet", tmp_path / "fit"
    plain = "--ema_decay=0.9", f"--hparams={TINY[app]},{PLAIN[app]}"
    words = "--epochs=2", "--steps_per_epoch=1", "--eval_every=0", *coco_flags(drawn, "eval"), *plain
    train, a = parsed(app, *training_flags(app, drawn, tmp_path / "train", "none", IMAGES), *words)
    example = example_for(app)

    def fit(**changes):
        example.fit(example.Args(**dataclasses.asdict(a) | {"output_dir": str(output_dir)} | changes))

    save, permits = Checkpoints.save, iter([1])

    def save_once(*values, **options):
        next(permits)
        save(*values, **options)

    with eagerly():
        train.train(a)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", save_once)
            with pytest.raises(StopIteration):  # stops the run at its second checkpoint
                fit()
        fit()
    losses = [float(row["loss"]) for row in rows_of(tmp_path / "train")]
    assert losses[1] < 0.97 * losses[0]
    files = sorted(output_dir.glob("tensorboard/train/events*"), key=lambda path: path.stat().st_mtime)
    events = [event for file in files for event in tf.compat.v1.train.summary_iterator(str(file))]
    logs = [value for event in events for value in event.summary.value if value.tag == "epoch_loss"]
    np.testing.assert_allclose([tf.make_ndarray(value.tensor) for value in logs], losses, rtol=1e-5)
    weights = weights_of(output_dir / "last.weights.h5")
    for name, value in weights_of(tmp_path / "train" / "last.weights.h5").items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    scores = [json.loads((tmp_path / run / "metrics.json").read_text())["AP50"] for run in ("fit", "train")]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert "batch_size was 12 and is now 6" in refusal(fit, batch_size=6)


def test_keras_fit_with_strategy_multi_worker_is_refused(tmp_path):
    example = example_for("efficientdet")
    a = example.Args(strategy="multi_worker", output_dir=str(tmp_path))
    assert "use horovod" in refusal(example.fit, a)


def test_keras_fit_example_reads_a_recipe_and_ignores_flags_that_it_does_not_have():
    _, values = flag_values("examples.keras_fit", "--flagfile=efficientdet/flags/demo.txt")
    assert values["epochs"] == 20
    assert "xla" not in values


@pytest.mark.slow
@pytest.mark.parametrize("app, strategy", [("efficientdet", "horovod"), ("yolov4", "mirrored")])
def test_loss_of_each_keras_fit_step_on_two_replicas_is_that_of_train_py(app, strategy, drawn, tmp_path):
    words = [__file__, app, *training_flags(app, drawn, tmp_path, strategy, 4), "--epochs=1"]
    hparams = ",multi_scale=2,learning_rate=0.008" if app == "yolov4" else ""
    words += ["--clip_norm=0.5", f"--hparams={TINY[app]}{hparams}"]
    launching.run_two_replicas(strategy, [*words, "--steps_per_epoch=20"], timeout=500)
    train_losses, fit_losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(train_losses) == 20
    assert np.ptp(train_losses) > 0.01
    np.testing.assert_allclose(fit_losses, train_losses, rtol=1e-5 if app == "efficientdet" else 1e-3)


def write_losses_of_both_loops(app, words):
    """Writes the losses of train.py and of `fit`, averaged over replicas."""
    example, after_step = example_for(app), Run.after_step
    on_batch_end = example.MovingAverage.on_train_batch_end
    train_losses, fit_losses = [], []

    def record_train_loss(self, result, targets):
        train_losses.append(float(result.values["loss"]))
        after_step(self, result, targets)

    def record_fit_loss(self, batch, logs):
        fit_losses.append(float(np.mean(self.ranks.gather(logs["loss"]))))
        self.model.reset_metrics()  # otherwise Keras gives the epoch's mean so far
        on_batch_end(self, batch, logs)

    module, a = parsed(app, *words)
    with (
        mock.patch.object(Run, "after_step", record_train_loss),
        mock.patch.object(example.MovingAverage, "on_train_batch_end", record_fit_loss),
        # Both loops share a strategy.
        mock.patch.object(run, "start", functools.cache(run.start)),
        mock.patch.object(HorovodRanks, "close"),
    ):
        module.train(dataclasses.replace(a, output_dir=f"{a.output_dir}/train"))
        example.fit(example.Args(**dataclasses.asdict(a) | {"output_dir": f"{a.output_dir}/fit"}))
    pathlib.Path(a.output_dir, "losses.json").write_text(json.dumps([train_losses, fit_losses]))


if __name__ == "__main__":
    write_losses_of_both_loops(sys.argv[1], sys.argv[2:])
