"""Runs candidates one after another, each in a separate process, in interleaved rounds.

A candidate is any command that keeps to this protocol:

    it sets itself up, warms up by a few steps, and prints the line `ready`
    from then on it prints `step N` after every N images, flushed, until it is killed

Other lines are ignored. In each round every candidate is started, measured and killed, so that only one uses
the machine. Every second round runs them in reverse order: a machine that slows down slows all of them.
"""

import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil

from common.progress import log
from tools.benchmark import summary
from tools.benchmark.summary import Record, Window

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


def measure(
    commands: Sequence[Command], *, rounds: int, seconds: float, logs: pathlib.Path
) -> dict[str, Record]:
    """Measures all candidates, `rounds` times.

    Args:
        commands: names must differ.
        rounds: how often each is started.
        seconds: length of a window, at least.
        logs: an existing directory for their stderr.

    Returns:
        By name, in the order of `commands`: summary.candidate. One that fails has the record
        {"error": reason}, and the others go on.
    """
    windows: dict[str, list[Window]] = {command.name: [] for command in commands}
    peaks, failed = dict.fromkeys(windows, 0), {}
    for number in range(rounds):
        for command in commands[::-1] if number % 2 else commands:
            name = command.name
            if name in failed:
                continue
            log(f"round {number + 1} of {rounds}: starting {name}")
            try:
                with contextlib.closing(Candidate(command, logs)) as candidate:
                    while candidate.line(START_TIMEOUT) != b"ready":
                        pass
                    window = candidate.window(seconds)
                    peaks[name] = max(peaks[name], candidate.usage()[1])
            except CandidateError as error:
                failed[name] = _failure(name, error)
                continue
            windows[name].append(window)
            log(f"  {name}: {window.images / window.seconds:.4g} images/s")
    return {name: failed.get(name) or summary.candidate(windows[name], peaks[name]) for name in windows}


def result(command: Command, logs: pathlib.Path) -> Any:
    """What a command that measures prints at its end, one line of JSON; {"error": reason} where it fails."""
    log(f"starting {command.name}")
    try:
        with contextlib.closing(Candidate(command, logs)) as candidate:
            return json.loads(candidate.line(None))
    except CandidateError as error:
        return _failure(command.name, error)


def _failure(name: str, error: CandidateError) -> Record:
    log(f"  {name} failed: {error}")
    return {"error": str(error)}


class Candidate:
    """A running command.

    Args:
        command: what to start.
        logs: directory for its stderr.

    Raises:
        CandidateError: it cannot be started.
    """

    def __init__(self, command: Command, logs: pathlib.Path) -> None:
        self._settle = command.settle
        self._log = logs / "stderr.txt"
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            with self._log.open("wb") as stderr:
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

    def close(self) -> None:
        """Kills it and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def line(self, timeout: float | None) -> bytes:
        """The next line of its output.

        Raises:
            CandidateError: none within `timeout` seconds (None: no limit), or it has ended.
        """
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise CandidateError(f"no line from it within {timeout:.0f} s: {self._last_words()}") from None
        if line is None:
            raise CandidateError(self._why_ended())
        return line

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
                    cpu_seconds += sum(process.cpu_times()[:4])  # user and system; the same of children
                    # psutil has the current memory only; VmHWM is the peak (proc(5)).
                    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                    found = re.search(r"VmHWM:\s+(\d+) kB", status)
                    peak += int(found[1]) * 1024 if found else 0
        return cpu_seconds, peak

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
            code = self._process.wait(min(STEP_TIMEOUT, 10))
        except psutil.TimeoutExpired:
            return "it has closed its output and still runs"
        if code == -signal.SIGKILL:
            return "killed, as the system does where memory runs out"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {self._last_words()}"

    def _last_words(self) -> str:
        """The last line of stderr, or our own error message where there is one."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its stderr is empty"])[-1]


def _machine_cpu_seconds() -> float:
    """CPU time of everything on this machine since its start, and what its host took from it (steal)."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal
