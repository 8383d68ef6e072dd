r"""Trains models of this project and of other programs on the same data for the same time; compares their AP.

    python benchmarks/accuracy.py --rows=d0 --output_dir=runs/accuracy

docs/accuracy.md has the method, the data and how to install the other programs. Each row of
benchmarks/accuracy.yaml lists data sets, and programs with their command lines. A run is one program with one
data set and one seed. It executes two bash scripts: one trains, the other detects.

A finished run has the files result.json and log.txt in the directory OUTPUT_DIR/ROW/DATA/PROGRAM/SEED. It is
executed again only if its commands have changed.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import yaml
from absl import flags

from common import args as shared_flags
from common import errors
from common.args import flag
from common.errors import UserError, unknown
from common.evaluation.coco_metrics import score
from common.files import user_errors, write_bytes
from common.progress import log
from common.weights import model_metadata
from tools.processes import ended_afterwards

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULT, DETECTIONS = "result.json", "detections.json"
METRICS = ("AP", "AP50", "AP75")
# Number of seeds, at most 10 -> 97.5 % quantile of Student's t distribution.
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclasses.dataclass(frozen=True)
class AccuracyArgs:
    rows: str = flag("", "Rows of --table to run, comma-separated. Default: all.")
    seeds: str = flag("1,2,3", "Seeds, comma-separated.")
    settings: str = flag("", "Values that override `settings` in --table: name=value,name=value.")
    table: str = flag("benchmarks/accuracy.yaml", "YAML file of the rows: data sets, programs and commands.")
    output_dir: str = flag("runs/accuracy", "Directory with the data sets (in data/) and all runs.")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one program.

    Attributes:
        name: identifies the run: row of the results table, data set, program, seed.
        directory: the directory of the run's files.
        truth: COCO json of the evaluation images.
        needs: a file that exists if the program is installed.
        commands: the scripts "train" and "detect". "detect" writes detections.json into `directory`.
        budget: the time limit of the training in seconds. {"cpu": ...} limits the CPU time, {"wall": ...}
            the wall time.
    """

    name: tuple[str, str, str, str]
    directory: pathlib.Path
    truth: pathlib.Path
    needs: pathlib.Path
    commands: dict[str, str]
    budget: dict[str, float]

    def record(self) -> dict[str, Any] | None:
        path = self.directory / RESULT
        record = json.loads(path.read_bytes()) if path.exists() else {}
        return record if record.get("commands") == self.commands else None


def jobs_of(a: AccuracyArgs, name: str, row: dict[str, Any]) -> Iterator[Job]:
    output = pathlib.Path(a.output_dir).resolve()
    overrides = dict(pair.partition("=")[::2] for pair in a.settings.split(",") if pair)
    for seed, data in itertools.product(a.seeds.split(","), row["data"]):
        folder = output / "data" / row["data"][data].get("directory", data)
        with user_errors(f"{folder}: docs/accuracy.md has the commands that create it"):
            num_classes = len((folder / "names.txt").read_text().splitlines())
        values = {"python": sys.executable, "peers": ROOT / "peers", "data": folder, "seed": seed}
        values |= {"num_classes": num_classes, **row["settings"], **row["data"][data], **overrides}
        for program, scripts in row["programs"].items():
            job = (name, data, program, seed)
            values["run"] = output.joinpath(*job)
            texts = {key: text.format(**values) for key, text in scripts.items()}
            needs = pathlib.Path(texts.pop("needs", sys.executable))
            truth = folder / "annotations/instances_val2017.json"
            yield Job(job, values["run"], truth, needs, texts, row["budget"])


def run_script(script: str, output: Any, budget: dict[str, float]) -> dict[str, float]:
    """Runs a script. Returns its wall and CPU time in seconds. Raises SubprocessError if it fails."""
    limit = f"ulimit -t {budget['cpu']:.0f}\n" if "cpu" in budget else ""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["bash", "-euo", "pipefail", "-c", limit + script]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    with ended_afterwards(process):
        if process.wait(budget.get("wall", 7200)):
            raise subprocess.CalledProcessError(process.returncode, "bash")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": time.monotonic() - start, "cpu": cpu}


def run(job: Job) -> dict[str, Any]:
    """Trains, detects and scores. Returns the record in result.json."""
    shutil.rmtree(job.directory, ignore_errors=True)
    job.directory.mkdir(parents=True)
    with (job.directory / "log.txt").open("wb") as output:
        train = run_script(job.commands["train"], output, job.budget)
        detect = run_script(job.commands["detect"], output, {})
    truth, detections = (json.loads(path.read_bytes()) for path in (job.truth, job.directory / DETECTIONS))
    metrics = score(truth, detections).metrics
    record = {"commands": job.commands, "train": train, "detect": detect, "metrics": metrics}
    record |= {"cores": len(os.sched_getaffinity(0)), "commit": model_metadata.commit()}
    write_bytes(job.directory / RESULT, json.dumps(record, indent=1).encode())
    return record


def mean_and_interval(values: list[float]) -> str:
    """Formats the mean and half its 95 % confidence interval (Student's t)."""
    mean = f"{statistics.mean(values):.1f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {T_QUANTILES[min(len(values), 10)] * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def table(jobs: list[Job]) -> str:
    lines = [f"| data | program | {' | '.join(METRICS)} | CPU s | wall s | seeds | commit |"]
    lines.append("|---|---|" + "--:|" * (len(METRICS) + 4))
    for data_and_program in dict.fromkeys(job.name[1:3] for job in jobs):
        seeds = [job for job in jobs if job.name[1:3] == data_and_program]
        records = [record for job in seeds if (record := job.record())]
        if records:
            cells = [mean_and_interval([100 * each["metrics"][name] for each in records]) for name in METRICS]
            cells += [f"{statistics.mean(each['train'][c] for each in records):.0f}" for c in ("cpu", "wall")]
            commits = ", ".join(sorted({str(each["commit"])[:7] for each in records}))
            lines.append(f"| {' | '.join((*data_and_program, *cells))} | {len(records)} | {commits} |")
    return "\n".join(lines)


def compare(a: AccuracyArgs) -> int:
    """Executes all runs that are not finished. Returns 1 if a run failed, else 0."""
    with user_errors(f"--table={a.table}"):
        rows = yaml.safe_load(pathlib.Path(a.table).read_text())
    names = a.rows.split(",") if a.rows else list(rows)
    if unknown_names := set(names) - set(rows):
        raise unknown("row", unknown_names.pop(), rows)
    jobs = [job for name in names for job in jobs_of(a, name, rows[name])]
    open_jobs = [job for job in jobs if not job.record()]
    log(f"{len(jobs)} runs, {len(jobs) - len(open_jobs)} of them already finished")
    exit_code = 0
    for number, job in enumerate(open_jobs, start=1):
        title = f"[{number}/{len(open_jobs)}] {', '.join(job.name)}"
        log(f"{title}: {job.directory}/log.txt")
        try:
            if not job.needs.exists():
                raise UserError(f"{job.needs} does not exist: install the program, see docs/accuracy.md")
            record = run(job)
            log(f"{title}: AP {100 * record['metrics']['AP']:.1f} after {record['train']['cpu']:.0f} CPU s")
        except (subprocess.SubprocessError, OSError, ValueError, KeyError, UserError) as error:
            log(f"{title}: {error}")
            exit_code = 1
    for name in names:
        print(f"\n{rows[name]['title']}\n\n{table([job for job in jobs if job.name[0] == name])}")
    return exit_code


def main() -> int:
    # SIGTERM also ends a running script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return compare(AccuracyArgs(**shared_flags.values(flags.FLAGS, define_flags)))


def define_flags(fv: flags.FlagValues) -> None:
    shared_flags.define(fv, AccuracyArgs)


if __name__ == "__main__":
    shared_flags.install(define_flags)
    errors.run(main)
