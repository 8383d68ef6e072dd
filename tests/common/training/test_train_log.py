"""results.csv: a row an epoch, new columns later, and no epoch twice after a resume."""

import csv
import math

from common.training.train_log import RunLog


def rows_of(directory):
    with (directory / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_rows_columns_and_resume(tmp_path):
    log = RunLog(tmp_path, done_epochs=0)
    log.add(1, 10, {"loss": 2.0})
    log.add(2, 20, {"loss": math.nan, "AP": 0.25})
    assert rows_of(tmp_path) == [
        {"epoch": "1", "step": "10", "loss": "2", "AP": ""},
        {"epoch": "2", "step": "20", "loss": "", "AP": "0.25"},
    ]
    resumed = RunLog(tmp_path, done_epochs=1)  # stopped after its second row, before its second checkpoint
    resumed.add(2, 20, {"loss": 1.5, "AP": 0.5})
    assert [(row["epoch"], row["loss"]) for row in rows_of(tmp_path)] == [("1", "2"), ("2", "1.5")]
    assert (tmp_path / "loss_curves.png").exists()
    assert list((tmp_path / "tensorboard").iterdir())


def test_metrics_are_the_last_columns_also_where_the_first_row_has_nothing_else(tmp_path):
    log = RunLog(tmp_path, done_epochs=0)
    log.add(0.5, 5, {"AP": 0.1, "AP50": 0.2})  # --eval_every_steps
    log.add(1, 10, {"loss": 2.0, "AP": 0.3, "AP50": 0.4})
    log.add(1.5, 15, {"AP": 0.5, "AP50": 0.6})
    assert list(rows_of(tmp_path)[0]) == ["epoch", "step", "loss", "AP", "AP50"]
    resumed = RunLog(tmp_path, done_epochs=1)  # stopped after the third row, before its checkpoint
    resumed.add(1.5, 15, {"AP": 0.5, "AP50": 0.6})
    assert [row["epoch"] for row in rows_of(tmp_path)] == ["0.5", "1", "1.5"]
