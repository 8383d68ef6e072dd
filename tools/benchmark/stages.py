"""What each stage of a DALI loader costs: the loader's own graph, cut after each stage.

A cut gives what its stage gives, and DALI leaves out of the graph whatever that does not need. The stage
costs what its cut costs more than the cut before it, in CPU time. All cuts live in one process and are
measured in turn, each from and to a moment at which its queues are full and nothing moves any more: so the
CPU time is that of as many batches as were taken.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from nvidia import dali

from common.loading import Loader
from tools.benchmark import steps
from tools.benchmark.summary import CutCost

_QUIET = 0.05  # seconds without work after which a queue is taken to be full


class Cut(NamedTuple):
    """One cut of a loader.

    Attributes:
        stage: what comes last in it.
        advance: makes one batch.
        instead: it takes the place of what follows the cut named here, and is no part of the loader's sum.
    """

    stage: str
    advance: Callable[[], object]
    instead: str = ""


def of_graph(stage: str, pipeline: dali.Pipeline, instead: str = "") -> Cut:
    """A cut that DALI runs by itself."""
    return Cut(stage, pipeline.run, instead)


def of_dataset(stage: str, loader: Loader) -> Cut:
    """A cut that TensorFlow takes its batches from."""
    return Cut(stage, steps.load(loader))


def cost(cut: Cut, *, batch_size: int, seconds: float, settle: int) -> CutCost:
    """Takes batches for at least so many seconds.

    Args:
        cut: of which nothing is running at the moment.
        batch_size: images of a batch.
        seconds: of the time that is measured.
        settle: batches that were ready before it began; the rate is that of those after them.
    """
    _wait_until_quiet()
    cpu = time.process_time()
    for _ in range(settle):
        cut.advance()
    batches, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        cut.advance()
        batches += 1
    elapsed = time.monotonic() - start
    _wait_until_quiet()
    cpu = time.process_time() - cpu
    return CutCost(
        cut.stage,
        cpu_ms=1000 * cpu / (batch_size * (settle + batches)),
        ms=1000 * elapsed / (batch_size * batches),
    )


def _wait_until_quiet() -> None:
    while True:
        cpu = time.process_time()
        time.sleep(_QUIET)
        if time.process_time() - cpu < 0.1 * _QUIET:
            return
