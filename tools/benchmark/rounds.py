"""Runs candidates one after another, each in a process of its own, in interleaved rounds.

A candidate is any command that keeps to this protocol:

    it sets itself up, warms up by a few steps, and prints the line `ready`
    from then on it prints `step N` after every N images, flushed, until it is killed

Other lines are ignored. In each round every candidate is started, measured and killed, so that only one uses
the machine. Every second round runs them in reverse order: a machine that slows down slows all of them.
"""

import contextlib
import os
import pathlib
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import psutil

START_TIMEOUT = 1800.0  # seconds until `ready`: data are checked, a network is compiled
STEP_TIMEOUT = 600.0  # seconds between two steps
_STEP = re.compile(rb"step (\d+)$")


class CandidateError(Exception):
    """A candidate cannot be measured. The message is one line with the reason."""


class Command(NamedTuple):
    """How a candidate is started.

    Attributes:
        name: its name in reports.
        arguments: program and arguments.
        settle: steps to skip before the clock starts: batches that a loader prefetched during the warm-up.
    """

    name: str
    arguments: Sequence[str]
    settle: int = 1


class Window(NamedTuple):
    """What one candidate did in one round."""

    images: int
    seconds: float
    cpu_seconds: float  # user and system, of all its processes
    other_cpu_seconds: float = 0.0  # of everything else on this machine


class Measured(NamedTuple):
    """What one candidate did in all rounds.

    Attributes:
        windows: one for each round; none where it failed.
        peak_bytes: highest resident memory of a round, summed over its processes, start-up included.
        error: why it failed, one line; "" where it did not.
    """

    windows: list[Window]
    peak_bytes: int
    error: str


class Candidate:
    """A started command.

    Args:
        command: what to start.
        log: file for its stderr.

    Raises:
        CandidateError: it cannot be started.
    """

    def __init__(self, command: Command, log: pathlib.Path) -> None:
        self._settle = command.settle
        self._log = log
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            with log.open("wb") as stderr:
                self._process = psutil.Popen(
                    command.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    process_group=0,
                )
        except OSError as error:
            raise CandidateError(f"cannot be started: {error.strerror}: {command.arguments[0]}") from error
        threading.Thread(target=self._read, daemon=True).start()

    def line(self, timeout: float) -> bytes:
        """The next line of its output.

        Raises:
            CandidateError: none within `timeout` seconds, or it has ended.
        """
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise CandidateError(f"no line from it within {timeout:.0f} s: {self._last_words()}") from None
        if line is None:
            raise CandidateError(self._why_ended())
        return line

    def wait_until_ready(self) -> None:
        """Waits for `ready`; CandidateError if it ends or takes longer than START_TIMEOUT."""
        while self.line(START_TIMEOUT) != b"ready":
            pass

    def window(self, seconds: float) -> Window:
        """Measures whole steps that take at least so many seconds together."""
        start = time.monotonic()
        for settled in range(self._settle):
            if settled and time.monotonic() - start > seconds / 2:
                break  # the queue of a loader with such slow steps is soon full again
            self._step()
        start, cpu, machine = time.monotonic(), self.usage()[0], _machine_cpu_seconds()
        images, end = 0, start
        while end - start < seconds:
            images += self._step()
            end = time.monotonic()
        cpu, machine = self.usage()[0] - cpu, _machine_cpu_seconds() - machine
        return Window(images, end - start, cpu, max(machine - cpu, 0.0))

    def usage(self) -> tuple[float, int]:
        """CPU seconds, ended children included, and peak resident bytes, summed over all its processes."""
        cpu_seconds, peak = 0.0, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._process, *self._process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    times = process.cpu_times()
                    cpu_seconds += times.user + times.system + times.children_user + times.children_system
                    # psutil has the current memory only; VmHWM is the peak (proc(5)).
                    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                    found = re.search(r"VmHWM:\s+(\d+) kB", status)
                    peak += int(found[1]) * 1024 if found else 0
        return cpu_seconds, peak

    def close(self) -> None:
        """Kills it and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip(b"\n"))
        self._lines.put(None)

    def _step(self) -> int:
        """Waits for a step; returns its number of images."""
        while not (found := _STEP.match(self.line(STEP_TIMEOUT))):
            pass
        return int(found[1])

    def _why_ended(self) -> str:
        try:
            code = self._process.wait(10)
        except psutil.TimeoutExpired:
            return "it has closed its output"
        if code == -signal.SIGKILL:
            return "killed, as the system does where memory runs out"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}: {self._last_words()}"
        return f"exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        """The last line of stderr, or our own error message where there is one."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its stderr is empty"])[-1]


@contextlib.contextmanager
def started(command: Command, log: pathlib.Path) -> Iterator[Candidate]:
    """A running candidate, killed at the end of the block; see `Candidate`."""
    candidate = Candidate(command, log)
    try:
        yield candidate
    finally:
        candidate.close()


def measure(
    commands: Sequence[Command],
    *,
    rounds: int,
    seconds: float,
    logs: pathlib.Path,
    log: Callable[[str], None],
) -> dict[str, Measured]:
    """Measures all candidates, `rounds` times.

    Args:
        commands: names must differ.
        rounds: how often each is started.
        seconds: length of a window, at least.
        logs: an existing directory for their stderr.
        log: takes a line about each step.

    Returns:
        By name, in the order of `commands`. One that fails has an error and no windows; the others go on.
    """
    windows: dict[str, list[Window]] = {command.name: [] for command in commands}
    peaks, errors = dict.fromkeys(windows, 0), dict.fromkeys(windows, "")
    for number in range(rounds):
        for command in commands[::-1] if number % 2 else commands:
            name = command.name
            if errors[name]:
                continue
            log(f"round {number + 1} of {rounds}: starting {name}")
            try:
                with started(command, logs / "stderr.txt") as candidate:
                    candidate.wait_until_ready()
                    window = candidate.window(seconds)
                    peaks[name] = max(peaks[name], candidate.usage()[1])
            except CandidateError as error:
                errors[name] = str(error)
                log(f"  {name} failed: {error}")
                continue
            windows[name].append(window)
            log(f"  {name}: {window.images / window.seconds:.4g} images/s")
    return {
        name: Measured([], 0, errors[name]) if errors[name] else Measured(windows[name], peaks[name], "")
        for name in windows
    }


def _machine_cpu_seconds() -> float:
    """CPU time of everything on this machine since its start, and what its host took from it (steal)."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal
