"""Ends a run after a signal, or because it hangs or has lost a rank.

    with StopSignals() as signals, Watchdog(ranks, step_timeout=600) as watchdog:
        for ...:
            watchdog.beat("training", epoch=epoch, step=step)  # at each step, evaluation batch and save
            result = step(images, targets, signals.received is not None)  # tells the other ranks

SIGTERM and SIGINT stop all ranks after the same step. A run that hangs or has lost a rank ends with exit
code 1 and one line with the reason; a rank that hangs also prints the stacks of its threads.

Each rank limits the time between two of its own calls of `beat`. A rank that exceeds this limit ends, and
the launcher (horovodrun, Slurm) or TensorFlow's coordination service ends the other ranks.

A launcher would wait forever for a rank that SIGSTOP has stopped. Therefore other ranks of the same host
kill this rank.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import psutil

from common.errors import OtherRankError, StoppedError, UserError, is_lost_rank

if TYPE_CHECKING:
    from common.distributed.ranks import Ranks  # imports TensorFlow, which is not needed here

TICK = 0.5  # seconds between two checks of the time limit
NAMING_SECONDS = 1.0  # time to find out which rank of this host is gone
CONTINUE = "run the same command to continue from the last checkpoint"
_LOST = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class StopSignals:
    """A context in which SIGTERM or SIGINT requests a stop. A second SIGINT interrupts at once.

    Args:
        quiet: whether to print nothing; True on all ranks but the first.

    Attributes:
        received: name of the signal that this process has received, or None.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.received: str | None = None
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, ranks: "Ranks") -> bool:
        """Whether any rank was asked to stop. All ranks call it together."""
        return any(ranks.gather(self.received is not None))

    def message(self, step: int) -> str:
        """Returns the last line of a run that was stopped by a signal."""
        by = self.received or "a signal to another rank"
        return f"stopped by {by}; saved after step {step}: run the same command to go on"

    def _handle(self, number: int, _: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if not self._quiet:
            _print(f"\n{self.received}: stopping after this step")


class Watchdog:
    """Limits the time between two calls of `beat` on this rank. All ranks create their watchdogs together.

    The time during which this process is suspended does not count.

    Args:
        step_timeout: seconds that a rank may take between two beats; 0: no limit.
    """

    def __init__(self, ranks: "Ranks", *, step_timeout: float) -> None:
        host = socket.gethostname()
        # Processes in two containers may have the same pid. The time when they were created tells them apart.
        processes = ranks.gather([host, os.getpid(), psutil.Process().create_time()])
        names = [f"rank {i} ({name}, pid {pid})" for i, (name, pid, _) in enumerate(processes)]
        self._name, self._alone = names[ranks.rank], len(names) == 1
        self._neighbours: dict[str, psutil.Process] = {}  # the other ranks of this host
        for name, (where, pid, begun) in zip(names, processes, strict=True):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if where == host and name != self._name and abs(process.create_time() - begun) < 1:
                    self._neighbours[name] = process
        self._step_timeout = step_timeout
        self._limit = 0.0  # seconds until the next beat; 0: no limit
        self._beats = 0
        self._at = "starting"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str, *, epoch: int = 0, step: int = 0, at_least: float = 0.0) -> None:
        """Restarts the time limit. Call it when this rank begins a step, an evaluation batch or a save.

        Args:
            doing: name of the work that begins, in one word.
            at_least: limit in seconds for this work, if that is longer than `step_timeout`.
        """
        self._at = f"{doing}, epoch {epoch}, step {step}"
        self._limit = self._step_timeout and max(self._step_timeout, at_least)
        self._beats += 1

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends this process at once if only this rank has failed, because other ranks may wait for it."""
        self._closing.set()
        self._thread.join()
        on_all_ranks = not isinstance(error, Exception) or isinstance(error, StoppedError | OtherRankError)
        if on_all_ranks or self._alone:
            return
        lost = self._kill_stopped()
        if isinstance(error, UserError):
            _end(f"error: {error}")
        if error and is_lost_rank(error):
            # The status of a killed process may change late, so check repeatedly.
            deadline = time.monotonic() + NAMING_SECONDS
            while self._neighbours and not lost and time.monotonic() < deadline:
                time.sleep(0.05)
                lost = self._kill_stopped()
            lost = lost or "another rank"
            _end(f"error: {lost} is stopped or dead; {self._name}, {self._at}: {CONTINUE}")
        _end("".join(traceback.format_exception(error)).rstrip())

    def _watch(self) -> None:
        beats, waited = 0, 0.0
        while not self._closing.wait(TICK):
            # A suspended process has no ticks.
            waited = waited + TICK if self._beats == beats else 0.0
            beats = self._beats
            if not self._limit or waited < self._limit:
                continue
            lost = self._kill_stopped()
            faulthandler.dump_traceback(file=2)
            why = "if it waits for another rank, see the stacks of that rank"
            why = f"{lost} is stopped or dead" if lost else why
            limit = f"{self._limit:g} s (--step_timeout)"
            _end(f"error: {self._name}, {self._at}, made no progress for {limit}: {why}; {CONTINUE}")

    def _kill_stopped(self) -> str:
        """Kills stopped ranks of this host. Returns the names of stopped or dead ranks."""
        lost = []
        for name, process in self._neighbours.items():
            status = psutil.STATUS_DEAD
            with contextlib.suppress(psutil.Error):
                status = process.status()
                if status == psutil.STATUS_STOPPED:
                    process.kill()
            if status in _LOST:
                lost.append(name)
        return ", ".join(lost)


def _end(text: str) -> None:
    """Prints the text and ends the process at once."""
    _print(text)
    sys.stdout.flush()
    os._exit(1)


def _print(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # sys.stderr may be locked by a main thread that hangs
