"""Stops training runs at random steps, starts them again, and compares what they end with, bit by bit.

    python tests/soak/soak_kills.py --app=efficientdet --ranks=2 --rounds=20

`make soak` runs it for both apps, alone and with two ranks; the tests call `stop_and_resume` for one round.
A round is one run: stopped three times somewhere, by SIGKILL, by SIGTERM or SIGINT, and by SIGKILL, and
started again by the same command each time, until it is done. With two ranks SIGKILL hits one, which has to
end the other, or both; a signal that asks to stop goes to one rank or to both.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil

ROOT = pathlib.Path(__file__).resolve().parents[2]
EPOCHS, STEPS, SAVE_EVERY = 2, 8, 2
SMALL = {  # trained with everything that a checkpoint has to hold
    "efficientdet": (
        "--model_name=efficientdet-nano",
        "--image_size=128",
        "--hparams=fpn_cells=1,head_repeats=1,max_level=5,optimizer=sgd",
    ),
    "yolov4": (
        "--model_name=yolov4-nano",
        "--image_size=64",
        "--close_mosaic=1",  # the loader changes between the epochs
        "--hparams=width=0.25,optimizer=sgd",
    ),
}


def command(app: str, ranks: int, data: pathlib.Path, output_dir: pathlib.Path, *flags: str) -> list[str]:
    """The training run as a user would type it."""
    launcher = [str(pathlib.Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(ranks)]
    return [
        *(launcher if ranks > 1 else []),
        sys.executable,
        str(ROOT / app / "train.py"),
        *SMALL[app],
        f"--train_images={data}/images",
        f"--train_annotations={data}/instances.json",
        f"--eval_images={data}/images",
        f"--eval_annotations={data}/instances.json",
        f"--output_dir={output_dir}",
        "--batch_size=2",
        f"--epochs={EPOCHS}",
        f"--steps_per_epoch={STEPS}",
        f"--save_every={SAVE_EVERY}",
        "--eval_every=0",
        "--ema_decay=0.9",
        "--num_threads=1",
        "--pipeline_type=dali_cpu",
        "--step_timeout=120",
        f"--strategy={'horovod' if ranks > 1 else 'none'}",
        *flags,
    ]


def environment() -> dict[str, str]:
    """Quiet, without a GPU, and with `horovodrun`'s python on PATH."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": path}


def start(arguments: list[str], log: pathlib.Path) -> subprocess.Popen:
    """Starts a run in a session of its own, which can be killed as a whole."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            arguments, env=environment(), stdout=stream, stderr=stream, start_new_session=True
        )


def run(arguments: list[str], log: pathlib.Path, seconds: float = 300) -> int:
    """Runs to the end; the exit code."""
    process = start(arguments, log)
    try:
        return process.wait(seconds)
    finally:
        end(process)


def rank_processes(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """The training processes of a run by their ranks; those that are starting or gone are left out."""
    found = {}
    try:
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for child in everyone:
        try:
            words = child.cmdline()
            if len(words) > 1 and words[1].endswith("train.py"):
                found[int(child.environ().get("HOROVOD_RANK", 0))] = child
        except psutil.Error:
            continue
    return found


def end(process: subprocess.Popen) -> None:
    """Kills whatever of a run is left; horovodrun's ranks have sessions of their own."""
    leftovers = list(rank_processes(process).values())
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for rank in leftovers:
        try:
            rank.kill()
        except psutil.NoSuchProcess:
            continue


def saved_steps(output_dir: pathlib.Path) -> list[int]:
    """Steps of the checkpoints that stand."""
    return sorted({int(path.stem) for path in output_dir.glob("checkpoints/[0-9]*")})


def what_it_ends_with(output_dir: pathlib.Path) -> dict[str, str]:
    """Hashes of every array of the last checkpoint and weights, by name; and the whole of results.csv."""
    import h5py
    import tensorflow as tf

    arrays: dict[str, np.ndarray] = {}
    manifests = output_dir.glob("checkpoints/[0-9]*/manifest.json")
    newest = max(manifests, key=lambda path: json.loads(path.read_text())["serial"]).parent
    for index in newest.glob("*.index"):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        for name in reader.get_variable_to_shape_map():
            if "iterator" not in name.lower() and "OBJECT_GRAPH" not in name:
                arrays[f"{index.stem}:{name}"] = reader.get_tensor(name)
    for file in ("last.weights.h5", "best.weights.h5"):
        with h5py.File(output_dir / file) as weights:
            weights.visititems(
                lambda name, item, file=file: (
                    arrays.update({f"{file}:{name}": item[()]}) if isinstance(item, h5py.Dataset) else None
                )
            )
    hashes = {name: hashlib.sha256(np.asarray(a).tobytes()).hexdigest() for name, a in arrays.items()}
    rows = (output_dir / "results.csv").read_text().splitlines()
    speed = rows[0].split(",").index("images_per_second")
    hashes["results.csv"] = json.dumps(
        [[*row[:speed], *row[speed + 1 :]] for row in (r.split(",") for r in rows)]
    )
    return hashes


def stop_and_resume(
    app: str, ranks: int, *, rounds: int, directory: pathlib.Path, seed: int = 0, flags: tuple[str, ...] = ()
) -> list[str]:
    """Runs once unbroken, and `rounds` times stopped three times and started again.

    Args:
        app: efficientdet or yolov4.
        ranks: 1, or processes under horovodrun.
        rounds: runs that are broken.
        directory: for data, runs and logs.
        seed: of the places where they are stopped.
        flags: more of train.py.

    Returns:
        One line for each round: where it was stopped.

    Raises:
        AssertionError: a run failed, or ended with anything else than the unbroken one.
    """
    data = directory / "data"
    if not data.exists():
        synthetic = [sys.executable, ROOT / "tools/synthetic.py", f"--output_dir={data}"]
        subprocess.run([*synthetic, "--num_images=37", "--seed=5"], check=True, capture_output=True)
    log = directory / "unbroken.log"
    unbroken = directory / "unbroken"
    assert run(command(app, ranks, data, unbroken, *flags), log) == 0, log.read_text()
    wanted = what_it_ends_with(unbroken)
    draw = random.Random(seed)
    lines = []
    for number in range(rounds):
        broken = directory / f"broken_{number}"
        log = directory / f"broken_{number}.log"
        arguments = command(app, ranks, data, broken, *flags)
        places = []
        for how in ("SIGKILL", draw.choice(["SIGTERM", "SIGINT"]), "SIGKILL"):
            process = start(arguments, log)
            try:
                places.append(_stop_somewhere(process, broken, ranks, how, draw))
            finally:
                end(process)
            if how != "SIGKILL" and not places[-1].startswith("ended"):
                _check_that_it_was_saved(process.returncode, ranks, log.read_text())
        assert run(arguments, log) == 0, log.read_text()
        found = what_it_ends_with(broken)
        different = sorted(
            name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
        )
        assert not different, f"{places}: {len(different)} of {len(wanted)} differ: {different[:5]}"
        shutil.rmtree(broken)
        lines.append(f"{app}, {ranks} ranks, round {number}: {'; '.join(places)}: bit-equal")
    return lines


def _stop_somewhere(
    process: subprocess.Popen, output_dir: pathlib.Path, ranks: int, how: str, draw: random.Random
) -> str:
    """Waits for a checkpoint, then for a moment, then sends the signal; says where."""
    before = (saved_steps(output_dir) or [0])[-1]
    ahead = [step for step in range(before + 1, EPOCHS * STEPS + 1) if step % SAVE_EVERY == 0]
    awaited = draw.choice(ahead[: max(len(ahead) // 2, 1)] or [before])  # leaving some for the next time
    victims: dict[int, psutil.Process] = {}
    while process.poll() is None and (saved_steps(output_dir) or [-1])[-1] < awaited:
        if len(victims) < ranks:  # looked for before the moment comes: looking takes longer than a step
            victims = rank_processes(process)
        time.sleep(0.005)
    time.sleep(draw.random() * 0.1)
    if ranks > 1 and victims and draw.random() < 0.7:  # one of them; the others have to notice
        victims = {rank: victims[rank] for rank in draw.sample(sorted(victims), 1)}
    for victim in victims.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(getattr(signal, how))
    process.wait(120)
    reached = (saved_steps(output_dir) or [0])[-1]
    if process.returncode == 0:
        return "ended before it was hit"
    return f"{how} to rank {' and '.join(map(str, sorted(victims)))}, saved was step {reached}"


def _check_that_it_was_saved(returncode: int, ranks: int, log: str) -> None:
    """Exit code 75 of the ranks; horovodrun has a code of its own and tells the first rank's."""
    assert "saved after step" in log, log
    if ranks == 1:
        assert returncode == 75, log
    else:
        assert "Exit code: 75" in log, log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--app", choices=sorted(SMALL), required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        lines = stop_and_resume(
            given.app, given.ranks, rounds=given.rounds, directory=pathlib.Path(directory), seed=given.seed
        )
        print(*lines, sep="\n")
        print(f"{len(lines)} of {given.rounds} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
