"""A run under Horovod Elastic loses a host, and gains one: both are this machine, by two names."""

import csv
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from tests.soak.soak_kills import SMALL, environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 240  # seconds; a run takes 30 on two idle cores
HOSTS = ("localhost", "127.0.0.1")
BATCH_SIZE, IMAGES, EPOCHS = 2, 12, 4
STEPS = {1: IMAGES // BATCH_SIZE, 2: IMAGES // BATCH_SIZE // 2}  # in an epoch, by the number of ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)

# Rank 1 has a problem of its own while rank 0 waits for it in an all-reduce.
ONE_FAILS = """
import types
from common import errors, progress
from common.distributed import elastic
import horovod.tensorflow as hvd, tensorflow as tf

def train(*_):
    progress.log(f"attempt with {hvd.size()}")
    if hvd.rank() == 1:
        raise errors.UserError("the disk of rank 1 is no good")
    hvd.allreduce(tf.ones(1))

errors.run(lambda: elastic.run(train, types.SimpleNamespace(strategy="horovod")))
"""


class Cluster:
    """horovodrun, elastic, with hosts that come and go."""

    def __init__(self, directory: pathlib.Path, hosts: tuple[str, ...], *command: str | pathlib.Path):
        self._hosts = directory / "hosts"
        self._log = directory / "log"
        script = directory / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat '{self._hosts}'\n")
        script.chmod(0o755)
        self.set_hosts(hosts)
        launcher = [pathlib.Path(sys.executable).with_name("horovodrun"), "--gloo", "--min-np", "1"]
        launcher += ["--max-np", "2", "-np", str(len(hosts)), "--host-discovery-script", script]
        # With two hosts horovodrun would ask them, one by one, which interface they share.
        launcher += ["--network-interface", "lo", "--blacklist-cooldown-range", "600", "601"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, *command],
                cwd=ROOT,
                env=environment() | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._deadline = time.monotonic() + TIMEOUT

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        """Kills whatever is left: horovodrun's ranks have sessions of their own."""
        try:
            processes = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        self.process.kill()
        self.process.wait()
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def set_hosts(self, hosts: tuple[str, ...]) -> None:
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{host}:1\n" for host in hosts))
        new.replace(self._hosts)

    def until(self, true: Callable[[], bool], what: str) -> None:
        while not true():
            assert time.monotonic() < self._deadline, f"no {what} in {TIMEOUT} s:\n{self.log}"
            time.sleep(0.05)

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.log or self.process.poll() is not None, text)
        assert text in self.log, self.log

    def wait(self) -> int:
        self.until(lambda: self.process.poll() is not None, "end")
        return self.process.returncode

    def kill_rank(self, rank: int) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
                is_training = len(words) > 1 and words[1].endswith("train.py")
                if is_training and process.environ()["HOROVOD_RANK"] == str(rank):
                    return process.kill()
            except psutil.Error:  # a script of horovodrun's that has just ended
                continue
        raise AssertionError(f"no rank {rank}:\n{self.log}")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("elastic") / "data"
    synthetic = [sys.executable, ROOT / "tools/synthetic.py", f"--output_dir={path}"]
    subprocess.run([*synthetic, f"--num_images={IMAGES}", "--seed=5"], check=True, capture_output=True)
    return path


def training(app: str, data: pathlib.Path, output_dir: pathlib.Path, *flags: str) -> list[str | pathlib.Path]:
    return [
        ROOT / app / "train.py",
        *SMALL[app],
        f"--train_images={data}/images",
        f"--train_annotations={data}/instances.json",
        f"--output_dir={output_dir}",
        f"--batch_size={BATCH_SIZE}",
        f"--epochs={EPOCHS}",
        "--save_every=2",
        "--num_threads=1",
        "--pipeline_type=dali_cpu",
        "--strategy=horovod",
        *flags,
    ]


def rows(output_dir: pathlib.Path) -> list[tuple[int, int]]:
    """(epoch, step at its end) of results.csv."""
    with (output_dir / "results.csv").open(newline="") as file:
        return [(int(row["epoch"]), int(row["step"])) for row in csv.DictReader(file)]


def last_manifest(output_dir: pathlib.Path) -> dict:
    manifests = [json.loads(path.read_text()) for path in output_dir.glob("checkpoints/*/manifest.json")]
    return max(manifests, key=lambda m: (m["state"]["epoch"], m["state"]["step_in_epoch"]))


def check(cluster: Cluster, output_dir: pathlib.Path, before: int, after: int) -> None:
    """The run went on from a whole epoch, on `after` ranks instead of `before`, to its end."""
    assert cluster.wait() == 0, cluster.log
    (epoch,) = map(int, re.findall(r"resumed after epoch (\d+) ", cluster.log))
    assert 0 < epoch < EPOCHS, cluster.log
    assert rows(output_dir) == [
        (e, e * STEPS[before if e <= epoch else after]) for e in range(1, EPOCHS + 1)
    ], cluster.log
    manifest = last_manifest(output_dir)
    assert (manifest["world_size"], manifest["state"]["epoch"]) == (after, EPOCHS)
    assert manifest["state"]["step"] == EPOCHS * STEPS[after]
    images = [int(n) for n in re.findall(r"learning rate \S+ = \S+ x (\d+) images", cluster.log)]
    assert images == [BATCH_SIZE * before, BATCH_SIZE * after]


def test_losing_a_host(data, tmp_path):
    """Rank 0, the one that writes: the other has to take its place."""
    run = tmp_path / "run"
    with Cluster(tmp_path, HOSTS, *training("efficientdet", data, run, "--elastic")) as cluster:
        cluster.until_said(f"epoch 2/{EPOCHS}")
        cluster.kill_rank(0)
        check(cluster, run, before=2, after=1)
        assert "with another num_ranks, num_replicas" in cluster.log


@pytest.fixture(scope="module")
def grown(data, tmp_path_factory) -> pathlib.Path:
    """The run directory of a run that one rank began and two finished."""
    directory = tmp_path_factory.mktemp("grown")
    run = directory / "run"
    with Cluster(directory, HOSTS[:1], *training("yolov4", data, run, "--elastic")) as cluster:
        cluster.until_said(f"epoch 1/{EPOCHS}")
        cluster.set_hosts(HOSTS)
        check(cluster, run, before=1, after=2)
        assert "with another num_ranks, num_replicas" in cluster.log
    return run


def test_a_new_host_joins(grown):
    assert rows(grown)[-1] == (EPOCHS, EPOCHS * STEPS[2])


def test_one_rank_goes_on_with_the_run_of_two(grown, data, tmp_path):
    run = shutil.copytree(grown, tmp_path / "run")
    command = [sys.executable, *training("yolov4", data, run, f"--epochs={EPOCHS + 1}")]
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": TIMEOUT}

    refused = subprocess.run(command, **options)
    assert refused.returncode == 1
    assert "num_replicas was 2 and is now 1" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr
    assert rows(run) == rows(grown)

    gone_on = subprocess.run([*command, "--elastic"], **options)
    assert gone_on.returncode == 0, gone_on.stderr
    assert f"resumed after epoch {EPOCHS} " in gone_on.stderr
    assert "with another num_ranks, num_replicas, steps_per_epoch" in gone_on.stderr
    assert rows(run) == [*rows(grown), (EPOCHS + 1, (EPOCHS + 1) * STEPS[1])]
    assert last_manifest(run)["world_size"] == 1


def test_an_error_of_one_rank_ends_all(tmp_path):
    with Cluster(tmp_path, HOSTS, "-c", ONE_FAILS) as cluster:
        assert cluster.wait() != 0
        assert cluster.log.count("error: the disk of rank 1 is no good") == 1, cluster.log
        assert cluster.log.count("attempt with") == 1, cluster.log
        assert "Process 0 exit with status code 1." in cluster.log
