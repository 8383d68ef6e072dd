r"""Compares two benchmark files, and checks that both were measured under the same conditions.

    python efficientdet/bench.py --train_images=my/images --train_annotations=my/instances.json --json=a.json
    python tools/bench.py compare a.json b.json

The first command measures and writes a.json. Run it again with --json=b.json to get the second file. Even on
one machine, differences under 10 % mean nothing.
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
    found = changes("app", {"name": old["app"]}, {"name": new["app"]})
    for part in ("machine", "data", "settings"):
        found += changes(part, old[part], new[part])
    if found:
        lines.append("These numbers cannot be compared, because the runs differ:")
        lines += [f"  {line}" for line in sorted(found)]
    else:
        lines.append("Both ran on one machine: differences under 10 % mean nothing.")
    lines += report.other_work(old, " during the old run") + report.other_work(new, " during the new run")
    lines += changes("software", old["versions"], new["versions"])
    before, after = numbers(old), numbers(new)
    rows = [
        [name, f"{before[name]:.4g}", f"{after[name]:.4g}", f"{after[name] / before[name]:.2f}"]
        for name in before
        if name in after and before[name]
    ]
    table = report.align([["", "old", "new", "ratio"], *rows]) if rows else "the files have no common number"
    return "\n".join(lines) + "\n\n" + table


def changes(part: str, old: Record, new: Record) -> list[str]:
    """Lists the keys whose values differ, one line each."""
    keys = (old.keys() | new.keys()) - {"memory_bytes", "summary"}
    return [
        f"{part}: {key} was {old.get(key)}, is {new.get(key)}"
        for key in sorted(keys)
        if old.get(key) != new.get(key)
    ]


def numbers(benchmark: Record) -> dict[str, float]:
    found = {}
    for name, each in summary.succeeded(benchmark["candidates"]).items():
        found[f"{name}: images/s"] = each["images_per_second"]["median"]
        found[f"{name}: CPU ms/image"] = each["cpu_ms_per_image"]["median"]
        found[f"{name}: peak MB"] = each["peak_bytes"] / 1e6
    for name, stages in summary.succeeded(benchmark["stages"]).items():
        for stage in stages:
            found[f"{name}, {stage['stage']}: CPU ms/image"] = stage["cpu_ms_per_image"]["median"]
    return found


def main(*words: str) -> None:
    if len(words) != 3 or words[0] != "compare":
        raise UserError("give two files: python tools/bench.py compare OLD.json NEW.json")
    print(compare(*words[1:]))


if __name__ == "__main__":
    errors.run(main, positional=True)
