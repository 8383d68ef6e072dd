"""Interrupts saves of checkpoints by SIGKILL and by full disks, and checks which checkpoint is then loaded.

    python -m tests.common.training.soak_saves --rounds=100

All numbers in the checkpoint of step 7 are 7.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

from common.distributed.ranks import Ranks
from common.training.checkpoints import Checkpoints, Identity, RunState
from common.training.ema import AveragedWeights
from common.weights.checkpoint_files import saved as saved_checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[3]
STEPS_PER_EPOCH = 3
UNITS = 40_000  # units of the model; enough that kills often hit the writing of its file (2 MB)


class Subject:
    """Every saved number equals the step."""

    def __init__(self, directory: pathlib.Path, units: int = UNITS) -> None:
        layers = [keras.Input((4,)), keras.layers.Dense(units), keras.layers.BatchNormalization()]
        self.model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(self.model.trainable_variables)
        averaged = AveragedWeights(self.model, 0.9)
        keras_variables = [*self.model.weights, *optimizer.variables]
        self._variables = [*(variable.value for variable in keras_variables), *averaged.variables]
        parts = Ranks(), self.model, optimizer, averaged
        self.checkpoints = Checkpoints(directory, *parts, metadata={}, identity=Identity({}))
        self.state = RunState()
        self.iterator = iter(tf.data.Dataset.range(2**40))

    def restore(self) -> int:
        """Asserts that all numbers equal the checkpoint's step; returns the step or 0."""
        state = self.checkpoints.find()
        if state is None:
            return 0
        self.state = state
        self.checkpoints.restore(state, [self.iterator])
        step = state.step
        assert (state.epoch, state.step_in_epoch) == divmod(step, STEPS_PER_EPOCH)
        for variable in self._variables:
            assert (variable.numpy() == step).all(), f"{variable.name} is not of step {step}"
        assert int(next(self.iterator)) == step
        self.iterator = iter(tf.data.Dataset.range(step, 2**40))
        return step

    def step(self) -> int:
        step = self.state.step + 1
        self.state.step = step
        self.state.epoch, self.state.step_in_epoch = divmod(step, STEPS_PER_EPOCH)
        for variable in self._variables:
            variable.assign(tf.cast(tf.fill(variable.shape, step), variable.dtype))
        next(self.iterator)
        return step

    def save(self) -> bool:
        return self.checkpoints.save(self.state, [self.iterator])


# --- kill -9 ---


def kill_saves(directory: pathlib.Path, rounds: int, seed: int = 0) -> list[str]:
    """Starts processes that save in a loop, and kills each one at a random moment.

    Returns:
        One line for each round.

    Raises:
        AssertionError: a loaded step was never saved, or is older than the last successful save.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.common.training.soak_saves"])
    draw = random.Random(seed)
    saved_step, lines = 0, []
    for _ in range(rounds):
        receiver, sender = context.Pipe()
        process = context.Process(target=_save_until_killed, args=(directory, sender))
        process.start()
        sender.close()
        step = receiver.recv()
        assert step in (saved_step, saved_step + 1), f"step {saved_step} was saved, but {step} was loaded"
        for _ in range(draw.randint(1, 4)):
            saved_step, seconds = receiver.recv()
        time.sleep(draw.random() * seconds)
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                saved_step, _ = receiver.recv()
        place = "a save" if any(directory.glob("checkpoints/.tmp-*")) else "between writing"
        lines.append(f"loaded step {step}, saved {saved_step}, killed in {place}")
    with context.Pool(1) as pool:
        assert pool.apply(_load, (directory,)) in (saved_step, saved_step + 1)
    return lines


def _save_until_killed(directory: pathlib.Path, pipe: Connection) -> None:
    subject = Subject(directory)
    pipe.send(subject.restore())
    while True:
        step = subject.step()
        start = time.monotonic()
        # Saves twice, as a training run does: before and after the evaluation.
        assert subject.save()
        assert subject.save()
        pipe.send((step, time.monotonic() - start))


def _load(directory: pathlib.Path) -> int:
    return Subject(directory).restore()


# --- full disks ---


def fill_disks(directory: pathlib.Path, rounds: int, seed: int = 0) -> list[str] | None:
    """Saves to a small disk that becomes full during a save.

    Returns:
        One line for each round, or None if this user may not mount a tmpfs.

    Raises:
        AssertionError: a failed save destroyed an earlier one, or stopped the run.
    """
    mount = f'mount -t tmpfs -o size=16m none "{directory}"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*namespace, mount], capture_output=True).returncode:
        return None
    module = "tests.common.training.soak_saves"
    script = [sys.executable, "-m", module, f"--disk={directory}", f"--rounds={rounds}", f"--seed={seed}"]
    command = [*namespace, f'{mount} && exec "$@"', "sh", *script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def _save_on(disk: pathlib.Path, rounds: int, seed: int) -> None:
    """`disk` is a small tmpfs in a separate mount namespace."""
    draw = random.Random(seed)
    run, filler = disk / "run", disk / "filler"
    subject = Subject(run)
    assert subject.restore() == 0
    subject.step()
    assert subject.save()
    size = sum(file.stat().st_size for file in saved_checkpoints(run / "checkpoints")[0].iterdir())
    for _ in range(rounds):
        step = subject.step()
        free = draw.randrange(int(size * 0.98))
        filler.write_bytes(bytes(max(shutil.disk_usage(disk).free - free, 0)))
        assert not subject.save()
        loaded_step = Subject(run).restore()
        assert loaded_step == step - 1, f"step {step - 1} was saved, but step {loaded_step} was loaded"
        print(f"{free / size:4.0%} of the room for step {step}: the save failed, loaded step {loaded_step}")
        filler.unlink()
        assert subject.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.disk:
        _save_on(arguments.disk, arguments.rounds, arguments.seed)
        return
    for soak in (kill_saves, fill_disks):
        with tempfile.TemporaryDirectory() as directory:
            lines = soak(pathlib.Path(directory), arguments.rounds, arguments.seed)
        print(*(lines or [f"{soak.__name__}: not run, this user may not mount a disk in memory"]), sep="\n")


if __name__ == "__main__":
    main()
