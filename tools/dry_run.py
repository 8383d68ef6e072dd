"""`train.py --dry_run=N`: the real flags with N processes on this machine, before a cluster is booked.

    python efficientdet/train.py --flagfile=... --output_dir=runs/d0 --dry_run=2

N processes on CPUs (dry_run_process.py) train the real model under the real flags, but on small images, for a
few steps, on a few images of the data. They do so twice: the second session resumes the first. The report
compares what they did with what they should have done, a line for each check. All of it happens in a
temporary directory; nothing is written to --output_dir.
"""

import contextlib
import csv
import dataclasses
import importlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import PIL.Image

from common import hparams
from common.args import Args
from common.datacheck.open_data import open_checked
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.loader import SYNTHETIC_IMAGES, steps_per_epoch
from common.progress import log
from common.sources import Source
from common.training import checkpoint_files
from common.training.setup import open_data
from tools.conversion.coco_writer import write_coco
from tools.dry_run_checks import DryRun, Session, report

IMAGES_PER_PROCESS = 4  # and one more, so that the shards are uneven
SIDE = 128  # pixels of the shorter side of the network input
STRIDE = 32  # sides are multiples of it, as YOLOv4 requires
MAX_BATCH = 2
MAX_STEPS = 3
EPOCHS = (2, 3)  # at the end of each session
LOG_SECONDS = 10.0
STOP_SECONDS = 15.0  # horovodrun kills its ranks 5 s after SIGTERM
_PROCESS = pathlib.Path(__file__).with_name("dry_run_process.py")


def run(app: str, a: Args) -> None:
    """Trains twice on a small scale and prints what was checked, a line each, to stdout.

    Args:
        app: "efficientdet" or "yolov4".
        a: its flags; `dry_run` is the number of processes.

    Raises:
        UserError: a check failed; the flags or the data cannot be used; Horovod is missing.
        RuntimeError: a process failed; its traceback.
    """
    if not a.output_dir:
        raise UserError("--output_dir is missing: name a directory for checkpoints and results")
    launcher = _launcher(a.dry_run)
    config = hparams.resolve(importlib.import_module(f"{app}.config").get_config(a.model_name), a)
    ranks = Ranks()
    ranks.num_replicas = a.dry_run
    # As Ctrl-C: the processes end, and the temporary directory is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="dry-run-") as name:
        directory = pathlib.Path(name)
        log("dry run: checking all of the data")
        data = open_data(a, ranks, open_checked, max_instances=config.max_instances, synthetic_classes=1)
        size = data.train.size if data.train else SYNTHETIC_IMAGES
        small, ids = _small_flags(a, config, size), {"train": [], "eval": []}
        for split, source in (("train", data.train), ("eval", data.evaluation)):
            if source:
                flags, ids[split] = _small_data(directory / split, split, source, a.dry_run)
                small |= flags
        result = DryRun(
            flags=a,
            config=config,
            images=size,
            steps_per_epoch=a.steps_per_epoch
            or steps_per_epoch(size, a.batch_size * a.dry_run, training=True),
            sessions=[
                _run_session(
                    app, launcher, a.dry_run, directory, dataclasses.replace(a, **small, epochs=epochs)
                )
                for epochs in EPOCHS
            ],
            train_ids=ids["train"],
            eval_ids=ids["eval"],
        )
        report(result)


# --- small flags and data ---------------------------------------------------------------------------


def small_image_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of about the same shape with a shorter side of SIDE pixels, never larger.

    >>> small_image_size((512, 512)), small_image_size((384, 640)), small_image_size((64, 96))
    ((128, 128), (128, 224), (64, 96))
    """
    scale = SIDE / min(image_size)
    if scale >= 1:
        return image_size
    return tuple(max(round(side * scale / STRIDE), 1) * STRIDE for side in image_size)


def _small_flags(a: Args, config: Any, size: int) -> dict[str, Any]:
    """The flags that differ from the real ones, the data apart."""
    processes, batch = a.dry_run, min(a.batch_size, MAX_BATCH)
    images = min(size, IMAGES_PER_PROCESS * processes + 1)
    height, width = small_image_size(config.image_size)
    small = {
        "dry_run": None,
        "image_size": f"{height}x{width}",
        "batch_size": batch,
        "steps_per_epoch": max(min(images // (processes * batch), MAX_STEPS), 1),
        "accumulate_steps": min(a.accumulate_steps, 2),
        "eval_every": 1,
        "eval_every_steps": 0,
        "patience": 0,
        "save_every": 1,
        "num_threads": 1,
        "prefetch": 1,
        "pipeline_type": a.pipeline_type if a.pipeline_type in ("tensorflow", "synthetic") else "dali_cpu",
        "dali_device_id": None,
        "overwrite": False,
        "step_timeout": 600.0,  # the first step compiles, and the processes share the CPUs
        "elastic": False,
        # One process needs no Horovod, which a laptop may not have.
        "strategy": "horovod" if processes > 1 else "none",
        "compression": a.compression if processes > 1 else "none",
    }
    if a.strategy in ("mirrored", "multi_worker"):
        log(f"dry run: {processes} processes stand for the devices of --strategy={a.strategy}")
    if getattr(config, "close_mosaic", 0):
        small["close_mosaic"] = 1  # one epoch with mosaic and one without
    return small


def _small_data(
    directory: pathlib.Path, split: str, source: Source, processes: int
) -> tuple[dict[str, Any], list[int]]:
    """Writes the first images that have objects as files with a COCO json of all categories.

    Returns:
        The flags that name them, and their image ids.
    """
    annotations = source.annotations
    count = min(source.size, IMAGES_PER_PROCESS * processes + 1)
    empty = np.diff(annotations.target_boxes.row_splits) == 0
    rows = np.sort(np.argsort(empty, kind="stable")[:count])
    images = directory / "images"
    images.mkdir(parents=True)
    names = []
    for row in rows.tolist():
        encoded = source.encoded(row)
        names.append(f"{row}.{PIL.Image.open(io.BytesIO(encoded)).format.lower()}")
        (images / names[-1]).write_bytes(encoded)
    kept = np.zeros(source.size, bool)
    kept[rows] = True
    selected = annotations.select(kept)
    selected.file_names[:] = names
    write_coco(selected, directory / "instances.json")
    flags = {
        "input_type": "coco",
        "label_map": None,
        f"{split}_images": str(images),
        f"{split}_annotations": str(directory / "instances.json"),
        f"{split}_file_pattern": None,
    }
    return flags, [int(image_id) for image_id in selected.image_ids]


# --- processes --------------------------------------------------------------------------------------


def _launcher(processes: int) -> list[str]:
    """The words before `python tools/dry_run_process.py`."""
    if processes == 1:
        return []
    beside = pathlib.Path(sys.executable).with_name("horovodrun")
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if not found or importlib.util.find_spec("horovod") is None:
        raise UserError(
            f"--dry_run={processes} needs Horovod, which is not installed: run `make horovod`, or use "
            "--dry_run=1"
        )
    return [found, "--gloo", "-np", str(processes), "-H", f"localhost:{processes}"]


def _run_session(
    app: str, launcher: list[str], processes: int, directory: pathlib.Path, flags: Args
) -> Session:
    """Runs all processes to epoch `flags.epochs`, and collects what they and the run directory hold."""
    records, output = directory / f"to_epoch_{flags.epochs}", directory / "run"
    records.mkdir()
    flags = dataclasses.replace(flags, output_dir=str(output))
    spec = {"app": app, "flags": dataclasses.asdict(flags)}
    (records / "spec.json").write_text(json.dumps(spec))
    log(
        f"dry run: {processes} processes train {flags.model_name} at {flags.image_size} to epoch "
        f"{flags.epochs}, {flags.steps_per_epoch} steps each"
    )
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": str(max((os.cpu_count() or 1) // processes, 1)),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }
    command = [*launcher, sys.executable, str(_PROCESS), str(records / "spec.json")]
    code = _wait(command, environment, records / "log.txt")
    files = [records / f"rank_{rank}.json" for rank in range(processes)]
    if code or not all(file.exists() for file in files):
        raise _failure((records / "log.txt").read_text(errors="replace"), code)
    with (output / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = checkpoint_files.newest(output / "checkpoints")
    return Session(
        flags=flags,
        ranks=[json.loads(file.read_bytes()) for file in files],
        rows=rows,
        state=checkpoint_files.read_manifest(found.path)["state"] if found else None,
        checkpoint_bytes=sum(file.stat().st_size for file in found.path.iterdir()) if found else 0,
    )


def _wait(command: list[str], environment: dict[str, str], log_file: pathlib.Path) -> int:
    """Runs the processes to their end, with a line from time to time. Their exit code."""
    with log_file.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    start = time.monotonic()
    try:
        while True:
            try:
                return process.wait(timeout=LOG_SECONDS)
            except subprocess.TimeoutExpired:
                log(f"  {time.monotonic() - start:.0f} s")
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(text: str, code: int) -> Exception:
    """The error of the rank that failed first, from the output of all."""
    rank_lines = re.compile(r"^\[(\d+)\]<std(?:err|out)>:")  # horovodrun's prefix
    first = re.search(rf"^(?:{rank_lines.pattern[1:]})?(error:|Traceback)(.*)$", text, re.MULTILINE)
    if not first:
        lines = [line for line in text.splitlines() if line.strip()]
        return UserError(f"the dry run ended too early (exit code {code}): {(lines or ['no output'])[-1]}")
    if first[2] == "error:":
        return UserError(first[3].strip())
    own = [line for line in text[first.start() :].splitlines() if line.startswith(first[0].split("Tr")[0])]
    return RuntimeError(
        "in a process of the dry run:\n" + "\n".join(rank_lines.sub("", line) for line in own)
    )
