"""Formats a benchmark as text, and compares two `--json` files."""

import json
import pathlib
import statistics
from collections.abc import Sequence

from common.errors import UserError
from tools.benchmark.rounds import Record

FORMAT = 1  # version of `--json` files
QUIET = 0.1  # share of the cores that other processes may use without a warning
ADVICE = {
    "the loader": "--pipeline_type=dali_gpu, a higher --num_threads, or a smaller --image_size",
    "the model": "a larger --batch_size, --precision=mixed_float16, or a smaller --image_size",
    "the CPU that they share": "a smaller --image_size, or --pipeline_type=dali_gpu",
}


def tables(record: Record) -> str:
    machine = record["machine"]
    hardware = ", ".join([machine["cpu"], f"{machine['cores']:g} cores", *machine["gpus"]])
    parts = [f"{record['title']}\n{hardware}; {record['data']['summary']}"]
    if record["candidates"]:
        parts.append(candidate_table(record["candidates"]))
    for kind, table in (("stages", stage_table), ("inference", inference_table)):
        for name, each in record[kind].items():
            failed = "error" in each
            parts.append(f"{kind} of {name}: failed: {each['error']}" if failed else table(name, each))
    return "\n\n".join([*parts, "\n".join(record["verdict"])]).rstrip()


def candidate_table(candidates: dict[str, Record]) -> str:
    """Ratios compare with the first baseline, or else with the first line."""
    good = succeeded(candidates)
    first = next((name for name in good if name.startswith("baseline ")), next(iter(good), ""))
    rows = [["", "images/s (min..max)", "CPU ms/image", "cores", "peak MB", f"x {first}"]]
    for name, each in good.items():
        cells = [name, _spread(each["images_per_second"]), _spread(each["cpu_ms_per_image"])]
        cells += [f"{each['cores']['median']:.2f}", f"{each['peak_bytes'] / 1e6:.0f}"]
        rows.append([*cells, f"{ratio(each, candidates[first]):.3g}"])
    failed = [f"{name}: failed: {each['error']}" for name, each in candidates.items() if name not in good]
    return "\n".join([*([align(rows)] if good else []), *failed])


def stage_table(name: str, stages: Sequence[Record]) -> str:
    rows = [[f"{name} by stage", "CPU ms/image (min..max)", "share", "so far", "images/s so far"]]
    for stage in stages:
        cost, so_far = stage["cpu_ms_per_image"], stage["cpu_ms_so_far"]
        share = cost["median"] / stages[-1]["cpu_ms_so_far"]
        cells = [_spread(cost), f"{share:.0%}", _number(so_far), _number(stage["images_per_second"])]
        rows.append([stage["stage"], *cells])
    return align(rows)


def inference_table(name: str, times: Sequence[Record]) -> str:
    rows = [[f"inference with {name}, ms/batch", *(f"batch {each['batch_size']}" for each in times)]]
    for stage in times[0]["stages"]:
        rows.append([stage, *(f"{each['stages'][stage]['wall_ms']:.1f}" for each in times)])
    rows.append(["one after the other", *(f"{each['latency_ms']:.1f}" for each in times)])
    rows.append(["overlapped, images/s", *(_number(each["images_per_second"]) for each in times)])
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def verdict(record: Record) -> list[str]:
    """Returns a line for each loader: what limits training, and which flag to change."""
    candidates = succeeded(record["candidates"])
    types = [name.removeprefix("data ") for name in candidates if name.startswith("data ")]
    loaders = [_of_loader(record, candidates, name) for name in types if "model" in candidates]
    return other_work(record) + loaders


def other_work(record: Record, when: str = "") -> list[str]:
    """Warns if other processes used more than QUIET of the cores."""
    others, cores = record["other_cores"], record["machine"]["cores"]
    if others <= QUIET * cores:
        return []
    return [f"Other processes used {others:.2g} of {cores:g} cores{when}: measure again on an idle machine."]


def succeeded(candidates: Record) -> Record:
    return {name: each for name, each in candidates.items() if "error" not in each}


def ratio(record: Record, other: Record) -> float:
    """Returns the median ratio of the images/s of two candidates."""
    rates, others = ([w["images"] / w["seconds"] for w in each["windows"]] for each in (record, other))
    return statistics.median(a / b for a, b in zip(rates, others, strict=True))


def ratios(candidates: Record) -> dict[str, dict[str, float]]:
    """Returns the ratio of each pair of candidates, as [name][other name]."""
    good = succeeded(candidates)
    return {a: {b: ratio(good[a], good[b]) for b in good if b != a} for a in good}


def other_cores(candidates: Record) -> float:
    """Returns how many cores other processes used: the median of all windows."""
    windows = [w for each in candidates.values() for w in each.get("windows", [])]
    return statistics.median([w["other_cpu_seconds"] / w["seconds"] for w in windows] or [0.0])


# --- two files ---


def read(path: str) -> Record:
    """Reads a `--json` file of bench.py; raises UserError if the file is anything else."""
    try:
        record = json.loads(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a benchmark file of this version: write one with bench.py --json")
    return record


def compare(old_path: str, new_path: str) -> str:
    """Compares two `--json` files; returns the text to print."""
    old, new = read(old_path), read(new_path)
    lines = [
        f"{word}: {path}: {each['title']}, {each['when']}, commit {each['commit']}"
        for word, path, each in (("old", old_path, old), ("new", new_path, new))
    ]
    differences = _changes("app", {"name": old["app"]}, {"name": new["app"]})
    for part in ("machine", "data", "settings"):
        differences += _changes(part, old[part], new[part])
    if differences:
        lines.append("These numbers cannot be compared, because the runs differ:")
        lines += [f"  {line}" for line in sorted(differences)]
    else:
        lines.append("Both ran on one machine: differences under 10 % mean nothing.")
    lines += other_work(old, " during the old run") + other_work(new, " during the new run")
    lines += _changes("software", old["versions"], new["versions"])
    before, after = _numbers(old), _numbers(new)
    rows = [
        [name, f"{value:.4g}", f"{after[name]:.4g}", f"{after[name] / value:.2f}"]
        for name, value in before.items()
        if name in after and value
    ]
    table = align([["", "old", "new", "ratio"], *rows]) if rows else "the files have no common number"
    return "\n".join(lines) + "\n\n" + table


def _changes(part: str, old: Record, new: Record) -> list[str]:
    """Lists the keys whose values differ, one line each."""
    keys = sorted((old.keys() | new.keys()) - {"memory_bytes", "summary"})
    changed = [key for key in keys if old.get(key) != new.get(key)]
    return [f"{part}: {key} was {old.get(key)}, is {new.get(key)}" for key in changed]


def _numbers(record: Record) -> dict[str, float]:
    numbers = {}
    for name, each in succeeded(record["candidates"]).items():
        numbers[f"{name}: images/s"] = each["images_per_second"]["median"]
        numbers[f"{name}: CPU ms/image"] = each["cpu_ms_per_image"]["median"]
        numbers[f"{name}: peak MB"] = each["peak_bytes"] / 1e6
    for name, stages in succeeded(record["stages"]).items():
        for stage in stages:
            numbers[f"{name}, {stage['stage']}: CPU ms/image"] = stage["cpu_ms_per_image"]["median"]
    return numbers


# --- parts of the text ---


def _of_loader(record: Record, candidates: dict[str, Record], name: str) -> str:
    data, model = candidates[f"data {name}"], candidates["model"]
    cpu_ms = sum(each["cpu_ms_per_image"]["median"] for each in (data, model))
    rates = {
        "the loader": data["images_per_second"]["median"],
        "the model": model["images_per_second"]["median"],
        "the CPU that they share": 1000 * record["machine"]["cores"] / max(cpu_ms, 1e-9),
    }
    limit = min(rates, key=rates.__getitem__)
    if both := candidates.get(f"both {name}"):
        rates["together"] = both["images_per_second"]["median"]
    listed = ", ".join(f"{what} {_number(rate)}" for what, rate in rates.items())
    return f"{name}: {limit} limits training ({listed} images/s). For more, try {ADVICE[limit]}."


def _spread(values: Record) -> str:
    return f"{_number(values['median'])} ({_number(values['min'])}..{_number(values['max'])})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
