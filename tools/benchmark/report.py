"""The text of a benchmark: a table of candidates, one of stages, and a verdict in words."""

import statistics
from collections.abc import Mapping, Sequence

from tools.benchmark import summary
from tools.benchmark.summary import Record

NONE = 1.1  # two rates with a smaller ratio count as equal
QUIET = 0.1  # share of the cores that other work may take


def tables(record: Record) -> str:
    """All tables and the verdict, as printed."""
    machine = record["machine"]
    hardware = ", ".join([machine["cpu"], f"{machine['cores']:g} cores", *machine["gpus"]])
    parts = [f"{record['title']}\n{hardware}; {record['data']['summary']}"]
    if record["candidates"]:
        parts.append(candidate_table(record["candidates"]))
    parts += [stage_table(name, stages) for name, stages in record["stages"].items()]
    parts += [inference_table(name, times) for name, times in record["inference"].items()]
    parts.append("\n".join(record["verdict"]))
    return "\n\n".join(part for part in parts if part)


def candidate_table(
    candidates: dict[str, Record], *, beside: str = "", more: Mapping[str, Mapping[str, str]] = {}
) -> str:
    """A line each.

    Args:
        candidates: by name.
        beside: the one that the last column compares with; "": the first that did not fail.
        more: columns that follow: header -> candidate -> cell.
    """
    good = summary.succeeded(candidates)
    first = beside or next(iter(good), "")
    rows = [["", "images/s", "min..max", "CPU ms/image", "min..max", "cores", "peak MB", f"x {first}", *more]]
    for name, each in good.items():
        cells = [name]
        for key in ("images_per_second", "cpu_ms_per_image"):
            spread = {which: _number(value) for which, value in each[key].items()}
            cells += [spread["median"], f"{spread['min']}..{spread['max']}"]
        cells += [f"{each['cores']['median']:.2f}", f"{each['peak_bytes'] / 1e6:.0f}"]
        cells.append(f"{summary.ratio(each, candidates[first]):.3g}")
        rows.append([*cells, *(column.get(name, "") for column in more.values())])
    failed = [f"{name}: failed: {each['error']}" for name, each in candidates.items() if name not in good]
    return "\n".join([*([align(rows)] if good else []), *failed])


def stage_table(name: str, stages: Sequence[Record] | Record) -> str:
    """What each stage costs."""
    title = f"{name} by stage"
    if isinstance(stages, dict):
        return f"{title}: failed: {stages['error']}"
    total = _regular(stages)[-1]["cpu_ms_so_far"]
    rows = [[title, "CPU ms/image", "min..max", "share", "so far", "images/s so far"]]
    for stage in stages:
        cost, instead = stage["cpu_ms_per_image"], stage["instead"]
        rows.append(
            [
                f"({stage['stage']})" if instead else stage["stage"],
                f"{cost['median']:.2f}",
                f"{cost['min']:.2f}..{cost['max']:.2f}",
                "" if instead else f"{cost['median'] / total:.0%}",
                f"{stage['cpu_ms_so_far']:.2f}",
                _number(stage["images_per_second"]),
            ]
        )
    return align(rows)


def inference_table(name: str, times: Sequence[Record] | Record) -> str:
    """Detecting with one loader: by stage, at each batch size."""
    title = f"inference with {name}"
    if isinstance(times, dict):
        return f"{title}: failed: {times['error']}"
    rows = [[f"{title}, ms/batch", *(f"batch {each['batch_size']}" for each in times)]]
    for stage in times[0]["stages"]:
        rows.append([stage, *(f"{each['stages'][stage]['wall_ms']:.1f}" for each in times)])
    rows.append(["one after the other", *(f"{each['latency_ms']:.1f}" for each in times)])
    rows.append(["overlapped, images/s", *(_number(each["images_per_second"]) for each in times)])
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


# --- the verdict ---


def verdict(record: Record) -> list[str]:
    """Which side limits training, and which flag to change: a line or two for each loader."""
    candidates, cores = summary.succeeded(record["candidates"]), record["machine"]["cores"]
    lines = other_work(candidates, cores)
    types = [name.removeprefix("data ") for name in candidates if name.startswith("data ")]
    if "model" in candidates:
        lines += [_of_loader(record, candidates, pipeline_type, types) for pipeline_type in types]
    lines += _of_types(candidates, types)
    ratios = summary.ratios(candidates)
    own = [name for name in ratios if not name.startswith("baseline ")]
    lines += [
        f"Against {name}: " + ", ".join(f"{each} {ratios[each][name]:.3g}x" for each in own) + "."
        for name in ratios
        if own and name not in own
    ]
    for name, stages in record["stages"].items():
        if not isinstance(stages, dict):
            lines.append(_of_stages(name, _regular(stages)))
    return lines


def other_work(candidates: dict[str, Record], cores: float) -> list[str]:
    """A line where other work took more than QUIET of the cores."""
    others = summary.other_cores(candidates)
    if others <= QUIET * cores:
        return []
    return [f"Other work took {others:.2g} of {cores:g} cores: measure again where nothing else runs."]


def _of_loader(record: Record, candidates: dict[str, Record], name: str, types: Sequence[str]) -> str:
    """Whether the loader or the model limits training, what both reach together, and an advice."""
    data, model, both = (candidates.get(each) for each in (f"data {name}", "model", f"both {name}"))
    cores = record["machine"]["cores"]
    limits = summary.bound(data, model, cores)
    limit = {which: statistics.median(values) for which, values in limits.items()}
    least = min(limit, key=limit.get)
    made, taken = limit["loader"], limit["model"]
    relation = "they are equally fast"
    if made < taken / NONE:
        relation = "the model waits for the loader"
    elif taken < made / NONE:
        relation = "the loader waits for the model"
    sentences = [
        f"{name}: the loader alone makes {_number(made)} images/s, the model alone takes {_number(taken)}: "
        f"{relation}."
    ]
    if least == "cpu":
        costs = [each["cpu_ms_per_image"]["median"] for each in (data, model)]
        sentences.append(
            f"They share {cores:g} cores: {costs[0]:.3g} + {costs[1]:.3g} ms of CPU an image allow "
            f"{_number(limit['cpu'])} images/s."
        )
    share = 1.0
    if both:
        lowest = map(min, zip(*limits.values(), strict=True))
        share = statistics.median(a / b for a, b in zip(summary.rates(both), lowest, strict=True))
        of = {"cpu": "what the CPU allows", "loader": "the loader's rate", "model": "the model's rate"}[least]
        sentences.append(f"Together {_number(both['images_per_second']['median'])}, {share:.0%} of {of}.")
    if least == "loader":
        sentences.append(_loader_advice(record, data, types))
    else:
        sentences.append(_advice(record, least, share, data, model))
    return " ".join(sentences)


def _loader_advice(record: Record, data: Record, types: Sequence[str]) -> str:
    """Which flag makes the loader faster."""
    threads, cores = record["settings"]["num_threads"], record["machine"]["cores"]
    used = data["cores"]["median"]
    if record["machine"]["gpus"] and "dali_gpu" not in types:
        return "Let the GPU decode: --pipeline_type=dali_gpu."
    if used > 0.8 * threads and threads < cores:
        return f"The loader uses all of its threads: --num_threads={int(cores)}."
    if used > 0.8 * cores:
        return "The loader uses all cores: more of them, a smaller --image_size or less augmentation."
    return (
        f"The loader uses {used:.2g} of {cores:g} cores: it waits, most likely for the disk. A higher "
        "--num_threads or --prefetch may hide that."
    )


def _advice(record: Record, least: str, share: float, data: Record, model: Record) -> str:
    """Which flag to change where the loader alone is fast enough."""
    settings = record["settings"]
    if share < 1 / NONE:
        fewer = "fewer --num_threads leave the cores to the model; "
        fewer = fewer if settings["num_threads"] > 1 and least == "cpu" else ""
        deeper = f"--prefetch={2 * settings['prefetch']} evens out batches that take longer."
        return f"They are in each other's way: {fewer}{deeper}"
    if least == "cpu":
        costs = [each["cpu_ms_per_image"]["median"] for each in (data, model)]
        return f"The loader takes {costs[0] / sum(costs):.0%} of the CPU time. No flag gives more."
    if record["machine"]["gpus"]:
        return "The loader keeps up. A larger --batch_size or --precision=mixed_float16 may help the model."
    return "The loader keeps up: there is nothing to change about it."


def _of_types(candidates: dict[str, Record], types: Sequence[str]) -> list[str]:
    """The first loader against each of the others."""
    lines = []
    for other in types[1:]:
        parts = []
        for what, words in (("data", "alone"), ("both", "in training")):
            first, second = (candidates.get(f"{what} {each}") for each in (types[0], other))
            if first and second:
                ratio = summary.ratio(first, second)
                none = " (no difference)" if 1 / NONE < ratio < NONE else ""
                parts.append(f"{ratio:.2f}x {words}{none}")
        lines.append(f"{types[0]} against {other}: {', '.join(parts)}.")
    return lines


def _of_stages(name: str, stages: Sequence[Record]) -> str:
    total = stages[-1]["cpu_ms_so_far"]
    dearest = sorted(stages, key=lambda stage: -stage["cpu_ms_per_image"]["median"])[:3]
    parts = [f"{each['stage']} {each['cpu_ms_per_image']['median'] / total:.0%}" for each in dearest]
    return f"Of the {total:.3g} ms of CPU that {name} spends on an image: {', '.join(parts)}."


def _regular(stages: Sequence[Record]) -> list[Record]:
    return [stage for stage in stages if not stage["instead"]]


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
