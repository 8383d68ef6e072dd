"""--patience: a run whose AP no longer gets better ends, and stays ended."""

import csv
import itertools
import re

import pytest

from common.training import results


@pytest.mark.parametrize(
    ("metrics", "limit", "ends_after"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.3], 2, 4),
        ([0.1, 0.2, 0.2, 0.3, 0.3], 2, None),
        ([0.0, 0.0], 1, 2),
        ([float("nan"), float("nan"), 0.1], 2, 2),  # no finite AP is no gain
        ([0.1] * 9, 0, None),
    ],
)
def test_when_it_ends(metrics, limit, ends_after):
    state, ended = {"epoch": 0}, None
    for number, metric in enumerate(metrics, 1):
        results.note_metric(state, metric)
        state["epoch"] = number
        if why := results.out_of_patience(state, limit):
            ended = number
            assert f"after epoch {number}" in why
            break
    assert ended == ends_after


def test_a_run_that_learns_nothing_ends_early_and_once(tiny_train, drawn, tmp_path, capsys):
    """Batch norm's statistics still move, so AP may rise once or twice."""
    options = ["--epochs=30", "--steps_per_epoch=1", "--learning_rate=0", "--ema_decay=0", "--patience=1"]
    metrics = tiny_train(drawn, tmp_path / "run", *options)
    ended = int(re.search(r"ends after epoch (\d+): 1 eval", capsys.readouterr().err)[1])
    assert 2 <= ended < 30
    with (tmp_path / "run/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(1, ended + 1))
    found = [float(row["AP"]) for row in rows]
    assert found[-1] <= max(found[:-1])
    assert all(later > before for before, later in itertools.pairwise(found[:-1]))
    again = tiny_train(drawn, tmp_path / "run", *options)
    assert "nothing left to train" in capsys.readouterr().err
    assert again["AP"] == pytest.approx(metrics["AP"], abs=1e-6)  # metrics.json is rounded
    tiny_train(drawn, tmp_path / "run", *options[1:-1], f"--epochs={ended + 1}")  # without it the run goes on
    assert f"epoch {ended + 1}: AP" in capsys.readouterr().err
