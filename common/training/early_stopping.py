"""Ends a run whose AP no longer gets better (--patience). What it remembers is in the checkpoint's state."""

import math
from typing import Any


def note(state: dict[str, Any], metric: float) -> None:
    """Remembers one evaluation: the best metric so far, and the number of evaluations since.

    Args:
        state: of the checkpoint, changed in place; `best_metric` and `without_gain` are added to it.
        metric: higher is better; one that is not finite is no gain.
    """
    best = state.get("best_metric")
    if math.isfinite(metric) and (best is None or metric > best):
        state.update(best_metric=float(metric), without_gain=0)
    else:
        state["without_gain"] = state.get("without_gain", 0) + 1


def is_over(state: dict[str, Any], patience: int) -> bool:
    """Whether `patience` evaluations in a row brought nothing better; never where it is 0."""
    return 0 < patience <= state.get("without_gain", 0)


def describe(state: dict[str, Any], patience: int) -> str:
    """Why the run ends, for the log."""
    best = state.get("best_metric")
    best_ap = "none that is finite" if best is None else f"{100 * best:.1f}"
    return (
        f"ends after epoch {state['epoch']}: {state['without_gain']} evaluations without a better AP than "
        f"{best_ap} (--patience={patience}); the best weights are kept"
    )
