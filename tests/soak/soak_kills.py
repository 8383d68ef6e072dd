"""Stops training runs at random steps, restarts them, and compares their results with a run without stops.

    python -m tests.soak.soak_kills --app=efficientdet --ranks=2 --rounds=20

A round is one run, which is stopped three times: by SIGKILL, by SIGTERM or SIGINT, and by SIGKILL. With two
ranks, one or both get the signal. If SIGKILL ends one rank, the other must end, too.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time

import numpy as np
import tensorflow as tf

from tests.common.training.small_model import weights_of
from tests.distributed import launching
from tests.small_apps import TINY, training_flags
from tools import synthetic

EPOCHS, STEPS, SAVE_EVERY = 2, 8, 2
HANG = 1200  # seconds for a run that takes 10 to 20; a busy machine must not end it
SETTINGS = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "save_every": SAVE_EVERY}
SETTINGS |= {"eval_every": 0, "ema_decay": 0.9}
APP_FLAGS = {  # the last epoch of yolov4 needs another loader
    "efficientdet": (),
    "yolov4": ("--close_mosaic=1", f"--hparams={TINY['yolov4']},mosaic_prob=0.5"),
}


def command(app: str, ranks: int, data: pathlib.Path, output_dir: pathlib.Path, *flags: str) -> list[str]:
    """Returns a training command whose flags put all kinds of state into a checkpoint."""
    options = training_flags(app, data, output_dir, "horovod" if ranks > 1 else "none", batch_size=2)
    options += [f"--eval_images={data}/images", f"--eval_annotations={data}/instances.json"]
    options += [f"--{name}={value}" for name, value in SETTINGS.items()]
    return [str(launching.ROOT / app / "train.py"), *options, *APP_FLAGS[app], *flags]


def start(ranks: int, arguments: list[str]) -> launching.Job:
    return launching.start(ranks, arguments) if ranks > 1 else launching.start_alone(arguments)


def run(ranks: int, arguments: list[str]) -> None:
    with start(ranks, arguments) as job:
        result = job.finish(HANG)
    assert result.returncode == 0, result.stdout + result.stderr


def saved_steps(output_dir: pathlib.Path) -> list[int]:
    return sorted({int(path.stem) for path in output_dir.glob("checkpoints/[0-9]*")})


def final_state(output_dir: pathlib.Path) -> dict[str, str]:
    """Returns hashes of the arrays in the last checkpoint and the weights, and results.csv's rows."""
    arrays = {}
    manifests = output_dir.glob("checkpoints/[0-9]*/manifest.json")
    newest = max(manifests, key=lambda path: json.loads(path.read_text())["serial"]).parent
    for index in newest.glob("*.index"):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        for name in reader.get_variable_to_shape_map():
            if "iterator" not in name.lower() and "OBJECT_GRAPH" not in name:
                arrays[f"{index.stem}:{name}"] = np.asarray(reader.get_tensor(name))
    for file in output_dir.glob("*.weights.h5"):
        weights = weights_of(file, kinds="biufSO")
        arrays |= {f"{file.name}:{name}": np.asarray(array) for name, array in weights.items()}
    hashes = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    with (output_dir / "results.csv").open() as file:
        rows = [{**row, "images_per_second": ""} for row in csv.DictReader(file)]
    return hashes | {"results.csv": json.dumps(rows)}


def stop_and_resume(
    app: str,
    ranks: int,
    *,
    rounds: int,
    directory: pathlib.Path,
    seed: int = 0,
    flags: tuple[str, ...] = (),
    stops_per_round: int = 3,
) -> list[str]:
    """Compares a run without a stop with `rounds` runs that are stopped `stops_per_round` times.

    Returns:
        One line for each round, with the steps at which it was stopped.

    Raises:
        AssertionError: a run failed, or its results differ.
    """
    data = directory / "data"
    synthetic.draw_dataset(data, 37, seed=5)
    unbroken = directory / "unbroken"
    run(ranks, command(app, ranks, data, unbroken, *flags))
    expected = final_state(unbroken)
    draw = random.Random(seed)
    lines = []
    for number in range(rounds):
        broken = directory / f"broken_{number}"
        arguments = command(app, ranks, data, broken, *flags)
        stops = []
        signal_names = "SIGKILL", draw.choice(["SIGTERM", "SIGINT"]), "SIGKILL"
        for signal_name in signal_names[:stops_per_round]:
            with start(ranks, arguments) as job:
                stops.append(_stop_at_random_step(job, broken, ranks, signal_name, draw))
        run(ranks, arguments)
        result = final_state(broken)
        names = sorted(expected.keys() | result.keys())
        different = [name for name in names if expected.get(name) != result.get(name)]
        assert not different, f"{stops}: {len(different)} of {len(expected)} differ: {different[:5]}"
        shutil.rmtree(broken)
        lines.append(f"{app}, {ranks} ranks, round {number}: {'; '.join(stops)}: bit-equal")
    return lines


def _stop_at_random_step(
    job: launching.Job, output_dir: pathlib.Path, ranks: int, signal_name: str, draw: random.Random
) -> str:
    """Signals some ranks at a random step. Returns the signal, the ranks and the last saved step."""
    last_saved = (saved_steps(output_dir) or [0])[-1]
    later_saves = [step for step in range(last_saved + 1, EPOCHS * STEPS + 1) if step % SAVE_EVERY == 0]
    awaited_step = draw.choice(later_saves[: max(len(later_saves) // 2, 1)] or [last_saved])
    while job.poll() is None and (saved_steps(output_dir) or [-1])[-1] < awaited_step:
        time.sleep(0.02)
    pids = launching.rank_pids(job) if ranks > 1 else {0: job.pid}
    time.sleep(draw.random() * 0.1)
    if ranks > 1 and pids and draw.random() < 0.7:
        pids = {rank: pids[rank] for rank in draw.sample(sorted(pids), 1)}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, signal_name))
    result = job.finish(HANG)
    if result.returncode == 0:
        return "ended before the signal"
    if signal_name != "SIGKILL":
        output = result.stdout + result.stderr
        assert "saved after step" in output, output
        # With more ranks, horovodrun prints the exit code.
        assert "Exit code: 75" in output if ranks > 1 else result.returncode == 75, output
    saved_step = (saved_steps(output_dir) or [0])[-1]
    return f"{signal_name} to rank {' and '.join(map(str, sorted(pids)))}, saved was step {saved_step}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--app", choices=sorted(APP_FLAGS), required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        print(*stop_and_resume(a.app, a.ranks, rounds=a.rounds, directory=path, seed=a.seed), sep="\n")


if __name__ == "__main__":
    main()
