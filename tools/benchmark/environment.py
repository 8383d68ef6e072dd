"""What was measured, on what: hardware, commit, data."""

import contextlib
import os
import pathlib
import platform
import subprocess
from typing import Any

import numpy as np
import tensorflow as tf

from common.sources import Source

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLE = 200  # images whose size in bytes is looked at


def machine() -> dict[str, Any]:
    """Hardware."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [each.get("device_name", "GPU") for each in details],
    }


def cores() -> float:
    """CPU cores that this process may use: its affinity, and what a container is allowed of them."""
    count = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # the quota may be "max"
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, int(quota) / int(period))
    return count


def commit() -> str | None:
    """Of this tree, with a + where files differ from it; None where there is none.

    A copy within somebody else's repository has none: git is told where to look, and so looks no further up.
    """
    said = []
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            done = subprocess.run([*git, *arguments], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None
        if done.returncode:
            return None
        said.append(done.stdout.strip())
    return said[0] + ("+" if said[1] else "")


def data(source: Source | None) -> dict[str, Any]:
    """What the images are like."""
    if source is None:
        return {"summary": "no data"}
    rows = np.unique(np.linspace(0, source.size - 1, min(source.size, SAMPLE)).astype(int)).tolist()
    sizes = source.annotations.image_sizes
    return {
        "summary": source.annotations.summary(),
        "fingerprint": source.fingerprint,
        "images": source.size,
        "read_from": source.name,
        "kilobytes_per_image": round(sum(len(source.encoded(row)) for row in rows) / len(rows) / 1000, 1),
        "megapixels_per_image": round(float(sizes.prod(axis=1).mean()) / 1e6, 3),
    }
