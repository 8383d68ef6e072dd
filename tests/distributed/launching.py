"""Starts real ranks for tests: horovodrun over Gloo on this machine, small, quiet and never left behind.

    result = launching.launch(2, [script, "--flag=value"], timeout=120)
    assert result.returncode == 0, result.stderr
    result.stdout_of(1)

    with launching.start(2, [script]) as job:  # a Popen
        os.kill(launching.rank_pids(job)[1], signal.SIGKILL)
        result = job.finish(timeout=60)

horovodrun gives every rank a session of its own, so neither its process group nor its children are all that
there is to kill. Each job carries a mark in its environment, which all its processes inherit.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[2]
MARK = "DETECTION_TEST_JOB"


class Result(NamedTuple):
    """What a job ended with. horovodrun's own code is 1 whatever code a rank ended with.

    Attributes:
        returncode: of horovodrun.
        stdout, stderr: of horovodrun and all ranks; each line of a rank begins with "[rank]<stdout>:".
    """

    returncode: int
    stdout: str
    stderr: str

    def stdout_of(self, rank: int) -> str:
        """What one rank printed, without the prefixes."""
        return _of_rank(self.stdout, rank, "stdout")

    def stderr_of(self, rank: int) -> str:
        return _of_rank(self.stderr, rank, "stderr")

    def exit_code_of(self, rank: int) -> int:
        """The exit code of a rank as horovodrun reports it; 128 + N for one that signal N ended."""
        found = re.search(rf"^Process {rank} exit with status code (\d+)\.", self.stdout, re.MULTILINE)
        return int(found[1]) if found else 0


class Job(subprocess.Popen):
    """horovodrun at work. Leaving the `with` kills whatever is left of the job.

    Its output goes to files: it can be read while the job runs, and never makes it wait.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], cwd: str | os.PathLike) -> None:
        self.mark = uuid.uuid4().hex
        self._outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed by __exit__)
        super().__init__(
            list(map(str, command)),
            env=env | {MARK: self.mark},
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
                said = "\n".join(self.output())
                raise AssertionError(f"{text!r} did not come {times} times: {self.args}\n{said[-5000:]}")
            time.sleep(0.05)

    def finish(self, timeout: float) -> Result:
        """Waits for the end; a job that takes longer is killed, and the test fails with its last words."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            said = "\n".join(self.output())
            raise AssertionError(f"not done after {timeout:g} s: {self.args}\n{said[-5000:]}") from None
        finally:
            self.kill_all()
        return Result(self.returncode, *self.output())

    def kill_all(self) -> None:
        """SIGKILL to every process of the job that is left, horovodrun first: it would report the rest."""
        if self.poll() is None:
            self.kill()
            self.wait()
        while left := _processes(self):
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=5)

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        super().__exit__(*error)
        for file in self._outputs:
            file.close()


def launch(
    np: int,
    arguments: Sequence[str | os.PathLike],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    cwd: str | os.PathLike = ROOT,
) -> Result:
    """Runs this Python with the arguments on `np` ranks, to the end.

    Args:
        np: ranks.
        arguments: of Python: a script and its flags.
        timeout: seconds; then everything is killed and the test fails.
        env: added to this process' environment and to what `start` sets.
        options: more options of horovodrun, for example ("-H", "localhost:1,127.0.0.1:1").
        cwd: where the ranks start.
    """
    with start(np, arguments, env=env, options=options, cwd=cwd) as job:
        return job.finish(timeout)


def start(
    np: int,
    arguments: Sequence[str | os.PathLike],
    *,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    cwd: str | os.PathLike = ROOT,
) -> Job:
    """Starts what `launch` runs, for tests that send signals; to be used in a `with`."""
    launcher = pathlib.Path(sys.executable).with_name("horovodrun")
    if not launcher.exists():
        raise AssertionError(f"{launcher} is not there: run `make horovod`")
    settings = {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # One thread a rank in an operation: the ranks share two cores, and sums come out the same every time.
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),  # whatever directory the script lies in
    }
    options = ["--gloo", "--disable-cache", *options]  # its cache is a directory in the user's home
    return Job(
        [launcher, *options, "-np", str(np), sys.executable, *arguments],
        {**os.environ, **settings, **(env or {})},
        cwd,
    )


def rank_pids(job: Job, np: int | None = None, timeout: float = 60) -> dict[int, int]:
    """The process of each rank that runs, not those it started itself: {rank: pid}.

    Args:
        job: of `start`.
        np: wait until so many run.
        timeout: seconds to wait.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = {}
        for process in _processes(job):
            rank = _environment(process).get("HOROVOD_RANK")
            # The launcher's helpers do not have it; a rank's own children inherit it.
            if rank is not None and "HOROVOD_RANK" not in _environment(_parent(process)):
                found[int(rank)] = process.pid
        if np is None or len(found) == np:
            return dict(sorted(found.items()))
        if job.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{len(found)} of {np} ranks run\n{job.output()[1][-5000:]}")
        time.sleep(0.05)


def _processes(job: Job) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == job.mark]


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


def _of_rank(text: str, rank: int, stream: str) -> str:
    prefix = f"[{rank}]<{stream}>:"
    return "".join(
        line.removeprefix(prefix) for line in text.splitlines(keepends=True) if line.startswith(prefix)
    )
