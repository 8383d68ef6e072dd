"""The text of a benchmark: a table of candidates, one of stages, and a verdict in words."""

from collections.abc import Mapping, Sequence

from tools.benchmark import summary
from tools.benchmark.summary import Record

EQUAL = 1.1  # two rates with a smaller ratio count as equal
QUIET = 0.1  # share of the cores that other work may take


def tables(record: Record) -> str:
    """All tables and the verdict, as printed."""
    parts = [heading(record)]
    if record["candidates"]:
        parts.append(candidate_table(record["candidates"]))
    parts += [stage_table(name, stages) for name, stages in record["stages"].items()]
    parts += [inference_table(name, times) for name, times in record["inference"].items()]
    return "\n\n".join([*parts, "\n".join(record["verdict"])]).rstrip()


def heading(record: Record) -> str:
    """What was measured on which machine and data."""
    machine = record["machine"]
    hardware = ", ".join([machine["cpu"], f"{machine['cores']:g} cores", *machine["gpus"]])
    return f"{record['title']}\n{hardware}; {record['data']['summary']}"


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
    """What each stage costs; in brackets one that replaces the rest of the loader."""
    if isinstance(stages, dict):
        return f"{name} by stage: failed: {stages['error']}"
    rows = [[f"{name} by stage", "CPU ms/image", "min..max", "share", "so far", "images/s so far"]]
    for stage in stages:
        cost, instead = stage["cpu_ms_per_image"], stage["instead"]
        rows.append(
            [
                f"({stage['stage']})" if instead else stage["stage"],
                f"{cost['median']:.2f}",
                f"{cost['min']:.2f}..{cost['max']:.2f}",
                "" if instead else f"{cost['median'] / _total(stages):.0%}",
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
    candidates = summary.succeeded(record["candidates"])
    types = [name.removeprefix("data ") for name in candidates if name.startswith("data ")]
    lines = other_work(record)
    if "model" in candidates:
        lines += [_of_loader(record, candidates, pipeline_type, types) for pipeline_type in types]
    lines += [_of_types(candidates, types[0], other) for other in types[1:]]
    own = [name for name in candidates if not name.startswith("baseline ")]
    for name in [name for name in candidates if own and name not in own]:
        ratios = [f"{each} {summary.ratio(candidates[each], candidates[name]):.3g}x" for each in own]
        lines.append(f"Against {name}: {', '.join(ratios)}.")
    for name, stages in record["stages"].items():
        if not isinstance(stages, dict):
            lines.append(_of_stages(name, stages))
    return lines


def other_work(record: Record, when: str = "") -> list[str]:
    """A line where other work took more than QUIET of the cores; `when`: words for the run, or ""."""
    others, cores = record["other_cores"], record["machine"]["cores"]
    if others <= QUIET * cores:
        return []
    return [f"Other work took {others:.2g} of {cores:g} cores{when}: measure again where nothing else runs."]


def _of_loader(record: Record, candidates: dict[str, Record], name: str, types: Sequence[str]) -> str:
    """Whether the loader or the model limits training, what both reach together, and an advice."""
    cores = record["machine"]["cores"]
    data, model = candidates[f"data {name}"], candidates["model"]
    made, taken = (_median(each, "images_per_second") for each in (data, model))
    loading, training = (_median(each, "cpu_ms_per_image") for each in (data, model))
    allowed = 1000 * cores / max(loading + training, 1e-9)
    limit, of = min(
        (made, "the loader's rate"), (taken, "the model's rate"), (allowed, "what the CPU allows")
    )
    relation = "they are equally fast"
    if made < taken / EQUAL:
        relation = "the model waits for the loader"
    elif taken < made / EQUAL:
        relation = "the loader waits for the model"
    sentences = [
        f"{name}: the loader alone makes {_number(made)} images/s, the model alone takes {_number(taken)}: "
        f"{relation}."
    ]
    if limit == allowed:
        sentences.append(
            f"They share {cores:g} cores: {loading:.3g} + {training:.3g} ms of CPU an image allow "
            f"{_number(allowed)} images/s."
        )
    share = 1.0
    if both := candidates.get(f"both {name}"):
        together = _median(both, "images_per_second")
        share = together / limit
        sentences.append(f"Together {_number(together)}, {share:.0%} of {of}.")
    if limit == made:
        sentences.append(_loader_advice(record, data, types))
    elif share < 1 / EQUAL:
        sentences.append(_overlap_advice(record["settings"], on_cpu=limit == allowed))
    elif limit == allowed:
        part = loading / (loading + training)
        sentences.append(f"The loader takes {part:.0%} of the CPU time. No flag gives more.")
    elif record["machine"]["gpus"]:
        sentences.append(
            "The loader keeps up. A larger --batch_size or --precision=mixed_float16 may help the model."
        )
    else:
        sentences.append("The loader keeps up: there is nothing to change about it.")
    return " ".join(sentences)


def _loader_advice(record: Record, data: Record, types: Sequence[str]) -> str:
    """Which flag makes the loader faster."""
    threads, cores = record["settings"]["num_threads"], record["machine"]["cores"]
    used = _median(data, "cores")
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


def _overlap_advice(settings: Record, *, on_cpu: bool) -> str:
    """Which flag to change where both together reach less than the slower of them."""
    fewer = on_cpu and settings["num_threads"] > 1
    return (
        f"They are in each other's way: {'fewer --num_threads leave the cores to the model; ' * fewer}"
        f"--prefetch={2 * settings['prefetch']} evens out batches that take longer."
    )


def _of_types(candidates: dict[str, Record], name: str, other: str) -> str:
    """One loader against another, alone and in training."""
    parts = []
    for what, words in (("data", "alone"), ("both", "in training")):
        first, second = (candidates.get(f"{what} {each}") for each in (name, other))
        if first and second:
            ratio = summary.ratio(first, second)
            equal = " (no difference)" if 1 / EQUAL < ratio < EQUAL else ""
            parts.append(f"{ratio:.2f}x {words}{equal}")
    return f"{name} against {other}: {', '.join(parts)}."


def _of_stages(name: str, stages: Sequence[Record]) -> str:
    """The three stages that cost the most."""
    costs = {each["stage"]: _median(each, "cpu_ms_per_image") for each in stages if not each["instead"]}
    total, dearest = _total(stages), sorted(costs, key=costs.get, reverse=True)[:3]
    parts = [f"{stage} {costs[stage] / total:.0%}" for stage in dearest]
    return f"Of the {total:.3g} ms of CPU that {name} spends on an image: {', '.join(parts)}."


def _total(stages: Sequence[Record]) -> float:
    """CPU milliseconds an image of the whole loader."""
    return [stage for stage in stages if not stage["instead"]][-1]["cpu_ms_so_far"]


def _median(record: Record, key: str) -> float:
    return record[key]["median"]


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
