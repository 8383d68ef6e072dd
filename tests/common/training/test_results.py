"""What a run leaves besides checkpoints: the best weights, and what a full disk costs."""

import errno
import os

import keras

from common.training import results, weights
from common.training.results import Results, save_best


def make_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_best_is_the_highest_finite_metric(tmp_path):
    model, path = make_model(), tmp_path / weights.BEST
    metrics = [float("nan"), 0.2, 0.2, float("inf"), 0.1, float("nan"), 0.3]
    kept = [save_best(model, path, metric, {"epoch": epoch}) for epoch, metric in enumerate(metrics)]
    assert kept == [False, True, False, False, False, False, True]
    assert weights.read_metadata(path) == {"epoch": 6, "metric": 0.3}
    assert not save_best(model, path, 0.25, {"epoch": 7})
    assert save_best(model, path, 0.25, {"epoch": 7, "eval_data": "other"})
    path.write_bytes(b"damaged")
    assert save_best(model, path, 0.1, {"epoch": 8})


def test_a_full_disk_costs_one_file_and_not_the_run(tmp_path, monkeypatch, capfd):
    files = Results(tmp_path, make_model(), {"app": "a"})
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(results.weight_files, "save", full)
        files.save_last(1, 5)
    assert "No space left on device; training continues" in capfd.readouterr().err
    files.save_last(2, 10)
    assert weights.read_metadata(tmp_path / weights.LAST) == {"app": "a", "epoch": 2, "step": 10}


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = Results(None, make_model(), {})
    files.save_row(1, 5, {"loss": 1.0})
    files.save_last(1, 5)
    assert not list(tmp_path.iterdir())
