"""Measures loaders and the training step of an app.

The candidates are each loader, the training step on a synthetic batch, the step with each loader, and each
command of `--baseline`. Each candidate runs in a separate process (rounds.py).
"""

import contextlib
import dataclasses
import datetime
import json
import pathlib
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from common.args import default_threads
from common.data.loader import gpu_visible
from common.data.open import open_data
from common.data.sources import Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import cache_directory, user_errors, write_bytes
from common.progress import log
from common.weights import model_metadata
from tools import synthetic
from tools.benchmark import report, rounds
from tools.benchmark.options import TYPES, WHAT, BenchApp, BenchArgs, chosen
from tools.benchmark.rounds import Command, Record

PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "bench.py"
SAMPLE = 200  # number of images whose file sizes are averaged
_SETTINGS = ("num_classes", "batch_size", "num_threads", "prefetch", "precision", "xla")


def measure(app: BenchApp, a: BenchArgs) -> None:
    """Measures what the flags select, prints the results, and writes them to --json.

    Raises UserError for unusable flags, and if nothing could be measured.
    """
    a = dataclasses.replace(a, num_threads=a.num_threads or default_threads())
    what = chosen("thing to measure", a.what, WHAT)
    runnable = TYPES if gpu_visible() else TYPES[1:]
    types = chosen("loader", a.pipeline_types or ",".join(runnable), TYPES)
    baselines = parse_baselines(a.baseline)
    if not what and not baselines:
        raise UserError("--what is empty and --baseline is not given: nothing to measure")
    config = app.make_config(a)
    a, source = with_data(app, a, config, types, needed=what not in ([], ["model"]))

    roles = [*(f"data:{each}" for each in types), "model", *(f"both:{each}" for each in types)]
    commands = [command(app, role, a) for role in roles if role.partition(":")[0] in what]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        logs = pathlib.Path(name)
        candidates = rounds.measure([*commands, *baselines], rounds=a.rounds, seconds=a.seconds, logs=logs)
        dali = [each for each in types if each != "tensorflow"]  # loaders whose graph can be truncated
        results: Record = {"stages": {}, "inference": {}}
        for part, measured in (("stages", dali), ("inference", types)):
            if part in what:
                results[part] = {
                    each: rounds.result(command(app, f"{part}:{each}", a), logs) for each in measured
                }
    height, width = config.image_size
    record = {
        **context(a),
        "app": app.name,
        "title": f"{a.model_name} at {height}x{width}, batch {a.batch_size}, {a.precision}"
        f"{', XLA' if a.xla else ''}; loaders with {a.num_threads} threads, prefetch {a.prefetch}",
        "data": _describe(source) if source else {"summary": "no data"},
        "settings": {name: getattr(a, name) for name in _SETTINGS} | dataclasses.asdict(config),
        "candidates": candidates,
        "other_cores": report.other_cores(candidates),
        "ratios": report.ratios(candidates),
        **results,
    }
    record["verdict"] = report.verdict(record)
    print(report.tables(record), flush=True)
    if a.json:
        write_json(a.json, record)
        log(f"wrote {a.json}")
    failed = [
        name for part in (candidates, *results.values()) for name, each in part.items() if "error" in each
    ]
    if failed:
        raise UserError(f"not measured: {', '.join(failed)}. The lines above name the reasons")


def command(app: BenchApp, role: str, a: BenchArgs) -> Command:
    """Returns the command that runs one candidate; see worker.work for its roles."""
    values = json.dumps(dataclasses.asdict(a))
    arguments = [sys.executable, str(PROGRAM), "candidate", app.name, role, values]
    return Command(role.replace(":", " "), arguments, settle=a.prefetch + 1)


def parse_baselines(texts: Sequence[str]) -> list[Command]:
    baselines: dict[str, Command] = {}
    for text in texts:
        name, _, line = text.partition("=")
        try:
            arguments = shlex.split(line)
        except ValueError as error:
            raise UserError(f"--baseline={text!r}: {error}") from error
        name = f"baseline {name.strip()}"
        if not arguments or name in ("baseline ", *baselines):
            raise UserError(f"--baseline={text!r} is not NAME=COMMAND, or another --baseline has this NAME")
        baselines[name] = Command(name, arguments, settle=3)
    return list(baselines.values())


def with_data(
    app: BenchApp, a: BenchArgs, config: Any, types: Sequence[str], *, needed: bool
) -> tuple[BenchArgs, Source | None]:
    """Checks the data once for all candidates, and draws images if there are no data but they are needed.

    Returns the flags, with num_classes set, and the data.
    """
    has_data = bool(a.train_images or a.train_annotations or a.train_file_pattern)
    if needed and not has_data:
        directory = draw(a.synthetic_images)
        images, annotations = str(directory / "images"), str(directory / "instances.json")
        a = dataclasses.replace(a, train_images=images, train_annotations=annotations)
    pipeline_type = "dali_gpu" if "dali_gpu" in types else "dali_cpu"
    checked = dataclasses.replace(a, pipeline_type=pipeline_type if needed or has_data else "synthetic")
    data = open_data(checked, Ranks(), config.max_instances, synthetic_classes=app.num_classes)
    return dataclasses.replace(a, num_classes=data.num_classes), data.train


def draw(count: int) -> pathlib.Path:
    """Draws photo-sized images into the user's cache, unless they exist there."""
    directory = cache_directory() / f"bench-images-{count}"
    if not (directory / "instances.json").exists():
        log(f"no data are given: drawing {count} images into {directory}")
        synthetic.draw_dataset(directory, count, seed=0, style="photo")
    return directory


def context(a: BenchArgs) -> Record:
    """Returns the entries of a `--json` file about this measurement: when, where, with which versions."""
    return {
        "format": report.FORMAT,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": model_metadata.commit(),
        "versions": model_metadata.versions(),
        "machine": machine(),
        "rounds": a.rounds,
        "seconds": a.seconds,
    }


def machine() -> Record:
    """Describes the hardware. `cores` respects the affinity and the container's quota."""
    model = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
    gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    cores = float(len(psutil.Process().cpu_affinity()))
    with contextlib.suppress(OSError, ValueError):  # without a quota the file is missing or has "max"
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": cores,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [each.get("device_name", "GPU") for each in gpus],
    }


def write_json(path: str, record: Record) -> None:
    with user_errors(f"--json={path}"):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps(record, indent=1).encode())


def _describe(source: Source) -> Record:
    rows = np.unique(np.linspace(0, source.size - 1, min(source.size, SAMPLE)).astype(int)).tolist()
    return {
        "summary": source.annotations.summary(),
        "fingerprint": source.fingerprint,
        "images": source.size,
        "read_from": source.name,
        "kilobytes_per_image": round(sum(len(source.encoded(row)) for row in rows) / len(rows) / 1000, 1),
        "megapixels_per_image": round(source.annotations.image_sizes.prod(axis=1).mean() / 1e6, 3),
    }
