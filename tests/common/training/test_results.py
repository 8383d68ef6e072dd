"""What a run leaves besides checkpoints: the best weights, results.csv, and what a full disk costs."""

import csv
import errno
import math
import os

import keras

from common.training import results, weights
from common.training.results import Results, note_metric


def make_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def make_results(directory, **state):
    return Results(directory, make_model(), {"app": "a"}, {"epoch": 0, "step": 5} | state)


def rows_of(directory):
    with (directory / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_best_is_the_highest_finite_metric():
    state = {}
    metrics = [math.nan, 0.2, 0.2, math.inf, 0.1, math.nan, 0.3]
    assert [note_metric(state, metric) for metric in metrics] == [False, True, *[False] * 4, True]
    assert state == {"best_metric": 0.3, "without_gain": 0, "eval_data": None}
    assert not note_metric(state, 0.25)
    assert note_metric(state, 0.25, "other data")
    assert not note_metric(state, 0.24, "other data")


def test_a_full_disk_costs_one_file_and_not_the_run(tmp_path, monkeypatch, capfd):
    files = make_results(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(results.weight_files, "save", full)
        files.save_weights(weights.LAST)
    assert "No space left on device; training continues" in capfd.readouterr().err
    files.save_weights(weights.LAST)
    assert weights.read_metadata(tmp_path / weights.LAST) == {"app": "a", "epoch": 1, "step": 5}


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = make_results(None)
    files.save_row(1, {"loss": 1.0})
    files.save_weights(weights.LAST)
    assert not list(tmp_path.iterdir())


def test_rows_columns_and_resume(tmp_path):
    log = make_results(tmp_path)
    log.save_row(1, {"loss": 2.0})
    log.save_row(2, {"loss": math.nan, "AP": 0.25})
    assert rows_of(tmp_path) == [
        {"epoch": "1", "step": "5", "loss": "2", "AP": ""},
        {"epoch": "2", "step": "5", "loss": "", "AP": "0.25"},
    ]
    resumed = make_results(tmp_path, epoch=1)  # stopped after its second row, before its second checkpoint
    resumed.save_row(2, {"loss": 1.5, "AP": 0.5})
    assert [(row["epoch"], row["loss"]) for row in rows_of(tmp_path)] == [("1", "2"), ("2", "1.5")]
    assert (tmp_path / "loss_curves.png").exists()
    assert list((tmp_path / "tensorboard").iterdir())


def test_metrics_are_the_last_columns_also_where_the_first_row_has_nothing_else(tmp_path):
    log = make_results(tmp_path)
    log.save_row(0.5, {"AP": 0.1, "AP50": 0.2})  # --eval_every_steps
    log.save_row(1, {"loss": 2.0, "AP": 0.3, "AP50": 0.4})
    log.save_row(1.5, {"AP": 0.5, "AP50": 0.6})
    assert list(rows_of(tmp_path)[0]) == ["epoch", "step", "loss", "AP", "AP50"]
    resumed = make_results(tmp_path, epoch=1, evaluated=0.5)  # stopped after the third row
    resumed.save_row(1.5, {"AP": 0.5, "AP50": 0.6})
    assert [row["epoch"] for row in rows_of(tmp_path)] == ["0.5", "1", "1.5"]
