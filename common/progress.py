"""Log lines and progress bars. They go to stderr, because stdout is for results."""

import functools
import gc
import logging as standard_logging
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
    """Hides log lines and progress bars if `quiet`, which is True on all ranks but rank 0."""
    global _quiet
    _quiet = quiet


def log(text: str) -> None:
    """Prints one line, except on quiet ranks."""
    if not _quiet:
        tell(text)


log_once = functools.cache(log)


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Returns a text such as "1 step" or "2 boxes"; the plural of `noun` has this ending."""
    return f"{number} {noun}{ending if number != 1 else ''}"


class Bar:
    """Shows a progress bar on a terminal. Elsewhere, prints one line at the end.

    Args:
        title: name of the task, one or two words.
        done: number of steps that were done in an earlier session.
        unit: what one step is.
    """

    def __init__(self, title: str, total: int, done: int = 0, unit: str = "step"):
        self._title, self._total, self._done, self._unit = title, total, done, unit
        self._start, self._shown_at, self._first = time.monotonic(), 0.0, done
        if done < total:
            self._show("")

    def step(self, values: dict[str, float] | None = None) -> None:
        """Counts one step and shows `values`."""
        self._done += 1
        now, is_last = time.monotonic(), self._done == self._total
        seconds = now - self._start
        text = "".join(f", {name} {value:.4g}" for name, value in (values or {}).items())
        if not sys.stderr.isatty():
            if is_last:
                log(f"{self._title}: {counted(self._total, self._unit)} in {seconds:.0f} s{text}")
        elif is_last or now - self._shown_at >= 1:
            self._shown_at = now
            left = seconds / (self._done - self._first) * (self._total - self._done)
            self._show((f"{seconds:.0f} s" if is_last else f"{left:.0f} s left") + text)
            if is_last and not _quiet:
                print(file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        bar = "=" * (_BAR_WIDTH * self._done // self._total)
        show_until_next(f"{self._title}: {self._done}/{self._total} [{bar:{_BAR_WIDTH}}] {text}")


def show_until_next(text: str) -> None:
    """Shows a line on a terminal until the next line replaces it."""
    if sys.stderr.isatty() and not _quiet:
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


def import_tensorflow(*, pyplot: bool = True) -> None:
    """Imports DALI and TensorFlow, and hides the lines that TensorFlow's C++ code prints.

    The lines are shown if the import fails, if TensorFlow finds no NVIDIA GPU, or with --verbosity=1.
    DALI comes first, see `storage.check_dali`. Python's garbage collector ignores what was imported: checking
    it again and again would take a second until the first training step.

    Args:
        pyplot: whether Keras may import Matplotlib's pyplot for keras.visualization, which takes a third of a
            second.
    """
    # Matplotlib logs where its caches are, if the home directory cannot be written.
    standard_logging.getLogger("matplotlib").setLevel(standard_logging.ERROR)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # TensorFlow itself uses oneDNN only on CPUs with AVX-512 VNNI or AMX, but it is faster on all x86 CPUs.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    if logging.get_verbosity() >= logging.DEBUG or "tensorflow" in sys.modules:
        return
    show_until_next("importing TensorFlow")
    sys.stderr.flush()
    gc.disable()
    if not pyplot:  # None makes an import fail, and Keras then goes on without it
        sys.modules.setdefault("matplotlib", None)  # type: ignore[arg-type]
    stderr, failed = os.dup(2), True
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import nvidia.dali  # noqa: F401
            import tensorflow as tf

            failed = not tf.config.list_physical_devices("GPU") and os.path.exists("/dev/nvidiactl")
        finally:
            if not pyplot and sys.modules["matplotlib"] is None:
                del sys.modules["matplotlib"]
            gc.freeze()
            gc.enable()
            os.dup2(stderr, 2)
            os.close(stderr)
            show_until_next("")
            captured.seek(0)
            if failed:
                os.write(2, captured.read())
