"""What `--dry_run` compares: what the processes did, and what they should have done."""

import dataclasses
import importlib
import itertools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from common.readers import shard_range
from tools.dry_run_records import Rehearsal, Sitting

CHECKPOINTS = 3  # on the disk at once, at most: two that stay, one that is being written
_EXACT = 1e-6  # relative: float32 against Python
_IN_TABLE = 1e-5  # relative: results.csv has six digits


class Check(NamedTuple):
    """One line of the table: what was found, with numbers."""

    name: str
    passed: bool
    detail: str


def all_checks(rehearsal: Rehearsal) -> list[Check]:
    """All checks, in the order of the table."""
    return [check(rehearsal) for check in CHECKS]


def format_table(checks: Sequence[Check]) -> str:
    """A line for each: `ok      steps           2 in each epoch ...`."""
    return "\n".join(
        f"{'ok' if check.passed else 'FAILED':8}{check.name:16}{check.detail}" for check in checks
    )


def check_ranks(rehearsal: Rehearsal) -> Check:
    """Every process joined, as a rank of its own, with the same libraries and data."""
    problems, first = [], rehearsal.sittings[0].ranks[0]
    for sitting in rehearsal.sittings:
        found = sorted(facts.rank for facts in sitting.ranks)
        if found != list(range(rehearsal.processes)):
            problems.append(f"ranks {found}")
        for facts in sitting.ranks:
            if facts.world_size != rehearsal.processes:
                problems.append(f"rank {facts.rank} sees {facts.world_size} processes")
            if facts.versions != first.versions:
                problems.append(f"rank {facts.rank} has other libraries: {facts.versions}")
            if facts.fingerprint != first.fingerprint:
                problems.append(f"rank {facts.rank} has other data")
    libraries = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return _check("ranks", problems, f"{rehearsal.processes}, all with the same data and {libraries}")


def check_steps(rehearsal: Rehearsal) -> Check:
    """Every rank took the same number of steps in every epoch."""
    problems = []
    for sitting, epochs in zip(rehearsal.sittings, _epochs(rehearsal), strict=True):
        wanted = [sitting.flags["steps_per_epoch"]] * epochs
        problems += [
            f"rank {facts.rank} took {facts.steps} steps instead of {wanted}"
            for facts in sitting.ranks
            if facts.steps != wanted
        ]
    batch = rehearsal.processes * rehearsal.given["batch_size"]
    used = rehearsal.steps_per_epoch * batch
    rest = rehearsal.images - used
    said = f"{rest} images of an epoch left out" if rest >= 0 else f"{-rest} images more than the data have"
    small = [facts.steps for facts in rehearsal.sittings[0].ranks]
    return _check(
        "steps",
        problems,
        f"{small[0]} on each of {len(small)} ranks; the real run: {rehearsal.steps_per_epoch} an epoch x "
        f"{rehearsal.processes} ranks x {rehearsal.given['batch_size']} images = {used} of "
        f"{rehearsal.images}, {said}",
    )


def check_sharding(rehearsal: Rehearsal) -> Check:
    """The ranks' parts of an epoch are disjoint and together complete, and training read from them."""
    if not rehearsal.small_images:
        return Check("sharding", True, "synthetic data: nothing to share out")
    problems, ranks = [], rehearsal.sittings[0].ranks
    seen = [image for facts in ranks for image in facts.shard_ids]
    if sorted(seen) != sorted(rehearsal.small_images):
        problems.append(
            f"of {len(rehearsal.small_images)} images the ranks' parts have {len(set(seen))}, and "
            f"{len(seen) - len(set(seen))} twice"
        )
    for facts in ranks:
        begin, end = shard_range(len(rehearsal.small_images), facts.rank, rehearsal.processes)
        if len(facts.shard_ids) != end - begin:
            problems.append(f"rank {facts.rank} has {len(facts.shard_ids)} images instead of {end - begin}")
        strange = set(facts.trained_ids[0]) - set(facts.shard_ids) if facts.trained_ids else set()
        if strange:
            problems.append(f"rank {facts.rank} trained on {len(strange)} images of other ranks")
    real = [
        end - begin
        for begin, end in (
            shard_range(rehearsal.images, rank, rehearsal.processes) for rank in range(rehearsal.processes)
        )
    ]
    small = " + ".join(str(len(facts.shard_ids)) for facts in ranks)
    return _check(
        "sharding",
        problems,
        f"{small} = {len(seen)} images, each on one rank; the real run: {min(real)} to {max(real)} a rank, "
        f"{sum(real)} in all",
    )


def check_learning_rate(rehearsal: Rehearsal) -> Check:
    """The peak is the recipe's rate times the images of an update over those of the recipe."""
    problems = []
    accumulate = max(rehearsal.given["accumulate_steps"], 1)
    effective = rehearsal.processes * rehearsal.given["batch_size"] * accumulate
    config = rehearsal.config
    expected = config.learning_rate / config.reference_batch * effective
    schedule = make_schedule(
        rehearsal.app, config, effective, rehearsal.steps_per_epoch, accumulate_steps=accumulate
    )
    if not math.isclose(schedule.peak, expected, rel_tol=_EXACT):
        problems.append(f"the schedule's peak is {schedule.peak:g} instead of {expected:g}")
    # EfficientDet's schedule counts batches, YOLOv4's updates.
    warmup = schedule.warmup_steps if hasattr(schedule, "warmup_steps") else schedule.burn_in * accumulate
    epochs = config.epochs
    if not epochs:  # EfficientDet's recipes may count iterations instead
        optimization = importlib.import_module(f"{rehearsal.app}.optimization")
        epochs = optimization.num_epochs(config, effective, rehearsal.steps_per_epoch, accumulate)
    total = epochs * rehearsal.steps_per_epoch
    points = [0, warmup // 2, warmup, (warmup + total) // 2, max(total - 1, 0)]
    values = [float(schedule(step)) for step in points]
    if not all(0 <= value <= expected * (1 + _EXACT) + 1e-30 for value in values):
        problems.append(f"rates at the steps {points} are {values}, above the peak of {expected:g}")
    for number, sitting in enumerate(rehearsal.sittings, 1):
        problems += [f"sitting {number}: {problem}" for problem in _small_rates(rehearsal, sitting)]
    shown = ", ".join(f"{value:.4g} at {step}" for step, value in zip(points, values, strict=True))
    return _check(
        "learning rate",
        problems,
        f"{config.learning_rate:g} x {effective} images an update / {config.reference_batch} = "
        f"{expected:.6g} after {warmup} warm-up steps of {total}: {shown}",
    )


def _small_rates(rehearsal: Rehearsal, sitting: Sitting) -> list[str]:
    """Where the optimizers of a sitting, or its table, had another rate than its schedule says."""
    flags = sitting.flags
    accumulate = max(flags["accumulate_steps"], 1)
    effective = rehearsal.processes * flags["batch_size"] * accumulate
    config = dataclasses.replace(rehearsal.config, epochs=flags["epochs"])
    schedule = make_schedule(
        rehearsal.app, config, effective, flags["steps_per_epoch"], accumulate_steps=accumulate
    )
    problems = []
    for facts in sitting.ranks:
        for step, rate in facts.rates:
            wanted = float(schedule(step))
            if not math.isclose(rate, wanted, rel_tol=_EXACT, abs_tol=1e-12):
                problems.append(
                    f"rank {facts.rank} had the rate {rate:g} after {step} batches instead of {wanted:g}"
                )
                break
    if len({str(facts.rates) for facts in sitting.ranks}) > 1:
        problems.append("the ranks had different rates")
    for row in sitting.rows[-len(sitting.ranks[0].steps) :]:
        wanted = float(schedule(int(row["step"]) - 1))
        if not math.isclose(float(row["learning_rate"]), wanted, rel_tol=_IN_TABLE, abs_tol=1e-12):
            problems.append(f"results.csv has {row['learning_rate']} at step {row['step']}, not {wanted:g}")
    return problems


def make_schedule(
    app: str, config: Any, effective_batch: int, steps_per_epoch: int, *, accumulate_steps: int
) -> Callable[[int], Any]:
    """The app's own schedule, as its train.py makes it."""
    module = importlib.import_module(f"{app}.optimization")
    return module.make_schedule(config, effective_batch, steps_per_epoch, accumulate_steps)


def check_weights(rehearsal: Rehearsal) -> Check:
    """After the last step all ranks hold the same weights, bit for bit, and training changed them."""
    problems = []
    for number, sitting in enumerate(rehearsal.sittings, 1):
        others = [facts.rank for facts in sitting.ranks if facts.weights != sitting.ranks[0].weights]
        if others:
            problems.append(f"sitting {number}: ranks {others} have other weights than rank 0")
    first = rehearsal.sittings[0].ranks[0]
    return _check(
        "weights",
        problems,
        f"the {first.trainable_values:,} trainable values are the same on {rehearsal.processes} ranks bit "
        f"for bit (SHA-256 {first.weights[:12]}...)",
    )


def check_gradients(rehearsal: Rehearsal) -> Check:
    """How much each rank sends: nothing to fail, but to plan with."""
    width = 2 if rehearsal.given["compression"] == "fp16" else 4
    values = rehearsal.sittings[0].ranks[0].trainable_values
    return Check(
        "gradients",
        True,
        f"{values * width / 1e6:.1f} MB a step and rank ({width} bytes each, --compression="
        f"{rehearsal.given['compression']})",
    )


def check_evaluation(rehearsal: Rehearsal) -> Check:
    """Every image was evaluated on one rank only, and all ranks have the same AP."""
    if not rehearsal.small_eval_images:
        return Check("evaluation", True, "none: no evaluation data were given")
    problems, wanted = [], sorted(rehearsal.small_eval_images)
    for sitting, epochs in zip(rehearsal.sittings, _epochs(rehearsal), strict=True):
        if any(len(facts.evaluated) != epochs for facts in sitting.ranks):
            problems.append(f"{[len(facts.evaluated) for facts in sitting.ranks]} evaluations, not {epochs}")
            continue
        for epoch in range(epochs):
            seen = sorted(image for facts in sitting.ranks for image in facts.evaluated[epoch])
            if seen != wanted:
                problems.append(f"of {len(wanted)} images {len(set(seen))} were evaluated, {len(seen)} times")
        scores = {facts.ap for facts in sitting.ranks}
        if len(scores) != 1 or None in scores:
            problems.append(f"the ranks' APs are {[facts.ap for facts in sitting.ranks]}")
    parts = " + ".join(
        str(len(facts.evaluated[-1])) for facts in rehearsal.sittings[0].ranks if facts.evaluated
    )
    return _check(
        "evaluation",
        problems,
        f"{parts} = {len(wanted)} images, each once; the same AP on {rehearsal.processes} ranks "
        f"({rehearsal.sittings[-1].ranks[0].ap})",
    )


def check_saving(rehearsal: Rehearsal) -> Check:
    """The checkpoints are whole, the weights files load, and the real disk has room."""
    problems = []
    for number, sitting in enumerate(rehearsal.sittings, 1):
        wanted = sitting.flags["epochs"] * sitting.flags["steps_per_epoch"]
        if sitting.manifest is None:
            problems.append(f"sitting {number} left no checkpoint")
            continue
        found, world = sitting.manifest["state"]["step"], sitting.manifest["world_size"]
        if found != wanted or world != rehearsal.processes:
            problems.append(
                f"sitting {number}: the newest whole checkpoint is of step {found} and {world} ranks instead "
                f"of step {wanted} and {rehearsal.processes}"
            )
        problems += [
            f"sitting {number}: {problem}" for problem in sitting.ranks[0].loaded.values() if problem
        ]
    size = rehearsal.sittings[-1].checkpoint_bytes
    place = _existing(pathlib.Path(rehearsal.given["output_dir"]))
    free = shutil.disk_usage(place).free
    if free < CHECKPOINTS * size:
        problems.append(
            f"{place} has {free / 1e6:.0f} MB free, and {CHECKPOINTS} checkpoints take "
            f"{CHECKPOINTS * size / 1e6:.0f} MB: choose another --output_dir"
        )
    if not place.is_dir() or not os.access(place, os.W_OK):
        problems.append(f"--output_dir={rehearsal.given['output_dir']}: {place} cannot be written to")
    return _check(
        "saving",
        problems,
        f"{size / 1e6:.1f} MB a checkpoint; {', '.join(rehearsal.sittings[-1].ranks[0].loaded)} load; "
        f"{free / 1e6:,.0f} MB are free where --output_dir is",
    )


def check_resume(rehearsal: Rehearsal) -> Check:
    """The second sitting went on at the step after the first one's last, on all ranks."""
    first, second = rehearsal.sittings
    wanted = first.flags["epochs"] * first.flags["steps_per_epoch"] + 1
    problems = [
        f"rank {facts.rank} went on with step {facts.first_step} instead of {wanted}"
        for facts in second.ranks
        if facts.first_step != wanted
    ]
    epochs = [int(row["epoch"]) for row in second.rows]
    if epochs != list(range(1, second.flags["epochs"] + 1)):
        problems.append(f"results.csv has the epochs {epochs}")
    return _check("resume", problems, f"the second sitting went on with step {wanted} on all ranks")


CHECKS = (
    check_ranks,
    check_steps,
    check_sharding,
    check_learning_rate,
    check_weights,
    check_gradients,
    check_evaluation,
    check_saving,
    check_resume,
)


def _check(name: str, problems: Sequence[str], detail: str) -> Check:
    return Check(name, not problems, "; ".join(problems) or detail)


def _epochs(rehearsal: Rehearsal) -> list[int]:
    """How many epochs each sitting trained."""
    done = [0, *(sitting.flags["epochs"] for sitting in rehearsal.sittings)]
    return [after - before for before, after in itertools.pairwise(done)]


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next((p for p in (path, *path.parents) if p.exists()), path)
