"""Where each rank is, by machine and in its work, and who of them is behind (watchdog.py)."""

import contextlib
import dataclasses
import faulthandler
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Home = dict[str, Any]


@dataclasses.dataclass
class Place:
    """Where a rank's main thread is, as the rank tells it."""

    doing: str = "starting"
    epoch: int = 0
    step: int = 0
    age: float = 0.0  # seconds since its last beat, at the time of telling
    limit: float | None = None  # seconds that it may go without
    leave: bool = False  # it was given longer (Watchdog.allow)
    at: str = ""  # file:line function, of code that is not a library's
    waiting: bool = False  # inside a call of TensorFlow or Horovod
    heard: float = 0.0  # when it was told, by the listener's clock

    def __str__(self) -> str:
        return f"{self.doing}, epoch {self.epoch}, step {self.step}" + (f", at {self.at}" if self.at else "")


def where(thread: int) -> tuple[str, bool]:
    """The line that a thread is at, of code that is not a library's, and whether it waits in TensorFlow."""
    calls = _calls(thread)
    innermost = calls[0][0] if calls else ""
    waiting = "/tensorflow/" in innermost or "/horovod/" in innermost
    for file, line, function in calls:
        if not file.startswith((_STANDARD_LIBRARY, "<")) and "-packages/" not in file:
            return f"{os.path.basename(file)}:{line} {function}", waiting
    return "", waiting


def stack(thread: int) -> str:
    """A thread's calls, the innermost last."""
    return "\n".join(
        f'  File "{file}", line {line}, in {function}' for file, line, function in reversed(_calls(thread))
    )


def _calls(thread: int) -> list[tuple[str, str, str]]:
    """File, line and function of a thread's calls, the innermost first; of very deep ones the inner hundred.

    sys._current_frames() would hand out frames of a thread that runs on while they are looked at, and
    following them has crashed CPython 3.11. faulthandler reads a stack within one hold of the interpreter's
    lock.
    """
    with os.fdopen(os.memfd_create("calls"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    for text in threads:
        head, _, calls = text.partition("\n")
        named = re.search(r"[Tt]hread 0x([0-9a-f]+)", head)
        if named and int(named[1], 16) == thread:
            return re.findall(r'^  File "(.*)", line (\d+) in (.*)$', calls, re.MULTILINE)
    return []


def stragglers(places: Mapping[int, Place]) -> list[int]:
    """The ranks that the others wait for; none where nothing tells them from each other.

    Who waits in a collective operation has come as far as anybody. So: the ranks with the fewest steps; else
    those that do something else than most, and than training; else those whose main thread is in no call of
    TensorFlow or Horovod.
    """
    doings = Counter(place.doing for place in places.values())
    usual = max(doings, key=lambda doing: (doings[doing], doing == "training"), default="")
    first = min(((place.epoch, place.step) for place in places.values()), default=None)
    for behind in (
        [rank for rank, place in places.items() if (place.epoch, place.step) == first],
        [rank for rank, place in places.items() if place.doing != usual],
        [rank for rank, place in places.items() if not place.waiting],
    ):
        if 0 < len(behind) < len(places):
            return sorted(behind)
    return sorted(places) if len(places) == 1 else []


# --- machines ---


def home() -> Home:
    """Which process of which machine this is."""
    kernel = _read("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "network": f"{kernel} {_namespace('net')}",  # equal: they share the loopback interface
        "processes": f"{kernel} {_namespace('pid')}",  # equal: a pid means the same process to both
    }


def kill(other: Home) -> None:
    """SIGKILL to a process of this machine; of another machine, or gone, it is left alone.

    The launcher's SIGTERM does not reach a stopped process, and the launcher waits for it.
    """
    same = other["processes"] == home()["processes"] and other["pid"] != os.getpid()
    if same and other["started"] and _started(other["pid"]) == other["started"]:
        with contextlib.suppress(OSError):
            os.kill(other["pid"], signal.SIGKILL)


def names(homes: Sequence[Home], ranks: Iterable[int]) -> str:
    """ "rank 1 (host, pid 17)", and up to three more."""
    known = [f"rank {rank} ({homes[rank]['host']}, pid {homes[rank]['pid']})" for rank in sorted(ranks)]
    return ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")


def table(
    homes: Sequence[Home], places: Mapping[int, Place], ages: Mapping[int, float], lost: Sequence[int]
) -> str:
    """A row for each rank; a star for those that are lost."""
    rows = [("", "rank", "host", "pid", "seconds", "epoch", "step", "doing", "at")]
    for rank, machine in enumerate(homes):
        row = ("*" if rank in lost else "", rank, machine["host"], machine["pid"])
        place = places.get(rank)
        if place is None:
            rows.append((*row, "", "", "", "not connected", ""))
        else:
            rows.append((*row, f"{ages[rank]:.1f}", place.epoch, place.step, place.doing, place.at))
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; pids are used again."""
    after_name = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return after_name[19] if len(after_name) > 19 else ""  # proc(5): field 22, starttime


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
