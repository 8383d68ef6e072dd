"""Makes the content of a `--json` file."""

import contextlib
import datetime
import json
import pathlib
import platform
import re
from typing import Any

import psutil
import tensorflow as tf

from common.errors import UserError
from common.files import user_errors, write_bytes
from common.progress import log
from common.training import run_directory
from common.weights import model_metadata
from tools.benchmark import summary
from tools.benchmark.summary import FORMAT, Record


def make(app: str, a: Any, *, candidates: dict[str, Record], **about: Any) -> Record:
    """Makes a record. The caller adds the verdict.

    Args:
        app: the app whose bench.py measured.
        a: the flags `rounds` and `seconds`.
        candidates: the result of rounds.measure.
        about: further entries. `title` is one line about the measurement. `data` describes the images, with a
            "summary" to print. `settings` has other values on which the results depend.
    """
    return {
        "format": FORMAT,
        "app": app,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": model_metadata.commit(),
        "versions": run_directory.versions(),
        "machine": machine(),
        "rounds": a.rounds,
        "seconds": a.seconds,
        "candidates": candidates,
        "other_cores": summary.other_cores(candidates),
        "ratios": summary.ratios(candidates),
        "stages": {},
        "inference": {},
        **about,
    }


def publish(record: Record, text: str, path: str | None) -> None:
    """Prints the text, and writes the record to `path`. Raises UserError if nothing was measured."""
    print(text, flush=True)
    if path:
        with user_errors(f"--json={path}"):
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, json.dumps(record, indent=1).encode())
        log(f"wrote {path}")
    results = [each for part in ("candidates", "stages", "inference") for each in record[part].values()]
    if all("error" in each for each in results):
        raise UserError("nothing could be measured: the lines above name the reasons")


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
