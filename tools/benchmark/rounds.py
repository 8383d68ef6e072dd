"""Runs candidates one after another, each in a separate process, in interleaved rounds.

A candidate is any command that follows this protocol:

    it starts, runs a few steps to warm up, and prints the line `ready`
    then it prints and flushes the line `step N` after each step of N images, until it is killed

Other lines are ignored. Every second round runs in reverse order, because a machine can slow down.
"""

import contextlib
import json
import pathlib
import queue
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from common.progress import log
from tools.processes import ended_afterwards

START_TIMEOUT = 1800.0  # seconds until `ready`: candidates check data and compile a network
STEP_TIMEOUT = 600.0  # seconds between two steps
_END_TIMEOUT = 10.0  # seconds

Record = dict[str, Any]  # a part of a `--json` file: plain dicts and lists


class Window(NamedTuple):
    """What a candidate did in one round."""

    images: int
    seconds: float
    cpu_seconds: float  # of all processes of the candidate
    other_cpu_seconds: float = 0.0  # of all other processes on this machine


class CandidateError(Exception):
    """A candidate cannot be measured. The message is one line with the reason."""


class Command(NamedTuple):
    """The command line of a candidate.

    Attributes:
        settle: number of steps to skip before each measurement.
    """

    name: str
    arguments: Sequence[str]
    settle: int = 1


def measure(
    commands: Sequence[Command], *, rounds: int, seconds: float, logs: pathlib.Path
) -> dict[str, Record]:
    """Measures all candidates once per round.

    Args:
        rounds: number of rounds.
        seconds: minimum length of the timed part of a round.
        logs: an existing directory for the candidates' stderr.

    Returns:
        Name -> record of `summarize`; {"error": reason} for a candidate that fails.
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
                with _started(command, logs) as candidate:
                    candidate.wait_for(rb"ready$", START_TIMEOUT)
                    window = candidate.window(seconds, command.settle)
                    peaks[name] = max(peaks[name], candidate.usage()[1])
            except CandidateError as error:
                failed[name] = _failure(name, error)
            else:
                windows[name].append(window)
                log(f"  {name}: {window.images / window.seconds:.4g} images/s")
    return {name: failed.get(name) or summarize(windows[name], peaks[name]) for name in windows}


def result(command: Command, logs: pathlib.Path) -> Any:
    """Returns the JSON that a command prints after `result`, or {"error": reason} if it fails."""
    log(f"starting {command.name}")
    try:
        with _started(command, logs) as candidate:
            return json.loads(candidate.wait_for(rb"result (.*)", None)[1])
    except CandidateError as error:
        return _failure(command.name, error)


def summarize(windows: Sequence[Window], peak_bytes: int) -> Record:
    """Makes the record of a candidate that did not fail.

    Args:
        windows: the measurement of each round.
        peak_bytes: highest resident memory in any round, summed over all processes.
    """
    return {
        "images_per_second": spread(w.images / w.seconds for w in windows),
        "cpu_ms_per_image": spread(1000 * w.cpu_seconds / w.images for w in windows),
        "cores": spread(w.cpu_seconds / w.seconds for w in windows),
        "peak_bytes": peak_bytes,
        "windows": [w._asdict() for w in windows],
    }


def spread(values: Iterable[float]) -> Record:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _failure(name: str, error: CandidateError) -> Record:
    log(f"  {name} failed: {error}")
    return {"error": str(error)}


@contextlib.contextmanager
def _started(command: Command, logs: pathlib.Path) -> Iterator["Candidate"]:
    """Starts a command. Kills it and its processes at the end of the block."""
    stderr = logs / "stderr.txt"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    try:
        with stderr.open("wb") as file:
            process = psutil.Popen(command.arguments, **pipes, stderr=file, process_group=0)
    except OSError as error:
        raise CandidateError(f"cannot be started: {error.strerror}: {command.arguments[0]}") from error
    with ended_afterwards(process):
        yield Candidate(process, stderr)


class Candidate:
    """A running command with a pipe for its stdout. `stderr` is a file."""

    def __init__(self, process: psutil.Popen, stderr: pathlib.Path) -> None:
        self._process, self._stderr = process, stderr
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, pattern: bytes, timeout: float | None) -> re.Match[bytes]:
        """Returns the next line of output that matches `pattern`, or raises CandidateError."""
        match = None
        while not match:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                reason = f"it printed no line within {timeout:.0f} s: {self._last_words()}"
                raise CandidateError(reason) from None
            if line is None:
                raise CandidateError(self._why_ended())
            match = re.match(pattern, line)
        return match

    def window(self, seconds: float, settle: int) -> Window:
        """Skips `settle` steps, then measures whole steps for at least `seconds`."""
        start = time.monotonic()
        for settled in range(settle):
            if settled and time.monotonic() - start > seconds / 2:
                break  # during slow steps, the loader refills its queue
            self._step()
        start, cpu, machine = time.monotonic(), self.usage()[0], _machine_cpu_seconds()
        images, end = 0, start
        while end - start < seconds:
            images += self._step()
            end = time.monotonic()
        cpu, machine = self.usage()[0] - cpu, _machine_cpu_seconds() - machine
        return Window(images, end - start, cpu, max(machine - cpu, 0.0))

    def usage(self) -> tuple[float, int]:
        """Returns the processes' CPU seconds and their peak resident bytes."""
        cpu_seconds, peak = 0.0, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._process, *self._process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    cpu_seconds += sum(process.cpu_times()[:4])
                    # VmHWM is the peak (proc(5)). psutil only has the current memory.
                    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                    peak_line = re.search(r"VmHWM:\s+(\d+) kB", status)
                    peak += int(peak_line[1]) * 1024 if peak_line else 0
        return cpu_seconds, peak

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip(b"\n"))
        self._lines.put(None)

    def _step(self) -> int:
        return int(self.wait_for(rb"step (\d+)$", STEP_TIMEOUT)[1])

    def _why_ended(self) -> str:
        try:
            code = self._process.wait(_END_TIMEOUT)
        except psutil.TimeoutExpired:
            return "it has closed its output but still runs"
        if code == -signal.SIGKILL:
            return "killed (SIGKILL): the system does this when memory runs out"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {self._last_words()}"

    def _last_words(self) -> str:
        lines = [line for line in self._stderr.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its stderr is empty"])[-1].strip()


def _machine_cpu_seconds() -> float:
    """Returns CPU seconds of all processes, plus what the host took (steal)."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal
