"""What a benchmark of preprocessing says: a table of candidates, and a verdict in words."""

from tools.benchmark import report, summary
from tools.benchmark.summary import Record

SAME = 2.5  # levels: other decoders, and filters that average over the same pixels, differ by less
_FIRST = "pipeline"


def text(record: Record) -> str:
    """The table and the verdict, as printed."""
    machine = record["machine"]
    head = [record["title"], f"{machine['cpu']}, {machine['cores']:g} cores; {record['data']['summary']}"]
    off = {name: f"{each['mean']:.2f}" for name, each in record["pixels"].items()}
    table = report.candidate_table(
        record["candidates"], beside=fastest(record["candidates"]), more={"levels off": off}
    )
    return "\n\n".join(["\n".join(head), table, "\n".join(record["verdict"])])


def fastest(candidates: dict[str, Record]) -> str:
    """The candidate with the highest median; "" where all failed."""
    good = {name: each for name, each in candidates.items() if "error" not in each}
    return max(good, key=lambda name: good[name]["images_per_second"]["median"], default="")


def verdict(record: Record) -> list[str]:
    """Where the pipeline stands, what its other two forms cost, and who is fast by other pixels."""
    said = []
    good = {name: each for name, each in record["candidates"].items() if "error" not in each}
    cores = record["machine"]["cores"]
    if record["other_cores"] > report.QUIET * cores:
        said.append(
            f"Other work took {record['other_cores']:.2g} of {cores:g} cores: measure again where nothing "
            "else runs."
        )
    if _FIRST not in good:
        return said
    pixels = record["pixels"]
    same = {
        name: each
        for name, each in good.items()
        if name == _FIRST or (name in pixels and pixels[name]["mean"] <= SAME)
    }
    best = fastest(good)
    said.append(_of_best(good, best, "The fastest of all"))
    if best not in same:
        said.append(_of_best(good, fastest(same), "The fastest with the pipeline's pixels"))
    for name, what in (("dynamic", "The Dynamic API"), ("dataset", "TensorFlow's dataset around it")):
        if name in good:
            costs = [good[each]["cpu_ms_per_image"]["median"] for each in (name, _FIRST)]
            said.append(
                f"{what} makes {summary.ratio(good[name], good[_FIRST]):.2f}x as many images/s as the "
                f"pipeline, at {costs[0]:.3g} ms of CPU an image beside {costs[1]:.3g}."
            )
    others = [name for name in good if name in pixels and name not in same]
    if others:
        listed = ", ".join(f"{name} by {pixels[name]['mean']:.1f}" for name in others)
        said.append(f"Other pixels than the pipeline's, in levels on average: {listed}.")
    return said


def _of_best(good: dict[str, Record], best: str, where: str) -> str:
    if best == _FIRST:
        return f"{where}: {best}."
    return f"{where}: {best}. The pipeline reaches {summary.ratio(good[_FIRST], good[best]):.2f}x of it."
