"""Ends a run that hangs or has lost a rank: exit code 1, the stacks of the rank's threads, one line.

    with Watchdog(ranks, step_timeout=600) as watchdog:
        watchdog.beat("training", epoch=epoch, step=step)  # at each step, batch of evaluation, save
        with watchdog.allow(1800):  # what takes longer than a step
            ...

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
import pathlib
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import OtherRankError, StoppedError, UserError, is_lost_rank

if TYPE_CHECKING:
    from common.distributed.ranks import Ranks  # imports TensorFlow, which is not needed here

TICK = 0.5  # seconds
GRACE = 5.0  # seconds after the limit until faulthandler ends a process whose threads Python cannot run
CONTINUE = "run the same command to continue from the last checkpoint"


class _Process(NamedTuple):
    """A rank's process.

    Attributes:
        host: its name.
        namespace: of process ids; equal on one host: a pid means the same process to both.
        pid: its id.
        started: clock ticks since boot; process ids are used again.
    """

    host: str
    namespace: str
    pid: int
    started: str

    @property
    def state(self) -> str:
        """R, S, D (alive), T (stopped), Z (ended), or "" where it is gone: proc(5), stat."""
        state, started = _stat(self.pid)
        return state if started == self.started else ""


class Watchdog:
    """Limits the time between two beats of this rank. All ranks make theirs together.

    The limit holds from the first `beat` on. It counts only time in which this process runs: a job that was
    suspended continues. (With several ranks faulthandler's limit, GRACE later, counts that time too.)

    Args:
        ranks: of the run.
        step_timeout: seconds that a rank may take between two beats; 0: no limit.
        on_loss: what the loss of another rank means. exit: this process ends with code 1. report: the error
            of the collective operation propagates (Horovod Elastic continues without the rank).
    """

    def __init__(self, ranks: "Ranks", *, step_timeout: float, on_loss: str = "exit") -> None:
        if on_loss not in ("exit", "report") or step_timeout < 0:
            raise ValueError(f"on_loss={on_loss!r}, step_timeout={step_timeout}")
        own = _Process(
            socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid(), _stat(os.getpid())[1]
        )
        processes = [_Process(*fields) for fields in ranks.gather(list(own))]
        self._names = [f"rank {i} ({process.host}, pid {process.pid})" for i, process in enumerate(processes)]
        self._neighbours = {
            i: process
            for i, process in enumerate(processes)
            if i != ranks.rank and process[:2] == own[:2]  # on this host
        }
        self._rank, self._exits = ranks.rank, on_loss == "exit"
        self._limits = [step_timeout]  # the last one holds; `allow` adds its own
        self._beats = 0
        self._at = "starting"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str, *, epoch: int = 0, step: int = 0) -> None:
        """Restarts the limit: this rank begins a step, a batch of evaluation, a save. Takes about 0.1 ms."""
        self._at = f"{doing}, epoch {epoch}, step {step}"
        self._restart()

    @contextlib.contextmanager
    def allow(self, seconds: float = 0.0) -> Iterator[None]:
        """Another limit between two beats, on this rank; 0: none. Enter it on all ranks."""
        self._limits.append(seconds)
        self._restart()
        try:
            yield
        finally:
            self._limits.pop()
            self._restart()

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
        faulthandler.cancel_dump_traceback_later()
        on_all_ranks = not isinstance(error, Exception) or isinstance(error, StoppedError | OtherRankError)
        if on_all_ranks or len(self._names) == 1:
            return
        lost = self._lost()
        self._kill_stopped()
        if not self._exits:
            return
        if isinstance(error, UserError):
            _print(f"error: {error}")
        elif is_lost_rank(error):
            _print(f"error: {lost or 'another rank'} is stopped or dead; {self._own}: {CONTINUE}")
        else:
            _print("".join(traceback.format_exception(error)).rstrip())
        sys.stdout.flush()
        os._exit(1)  # sys.exit would wait for the other ranks, in Horovod's and TensorFlow's own clean-up

    def _restart(self) -> None:
        self._beats += 1
        if len(self._names) > 1 and self._limits[-1]:
            faulthandler.dump_traceback_later(self._limits[-1] + GRACE, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        beats, waited = 0, 0.0
        while not self._closing.wait(TICK):
            limit = self._limits[-1]
            # Ticks are counted, and not time: in a suspended process there are none.
            beats, waited = self._beats, waited + TICK if self._beats == beats else 0.0
            if beats and limit and waited >= limit:
                self._end(limit)
                waited = 0.0

    def _end(self, limit: float) -> None:
        lost = self._lost()
        if self._kill_stopped() and not self._exits:
            self._restart()
            return  # Horovod notices their death
        faulthandler.dump_traceback(file=2)
        why = (
            f"{lost} is stopped or dead"
            if lost
            else "its stacks are above; if it waits, so are the late rank's"
        )
        _print(f"error: {self._own}, has not moved for {limit:g} s (--step_timeout): {why}; {CONTINUE}")
        os._exit(1)  # sys.exit would end this thread only

    @property
    def _own(self) -> str:
        return f"{self._names[self._rank]}, {self._at}"

    def _lost(self) -> str:
        """The ranks of this host that are stopped or gone; "" where there is none."""
        found = [self._names[i] for i, process in self._neighbours.items() if process.state in ("T", "Z", "")]
        return ", ".join(found)

    def _kill_stopped(self) -> bool:
        """Kills the stopped ranks of this host. Whether there were any."""
        stopped = [process for process in self._neighbours.values() if process.state == "T"]
        for process in stopped:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        return bool(stopped)


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty where there is none."""
    try:
        after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return after_name[0], after_name[19]


def _print(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # the main thread may hang with the lock of sys.stderr
