"""Starts real ranks for tests, on this machine, small and quiet, and leaves none behind.

    result = launching.launch(2, [script, "--flag=value"], timeout=120)  # by horovodrun over Gloo
    assert result.returncode == 0, result.stderr
    result.stdout_of(1)

    with launching.start(2, [script]) as job:  # a Popen
        job.wait_for("ready", times=2)
        os.kill(launching.rank_pids(job)[1], signal.SIGKILL)
        result = job.finish(timeout=60)

    with launching.start_workers([script]) as (first, second):  # two processes of tf.distribute, by TF_CONFIG
        result = first.finish(timeout=60)

horovodrun gives every rank a session of its own, so neither its process group nor its children are all that
there is to kill. Each job carries a mark in its environment, which all its processes inherit.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = "DETECTION_TEST_JOB"
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # One thread a rank in an operation: the ranks share two cores, and sums come out the same every time.
    "TF_NUM_INTRAOP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


class Result(NamedTuple):
    """What a job ended with. horovodrun's code is 1 whatever code a rank ended with."""

    returncode: int
    stdout: str
    stderr: str

    def stdout_of(self, rank: int) -> str:
        """What one rank of horovodrun printed, without the prefix of each line."""
        return "".join(re.findall(rf"^\[{rank}\]<stdout>:(.*\n?)", self.stdout, re.MULTILINE))

    def stderr_of(self, rank: int) -> str:
        return "".join(re.findall(rf"^\[{rank}\]<stderr>:(.*\n?)", self.stderr, re.MULTILINE))


class Job(subprocess.Popen):
    """A command at work, with all processes that it starts. Leaving the `with` kills what is left of them.

    Its output goes to files: it can be read while the job runs, and never makes it wait.
    """

    def __init__(
        self, command: Sequence[str | os.PathLike], env: Mapping[str, str], cwd: str | os.PathLike = ROOT
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed by __exit__)
        super().__init__(
            list(map(str, command)),
            env={**os.environ, **env, MARK: self.mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
            start_new_session=True,
        )

    def output(self) -> tuple[str, str]:
        """stdout and stderr so far."""
        sizes = [os.fstat(file.fileno()).st_size for file in self._outputs]
        # pread leaves alone the position in the file, which the job shares.
        read = [os.pread(file.fileno(), size, 0) for file, size in zip(self._outputs, sizes, strict=True)]
        return read[0].decode(errors="replace"), read[1].decode(errors="replace")

    def wait_for(self, text: str, times: int = 1, timeout: float = 120) -> None:
        """Waits until the ranks have printed a text so many times, all together."""
        deadline = time.monotonic() + timeout
        while self.output()[0].count(text) < times:
            if self.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not come {times} times: {self._last_words()}")
            time.sleep(0.05)

    def finish(self, timeout: float) -> Result:
        """Waits for the end; a job that takes longer is killed, and the test fails with its last words."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout:g} s: {self._last_words()}") from None
        finally:
            self.kill_all()
        return Result(self.returncode, *self.output())

    def processes(self) -> list[psutil.Process]:
        """All that run, the command itself among them."""
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == self.mark]

    def kill_all(self) -> None:
        """SIGKILL to every process that is left, horovodrun first: it would report the rest."""
        if self.poll() is None:
            self.kill()
            self.wait()
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)

    def _last_words(self) -> str:
        said = "\n".join(self.output())
        return f"{self.args}\n{said[-5000:]}"

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        super().__exit__(*error)
        for file in self._outputs:
            file.close()


def start(
    np: int,
    arguments: Sequence[str | os.PathLike],
    *,
    options: Sequence[str | os.PathLike] = (),
    cwd: str | os.PathLike = ROOT,
) -> Job:
    """Starts this Python with the arguments on `np` ranks, by horovodrun with more options."""
    launcher = [sys.executable, ROOT / "tests/distributed/horovodrun.py"]
    options = ["--gloo", "--disable-cache", *options]  # its cache is a directory in the user's home
    return Job([*launcher, *options, "-np", str(np), sys.executable, *arguments], SETTINGS, cwd)


def launch(np: int, arguments: Sequence[str | os.PathLike], *, timeout: float, **options: object) -> Result:
    """Runs what `start` starts to its end; after `timeout` seconds all is killed and the test fails."""
    with start(np, arguments, **options) as job:
        return job.finish(timeout)


def start_alone(arguments: Sequence[str | os.PathLike], **env: str) -> Job:
    """Starts this Python with the arguments as one process, without a launcher."""
    return Job([sys.executable, *arguments], {**SETTINGS, **env})


@contextlib.contextmanager
def start_workers(arguments: Sequence[str | os.PathLike], indexes: Sequence[int] = (0, 1)) -> Iterator:
    """Starts some of the two workers of a cluster of tf.distribute: a Job for each index.

    Their ports stay bound here, without listening, so that no other process can get one before its worker
    does; TensorFlow shares a port only where TF_GRPC_REUSE_PORT asks for it.
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


def rank_pids(job: Job) -> dict[int, int]:
    """{rank: pid} of the ranks that run under horovodrun by now; not what they start themselves."""
    found = {}
    for process in job.processes():
        rank = _environment(process).get("HOROVOD_RANK")
        # The launcher's helpers do not have it; a rank's own children inherit it.
        if rank is not None and "HOROVOD_RANK" not in _environment(_parent(process)):
            found[int(rank)] = process.pid
    return dict(sorted(found.items()))


def _environment(process: psutil.Process | None) -> dict[str, str]:
    try:
        return process.environ() if process and process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None
