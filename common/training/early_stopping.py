"""Notes the best evaluation, for the best weights, and ends a run that no longer improves (--patience)."""

import math
from collections.abc import Mapping
from typing import Any


def note_metric(state: dict[str, Any], metric: float, eval_data: str | None = None) -> bool:
    """Records the metric of one evaluation in `state`, for the best weights and --patience.

    Args:
        state: state of the checkpoint; changes `best_metric` and `without_gain` (evaluations since the best).
        metric: higher is better; a value that is not finite never counts as better.
        eval_data: fingerprint of the evaluation data; if it has changed, earlier metrics are ignored.

    Returns:
        Whether this metric is the best so far.
    """
    comparable = state.get("eval_data", eval_data) == eval_data
    best = state.get("best_metric", -math.inf) if comparable else -math.inf
    gain = math.isfinite(metric) and metric > best
    if gain:
        state.update(best_metric=float(metric), without_gain=0, eval_data=eval_data)
    else:
        state["without_gain"] = state.get("without_gain", 0) + 1
    return gain


def out_of_patience(state: Mapping[str, Any], patience: int) -> str | None:
    """Returns why the run ends if the last `patience` evaluations had no better AP, else None."""
    without_gain = state.get("without_gain", 0)
    if not 0 < patience <= without_gain:
        return None
    best = 100 * state.get("best_metric", math.nan)
    return (
        f"training ends after epoch {state['epoch']}: {without_gain} evaluations without a better AP than "
        f"{best:.1f} (--patience={patience}); the best weights are kept"
    )
