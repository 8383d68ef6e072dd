"""Implements each app's bench.py: measures loaders and the training step.

The candidates are each loader, the training step on a synthetic batch, the step with each loader, and each
command of `--baseline`. Each candidate runs in a separate process (rounds.py).
"""

import dataclasses
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import errors
from common.args import default_threads
from common.data.loader import gpu_visible
from common.data.open import open_data
from common.data.sources import Source
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import cache_directory
from common.progress import log
from tools import synthetic
from tools.benchmark import record, report, rounds, worker
from tools.benchmark.options import TYPES, WHAT, App, BenchArgs
from tools.benchmark.rounds import Command
from tools.benchmark.summary import Record

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLE = 200  # number of images whose file sizes are averaged
_NOT_OF_CANDIDATES = ("what", "pipeline_types", "baseline", "json", "synthetic_images", "role")
_SETTINGS = ("num_classes", "batch_size", "num_threads", "prefetch", "precision", "xla")


def start(app: App, a: BenchArgs) -> None:
    """Measures what the flags select, prints the results, and writes them to --json.

    With --role, this process is one candidate that bench.py has started. Raises UserError for unusable flags.
    """
    if a.role:
        worker.work(app, a, a.role)
        return
    a = dataclasses.replace(a, num_threads=a.num_threads or default_threads())
    what = chosen("thing to measure", a.what, WHAT)
    runnable = TYPES if gpu_visible() else TYPES[1:]
    types = chosen("loader", a.pipeline_types or ",".join(runnable), TYPES)
    baselines = parse_baselines(a.baseline)
    if not what and not baselines:
        raise UserError("--what is empty and --baseline is not given: nothing to measure")
    config = app.make_config(a)
    a, source = _with_data(app, a, config, types, needed=what not in ([], ["model"]))

    roles = [*(f"data:{each}" for each in types), "model", *(f"both:{each}" for each in types)]
    own = [_command(app, a, role) for role in roles if role.partition(":")[0] in what]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        logs = pathlib.Path(name)
        candidates = rounds.measure([*own, *baselines], rounds=a.rounds, seconds=a.seconds, logs=logs)
        dali = [each for each in types if each != "tensorflow"]  # loaders whose graph can be truncated
        results = {
            part: {each: rounds.result(_command(app, a, f"{part}:{each}"), logs) for each in measured}
            for part, measured in (("stages", dali), ("inference", types))
            if part in what
        }
    height, width = config.image_size
    found = record.make(
        app.name,
        a,
        title=f"{a.model_name} at {height}x{width}, batch {a.batch_size}, {a.precision}"
        f"{', XLA' if a.xla else ''}; loaders with {a.num_threads} threads, prefetch {a.prefetch}",
        data=_describe(source) if source else {"summary": "no data"},
        settings={name: getattr(a, name) for name in _SETTINGS} | dataclasses.asdict(config),
        candidates=candidates,
        **results,
    )
    found["verdict"] = report.verdict(found)
    record.publish(found, report.tables(found), a.json)


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


def draw(count: int) -> pathlib.Path:
    """Draws photo-sized images into the user's cache, unless they exist there."""
    directory = cache_directory() / f"bench-images-{count}"
    if not (directory / "instances.json").exists():
        log(f"no data are given: drawing {count} images into {directory}")
        synthetic.draw_dataset(directory, count, seed=0, style="photo")
    return directory


def chosen(kind: str, text: str, known: Sequence[str]) -> list[str]:
    """Splits a comma-separated list. Raises UserError for an unknown name."""
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise errors.unknown(kind, name, known)
    return list(names)


def _command(app: App, a: BenchArgs, role: str) -> Command:
    arguments = [sys.executable, str(ROOT / app.name / "bench.py"), f"--role={role}"]
    for field in dataclasses.fields(a):
        value = getattr(a, field.name)
        if value != field.default and field.name not in _NOT_OF_CANDIDATES:
            arguments.append(f"--{field.name}={value}")
    return Command(role.replace(":", " "), arguments, settle=a.prefetch + 1)


def _with_data(
    app: App, a: BenchArgs, config: Any, types: Sequence[str], *, needed: bool
) -> tuple[BenchArgs, Source | None]:
    """Checks the data once for all candidates. Returns the flags, with num_classes set, and the data."""
    given = a.train_images or a.train_annotations or a.train_file_pattern
    if needed and not given:
        directory = draw(a.synthetic_images)
        images, annotations = str(directory / "images"), str(directory / "instances.json")
        a = dataclasses.replace(a, train_images=images, train_annotations=annotations)
    pipeline_type = "dali_gpu" if "dali_gpu" in types else "dali_cpu"
    checked = dataclasses.replace(a, pipeline_type=pipeline_type if needed or given else "synthetic")
    data = open_data(checked, Ranks(), config.max_instances, synthetic_classes=app.num_classes)
    return dataclasses.replace(a, num_classes=data.num_classes), data.train


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
