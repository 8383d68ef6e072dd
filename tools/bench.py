r"""Compares two benchmarks, and says whether they may be compared at all.

    python efficientdet/bench.py --train_images=my/images --train_annotations=my/instances.json --json=a.json
    python tools/bench.py a.json b.json

The first is an app's bench.py, which measures (bench/measuring.py). Numbers are comparable within one run;
between two runs of one machine differences under 10 % are none.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from common import errors
from common.errors import UserError
from tools.benchmark import report
from tools.benchmark.summary import FORMAT, Record


def read(path: str) -> Record:
    """What `--json` wrote; UserError for anything else."""
    try:
        record = json.loads(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is no benchmark of this version: bench.py --json=FILE writes one")
    return record


def differences(old: Record, new: Record) -> list[str]:
    """What was not the same, a line each: of hardware, data and settings, and then of software."""
    said = []
    for part in ("machine", "data", "settings"):
        for key in old[part].keys() | new[part].keys():
            before, after = old[part].get(key), new[part].get(key)
            if before != after and key not in ("memory_bytes", "summary"):
                said.append(f"{part}: {key} was {before}, is {after}")
    if old["app"] != new["app"]:
        said.append(f"app: was {old['app']}, is {new['app']}")
    return sorted(said)


def table(old: Record, new: Record) -> str:
    """Candidates and stages that both have, with the ratio of the new to the old."""
    rows = [["", "images/s old", "new", "ratio", "CPU ms/image old", "new", "ratio", "peak MB old", "new"]]
    for name in old["candidates"]:
        before, after = old["candidates"][name], new["candidates"].get(name)
        if after is None or "error" in before or "error" in after:
            continue
        row = [name]
        for key in ("images_per_second", "cpu_ms_per_image"):
            values = [each[key]["median"] for each in (before, after)]
            row += [*(f"{value:.4g}" for value in values), f"{values[1] / values[0]:.2f}"]
        rows.append([*row, *(f"{each['peak_bytes'] / 1e6:.0f}" for each in (before, after))])
    stages = [["CPU ms/image by stage", "old", "new", "ratio"]]
    for name in old["stages"]:
        for stage, before, after in _common_stages(old["stages"][name], new["stages"].get(name)):
            ratio = f"{after / before:.2f}" if before > 0 and after > 0 else ""
            stages.append([f"{name}: {stage}", f"{before:.2f}", f"{after:.2f}", ratio])
    parts = [report.align(each) for each in (rows, stages) if len(each) > 1]
    return "\n\n".join(parts) or "nothing that both have measured"


def compare(old_path: str, new_path: str) -> str:
    """The text that `python tools/bench.py OLD.json NEW.json` prints."""
    old, new = read(old_path), read(new_path)
    head = [
        f"{word}: {path}: {each['title']}, {each['when']}, commit {each['commit']}"
        for word, path, each in (("old", old_path, old), ("new", new_path, new))
    ]
    found = differences(old, new)
    if found:
        head.append("These numbers cannot be compared, because not the same was measured:")
        head += [f"  {line}" for line in found]
    else:
        head.append("Two runs of one machine: differences under 10 % are none.")
    for word, each in (("old", old), ("new", new)):
        if each["other_cores"] > report.QUIET * each["machine"]["cores"]:
            head.append(
                f"Other work took {each['other_cores']:.2g} cores while the {word} ones were measured."
            )
    versions = [
        f"{name} {old['versions'].get(name)} -> {version}"
        for name, version in new["versions"].items()
        if old["versions"].get(name) != version
    ]
    if versions:
        head.append(f"Other software: {', '.join(versions)}")
    return "\n".join(head) + "\n\n" + table(old, new)


def _common_stages(old: list[Record] | Record, new: list[Record] | Record | None) -> list[tuple]:
    if not isinstance(old, list) or not isinstance(new, list):
        return []
    after = {stage["stage"]: stage["cpu_ms_per_image"]["median"] for stage in new}
    return [
        (stage["stage"], stage["cpu_ms_per_image"]["median"], after[stage["stage"]])
        for stage in old
        if stage["stage"] in after
    ]


def main(paths: Sequence[str]) -> None:
    if len(paths) != 2:
        raise UserError("give two files: python tools/bench.py OLD.json NEW.json")
    print(compare(*paths))


if __name__ == "__main__":
    files = [word for word in sys.argv[1:] if not word.startswith("-")]
    sys.argv = [word for word in sys.argv if word not in files]
    errors.run(lambda: main(files))
