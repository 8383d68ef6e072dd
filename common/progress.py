"""What is told while work goes on, on stderr: stdout is for results."""

import contextlib
import functools
import sys

import keras

_quiet = False


def be_quiet(quiet: bool) -> None:
    """For all ranks but the first: they do the same, and one of them telling it is enough."""
    global _quiet
    _quiet = quiet


def log(text: str) -> None:
    """Prints one line."""
    if not _quiet:
        print(text, file=sys.stderr, flush=True)


log_once = functools.cache(log)


class Bar:
    """Keras' progress bar: counts steps of one titled piece of work, with running values beside the bar.

    Args:
        title: one word or two.
        total: number of steps.
        done: how many of them were done in an earlier session.
    """

    def __init__(self, title: str, total: int, done: int = 0):
        log(f"{title}: {total} steps")
        interval = 1.0 if sys.stderr.isatty() else 15.0  # seconds
        self._bar = keras.utils.Progbar(total, verbose=0 if _quiet else 1, interval=interval)
        self._done = done

    def step(self, values: dict[str, float] | None = None) -> None:
        """One step further; `values` are shown as they are, not averaged."""
        self._done += 1
        pairs = list((values or {}).items())
        self._bar.stateful_metrics.update(name for name, _ in pairs)
        with contextlib.redirect_stdout(sys.stderr):
            self._bar.update(self._done, pairs)
