"""CPU time and memory of processes, as Linux counts them (proc(5))."""

import contextlib
import os
import pathlib
import re
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Of all processes of a group."""

    cpu_seconds: float
    peak_bytes: int


def of_group(group: int) -> Usage:
    """CPU time, that of ended children included, and the highest resident memory of a process group."""
    ticks = peak = 0
    for process in pathlib.Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (process / "stat").read_text().rpartition(")")[2].split()  # proc(5): from `state` on
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
                found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
                peak += int(found[1]) * 1024 if found else 0
    return Usage(ticks / _TICKS, peak)


def machine_cpu_seconds() -> float:
    """CPU time of everything on this machine since it started, and what its host took from it."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = map(int, fields)
    return (user + nice + system + irq + soft_irq + stolen) / _TICKS


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024
