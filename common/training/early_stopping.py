"""Notes the best evaluation, for the best weights, and ends a run that no longer improves (--patience)."""

import math

from common.training.checkpoints import RunState


def note_metric(state: RunState, ap: float, eval_data: str | None = None) -> bool:
    """Notes the AP of one evaluation in `state`.

    Args:
        ap: an AP that is not finite never counts as better.
        eval_data: fingerprint of the evaluation data; if it has changed, earlier evaluations are ignored.

    Returns:
        Whether this AP is the best so far.
    """
    best = state.best_ap if state.best_eval_data == eval_data else None
    is_best = math.isfinite(ap) and (best is None or ap > best)
    if is_best:
        state.best_ap, state.best_eval_data, state.evaluations_since_best = float(ap), eval_data, 0
    else:
        state.evaluations_since_best += 1
    return is_best


def out_of_patience(state: RunState, patience: int) -> str | None:
    """Returns why the run ends if the last `patience` evaluations had no better AP, else None."""
    if not 0 < patience <= state.evaluations_since_best:
        return None
    best = math.nan if state.best_ap is None else 100 * state.best_ap
    return (
        f"training ends after epoch {state.epoch}: {state.evaluations_since_best} evaluations without a "
        f"better AP than {best:.1f} (--patience={patience}); the best weights are kept"
    )
