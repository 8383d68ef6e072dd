"""Measures on one GPU which flags make the loader and the training step faster. It never ran on a GPU.

Each row is one candidate of bench.py with its own flags. The file of `--json` gets each row at once. The rows
that it already has are not measured again, so an interrupted measurement continues. Failed rows are repeated.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from common import args
from common.args import default_threads
from common.data.loader import gpu_visible
from common.errors import UserError
from common.progress import log
from tools.benchmark import exports, measuring, report, rounds
from tools.benchmark.options import APPS, BenchArgs
from tools.benchmark.rounds import Record

BATCH_SIZES = {"efficientdet": 64, "yolov4": 16}
PAYS = 1.05  # smallest speed-up that is worth a flag
# roles of worker.work
LOADER, TF_DATA, STEP, BOTH = "data:dali_gpu", "data:tensorflow", "model", "both:dali_gpu"
EVALUATION = "inference:dali_gpu"
WITH_LATENCY = (EVALUATION, *exports.ROLES)  # their results are in "inference" of --json
_SET_BY_ROWS = (
    *("model_name", "what", "pipeline_types", "baseline", "hparams", "batch_size", "num_threads"),
    *args.DECODER_FLAGS,
    *("precision", "xla"),
)


class Row(NamedTuple):
    """One measurement: the flags that it changes, as on a command line."""

    app: str
    role: str
    flags: dict[str, Any]

    @property
    def text(self) -> str:
        return " ".join(f"--{name}={value}" for name, value in self.flags.items())

    @property
    def name(self) -> str:
        return f"{self.app} {self.role} {self.text}".rstrip()


def all_rows(cores: int, gpus: int) -> list[Row]:
    """Returns the rows for a host with these CPU cores and GPUs. A role's first rows have the fewest flags.

    The numbers of threads are 2, the default of a single rank, a rank's share of the cores, and all cores.
    """
    rows = []
    threads = sorted({2, max(cores // gpus, 1), cores} - {default_threads()})
    for app, batch_size in BATCH_SIZES.items():
        loader: list[dict[str, Any]] = [{}]
        loader += [{"num_threads": number} for number in threads if number <= cores]
        loader += [{"hw_decoder_load": load} for load in (0.0, 0.3, 0.45, 1.0)]
        loader += [{"fancy_upsampling": False}, {"roi_decoding": True}]
        loader += [{"batch_size": batch_size // 4}, {"batch_size": batch_size * 2}]
        if app == "yolov4":
            loader.append({"hparams": "mosaic_tiles=fresh"})
        precisions = ("float32", "mixed_bfloat16", "mixed_float16")
        step = [{"precision": p, "xla": xla} for p, xla in itertools.product(precisions, (False, True))]
        bfloat16, compiled = step[2:4]
        rows += [Row(app, LOADER, flags) for flags in loader] + [Row(app, TF_DATA, {})]
        rows += [Row(app, STEP, flags) for flags in (*step, compiled | {"batch_size": batch_size * 2})]
        rows += [Row(app, BOTH, flags) for flags in (bfloat16, compiled)]
        rows += [Row(app, role, {}) for role in WITH_LATENCY]
    return rows


def measure(a: BenchArgs) -> None:
    """Measures all rows that --json does not have, and prints a table and a verdict.

    Raises UserError without a GPU, for flags that the rows set, and if no row could be measured.
    """
    if not gpu_visible():
        raise UserError("no GPU: TensorFlow and DALI must see one; check the driver with nvidia-smi")
    default = BenchArgs()
    for name in _SET_BY_ROWS:
        if (getattr(a, name) or None) != (getattr(default, name) or None):
            raise UserError(f"omit --{name}: the measurement itself sets it")
    if not a.json:
        raise UserError("--json=FILE is missing: it keeps the results")
    missing = {role: line for role in exports.ROLES if (line := exports.missing(role.split(":")[1]))}
    gpus = len(tf.config.list_physical_devices("GPU"))
    rows, record = all_rows(len(os.sched_getaffinity(0)), max(gpus, 1)), open_record(a, a.json)
    rows = [row for row in rows if row.role not in missing]
    flags = {app: _checked(app, a) for app in BATCH_SIZES}
    with tempfile.TemporaryDirectory(prefix="bench-") as logs:
        for row in rows:
            results = record["inference" if row.role in WITH_LATENCY else "candidates"]
            if "error" in results.get(row.name, {"error": "not measured"}):
                of_row = dataclasses.replace(flags[row.app], **row.flags)
                command = measuring.command(APPS[row.app], row.role, of_row)._replace(name=row.name)
                if row.role in WITH_LATENCY:
                    results[row.name] = rounds.result(command, pathlib.Path(logs))
                else:
                    results |= rounds.measure(
                        [command], rounds=a.rounds, seconds=a.seconds, logs=pathlib.Path(logs)
                    )
                measuring.write_json(a.json, record)
    lines = [table(record), "", *verdict(rows, record), *dict.fromkeys(missing.values())]
    print("\n".join(lines), flush=True)
    log(f"wrote {a.json}")
    if not report.succeeded(record["candidates"]):
        raise UserError("nothing could be measured: the lines above name the reasons")


def open_record(a: BenchArgs, path: str) -> Record:
    """Returns the content of --json, or a record without rows. Raises UserError if other flags wrote it."""
    settings = json.loads(json.dumps(dataclasses.asdict(a) | {"json": None}))
    new = {**measuring.context(a), "app": "gpu", "title": "flags on a GPU", "data": {}, "settings": settings}
    new |= {"candidates": {}, "stages": {}, "inference": {}, "other_cores": 0.0}
    if not pathlib.Path(path).exists():
        return new
    record = report.read(path)
    if any(record.get(name) != new[name] for name in ("app", "machine", "settings")):
        raise UserError(f"{path} was written with other flags or on another machine: give another --json")
    return record


def table(record: Record) -> str:
    """Returns the rows for docs/benchmarks.md."""
    titles = ("images/s", "ms per batch", "CPU ms per image", "memory on the host, MB")
    lines = [f"| | {' | '.join(titles)} |", "|---" + "|--:" * len(titles) + "|"]
    for name, each in report.succeeded(record["candidates"]).items():
        rate, cpu = (each[key]["median"] for key in ("images_per_second", "cpu_ms_per_image"))
        lines.append(f"| {name} | {rate:.4g} | | {cpu:.3g} | {each['peak_bytes'] / 1e6:.0f} |")
    for name, times in report.succeeded(record["inference"]).items():
        for each in times:
            cells = f"{each['images_per_second']:.4g} | {each['latency_ms']:.3g}"
            lines.append(f"| {name} --batch_size={each['batch_size']} | {cells} | | |")
    return "\n".join(lines)


def verdict(rows: Sequence[Row], record: Record) -> list[str]:
    """Returns for each app whether DALI helps, which flags to change, what limits training, and exports.

    The last lines are the rows that failed.
    """
    lines = []
    rates: dict[tuple[str, str], dict[str, float]] = {}
    measured = report.succeeded(record["candidates"])
    for row in rows:
        if row.name in measured:
            rate = measured[row.name]["images_per_second"]["median"]
            rates.setdefault((row.app, row.role), {})[row.text] = rate
    for app in BATCH_SIZES:
        loader, step, both = (rates.get((app, role), {}) for role in (LOADER, STEP, BOTH))
        default, tf_data = loader.get("", 0.0), rates.get((app, TF_DATA), {}).get("", 0.0)
        if default and tf_data and step:
            lines.append(f"{app}: {does_dali_help(default, tf_data, max(step.values()))}")
        gains = {text: rate / default for text, rate in loader.items() if rate > PAYS * default > 0}
        faster = [f"{text} ({gains[text]:.2f} times)" for text in sorted(gains, key=gains.__getitem__)]
        if default:
            lines.append(f"{app}: the loader makes {default:.0f} images/s with its default flags.")
            lines.append(f"{app}: faster loaders: {', '.join(faster[::-1]) or 'none'}.")
        if step:
            enough = next(text for text, rate in step.items() if rate * PAYS >= max(step.values()))
            lines.append(f"{app}: train with {enough}: the step makes {step[enough]:.0f} images/s.")
        for text, rate in both.items():
            if default and text in step:
                limit = "loader" if default < step[text] else "step"
                share = rate / min(default, step[text])
                together = f"{app}: with {text}, loader and step together make {rate:.0f} images/s"
                lines.append(f"{together}, {share:.0%} of the slower, which is the {limit}.")
        lines += fastest_exports(app, report.succeeded(record["inference"]))
    results = record["candidates"] | record["inference"]
    return lines + [f"{name}: failed: {each['error']}" for name, each in results.items() if "error" in each]


def does_dali_help(dali: float, tf_data: float, step: float) -> str:
    """Answers the question from the images/s of DALI's loader, of tf.data, and of the fastest step."""
    if tf_data >= PAYS * step:
        answer = "no, tf.data is already faster than the step"
    elif dali > PAYS * tf_data:
        answer = "yes, training would wait for tf.data"
    else:
        answer = "no, it loads no faster than tf.data, for which training would wait"
    return (
        f"Does DALI help here? {answer}: DALI loads {dali:.0f} images/s, tf.data {tf_data:.0f}, "
        f"and the fastest step takes {step:.0f}."
    )


def fastest_exports(app: str, results: Record) -> list[str]:
    """Returns for each batch size the export with the lowest latency. `results` may lack rows."""
    rows = {role: Row(app, role, {}).name for role in exports.ROLES}
    latencies: dict[int, dict[str, float]] = {}
    for role, name in rows.items():
        for each in results.get(name, []):
            latencies.setdefault(each["batch_size"], {})[role] = each["latency_ms"]
    lines = []
    for size, of_roles in latencies.items():
        fastest = min(of_roles, key=of_roles.__getitem__)
        kind = fastest.removeprefix("export:")
        lines.append(f"{app}: fastest export at batch {size}: {kind}, {of_roles[fastest]:.3g} ms per batch.")
    return lines


def _checked(app: str, a: BenchArgs) -> BenchArgs:
    """Returns the flags that all rows of an app share. Checks the data, or draws some."""
    a = dataclasses.replace(a, model_name=APPS[app].model_name, batch_size=BATCH_SIZES[app])
    config = APPS[app].make_config(a)
    return measuring.with_data(APPS[app], a, config, ["dali_gpu"], needed=True)[0]
