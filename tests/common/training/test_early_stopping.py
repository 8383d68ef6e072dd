import math

import pytest

from common.training.checkpoints import RunState
from common.training.early_stopping import note_metric, out_of_patience


def test_best_ap_is_the_highest_finite_ap_on_the_same_evaluation_data():
    state = RunState()
    metrics = [math.nan, 0.2, 0.2, math.inf, 0.1, math.nan, 0.3]
    assert [note_metric(state, metric) for metric in metrics] == [False, True, *[False] * 4, True]
    assert (state.best_ap, state.evaluations_since_best, state.best_eval_data) == (0.3, 0, None)
    assert not note_metric(state, 0.25)
    assert note_metric(state, 0.25, "other data")
    assert not note_metric(state, 0.24, "other data")


PATIENCE = {
    "gain too late": ([0.1, 0.2, 0.2, 0.1, 0.3], 2, 4),
    "gain in time": ([0.1, 0.2, 0.2, 0.3, 0.3], 2, None),
    "AP of 0": ([0.0, 0.0], 1, 2),
    "AP not finite": ([math.nan, math.nan, 0.1], 2, 2),
    "no patience": ([0.1] * 9, 0, None),
}


@pytest.mark.parametrize(("metrics", "patience", "last_epoch"), PATIENCE.values(), ids=PATIENCE)
def test_patience_ends_a_run_after_that_many_evaluations_without_a_better_ap(metrics, patience, last_epoch):
    state = RunState()
    reasons = {}
    for state.epoch, metric in enumerate(metrics, 1):
        note_metric(state, metric)
        reason = out_of_patience(state, patience)
        if reason:
            reasons[state.epoch] = reason, state.best_ap
    assert min(reasons, default=None) == last_epoch
    if reasons:
        reason, best_ap = reasons[last_epoch]
        best = f"{100 * (math.nan if best_ap is None else best_ap):.1f}"
        assert f"after epoch {last_epoch}: {patience} evaluations without a better AP than {best}" in reason
