"""What was measured, on what: hardware, commit, data."""

import contextlib
import pathlib
import platform
import re
import subprocess
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from common.sources import Source

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLE = 200  # images of which the size in bytes is read


def machine() -> dict[str, Any]:
    """Hardware."""
    model = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
    gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [each.get("device_name", "GPU") for each in gpus],
    }


def cores() -> float:
    """CPU cores that this process may use: its affinity, and the quota of its container."""
    count = float(len(psutil.Process().cpu_affinity()))
    with contextlib.suppress(OSError, ValueError):  # the quota may be "max"
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, int(quota) / int(period))
    return count


def commit() -> str | None:
    """The commit of this tree, with a + where files differ from it; None where there is none.

    git gets the repository's path, so that it does not search the folders above: a copy of the project within
    another repository has no commit.
    """
    found = []
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            done = subprocess.run([*git, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")


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
