"""Numbers of one benchmark: medians over the rounds, ratios, and the bound of training with a loader.

A record is what `--json` writes and what reports are made of: plain dicts and lists.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tools.benchmark.rounds import Measured

FORMAT = 1  # of a record: raise it when an old one can no longer be read

Record = dict[str, Any]


class CutCost(NamedTuple):
    """What one cut cost in one round, for an image."""

    stage: str
    cpu_ms: float
    ms: float


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
    """Cores that others kept busy while a candidate ran: the median of all windows."""
    windows = [w for each in candidates.values() for w in each.get("windows", [])]
    return statistics.median([w["other_cpu_seconds"] / w["seconds"] for w in windows] or [0.0])


def ratios(candidates: dict[str, Record]) -> dict[str, dict[str, float]]:
    """`ratio` of every two that did not fail: [one][other]."""
    good = {name: each for name, each in candidates.items() if "error" not in each}
    return {
        name: {other: ratio(each, good[other]) for other in good if other != name}
        for name, each in good.items()
    }


def bound(data: Record, model: Record, cores: float) -> dict[str, list[float]]:
    """What limits training, round by round, in images a second.

    Returns:
        loader: it makes no more alone. model: it takes no more alone. cpu: each image costs the CPU time of
        both, and there are so many cores.
    """
    costs = zip(cpu_ms(data), cpu_ms(model), strict=True)
    return {
        "loader": rates(data),
        "model": rates(model),
        "cpu": [1000 * cores / max(loading + training, 1e-9) for loading, training in costs],
    }


def stages(told: Sequence[Any]) -> list[Record]:
    """What each stage costs more than what comes before it, and what the loader costs so far.

    Args:
        told: first stage -> the cut that it follows, where that is not the one before it; then the costs of
            all cuts in their order (CutCost or its values), once for each round.
    """
    instead, rounds = told[0], [[CutCost(*cost) for cost in costs] for costs in told[1:]]
    result = []
    for number, cut in enumerate(rounds[0]):
        names = [each.stage for each in rounds[0]]
        regular = [i for i in range(number) if names[i] not in instead]
        base = names.index(instead[cut.stage]) if cut.stage in instead else max(regular, default=None)
        before = [0.0] * len(rounds) if base is None else [costs[base].cpu_ms for costs in rounds]
        so_far = [costs[number].cpu_ms for costs in rounds]
        result.append(
            {
                "stage": cut.stage,
                "cpu_ms_per_image": spread(a - b for a, b in zip(so_far, before, strict=True)),
                "cpu_ms_so_far": statistics.median(so_far),
                "images_per_second": statistics.median(1000 / costs[number].ms for costs in rounds),
                "instead": cut.stage in instead,
            }
        )
    return result
