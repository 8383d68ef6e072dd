"""Computes medians over the rounds, and ratios between candidates."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

FORMAT = 1  # version of `--json` files

Record = dict[str, Any]  # a part of a `--json` file: plain dicts and lists


class Window(NamedTuple):
    images: int
    seconds: float
    cpu_seconds: float  # of all processes of the candidate
    other_cpu_seconds: float = 0.0  # of all other processes on this machine


def spread(values: Iterable[float]) -> Record:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def candidate(windows: Sequence[Window], peak_bytes: int) -> Record:
    """Makes the record of a candidate that did not fail.

    Args:
        windows: the measurement of each round.
        peak_bytes: highest resident memory in any round, summed over all processes.
    """
    return {
        "images_per_second": spread(w.images / w.seconds for w in windows),
        "cpu_ms_per_image": spread(1000 * w.cpu_seconds / w.images for w in windows),
        "cores": spread(w.cpu_seconds / w.seconds for w in windows),
        "peak_bytes": peak_bytes,
        "windows": [w._asdict() for w in windows],
    }


def succeeded(candidates: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in candidates.items() if "error" not in each}


def ratio(record: Record, other: Record) -> float:
    """Returns the median ratio of the images/s of two candidates."""
    rates, others = ([w["images"] / w["seconds"] for w in each["windows"]] for each in (record, other))
    return statistics.median(a / b for a, b in zip(rates, others, strict=True))


def ratios(candidates: dict[str, Record]) -> dict[str, dict[str, float]]:
    """Returns the ratio of each pair of candidates, as [name][other name]."""
    good = succeeded(candidates)
    return {
        name: {other: ratio(each, good[other]) for other in good if other != name}
        for name, each in good.items()
    }


def other_cores(candidates: dict[str, Record]) -> float:
    """Returns how many cores other processes used: the median of all windows."""
    windows = [w for each in candidates.values() for w in each.get("windows", [])]
    return statistics.median([w["other_cpu_seconds"] / w["seconds"] for w in windows] or [0.0])
