"""What a benchmark says: a table of candidates, one of stages, and a verdict in words."""

import statistics
from collections.abc import Mapping, Sequence

from tools.benchmark import summary
from tools.benchmark.summary import Record

NONE = 1.1  # two rates that differ by less do not differ
QUIET = 0.1  # share of the cores that other work may take


def tables(record: Record) -> str:
    """All tables and the verdict, as printed."""
    parts = [
        f"{record['title']}\n{record['machine']['cpu']}, {record['machine']['cores']:g} cores"
        + "".join(f", {gpu}" for gpu in record["machine"]["gpus"])
        + f"; {record['data']['summary']}"
    ]
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
    first = beside or next((name for name, each in candidates.items() if "error" not in each), None)
    header = ["", "images/s", "min..max", "CPU ms/image", "min..max", "cores", "peak MB", f"x {first}", *more]
    rows, failed = [header], []
    for name, each in candidates.items():
        if "error" in each:
            failed.append(f"{name}: failed: {each['error']}")
            continue
        rate, cpu = each["images_per_second"], each["cpu_ms_per_image"]
        rows.append(
            [
                name,
                _number(rate["median"]),
                f"{_number(rate['min'])}..{_number(rate['max'])}",
                _number(cpu["median"]),
                f"{_number(cpu['min'])}..{_number(cpu['max'])}",
                f"{each['cores']['median']:.2f}",
                f"{each['peak_bytes'] / 1e6:.0f}",
                f"{summary.ratio(each, candidates[first]):.3g}",
                *(cells.get(name, "") for cells in more.values()),
            ]
        )
    return "\n".join([*(align(rows).splitlines() if len(rows) > 1 else []), *failed])


def stage_table(name: str, stages: Sequence[Record] | Record) -> str:
    """What each stage costs."""
    title = f"{name} by stage"
    if isinstance(stages, dict):
        return f"{title}: failed: {stages['error']}"
    total = _regular(stages)[-1]["cpu_ms_so_far"]
    rows = [[title, "CPU ms/image", "min..max", "share", "so far", "images/s so far"]]
    for stage in stages:
        cost = stage["cpu_ms_per_image"]
        rows.append(
            [
                f"({stage['stage']})" if stage["instead"] else stage["stage"],
                f"{cost['median']:.2f}",
                f"{cost['min']:.2f}..{cost['max']:.2f}",
                "" if stage["instead"] else f"{cost['median'] / total:.0%}",
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


# --- the verdict ---


def verdict(record: Record) -> list[str]:
    """Who waits for whom, and which flag to change. One sentence or two for each loader."""
    said = []
    candidates = {name: each for name, each in record["candidates"].items() if "error" not in each}
    others, cores = summary.other_cores(candidates), record["machine"]["cores"]
    if others > QUIET * cores:
        said.append(
            f"Other work took {others:.2g} of {cores:g} cores: measure again where nothing else runs."
        )
    model = candidates.get("model")
    types = [name.removeprefix("data ") for name in candidates if name.startswith("data ")]
    for pipeline_type in types:
        if model:
            data, both = candidates[f"data {pipeline_type}"], candidates.get(f"both {pipeline_type}")
            said += _of_loader(record, pipeline_type, data, model, both, types)
    said += _of_types(candidates, types)
    said += _of_peers(candidates)
    for name, stages in record["stages"].items():
        if not isinstance(stages, dict):
            said.append(_of_stages(name, _regular(stages)))
    return said


def _of_loader(
    record: Record, name: str, data: Record, model: Record, both: Record | None, types: Sequence[str]
) -> list[str]:
    cores = record["machine"]["cores"]
    limits = summary.bound(data, model, cores)
    limit = {which: statistics.median(values) for which, values in limits.items()}
    least = min(limit, key=limit.get)
    made, taken = limit["loader"], limit["model"]
    said = [
        f"{name}: the loader alone makes {_number(made)} images/s, the model alone takes {_number(taken)}"
    ]
    if made < taken / NONE:
        said[0] += ": the model waits for the loader."
    elif taken < made / NONE:
        said[0] += ": the loader waits for the model."
    else:
        said[0] += ": they are equally fast."
    if least == "cpu":
        costs = [each["cpu_ms_per_image"]["median"] for each in (data, model)]
        said.append(
            f"They share {cores:g} cores: {costs[0]:.3g} + {costs[1]:.3g} ms of CPU an image allow "
            f"{_number(limit['cpu'])} images/s."
        )
    share = 1.0
    if both:
        reached = [
            rate / min(limits[which][i] for which in limits) for i, rate in enumerate(summary.rates(both))
        ]
        share = statistics.median(reached)
        of = {"cpu": "what the CPU allows", "loader": "the loader's rate", "model": "the model's rate"}[least]
        said.append(f"Together {_number(both['images_per_second']['median'])}, {share:.0%} of {of}.")
    said.append(_advice(record, least, share, data, model, types))
    return [" ".join(said)]


def _advice(
    record: Record, least: str, share: float, data: Record, model: Record, types: Sequence[str]
) -> str:
    """Which flag to change."""
    threads, cores = record["settings"]["num_threads"], record["machine"]["cores"]
    used = data["cores"]["median"]
    if least == "loader":
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
    if share < 1 / NONE:
        fewer = "fewer --num_threads leave the cores to the model; " if threads > 1 and least == "cpu" else ""
        deeper = f"--prefetch={2 * record['settings']['prefetch']} evens out batches that take longer."
        return f"They are in each other's way: {fewer}{deeper}"
    if least == "cpu":
        costs = [each["cpu_ms_per_image"]["median"] for each in (data, model)]
        return f"The loader takes {costs[0] / sum(costs):.0%} of the CPU time. No flag gives more."
    if record["machine"]["gpus"]:
        return "The loader keeps up. A larger --batch_size or --precision=mixed_float16 may help the model."
    return "The loader keeps up: there is nothing to change about it."


def _of_types(candidates: dict[str, Record], types: Sequence[str]) -> list[str]:
    """The loaders against the first of them."""
    said = []
    for other in types[1:]:
        parts = []
        for what, words in (("data", "alone"), ("both", "in training")):
            first, second = (candidates.get(f"{what} {each}") for each in (types[0], other))
            if first and second:
                ratio = summary.ratio(first, second)
                none = " (no difference)" if 1 / NONE < ratio < NONE else ""
                parts.append(f"{ratio:.2f}x {words}{none}")
        said.append(f"{types[0]} against {other}: {', '.join(parts)}.")
    return said


def _of_peers(candidates: dict[str, Record]) -> list[str]:
    """Everything of ours against each peer."""
    ratios = summary.ratios(candidates)
    ours = [name for name in ratios if not name.startswith("peer ")]
    return [
        f"Against {peer}: " + ", ".join(f"{name} {ratios[name][peer]:.3g}x" for name in ours) + "."
        for peer in ratios
        if ours and peer.startswith("peer ")
    ]


def _of_stages(name: str, stages: Sequence[Record]) -> str:
    total = stages[-1]["cpu_ms_so_far"]
    dearest = sorted(stages, key=lambda stage: -stage["cpu_ms_per_image"]["median"])[:3]
    parts = [f"{each['stage']} {each['cpu_ms_per_image']['median'] / total:.0%}" for each in dearest]
    return f"Of the {total:.3g} ms of CPU that {name} spends on an image: {', '.join(parts)}."


def _regular(stages: Sequence[Record]) -> list[Record]:
    return [stage for stage in stages if not stage["instead"]]


def _number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
