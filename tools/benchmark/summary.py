"""Numbers of one benchmark: medians over the rounds, and ratios between candidates of the same run."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

FORMAT = 1  # of a `--json` file: raise it when an old one can no longer be read

Record = dict[str, Any]  # a part of a `--json` file: plain dicts and lists


class Window(NamedTuple):
    """What one candidate did in one round."""

    images: int
    seconds: float
    cpu_seconds: float  # user and system, of all its processes
    other_cpu_seconds: float = 0.0  # of everything else on this machine


def spread(values: Iterable[float]) -> Record:
    """Median, smallest and largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def candidate(windows: Sequence[Window], peak_bytes: int) -> Record:
    """The record of one candidate; one that failed has the record {"error": reason} instead.

    Args:
        windows: one for each round.
        peak_bytes: highest resident memory of a round, summed over its processes, start-up included.
    """
    return {
        "images_per_second": spread(w.images / w.seconds for w in windows),
        "cpu_ms_per_image": spread(1000 * w.cpu_seconds / w.images for w in windows),
        "cores": spread(w.cpu_seconds / w.seconds for w in windows),
        "peak_bytes": peak_bytes,
        "windows": [w._asdict() for w in windows],
    }


def succeeded(candidates: dict[str, Any]) -> dict[str, Any]:
    """Those that did not fail."""
    return {name: each for name, each in candidates.items() if "error" not in each}


def ratio(record: Record, other: Record) -> float:
    """How many times as many images a second as another candidate of the same run: the median of rounds."""
    rates, others = ([w["images"] / w["seconds"] for w in each["windows"]] for each in (record, other))
    return statistics.median(a / b for a, b in zip(rates, others, strict=True))


def ratios(candidates: dict[str, Record]) -> dict[str, dict[str, float]]:
    """`ratio` of every two that did not fail: [one][other]."""
    good = succeeded(candidates)
    return {
        name: {other: ratio(each, good[other]) for other in good if other != name}
        for name, each in good.items()
    }


def other_cores(candidates: dict[str, Record]) -> float:
    """Cores that other work kept busy while a candidate ran: the median of all windows."""
    windows = [w for each in candidates.values() for w in each.get("windows", [])]
    return statistics.median([w["other_cpu_seconds"] / w["seconds"] for w in windows] or [0.0])
