r"""Compares two benchmarks, and checks that they measured the same.

    python efficientdet/bench.py --train_images=my/images --train_annotations=my/instances.json --json=a.json
    python tools/bench.py compare a.json b.json

The first command is an app's bench.py, which measures (tools/benchmark/measuring.py). Numbers of one run are
comparable. Between two runs on one machine, differences under 10 % mean nothing.
"""

import json
import pathlib
import sys

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from common import errors
from common.errors import UserError
from tools.benchmark import report, summary
from tools.benchmark.summary import FORMAT, Record


def read(path: str) -> Record:
    """The content of a `--json` file; UserError for anything else."""
    try:
        record = json.loads(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a benchmark of this version: bench.py --json=FILE writes one")
    return record


def compare(old_path: str, new_path: str) -> str:
    """The text that `python tools/bench.py compare OLD.json NEW.json` prints."""
    old, new = read(old_path), read(new_path)
    lines = [
        f"{word}: {path}: {each['title']}, {each['when']}, commit {each['commit']}"
        for word, path, each in (("old", old_path, old), ("new", new_path, new))
    ]
    if found := differences(old, new):
        lines.append("These numbers cannot be compared, because the runs differ:")
        lines += [f"  {line}" for line in found]
    else:
        lines.append("Both ran on one machine: differences under 10 % mean nothing.")
    lines += report.other_work(old, " during the old run") + report.other_work(new, " during the new run")
    versions = [
        f"{name} {old['versions'].get(name)} -> {version}"
        for name, version in new["versions"].items()
        if old["versions"].get(name) != version
    ]
    if versions:
        lines.append(f"Other software: {', '.join(versions)}")
    return "\n".join(lines) + "\n\n" + tables(old, new)


def differences(old: Record, new: Record) -> list[str]:
    """What differs in app, hardware, data and settings, a line each."""
    found = [] if old["app"] == new["app"] else [f"app: was {old['app']}, is {new['app']}"]
    for part in ("machine", "data", "settings"):
        for key in (old[part].keys() | new[part].keys()) - {"memory_bytes", "summary"}:
            before, after = old[part].get(key), new[part].get(key)
            if before != after:
                found.append(f"{part}: {key} was {before}, is {after}")
    return sorted(found)


def tables(old: Record, new: Record) -> str:
    """Candidates and stages that both have, with the ratio of the new to the old."""
    rows = [["", "images/s old", "new", "ratio", "CPU ms/image old", "new", "ratio", "peak MB old", "new"]]
    before, after = (summary.succeeded(each["candidates"]) for each in (old, new))
    for name in [name for name in before if name in after]:
        pair = before[name], after[name]
        row = [name]
        for key in ("images_per_second", "cpu_ms_per_image"):
            first, second = (each[key]["median"] for each in pair)
            row += [f"{first:.4g}", f"{second:.4g}", f"{second / first:.2f}"]
        rows.append([*row, *(f"{each['peak_bytes'] / 1e6:.0f}" for each in pair)])
    stages = [["CPU ms/image by stage", "old", "new", "ratio"]]
    before, after = _stage_costs(old), _stage_costs(new)
    for name in [name for name in before if name in after]:
        ratio = f"{after[name] / before[name]:.2f}" if before[name] > 0 and after[name] > 0 else ""
        stages.append([name, f"{before[name]:.2f}", f"{after[name]:.2f}", ratio])
    found = [report.align(each) for each in (rows, stages) if len(each) > 1]
    return "\n\n".join(found) or "nothing that both have measured"


def _stage_costs(benchmark: Record) -> dict[str, float]:
    """`LOADER: STAGE` -> CPU milliseconds an image, of the loaders whose stages were measured."""
    return {
        f"{name}: {stage['stage']}": stage["cpu_ms_per_image"]["median"]
        for name, stages in benchmark["stages"].items()
        if isinstance(stages, list)
        for stage in stages
    }


def main(*words: str) -> None:
    if len(words) != 3 or words[0] != "compare":
        raise UserError("give two files: python tools/bench.py compare OLD.json NEW.json")
    print(compare(*words[1:]))


if __name__ == "__main__":
    errors.run(main, positional=True)
