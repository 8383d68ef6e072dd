"""`--dry_run=N`: the real flags on a laptop, before a cluster is booked.

    python efficientdet/train.py --flagfile=... --output_dir=runs/d0 --dry_run=2

N processes on the CPUs of this machine (dry_run_process.py) train the real model under the real flags, but
on small images, for a few steps, on the first few images of the data, twice: the second sitting resumes the
first. What they did is then compared with what they should have done (dry_run_checks.py). All of it happens
in a temporary directory; --output_dir is looked at, never written to.
"""

import contextlib
import csv
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from common import dataset
from common import hparams as hparams_lib
from common.datacheck import images as image_files
from common.datacheck.images import ImagePolicy
from common.datacheck.open_data import DataFlags, check_sizes, log_source, open_splits
from common.errors import UserError
from common.loading import SYNTHETIC_IMAGES
from common.progress import log
from common.sources import Source
from common.training import checkpoint_files
from tools import dry_run_checks
from tools.conversion.coco_writer import write_coco
from tools.dry_run_records import RankFacts, Rehearsal, Sitting

IMAGES_PER_PROCESS = 4  # and one more, so that the shards are uneven
SIDE = 128  # pixels of the shorter side of the network input
STRIDE = 32  # sides are multiples of it: YOLOv4 asks for that
MAX_BATCH = 2
MAX_STEPS = 3
EPOCHS = 2  # of the first sitting; the second adds one
STEP_TIMEOUT = 600.0  # seconds: the first step compiles, and the processes share the CPUs
SAY_EVERY = 10.0  # seconds
_PROCESS = pathlib.Path(__file__).with_name("dry_run_process.py")


# --- the command ------------------------------------------------------------------------------------


def run(app: str, processes: int, given: dict[str, Any]) -> None:
    """Rehearses a training and prints what was checked, a line each, to stdout.

    Args:
        app: "efficientdet" or "yolov4".
        processes: how many take part.
        given: what would be `train`'s arguments.

    Raises:
        UserError: a check failed; the flags or the data cannot be used; Horovod is missing.
        RuntimeError: one of the processes met with a bug of ours; it holds the traceback.
    """
    if not given["output_dir"]:
        raise UserError("--output_dir is missing: name a directory for checkpoints and results")
    launcher = _launcher(processes)
    config = real_config(app, given)
    with _stoppable(), tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        directory = pathlib.Path(name)
        source, evaluation = _open(given, processes, config)
        size = source.size if source else SYNTHETIC_IMAGES
        overrides = _small_flags(given, processes, config, size)
        if source:
            overrides |= _small_data(directory / "train", "train", source, processes)
        if evaluation:
            overrides |= _small_data(directory / "eval", "eval", evaluation, processes)
        if given["strategy"] in ("mirrored", "multi_worker"):
            log(f"--strategy={given['strategy']} is rehearsed with {processes} processes instead of devices")
        sittings = [
            _sit(app, launcher, processes, directory, given | overrides | {"epochs": epochs}, number)
            for number, epochs in enumerate((EPOCHS, EPOCHS + 1), 1)
        ]
        rehearsal = Rehearsal(
            app=app,
            processes=processes,
            given=given,
            config=config,
            images=size,
            steps_per_epoch=given["steps_per_epoch"]
            or dataset.steps_per_epoch(size, given["batch_size"] * processes, training=True),
            sittings=sittings,
            small_images=_image_ids(overrides, "train"),
            small_eval_images=_image_ids(overrides, "eval"),
        )
        checks = dry_run_checks.all_checks(rehearsal)
    print(dry_run_checks.format_table(checks))
    failed = [check.name for check in checks if not check.passed]
    if failed:
        raise UserError(f"the rehearsal failed: {', '.join(failed)} (the lines above say what was expected)")


def real_config(app: str, given: dict[str, Any]) -> Any:
    """The config that the flags mean, as `train` makes it: the model's row, --hparams, flags of that name."""
    module = importlib.import_module(f"{app}.config")
    config = module.get_config(given["model_name"])
    fields = [name for name in vars(config) if name != "model_name"]
    config = hparams_lib.override(config, given["hparams"], only=fields)
    chosen = {name: given[name] for name in fields if given.get(name) is not None}
    if "image_size" in chosen:
        chosen["image_size"] = hparams_lib.parse_image_size(chosen["image_size"])
    return hparams_lib.replace(config, chosen)


def small_image_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of about the same shape with a shorter side of SIDE pixels, never larger.

    >>> small_image_size((512, 512)), small_image_size((384, 640)), small_image_size((64, 96))
    ((128, 128), (128, 224), (64, 96))
    """
    scale = SIDE / min(image_size)
    if scale >= 1:
        return image_size
    return tuple(max(round(side * scale / STRIDE), 1) * STRIDE for side in image_size)


def _small_flags(given: dict[str, Any], processes: int, config: Any, size: int) -> dict[str, Any]:
    """What is different from the real flags, the data apart."""
    batch = min(given["batch_size"], MAX_BATCH)
    images = min(size, IMAGES_PER_PROCESS * processes + 1)
    pipeline = given["pipeline_type"]
    height, width = small_image_size(config.image_size)
    small = {
        "image_size": f"{height}x{width}",
        "batch_size": batch,
        "steps_per_epoch": max(min(images // (processes * batch), MAX_STEPS), 1),
        "accumulate_steps": min(given["accumulate_steps"], 2),
        "eval_every": 1,
        "save_every": 1,
        "num_threads": 1,
        "prefetch": 1,
        "pipeline_type": pipeline if pipeline in ("tensorflow", "synthetic") else "dali_cpu",
        "dali_device_id": None,
        "overwrite": False,
        "step_timeout": STEP_TIMEOUT,
        "elastic": False,
        # One process needs no Horovod, which a laptop may not have.
        "strategy": "horovod" if processes > 1 else "none",
        "compression": given["compression"] if processes > 1 else "none",
    }
    if getattr(config, "close_mosaic", 0):
        small["close_mosaic"] = 1  # one epoch with mosaic and one without
    return small


def _open(given: dict[str, Any], processes: int, config: Any) -> tuple[Source | None, Source | None]:
    """The whole data, opened and checked as training would."""
    if given["pipeline_type"] == "synthetic":
        return None, None
    log("rehearsal: checking all of the data")
    source, evaluation = open_splits(
        DataFlags(given["train_images"], given["train_annotations"], given["train_file_pattern"]),
        DataFlags(given["eval_images"], given["eval_annotations"], given["eval_file_pattern"]),
        input_type=given["input_type"],
        label_map=given["label_map"],
        policy=ImagePolicy(given["on_bad_image"], given["max_megapixels"]),
    )
    log_source("training", source)
    check_sizes(
        source,
        batch_size=given["batch_size"],
        num_replicas=processes,
        max_instances=config.max_instances,
    )
    classes = source.label_map.num_classes
    if (given["num_classes"] or classes) < classes:
        raise UserError(
            f"--num_classes={given['num_classes']}: the data have {classes} classes; leave the flag out"
        )
    if evaluation:
        log_source("evaluation", evaluation)
    return source, evaluation


def _small_data(directory: pathlib.Path, split: str, source: Source, processes: int) -> dict[str, Any]:
    """Writes the first images that have objects as files with a COCO json. The flags that name them.

    All categories stay, so the network has its real number of classes.
    """
    annotations = source.annotations
    count = min(source.size, IMAGES_PER_PROCESS * processes + 1)
    empty = np.diff(annotations.target_boxes.row_splits) == 0
    rows = np.sort(np.argsort(empty, kind="stable")[:count])
    images = directory / "images"
    images.mkdir(parents=True)
    names = {}
    for row in rows.tolist():
        encoded = source.encoded(row)
        names[row] = f"{row}.{image_files.inspect(encoded).image_format.lower()}"
        (images / names[row]).write_bytes(encoded)
    kept = np.zeros(source.size, bool)
    kept[rows] = True
    selected = annotations.select(kept)
    selected.file_names[:] = names.values()
    write_coco(selected, directory / "instances.json")
    if source.name == "tfrecord":
        log(f"rehearsal: {count} images of the {split} records are read as files with a COCO json")
    return {
        "input_type": "coco",
        "label_map": None,
        f"{split}_images": str(images),
        f"{split}_annotations": str(directory / "instances.json"),
        f"{split}_file_pattern": None,
    }


def _image_ids(flags: dict[str, Any], split: str) -> list[int]:
    path = flags.get(f"{split}_annotations")
    return [image["id"] for image in json.loads(pathlib.Path(path).read_bytes())["images"]] if path else []


# --- one sitting ------------------------------------------------------------------------------------


def _launcher(processes: int) -> list[str]:
    """What comes before `python tools/dry_run_process.py`."""
    if processes == 1:
        return []
    beside = pathlib.Path(sys.executable).with_name("horovodrun")
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if not found or importlib.util.find_spec("horovod") is None:
        raise UserError(
            f"--dry_run={processes} needs Horovod, which is not installed: run `make horovod`, or rehearse "
            "with --dry_run=1"
        )
    return [found, "--gloo", "-np", str(processes), "-H", f"localhost:{processes}"]


def _sit(
    app: str,
    launcher: list[str],
    processes: int,
    directory: pathlib.Path,
    flags: dict[str, Any],
    number: int,
) -> Sitting:
    """Runs all processes once, and collects what they and the run directory say."""
    facts = directory / f"sitting_{number}"
    facts.mkdir()
    output = directory / "run"
    flags = flags | {"output_dir": str(output)}
    spec = facts / "spec.json"
    spec.write_text(json.dumps({"app": app, "flags": flags, "facts": str(facts)}))
    log(
        f"rehearsal: sitting {number} of 2, {processes} processes train {flags['model_name']} at "
        f"{flags['image_size']} to epoch {flags['epochs']}, {flags['steps_per_epoch']} steps each"
    )
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": str(max((os.cpu_count() or 1) // processes, 1)),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }
    log_file = facts / "log.txt"
    code = _wait([*launcher, sys.executable, str(_PROCESS), str(spec)], environment, log_file, facts)
    ranks = _read_facts(facts, processes, code, log_file)
    rows = []
    if (output / "results.csv").exists():
        with (output / "results.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    found = None
    with contextlib.suppress(UserError):  # all of them are damaged, as good as none
        found = checkpoint_files.newest(output / "checkpoints")
    return Sitting(
        flags=flags,
        ranks=ranks,
        rows=rows,
        manifest=checkpoint_files.read_manifest(found.path) if found else None,
        checkpoint_bytes=sum(file.stat().st_size for file in found.path.iterdir()) if found else 0,
    )


def _wait(command: list[str], environment: dict, log: pathlib.Path, facts: pathlib.Path) -> int:
    """Runs the processes to their end, saying from time to time that they live. Their exit code."""
    with log.open("wb") as stream:
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
                return process.wait(timeout=SAY_EVERY)
            except subprocess.TimeoutExpired:
                log(f"  {time.monotonic() - start:.0f} s")
    finally:
        if process.poll() is None:
            _kill(process, facts)


def _kill(process: subprocess.Popen, facts: pathlib.Path) -> None:
    """Ends launcher and ranks, which the launcher puts into sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for file in facts.glob("pid_*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def _read_facts(facts: pathlib.Path, processes: int, code: int, log: pathlib.Path) -> list[RankFacts]:
    """What the ranks left, in the order of the ranks.

    Raises:
        UserError: a rank had a problem with what the user gave, or is gone.
        RuntimeError: a rank met with a bug.
    """
    problems = [file.read_text() for file in sorted(facts.glob("problem_*"))]
    if problems:
        raise UserError(problems[0])
    bugs = [file.read_text() for file in sorted(facts.glob("bug_*"))]
    if bugs:
        raise RuntimeError(f"in a process of the rehearsal:\n{bugs[0]}")
    missing = [rank for rank in range(processes) if not (facts / f"rank_{rank}.json").exists()]
    if missing or code:
        lines = [re.sub(r"^\[?\d.*?<std(?:err|out)>:", "", line) for line in log.read_text().splitlines()]
        said = next((line for line in lines if line.startswith("error:")), "")
        said = said or next((line for line in reversed(lines) if line.strip()), "it said nothing")
        who = f"rank {missing[0]}" if missing else "a rank"
        raise UserError(f"{who} of the rehearsal ended too early (exit code {code}): {said.strip()}")
    return [
        msgspec.json.decode((facts / f"rank_{rank}.json").read_bytes(), type=RankFacts)
        for rank in range(processes)
    ]


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends this as Ctrl-C does: with the processes killed and the temporary directory gone."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
