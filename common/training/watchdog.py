"""Ends a run from outside: by a signal, because it hangs, or because it has lost a rank.

    with StopSignals() as signals, Watchdog(ranks, step_timeout=600) as watchdog:
        for ...:
            watchdog.beat("training", epoch=epoch, step=step)  # at each step, batch of evaluation, save
            result = step(images, targets, signals.received is not None)  # tells the other ranks

SIGTERM and SIGINT ask for a stop, of all ranks after the same step. A run that hangs or has lost a rank ends
with exit code 1, the stacks of the rank's threads and one line.

A collective operation waits for all ranks. Each rank therefore limits the time between its own beats; when
the limit has passed, the rank ends, and the launcher (horovodrun, Slurm) or TensorFlow's coordination service
ends the others. A dead rank raises an error in the collective operations of the others at once (Horovod) or
after 30 s (multi_worker). Horovod's stall inspector names the ranks that an operation waits for.

Nothing can run in a stopped process (SIGSTOP), and launchers wait for it without end. So the ranks of the
same host kill it when they end.
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

TICK = 0.5  # seconds
NAMING_SECONDS = 1.0  # to find out which rank of this host is gone
CONTINUE = "run the same command to continue from the last checkpoint"
_LOST = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class StopSignals:
    """While this is entered, SIGTERM and SIGINT request a stop; a second SIGINT interrupts at once.

    Args:
        quiet: print nothing: for all ranks but the first.

    Attributes:
        received: name of the signal that came, or None.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.received: str | None = None
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
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
        """The last line of a run that was stopped; another rank may have got the signal."""
        by = self.received or "a signal to another rank"
        return f"stopped by {by}; saved after step {step}: run the same command to go on"

    def _handle(self, number: int, _: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if not self._quiet:
            _print(f"\n{self.received}: stopping after this step")


class Watchdog:
    """Limits the time between two beats of this rank. All ranks make theirs together.

    The limit holds from the first `beat` on. It counts only time in which this process runs: a job that was
    suspended continues.

    Args:
        ranks: of the run.
        step_timeout: seconds that a rank may take between two beats; 0: no limit.
        on_loss: what the loss of another rank means. exit: this process ends with code 1. report: the error
            of the collective operation propagates (Horovod Elastic continues without the rank).
    """

    def __init__(self, ranks: "Ranks", *, step_timeout: float, on_loss: str = "exit") -> None:
        host = socket.gethostname()
        # The time at which a process began tells it from one with its number in another container.
        processes = ranks.gather([host, os.getpid(), psutil.Process().create_time()])
        names = [f"rank {i} ({name}, pid {pid})" for i, (name, pid, _) in enumerate(processes)]
        self._name, self._alone = names[ranks.rank], len(names) == 1
        self._neighbours: dict[str, psutil.Process] = {}  # the other ranks of this host
        for name, (where, pid, begun) in zip(names, processes, strict=True):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if where == host and name != self._name and abs(process.create_time() - begun) < 1:
                    self._neighbours[name] = process
        self._exits = on_loss == "exit"
        self._step_timeout = step_timeout
        self._limit = 0.0  # until the next beat; 0: none
        self._beats = 0
        self._at = "starting"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str, *, epoch: int = 0, step: int = 0, at_least: float = 0.0) -> None:
        """Restarts the limit: this rank begins a step, a batch of evaluation, a save.

        Args:
            doing: what it begins, in a word.
            epoch, step: where the run is.
            at_least: seconds that this may take, where they are more than `step_timeout`.
        """
        self._at = f"{doing}, epoch {epoch}, step {step}"
        self._limit = self._step_timeout and max(self._step_timeout, at_least)
        self._beats += 1

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends this process where only this rank has failed: the others may wait for it in an operation.

        Makes no collective call. Errors that all ranks raise together propagate, as do those of a single
        process and, with on_loss="report", all.
        """
        self._closing.set()
        self._thread.join()
        on_all_ranks = not isinstance(error, Exception) or isinstance(error, StoppedError | OtherRankError)
        if on_all_ranks or self._alone:
            return
        lost, _ = self._kill_stopped()
        if not self._exits:
            return
        if isinstance(error, UserError):
            _end(f"error: {error}")
        if error and is_lost_rank(error):
            # The connections of a killed process close a moment before its status changes.
            deadline = time.monotonic() + NAMING_SECONDS
            while self._neighbours and not lost and time.monotonic() < deadline:
                time.sleep(0.05)
                lost, _ = self._kill_stopped()
            lost = lost or "another rank"
            _end(f"error: {lost} is stopped or dead; {self._name}, {self._at}: {CONTINUE}")
        _end("".join(traceback.format_exception(error)).rstrip())

    def _watch(self) -> None:
        beats, waited = 0, 0.0
        while not self._closing.wait(TICK):
            # Ticks are counted, and not time: in a suspended process there are none.
            waited = waited + TICK if self._beats == beats else 0.0
            beats = self._beats
            if not self._limit or waited < self._limit:
                continue
            lost, killed = self._kill_stopped()
            if killed and not self._exits:
                waited = 0.0
                continue  # Horovod notices their death
            faulthandler.dump_traceback(file=2)
            why = "if it waits for another rank, see that one's stacks"
            why = f"{lost} is stopped or dead" if lost else why
            limit = f"{self._limit:g} s (--step_timeout)"
            _end(f"error: {self._name}, {self._at}, has not moved for {limit}: {why}; {CONTINUE}")

    def _kill_stopped(self) -> tuple[str, bool]:
        """Kills the stopped ranks of this host. The stopped or dead ones by name; whether any was stopped."""
        lost, stopped = [], False
        for name, process in self._neighbours.items():
            status = psutil.STATUS_DEAD
            with contextlib.suppress(psutil.Error):
                status = process.status()
                if status == psutil.STATUS_STOPPED:
                    stopped = True
                    process.kill()
            if status in _LOST:
                lost.append(name)
        return ", ".join(lost), stopped


def _end(text: str) -> None:
    """Ends the process. sys.exit would wait for other ranks, in Horovod's and TensorFlow's own clean-up."""
    _print(text)
    sys.stdout.flush()
    os._exit(1)


def _print(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # the main thread may hang with the lock of sys.stderr
