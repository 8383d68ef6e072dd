"""What `--dry_run` compares: what the processes did, and what they should have done."""

import dataclasses
import math
import os
import pathlib
import shutil
from typing import Any

from common.args import Args
from common.errors import UserError
from common.readers import shard_range

CHECKPOINTS = 3  # on the disk at once, at most: two that stay, one that is being written
Found = tuple[list[str], str]  # problems; what to report where there is none


@dataclasses.dataclass
class Session:
    """What one start of all processes did.

    Attributes:
        flags: of the small run.
        ranks: what each rank observed (dry_run_process.main), in the order of the ranks.
        rows: of results.csv.
        state: of the newest whole checkpoint; None where there is none.
        checkpoint_bytes: its size.
    """

    flags: Args
    ranks: list[dict[str, Any]]
    rows: list[dict[str, str]]
    state: dict[str, Any] | None
    checkpoint_bytes: int


@dataclasses.dataclass
class DryRun:
    """All that the checks compare.

    Attributes:
        flags, config: of the real run.
        images, steps_per_epoch: of the real run with as many processes.
        sessions: the two.
        train_ids, eval_ids: image ids of the small data; [] where there are none.
    """

    flags: Args
    config: Any
    images: int
    steps_per_epoch: int
    sessions: list[Session]
    train_ids: list[int]
    eval_ids: list[int]

    @property
    def processes(self) -> int:
        return self.flags.dry_run

    def effective_batch(self, flags: Args) -> int:
        """Images of one update."""
        return self.processes * flags.batch_size * max(flags.accumulate_steps, 1)


def report(result: DryRun) -> None:
    """Prints a line for each check: `ok      steps           [2, 2] on each of 2 ranks ...`.

    Raises:
        UserError: a check failed.
    """
    failed = []
    for name, check in CHECKS.items():
        problems, detail = check(result)
        print(f"{'FAILED' if problems else 'ok':8}{name:16}{'; '.join(problems) or detail}")
        failed += [name] * bool(problems)
    if failed:
        raise UserError(f"the dry run failed: {', '.join(failed)} (the lines above show what was expected)")


def check_ranks(result: DryRun) -> Found:
    """Every process is a rank of the same group, with the same libraries."""
    wanted = [(rank, result.processes) for rank in range(result.processes)]
    problems, versions = [], result.sessions[0].ranks[0]["versions"]
    for session in result.sessions:
        found = [(rank["rank"], rank["world_size"]) for rank in session.ranks]
        if found != wanted:
            problems.append(f"(rank, world size) are {found} instead of {wanted}")
        problems += [f"other libraries: {r['versions']}" for r in session.ranks if r["versions"] != versions]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return problems, f"{result.processes}, all with {libraries}"


def check_steps(result: DryRun) -> Found:
    """Every rank takes the same number of steps, and the second session continues where the first ended."""
    problems, done = [], 0
    for session in result.sessions:
        last = session.flags.epochs * session.flags.steps_per_epoch
        for rank in session.ranks:
            if rank["steps"] != list(range(done + 1, last + 1)):
                problems.append(f"rank {rank['rank']} took steps {rank['steps']}, not {done + 1} to {last}")
        epochs = [int(row["epoch"]) for row in session.rows]
        if epochs != list(range(1, session.flags.epochs + 1)):
            problems.append(f"results.csv has the epochs {epochs}")
        done = last
    images = result.steps_per_epoch * result.processes * result.flags.batch_size
    return problems, (
        f"{done} on each rank, across one resume; the real run: {result.steps_per_epoch} an epoch x "
        f"{result.processes} ranks x {result.flags.batch_size} images = {images} of {result.images}"
    )


def check_sharding(result: DryRun) -> Found:
    """No image of an epoch is trained on twice, on one rank or on two."""
    if not result.train_ids:
        return [], "synthetic data: no shards"
    ids = [image for rank in result.sessions[0].ranks for image in rank["image_ids"][0]]
    problems = [f"{len(ids) - len(set(ids))} images of an epoch twice"] if len(set(ids)) < len(ids) else []
    if set(ids) - set(result.train_ids):
        problems.append(f"image ids that the data do not have: {sorted(set(ids) - set(result.train_ids))}")
    bounds = [shard_range(result.images, rank, result.processes) for rank in range(result.processes)]
    sizes = [end - begin for begin, end in bounds]
    return problems, (
        f"{len(ids)} different images in an epoch; the real run: {min(sizes)} to {max(sizes)} a rank, "
        f"{sum(sizes)} in all"
    )


def check_learning_rate(result: DryRun) -> Found:
    """The peak is the recipe's rate, scaled by the images of an update; all ranks have the same rate."""
    problems, config = [], result.config

    def peak(flags: Args) -> float:
        return config.learning_rate / config.reference_batch * result.effective_batch(flags)

    for session in result.sessions:
        first, wanted = session.ranks[0], peak(session.flags)
        if not math.isclose(first["peak"], wanted, rel_tol=1e-6):
            problems.append(f"the schedule's peak is {first['peak']:g} instead of {wanted:g}")
        if any(rank["rates"] != first["rates"] for rank in session.ranks):
            problems.append("the ranks had different rates")
        if max(first["rates"]) > wanted * (1 + 1e-6):
            problems.append(f"the rate {max(first['rates']):g} is above the peak {wanted:g}")
        logged = float(session.rows[-1]["learning_rate"])
        if not math.isclose(logged, first["rates"][-1], rel_tol=1e-5, abs_tol=1e-12):  # the file has 6 digits
            problems.append(f"results.csv has {logged:g} instead of {first['rates'][-1]:g}")
    return problems, (
        f"the real run: {config.learning_rate:g} x {result.effective_batch(result.flags)} images an update / "
        f"{config.reference_batch} = {peak(result.flags):.6g}"
    )


def check_weights(result: DryRun) -> Found:
    """After the last step all ranks have the same trainable weights, bit for bit."""
    problems = [
        f"ranks {others} have other weights than rank 0 at epoch {session.flags.epochs}"
        for session in result.sessions
        if (others := [r["rank"] for r in session.ranks if r["weights"] != session.ranks[0]["weights"]])
    ]
    values, width = (
        result.sessions[0].ranks[0]["trainable_values"],
        2 if result.flags.compression == "fp16" else 4,
    )
    return problems, (
        f"{values:,} trainable values are the same on {result.processes} ranks; gradients: "
        f"{values * width / 1e6:.1f} MB a step and rank (--compression={result.flags.compression})"
    )


def check_evaluation(result: DryRun) -> Found:
    """Every image is evaluated on one rank only, and all ranks have the same AP."""
    if not result.eval_ids:
        return [], "none: there are no evaluation data"
    problems, wanted = [], sorted(result.eval_ids)
    for session in result.sessions:
        for parts in zip(*(rank["evaluated"] for rank in session.ranks), strict=True):
            seen = sorted(image for part in parts for image in part)
            if seen != wanted:
                problems.append(f"of {len(wanted)} images {len(set(seen))} were evaluated, {len(seen)} times")
        scores = [rank["AP"] for rank in session.ranks]
        if len(set(scores)) != 1 or not session.ranks[0]["evaluated"]:
            problems.append(f"the ranks' APs are {scores}")
    parts = " + ".join(str(len(rank["evaluated"][-1])) for rank in result.sessions[-1].ranks)
    return problems, f"{parts} = {len(wanted)} images, each once; AP {scores[0]} on every rank"


def check_saving(result: DryRun) -> Found:
    """The newest checkpoint is of the last step, and --output_dir has room for the real ones.

    The processes have loaded their weights files.
    """
    problems = []
    for session in result.sessions:
        wanted = session.flags.epochs * session.flags.steps_per_epoch
        found = session.state and session.state["step"]
        if found != wanted:
            problems.append(f"the newest checkpoint is of step {found} instead of {wanted}")
    size, path = result.sessions[-1].checkpoint_bytes, pathlib.Path(result.flags.output_dir).absolute()
    place = next((parent for parent in (path, *path.parents) if parent.exists()), path)
    free = shutil.disk_usage(place).free
    if not place.is_dir() or not os.access(place, os.W_OK):
        problems.append(f"--output_dir={result.flags.output_dir}: {place} cannot be written to")
    if free < CHECKPOINTS * size:
        problems.append(
            f"{place} has {free / 1e6:.0f} MB free, and {CHECKPOINTS} checkpoints take "
            f"{CHECKPOINTS * size / 1e6:.0f} MB: choose another --output_dir"
        )
    return problems, f"{size / 1e6:.1f} MB a checkpoint; {free / 1e6:,.0f} MB free at --output_dir"


CHECKS = {
    "ranks": check_ranks,
    "steps": check_steps,
    "sharding": check_sharding,
    "learning rate": check_learning_rate,
    "weights": check_weights,
    "evaluation": check_evaluation,
    "saving": check_saving,
}
