"""Formats a benchmark as text."""

from collections.abc import Sequence

from tools.benchmark import summary
from tools.benchmark.summary import Record

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
        for name, found in record[kind].items():
            failed = "error" in found
            parts.append(f"{kind} of {name}: failed: {found['error']}" if failed else table(name, found))
    return "\n\n".join([*parts, "\n".join(record["verdict"])]).rstrip()


def candidate_table(candidates: dict[str, Record]) -> str:
    """Ratios compare with the first baseline, or else with the first line."""
    good = summary.succeeded(candidates)
    first = next((name for name in good if name.startswith("baseline ")), next(iter(good), ""))
    rows = [["", "images/s (min..max)", "CPU ms/image", "cores", "peak MB", f"x {first}"]]
    for name, each in good.items():
        cells = [name, _spread(each["images_per_second"]), _spread(each["cpu_ms_per_image"])]
        cells += [f"{each['cores']['median']:.2f}", f"{each['peak_bytes'] / 1e6:.0f}"]
        rows.append([*cells, f"{summary.ratio(each, candidates[first]):.3g}"])
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
    candidates = summary.succeeded(record["candidates"])
    types = [name.removeprefix("data ") for name in candidates if name.startswith("data ")]
    loaders = [_of_loader(record, candidates, name) for name in types if "model" in candidates]
    return other_work(record) + loaders


def other_work(record: Record, when: str = "") -> list[str]:
    """Warns if other processes used more than QUIET of the cores."""
    others, cores = record["other_cores"], record["machine"]["cores"]
    if others <= QUIET * cores:
        return []
    return [f"Other processes used {others:.2g} of {cores:g} cores{when}: measure again on an idle machine."]


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
