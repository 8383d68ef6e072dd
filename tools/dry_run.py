"""Tries the flags of a run with N processes on this machine, before a cluster runs them.

    python efficientdet/train.py --flagfile=... --output_dir=runs/d0 --dry_run=2

N processes on CPUs train the real model with the real flags, for a few steps on a few images with a small
network input. There are two sessions, and the second one resumes the first. The report has one line for each
check. Nothing is written to --output_dir.
"""

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from common.args import Args
from common.data.loader import SYNTHETIC_IMAGES, steps_per_epoch
from common.data.open import open_data
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.progress import log
from common.training import run_directory
from tools.dry_run_process import small_data, small_flags
from tools.processes import ended_afterwards

EPOCHS = (2, 3)  # --epochs of the first and of the second session
STOP_SECONDS = 15.0  # from SIGTERM to SIGKILL: horovodrun needs 5 s to kill its ranks
CHECKPOINTS = 3  # on the disk at once
_PROCESS = pathlib.Path(__file__).with_name("dry_run_process.py")


class Session(NamedTuple):
    """The results of one session, which starts all processes once.

    Attributes:
        ranks: the record of each rank, which dry_run_process.main writes.
        saved_step: the step of the newest complete checkpoint; None without a checkpoint.
        checkpoint_bytes: the size of this checkpoint.
    """

    flags: Args
    ranks: list[dict[str, Any]]
    saved_step: int | None
    checkpoint_bytes: int


class DryRun(NamedTuple):
    """The data that the checks compare.

    Attributes:
        flags, config, processes: flags, config and number of processes of the real run.
        images: the number of training images of the real run.
        small_epoch: the number of steps in an epoch of the small run.
        sessions: the two sessions of the small run.
    """

    flags: Args
    config: Any
    processes: int
    images: int
    small_epoch: int
    sessions: list[Session]


def run(module: str, config: Any, a: Args, processes: int) -> None:
    """Trains in two small sessions and prints one line for each check.

    Args:
        module: the module of the app's train.py, for example "efficientdet.train".

    Raises:
        UserError: a check failed; the flags or the data cannot be used; Horovod is missing.
        RuntimeError: a process failed; the message has its traceback.
    """
    if not a.output_dir:
        raise UserError("--output_dir is missing: give a directory for checkpoints and results")
    launcher = _launcher(processes)
    ranks = Ranks()
    ranks.num_replicas = processes
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="dry-run-") as name:
        directory = pathlib.Path(name)
        log("dry run: checking all of the data")
        data = open_data(a, ranks, config.max_instances, synthetic_classes=1)
        images = data.train.size if data.train else SYNTHETIC_IMAGES
        small = small_flags(a, config, processes, images) | {"output_dir": str(directory / "run")}
        for split, source in (("train", data.train), ("eval", data.evaluation)):
            if source:
                small |= small_data(directory / split, split, source, processes)
        flags = [dataclasses.replace(a, **small, epochs=epochs) for epochs in EPOCHS]
        sessions = [_run_session(module, launcher, processes, directory, of_session) for of_session in flags]
        report(DryRun(a, config, processes, images, small["steps_per_epoch"], sessions))


# --- the checks -------------------------------------------------------------------------------------------


def report(dry: DryRun) -> None:
    """Prints a line for each check. Raises UserError if one failed."""
    failed = []
    for name, check in CHECKS.items():
        problem, detail = check(dry)
        print(f"{'FAILED' if problem else 'ok':8}{name:16}{problem or detail}")
        failed += [name] * bool(problem)
    if failed:
        raise UserError(f"the dry run failed: {', '.join(failed)} (the lines above show what was found)")


def _check_steps(dry: DryRun) -> tuple[str, str]:
    """Checks that all ranks take the same steps, and that the second session resumes the first."""
    problem, done = "", 0
    for epochs, session in zip(EPOCHS, dry.sessions, strict=True):
        wanted = list(range(done + 1, epochs * dry.small_epoch + 1))
        taken, done = [rank["steps"] for rank in session.ranks], wanted[-1]
        if any(steps != wanted for steps in taken):
            problem = f"the ranks took steps {taken}, not {wanted}"
    a = dry.flags
    real = a.steps_per_epoch or steps_per_epoch(dry.images, a.batch_size * dry.processes, training=True)
    return problem, (
        f"{done} on each rank, across one resume; the real run: {real} per epoch x {dry.processes} ranks x "
        f"{a.batch_size} images = {real * dry.processes * a.batch_size} of {dry.images}"
    )


def _check_sharding(dry: DryRun) -> tuple[str, str]:
    """No image is trained on twice in an epoch."""
    if dry.flags.pipeline_type == "synthetic":
        return "", "synthetic data: no shards"
    ids = sorted(image for rank in dry.sessions[0].ranks for image in rank["image_ids"])
    problem = f"an image id occurs twice in an epoch: {ids}" if len(set(ids)) < len(ids) else ""
    return problem, f"{len(ids)} different images in an epoch"


def _check_learning_rate(dry: DryRun) -> tuple[str, str]:
    """The peak learning rate is scaled by the number of images per update."""
    config, small = dry.config, dry.sessions[0].flags

    def peak(flags: Args) -> tuple[int, float]:
        effective_batch = dry.processes * flags.batch_size * max(flags.accumulate_steps, 1)
        return effective_batch, config.learning_rate / config.reference_batch * effective_batch

    peaks = [rank["peak"] for session in dry.sessions for rank in session.ranks]
    right = all(math.isclose(found, peak(small)[1], rel_tol=1e-6) for found in peaks)
    problem = "" if right else f"the peaks of the ranks are {peaks} instead of {peak(small)[1]:g}"
    effective_batch, rate = peak(dry.flags)
    return problem, (
        f"the real run: {config.learning_rate:g} x {effective_batch} images per update / "
        f"{config.reference_batch} = {rate:.6g}"
    )


def _check_weights(dry: DryRun) -> tuple[str, str]:
    """All ranks have bit-identical weights after the last step."""
    hashes = [[rank["weights"] for rank in session.ranks] for session in dry.sessions]
    same = all(len(set(of_ranks)) == 1 for of_ranks in hashes)
    values, compression = dry.sessions[0].ranks[0]["trainable_values"], dry.flags.compression
    megabytes = values * (2 if compression == "fp16" else 4) / 1e6
    problem = "" if same else f"the ranks' weights differ; their hashes are {hashes}"
    return problem, (
        f"{values:,} trainable values are the same on {dry.processes} ranks; gradients: "
        f"{megabytes:.1f} MB per step and rank (--compression={compression})"
    )


def _check_evaluation(dry: DryRun) -> tuple[str, str]:
    """All ranks have the same AP."""
    scores = [[rank["AP"] for rank in session.ranks] for session in dry.sessions]
    problem = "" if all(len(set(of_ranks)) == 1 for of_ranks in scores) else f"the APs are {scores}"
    if scores[-1][0] is None:
        return problem, "no AP: no evaluation data are given"
    return problem, f"each image evaluated once; AP {scores[-1][0]:.3f} on every rank"


def _check_saving(dry: DryRun) -> tuple[str, str]:
    """The last step was saved, and --output_dir has room for checkpoints."""
    problem, last, path = "", dry.sessions[-1], pathlib.Path(dry.flags.output_dir).absolute()
    for epochs, session in zip(EPOCHS, dry.sessions, strict=True):
        wanted = epochs * dry.small_epoch
        if session.saved_step != wanted:
            problem = f"the newest checkpoint is of step {session.saved_step} instead of {wanted}"
    place = next((parent for parent in (path, *path.parents) if parent.exists()), path)
    size, free = last.checkpoint_bytes / 1e6, shutil.disk_usage(place).free / 1e6
    if not place.is_dir() or not os.access(place, os.W_OK):
        problem = f"--output_dir={dry.flags.output_dir}: {place} cannot be written to"
    elif free < CHECKPOINTS * size:
        problem = f"{place} has {free:.0f} MB free, and checkpoints take {CHECKPOINTS} times {size:.0f} MB"
    return problem, f"{size:.1f} MB per checkpoint; {free:,.0f} MB free at --output_dir"


CHECKS: dict[str, Callable[[DryRun], tuple[str, str]]] = {  # return (problem or "", text to print)
    "steps": _check_steps,
    "sharding": _check_sharding,
    "learning rate": _check_learning_rate,
    "weights": _check_weights,
    "evaluation": _check_evaluation,
    "saving": _check_saving,
}

# --- processes --------------------------------------------------------------------------------------------


def _launcher(processes: int) -> list[str]:
    if processes == 1:
        return []
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    horovodrun = shutil.which("horovodrun", path=path)
    if not horovodrun or importlib.util.find_spec("horovod") is None:
        raise UserError(f"--dry_run={processes} needs Horovod: run `make horovod`, or use --dry_run=1")
    return [horovodrun, "--gloo", "-np", str(processes), "-H", f"localhost:{processes}"]


def _run_session(
    module: str, launcher: list[str], processes: int, directory: pathlib.Path, a: Args
) -> Session:
    records = directory / f"to_epoch_{a.epochs}"
    records.mkdir()
    (records / "spec.json").write_text(json.dumps({"module": module, "flags": dataclasses.asdict(a)}))
    log(f"dry run: {processes} processes train {a.model_name} at {a.image_size} pixels to epoch {a.epochs}")
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": str(max((os.cpu_count() or 1) // processes, 1)),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }
    command = [*launcher, sys.executable, str(_PROCESS), str(records / "spec.json")]
    code = _run_processes(command, environment, records / "log.txt")
    files = [records / f"rank_{rank}.json" for rank in range(processes)]
    if code or not all(file.exists() for file in files):
        raise _failure((records / "log.txt").read_text(errors="replace"), code)
    found = run_directory.newest(directory / "run" / "checkpoints")
    return Session(
        flags=a,
        ranks=[json.loads(file.read_bytes()) for file in files],
        saved_step=run_directory.read_manifest(found)["state"]["step"] if found else None,
        checkpoint_bytes=sum(file.stat().st_size for file in found.iterdir()) if found else 0,
    )


def _run_processes(command: list[str], environment: dict[str, str], log_file: pathlib.Path) -> int:
    with log_file.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    with ended_afterwards(process, STOP_SECONDS):
        return process.wait()


def _failure(text: str, code: int) -> Exception:
    first = re.search(r"^(?:\[\d+\]<std(?:err|out)>:)?(error: |Traceback)(.*)$", text, re.MULTILINE)
    if first and first[1] == "error: ":
        return UserError(first[2])
    kind, shown = (RuntimeError, text[first.start() :]) if first else (UserError, text[-500:].strip())
    return kind(f"the dry run ended with exit code {code}:\n{shown}")
