"""Candidates in processes of their own, each stopped while the others run, measured in turn.

A candidate is any command that keeps to this protocol:

    it sets itself up, warms up by a few steps, and prints the line `ready`
    from then on it goes on by itself, for ever, and prints `step N` after every N images, flushed

It is stopped by SIGSTOP and continued by SIGCONT, its whole process group, without being told. What else it
prints is ignored; its stderr goes into a file. All others stand still while it is measured, so that nobody's
queue fills at another's expense; rounds are interleaved, so that a machine that slows down slows all of them.
"""

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tools.benchmark import usage

START_TIMEOUT = 1800.0  # seconds until `ready`: data are checked, a network is compiled
STEP_TIMEOUT = 600.0  # seconds between two steps
_STEP = re.compile(rb"step (\d+)$")


class CandidateError(Exception):
    """A candidate cannot be measured. One line that says why."""


class Command(NamedTuple):
    """How a candidate is started.

    Attributes:
        name: what reports call it.
        arguments: program and arguments.
        settle: steps of a window before the clock starts: what a loader had ready when it was stopped.
        like: another candidate, started before, that takes about as much memory; "" where none is known.
    """

    name: str
    arguments: Sequence[str]
    settle: int = 1
    like: str = ""


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
        peak_bytes: resident memory at its highest, start included, summed over its processes.
        error: why it failed, one line; "" where it did not.
    """

    windows: list[Window]
    peak_bytes: int
    error: str


class Candidate:
    """A started command.

    Args:
        command: what to start.
        log: where its stderr goes.
    """

    def __init__(self, command: Command, log: pathlib.Path) -> None:
        self.name = command.name
        self._settle = command.settle
        self._log = log
        self._rest = b""
        try:
            with log.open("wb") as stream:
                # A group of its own, but in our session: if we are killed, the kernel ends a stopped group.
                self._process = subprocess.Popen(
                    command.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    process_group=0,
                )
        except OSError as error:
            raise CandidateError(f"cannot be started: {error.strerror}: {command.arguments[0]}") from error
        os.set_blocking(self._process.stdout.fileno(), False)

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Waits for `ready`, then stops it; CandidateError if it ends or takes longer."""
        deadline = time.monotonic() + timeout
        while b"ready" not in self.lines(deadline - time.monotonic()):
            pass
        self._signal(signal.SIGSTOP)

    def window(self, seconds: float) -> Window:
        """Lets it run for whole steps that take at least so many seconds together."""
        with contextlib.suppress(BlockingIOError):  # steps of which we had not yet heard
            self._read()
        self._rest = b""
        self._signal(signal.SIGCONT)
        try:
            start = time.monotonic()
            for settled in range(self._settle):
                # Slow steps bring their own settling: half a window of it is enough.
                if settled and time.monotonic() - start > seconds / 2:
                    break
                self._images()
            start, cpu, everybody = time.monotonic(), self._usage().cpu_seconds, usage.machine_cpu_seconds()
            images, end = 0, start
            while end - start < seconds:
                images += self._images()
                end = time.monotonic()
            cpu = self._usage().cpu_seconds - cpu
            everybody = usage.machine_cpu_seconds() - everybody
            return Window(images, end - start, cpu, max(everybody - cpu, 0.0))
        finally:
            self._signal(signal.SIGSTOP)

    def peak_bytes(self) -> int:
        return self._usage().peak_bytes

    def lines(self, timeout: float) -> list[bytes]:
        """All whole lines that it has printed since the last call; waits for one at least.

        Raises:
            CandidateError: none within `timeout` seconds, or it has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise CandidateError(f"no word from it for {timeout:.0f} s: {self._last_words()}")
            *lines, self._rest = (self._rest + self._read()).split(b"\n")
            if lines:
                return lines

    def close(self) -> None:
        """Ends it and all that it has started, stopped or not."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _usage(self) -> usage.Usage:
        return usage.of_group(self._process.pid)

    def _images(self) -> int:
        """Waits for a step; the images of all that have been done since the last call."""
        while True:
            steps = [_STEP.match(line) for line in self.lines(STEP_TIMEOUT)]
            if any(steps):
                return sum(int(step[1]) for step in steps if step)

    def _read(self) -> bytes:
        """What is in the pipe; CandidateError at its end."""
        content = os.read(self._process.stdout.fileno(), 1 << 20)
        if not content:
            raise CandidateError(self._why_ended())
        return content

    def _why_ended(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it has closed its output"
        if code == -signal.SIGKILL:
            return "killed, as the system does where memory runs out"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}: {self._last_words()}"
        return f"exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        """The line of stderr that says most: our own complaint, or else the last one."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (ours or lines or ["it said nothing"])[-1]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def measure(
    commands: Sequence[Command],
    *,
    rounds: int,
    seconds: float,
    logs: pathlib.Path,
    log: Callable[[str], None],
) -> dict[str, Measured]:
    """Starts all candidates, one after the other, and measures them in turn, `rounds` times.

    Args:
        commands: names must differ.
        rounds: the order of every second one is reversed.
        seconds: that each gets in each round, at least.
        logs: an existing directory for what they print on stderr.
        say: tells whoever watches.

    Returns:
        By name, in the order of `commands`. One that fails has an error and no windows; the others go on.
    """
    candidates: dict[str, Candidate] = {}
    errors: dict[str, str] = {}
    windows: dict[str, list[Window]] = {command.name: [] for command in commands}

    def fail(name: str, error: CandidateError) -> None:
        errors[name] = str(error)
        log(f"  {name} failed: {error}")
        if name in candidates:
            candidates.pop(name).close()

    with closed_at_the_end(candidates):
        for number, command in enumerate(commands):
            log(f"starting {command.name}")
            try:
                if command.like in candidates:
                    _check_memory(candidates[command.like])
                candidates[command.name] = Candidate(command, logs / f"{number}.txt")
                candidates[command.name].wait_until_ready()
            except CandidateError as error:
                fail(command.name, error)
        for number in range(rounds):
            names = list(candidates)
            for name in reversed(names) if number % 2 else names:
                try:
                    window = candidates[name].window(seconds)
                except CandidateError as error:
                    fail(name, error)
                    continue
                windows[name].append(window)
                rate = window.images / window.seconds
                log(f"round {number + 1} of {rounds}: {name} {rate:.4g} images/s")
        peaks = {name: candidate.peak_bytes() for name, candidate in candidates.items()}
    return {
        name: Measured([] if name in errors else windows[name], peaks.get(name, 0), errors.get(name, ""))
        for name in windows
    }


def _check_memory(like: Candidate) -> None:
    """CandidateError where there is no room for another of these: a stopped process keeps its memory."""
    needed, free = like.peak_bytes(), usage.available_bytes()
    if free < needed:
        raise CandidateError(
            f"not started: {free / 1e9:.1f} GB of memory are free, and {like.name} took {needed / 1e9:.1f}: "
            "measure fewer at once"
        )


@contextlib.contextmanager
def closed_at_the_end(candidates: Mapping[str, Candidate]) -> Iterator[None]:
    """Whatever ends this block, Ctrl-C, SIGTERM and a closed terminal included, ends the candidates."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        numbers = ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers[1:]:  # the first raises KeyboardInterrupt by itself
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave any behind
        for candidate in candidates.values():
            candidate.close()
        for number, handler in before.items():
            signal.signal(number, handler)
