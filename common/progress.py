"""What is told while work goes on, on stderr: stdout is for results."""

import functools
import os
import shutil
import sys
import tempfile
import time

from absl import logging

from common.errors import tell

_quiet = False
_BAR_WIDTH = 20  # characters


def be_quiet(quiet: bool) -> None:
    """For all ranks but the first: they do the same, and one of them telling it is enough."""
    global _quiet
    _quiet = quiet


def log(text: str) -> None:
    """Prints one line."""
    if not _quiet:
        tell(text)


log_once = functools.cache(log)


class Bar:
    """Counts the steps of one piece of work: a progress bar on a terminal, elsewhere one line at its end.

    Args:
        title: one word or two.
        total: number of steps.
        done: how many of them were done in an earlier session.
    """

    def __init__(self, title: str, total: int, done: int = 0):
        self._title, self._total, self._done = title, total, done
        self._start, self._shown_at, self._first = time.monotonic(), 0.0, done

    def step(self, values: dict[str, float] | None = None) -> None:
        """One step further; `values` are shown as they are, not averaged."""
        self._done += 1
        now, is_last = time.monotonic(), self._done == self._total
        seconds = now - self._start
        text = "".join(f", {name} {value:.4g}" for name, value in (values or {}).items())
        if not sys.stderr.isatty():
            if is_last:
                log(f"{self._title}: {self._total} steps in {seconds:.0f} s{text}")
        elif not _quiet and (is_last or now - self._shown_at >= 1):
            self._shown_at = now
            left = seconds / (self._done - self._first) * (self._total - self._done)
            bar = "=" * (_BAR_WIDTH * self._done // self._total)
            times = f"{seconds:.0f} s" if is_last else f"{left:.0f} s left"
            line = f"{self._title}: {self._done}/{self._total} [{bar:{_BAR_WIDTH}}] {times}{text}"
            line = line[: shutil.get_terminal_size().columns - 1]  # a longer one would not be overwritten
            print(f"\r{line}\033[K", end="\n" if is_last else "", file=sys.stderr, flush=True)


def import_tensorflow() -> None:
    """Imports TensorFlow without the lines that its C++ code prints before its log level has an effect.

    They are shown if the import fails, or if there is an NVIDIA driver and TensorFlow finds no GPU.
    --verbosity=1 hides nothing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if logging.get_verbosity() >= logging.DEBUG or "tensorflow" in sys.modules:
        return
    sys.stderr.flush()
    stderr, failed = os.dup(2), True
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import tensorflow as tf

            # The first question about GPUs prints, too.
            failed = not tf.config.list_physical_devices("GPU") and os.path.exists("/dev/nvidiactl")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            if failed:
                os.write(2, captured.read())
