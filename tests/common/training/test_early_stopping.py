import math

import pytest

from common.training.checkpoints import RunState
from common.training.early_stopping import note_metric, out_of_patience


def test_best_is_the_highest_finite_metric():
    state = RunState()
    metrics = [math.nan, 0.2, 0.2, math.inf, 0.1, math.nan, 0.3]
    assert [note_metric(state, metric) for metric in metrics] == [False, True, *[False] * 4, True]
    assert (state.best_ap, state.evaluations_since_best, state.best_eval_data) == (0.3, 0, None)
    assert not note_metric(state, 0.25)
    assert note_metric(state, 0.25, "other data")
    assert not note_metric(state, 0.24, "other data")


PATIENCE = [
    ([0.1, 0.2, 0.2, 0.1, 0.3], 2, 4),
    ([0.1, 0.2, 0.2, 0.3, 0.3], 2, None),
    ([0.0, 0.0], 1, 2),
    ([math.nan, math.nan, 0.1], 2, 2),  # an AP that is not finite never counts as better
    ([0.1] * 9, 0, None),
]


@pytest.mark.parametrize(("metrics", "patience", "ends_after"), PATIENCE)
def test_patience_ends_a_run_after_that_many_evaluations_without_gain(metrics, patience, ends_after):
    state, ended = RunState(), None
    for state.epoch, metric in enumerate(metrics, 1):
        note_metric(state, metric)
        why = out_of_patience(state, patience)
        if why:
            ended = state.epoch
            best = f"{100 * (math.nan if state.best_ap is None else state.best_ap):.1f}"
            assert f"after epoch {ended}: {patience} evaluations without a better AP than {best}" in why
            break
    assert ended == ends_after
