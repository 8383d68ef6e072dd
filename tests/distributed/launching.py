"""Starts ranks for tests as processes on this machine's CPU, and kills all processes that remain.

    result = launching.launch(2, [script, "--flag=value"], timeout=120)  # by horovodrun over Gloo
    assert result.returncode == 0, result.stderr
    result.stdout_of(1)

    with launching.start(2, [script]) as job:  # a subprocess.Popen
        job.wait_for("ready", times=2)
        os.kill(launching.rank_pids(job)[1], signal.SIGKILL)
        result = job.finish(timeout=60)

    with launching.start_workers([script]) as (first, second):  # two workers of tf.distribute
        result = first.finish(timeout=60)

    results = launching.run_two_replicas("mirrored", [script], timeout=60)  # two CPU devices of one process

Each rank has a separate session, so processes are found by an environment variable that they inherit.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil

Words = Sequence[str | os.PathLike]
ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = "DETECTION_TEST_JOB"
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
# With one thread, a rank adds numbers in the same order every time.
SETTINGS |= {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
# Splits the CPU into two devices in place of two GPUs, then runs the command line.
TWO_DEVICES = """
import sys, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Result(NamedTuple):
    """horovodrun exits with 1 if any rank fails."""

    returncode: int
    stdout: str
    stderr: str

    def stdout_of(self, rank: int) -> str:
        """Returns the lines of one rank, without their prefix."""
        return "".join(re.findall(rf"^\[{rank}\]<stdout>:(.*\n?)", self.stdout, re.MULTILINE))

    def stderr_of(self, rank: int) -> str:
        return "".join(re.findall(rf"^\[{rank}\]<stderr>:(.*\n?)", self.stderr, re.MULTILINE))


class Job(subprocess.Popen):
    """A command and all its processes. The end of the `with` block kills them.

    The output goes to files, because a full pipe would block the job.
    """

    def __init__(self, command: Words, env: Mapping[str, str], cwd: os.PathLike = ROOT) -> None:
        self.mark = uuid.uuid4().hex
        self._outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed by __exit__)
        env = {**os.environ, **env, MARK: self.mark}
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._outputs[0], "stderr": self._outputs[1]}
        super().__init__(list(map(str, command)), env=env, cwd=cwd, start_new_session=True, **streams)

    def output(self) -> tuple[str, str]:
        """Returns stdout and stderr so far."""
        sizes = [os.fstat(file.fileno()).st_size for file in self._outputs]
        contents = [os.pread(file.fileno(), size, 0) for file, size in zip(self._outputs, sizes, strict=True)]
        return contents[0].decode(errors="replace"), contents[1].decode(errors="replace")

    def wait_for(self, text: str, times: int = 1, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while self.output()[0].count(text) < times:
            if self.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not printed {times} times: {self._last_output()}")
            time.sleep(0.05)

    def finish(self, timeout: float) -> Result:
        """Kills the job after `timeout` seconds, and fails."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout:g} s: {self._last_output()}") from None
        finally:
            self.kill_all()
        return Result(self.returncode, *self.output())

    def processes(self) -> list[psutil.Process]:
        processes = psutil.process_iter(["environ"])
        return [process for process in processes if (process.info["environ"] or {}).get(MARK) == self.mark]

    def kill_all(self) -> None:
        """Kills horovodrun first, so that it does not report that ranks died."""
        if self.poll() is None:
            self.kill()
            self.wait()
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=5)

    def _last_output(self) -> str:
        return f"{self.args!r}\n{''.join(self.output())[-5000:]}"

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        super().__exit__(*error)
        for file in self._outputs:
            file.close()


def start(np: int, arguments: Words, options: Words = ()) -> Job:
    """Runs Python with the arguments on `np` ranks of horovodrun."""
    # --disable-cache, because horovodrun's cache would be written to the user's home directory.
    horovodrun = [sys.executable, ROOT / "tests/distributed/horovodrun.py", "--gloo", "--disable-cache"]
    return Job([*horovodrun, *options, "-np", str(np), sys.executable, *arguments], SETTINGS)


def launch(np: int, arguments: Words, *, timeout: float, options: Words = ()) -> Result:
    with start(np, arguments, options) as job:
        return job.finish(timeout)


def start_alone(arguments: Words, **env: str) -> Job:
    return Job([sys.executable, *arguments], {**SETTINGS, **env})


@contextlib.contextmanager
def start_workers(arguments: Words, indexes: Sequence[int] = (0, 1)) -> Iterator:
    """Starts workers of a tf.distribute cluster; yields a Job for each of `indexes`.

    This process also binds the workers' ports, so that no other program can get them.
    """
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(2):
            port = stack.enter_context(socket.socket())
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{port.getsockname()[1]}")
        jobs = []
        for index in indexes:
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            job = start_alone(arguments, TF_CONFIG=json.dumps(config), TF_GRPC_REUSE_PORT="1")
            jobs.append(stack.enter_context(job))
        yield jobs


def run_two_replicas(strategy: str, arguments: Words, *, timeout: float) -> list[Result]:
    """Returns a Result for each process."""
    if strategy == "horovod":
        results = [launch(2, arguments, timeout=timeout)]
    elif strategy == "mirrored":
        with start_alone(["-c", TWO_DEVICES, *arguments]) as job:
            results = [job.finish(timeout)]
    else:
        with start_workers(arguments) as jobs:
            results = [job.finish(timeout) for job in jobs]
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]
    return results


def rank_pids(job: Job) -> dict[int, int]:
    """Returns {rank: pid}, without child processes."""
    pids = {}
    for process in job.processes():
        # A process whose parent also has this variable is a child of a rank.
        with contextlib.suppress(psutil.Error, KeyError):
            if "HOROVOD_RANK" not in psutil.Process(process.ppid()).environ():
                pids[int(process.environ()["HOROVOD_RANK"])] = process.pid
    return dict(sorted(pids.items()))
