import io
import json
import math
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.data.open import open_coco
from common.evaluation import coco_metrics, curves
from common.evaluation.coco_metrics import Evaluation
from common.training import results
from common.training.checkpoints import RunState
from common.training.results import EpochLog, Results
from common.weights import weight_files as weights
from tests.common.training.small_model import full_disk, rows_of


def make_results(directory, *args, **state):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return Results(directory, model, {"app": "a"}, RunState(**{"step": 5} | state), *args)


def test_epoch_row_of_a_resumed_epoch_has_means_sums_and_images_per_second(monkeypatch):
    """The run was resumed after step 2, and step 5 was skipped."""
    seconds = iter((10.0, 12.0, 13.0, 14.0))
    monkeypatch.setattr(results, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    totals = {"loss": 3.0, "boxes_over_limit": 1.0, "steps": 2.0, "skipped_steps": 0.0}
    log = EpochLog("epoch 1/1", 6, 2, totals)
    for step, loss in ((3, 4.0), (4, 5.0), (5, 0.0), (6, 6.0)):
        values = {"loss": tf.constant(loss), "boxes_over_limit": tf.constant(2.0 * (loss > 0))}
        log.add(step, values, tf.constant(loss > 0))
    row = log.row(4, 2, learning_rate=0.5)
    expected = {"loss": 18 / 5, "learning_rate": 0.5, "images_per_second": 3 * 4 * 2 / 4}
    assert row == expected | {"boxes_over_limit": 14.0, "skipped_steps": 1.0}
    assert log.totals() == {"loss": 18.0, "boxes_over_limit": 7.0, "steps": 5.0, "skipped_steps": 1.0}
    log.restart_clock()
    assert math.isnan(log.row(4, 2, learning_rate=0.5)["images_per_second"])


def test_progress_bar_shows_new_means_at_every_tenth_and_at_the_last_step(monkeypatch):
    log = EpochLog("epoch 1/1", 22, 0, {})
    shown = []
    bar = types.SimpleNamespace(step=lambda means: shown.append(means.get("loss")))
    monkeypatch.setattr(log, "_bar", bar)
    for step in range(1, 23):
        log.add(step, {"loss": tf.constant(float(step))}, tf.constant(True))
    assert shown == [None] * 9 + [5.5] * 10 + [10.5] * 2 + [11.5]


def test_full_disk_loses_one_weights_file_and_training_continues(tmp_path, monkeypatch, capfd):
    log = make_results(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(results.weight_files, "save", full_disk)
        log.save_weights(weights.LAST)
    assert "No space left on device; training continues" in capfd.readouterr().err
    log.save_weights(weights.LAST)
    assert weights.read_metadata(tmp_path / weights.LAST) == {"app": "a", "epoch": 1, "step": 5}


def undrawable(*args, **options):
    raise ValueError("no picture")


def test_pictures_of_a_run_that_cannot_be_drawn_give_warnings_and_its_other_files_are_written(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(curves, "loss_curves", undrawable)
    monkeypatch.setattr(curves, "pr_curves", undrawable)
    log = make_results(tmp_path)
    log._show_batch = undrawable
    log.save_first_batch(None, None)
    log.save_row(1, {"loss": 2.0})
    log.save_evaluation(Evaluation({"AP": 0.5}, [], {}), is_best=False)
    assert rows_of(tmp_path) == [{"epoch": "1", "step": "5", "loss": "2"}]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"AP": 0.5}
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["warning:", str(tmp_path / name), "cannot", "be", "drawn"]
        for name in ("first_batch.png", "loss_curves.png", "pr_curves.png")
    ]


def test_ap_is_the_same_fraction_in_all_files_of_a_run_and_is_printed_in_percent(tmp_path, capsys):
    metrics = dict.fromkeys(coco_metrics.NAMES, 0.653) | {"per_class": {"cat": {"AP": 0.653, "AP50": 0.653}}}
    metrics["per_class"]["cat"]["num_boxes"] = 3
    log = make_results(tmp_path)
    log.save_row(1, {"AP": metrics["AP"]})
    log.save_evaluation(Evaluation(metrics, [], {}), is_best=True)
    (event_file,) = (tmp_path / "tensorboard").iterdir()
    events = tf.compat.v1.train.summary_iterator(str(event_file))
    scalars = [tf.make_ndarray(value.tensor).item() for event in events for value in event.summary.value]
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert scalars == pytest.approx([0.653])
    assert written["AP"] == written["per_class"]["cat"]["AP"] == 0.653
    assert rows_of(tmp_path)[0]["AP"] == "0.653"
    assert weights.read_metadata(tmp_path / weights.BEST)["AP"] == 0.653
    log.print_summary(metrics)
    assert re.search(r"^ +%\nAP +65\.3\n", capsys.readouterr().out)


def test_tensorboard_shows_the_first_batch_and_detections_of_each_evaluation(drawn, tmp_path):
    def show_batch(images, targets, path):
        results.drawing.save_png(images, path)
        return "a line for the log"

    source = open_coco(drawn / "images", drawn / "instances.json")
    log = make_results(tmp_path, show_batch, source)
    batch = np.zeros((30, 50, 3), np.uint8)
    log.save_first_batch(batch, None)
    for _ in range(2):
        log.save_evaluation(Evaluation({"AP": 0.5}, [], {}), is_best=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.PluginTagToContent("images").keys() == {"first_batch", "detections"}
    for name, count in (("first_batch", 1), ("detections", 2)):
        picture = np.asarray(Image.open(tmp_path / f"{name}.png"))
        pictures = events.Tensors(name)
        assert [picture.step for picture in pictures] == [5] * count
        width, height, jpeg = pictures[-1].tensor_proto.string_val
        assert (int(height), int(width)) == picture.shape[:2]
        assert np.abs(np.asarray(Image.open(io.BytesIO(jpeg))) - picture.astype(int)).mean() < 5


@pytest.mark.parametrize(("ap", "lines"), [(0.031, 1), (0.149, 1), (0.15, 0)])
def test_summary_of_a_low_ap_says_what_to_look_at(tmp_path, capsys, ap, lines):
    metrics = dict.fromkeys(coco_metrics.NAMES, ap) | {"per_class": {}}
    make_results(tmp_path).print_summary(metrics)
    low = [line for line in capsys.readouterr().out.splitlines() if " is low: " in line]
    assert len(low) == lines
    assert all(f"AP {100 * ap:.1f} is low: look at {tmp_path}/first_batch.png" in line for line in low)


def test_training_results_and_weights_are_not_written_if_there_is_no_output_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = make_results(None)
    log.save_row(1, {"loss": 1.0})
    log.save_weights(weights.LAST)
    assert not list(tmp_path.iterdir())


def test_non_finite_value_is_an_empty_cell_in_results_csv(tmp_path):
    log = make_results(tmp_path)
    log.save_row(1, {"loss": 2.0})
    log.save_row(2, {"loss": math.nan, "AP": 0.25})
    assert rows_of(tmp_path) == [
        {"epoch": "1", "step": "5", "loss": "2", "AP": ""},
        {"epoch": "2", "step": "5", "loss": "", "AP": "0.25"},
    ]
    assert list((tmp_path / "tensorboard").iterdir())


def test_resuming_drops_rows_of_results_csv_that_are_later_than_the_checkpoint(tmp_path):
    log = make_results(tmp_path)
    for epoch in (0.5, 1, 1.5, 2):
        log.save_row(epoch, {"loss": 2.0})
    resumed = make_results(tmp_path, epoch=1, evaluated=0.5)
    resumed.save_row(1.5, {"loss": 1.5})
    assert [(row["epoch"], row["loss"]) for row in rows_of(tmp_path)] == [
        ("0.5", "2"),
        ("1", "2"),
        ("1.5", "1.5"),
    ]


def test_metrics_are_the_last_columns_of_results_csv_even_if_its_first_row_has_only_metrics(tmp_path):
    log = make_results(tmp_path)
    log.save_row(0.5, {"AP": 0.1, "AP50": 0.2})
    log.save_row(1, {"loss": 2.0, "AP": 0.3, "AP50": 0.4})
    assert list(rows_of(tmp_path)[0]) == ["epoch", "step", "loss", "AP", "AP50"]
