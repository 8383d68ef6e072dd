"""Numbers of one benchmark: medians over the rounds, ratios, and the bound of training with a loader.

A record is the content of a `--json` file: plain dicts and lists.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tools.benchmark.rounds import Measured

FORMAT = 1  # of a record: raise it when an old one can no longer be read

Record = dict[str, Any]


class CutCost(NamedTuple):
    """What one cut (stages.py) cost in one round, for an image."""

    stage: str
    cpu_ms: float
    ms: float
    instead: str = ""  # see stages.Cut


def spread(values: Iterable[float]) -> Record:
    """Median, smallest and largest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def candidate(measured: Measured) -> Record:
    """The record of one candidate; `error` and no numbers where it failed."""
    if measured.error:
        return {"error": measured.error}
    windows = measured.windows
    return {
        "images_per_second": spread(w.images / w.seconds for w in windows),
        "cpu_ms_per_image": spread(1000 * w.cpu_seconds / w.images for w in windows),
        "cores": spread(w.cpu_seconds / w.seconds for w in windows),
        "peak_bytes": measured.peak_bytes,
        "windows": [w._asdict() for w in windows],
    }


def succeeded(candidates: dict[str, Record]) -> dict[str, Record]:
    """Those that did not fail."""
    return {name: each for name, each in candidates.items() if "error" not in each}


def rates(record: Record) -> list[float]:
    """Images a second of a candidate, round by round."""
    return [w["images"] / w["seconds"] for w in record["windows"]]


def cpu_ms(record: Record) -> list[float]:
    """CPU milliseconds an image of a candidate, round by round."""
    return [1000 * w["cpu_seconds"] / w["images"] for w in record["windows"]]


def ratio(record: Record, other: Record) -> float:
    """How many times as many images a second as another candidate of the same run: the median of rounds."""
    return statistics.median(a / b for a, b in zip(rates(record), rates(other), strict=True))


def other_cores(candidates: dict[str, Record]) -> float:
    """Cores that other work kept busy while a candidate ran: the median of all windows."""
    windows = [w for each in candidates.values() for w in each.get("windows", [])]
    return statistics.median([w["other_cpu_seconds"] / w["seconds"] for w in windows] or [0.0])


def ratios(candidates: dict[str, Record]) -> dict[str, dict[str, float]]:
    """`ratio` of every two that did not fail: [one][other]."""
    good = succeeded(candidates)
    return {
        name: {other: ratio(each, good[other]) for other in good if other != name}
        for name, each in good.items()
    }


def bound(data: Record, model: Record, cores: float) -> dict[str, list[float]]:
    """What limits training, round by round, in images a second.

    Returns:
        loader: its rate alone. model: its rate alone. cpu: the rate at which the CPU time of both keeps all
        cores busy.
    """
    costs = zip(cpu_ms(data), cpu_ms(model), strict=True)
    return {
        "loader": rates(data),
        "model": rates(model),
        "cpu": [1000 * cores / max(loading + training, 1e-9) for loading, training in costs],
    }


def stages(rounds: Sequence[Sequence[Sequence[Any]]]) -> list[Record]:
    """What each stage costs more than the cut before it, and what the loader costs so far.

    Args:
        rounds: for each round the values of a CutCost for every cut, in their order.
    """
    costs = [{each[0]: CutCost(*each) for each in told} for told in rounds]
    result, before = [], ""
    for stage, cut in costs[0].items():
        base = cut.instead or before
        result.append(
            {
                "stage": stage,
                "cpu_ms_per_image": spread(
                    each[stage].cpu_ms - (each[base].cpu_ms if base else 0.0) for each in costs
                ),
                "cpu_ms_so_far": statistics.median(each[stage].cpu_ms for each in costs),
                "images_per_second": statistics.median(1000 / each[stage].ms for each in costs),
                "instead": bool(cut.instead),
            }
        )
        before = before if cut.instead else stage
    return result
