"""A candidate's side of the protocol of rounds.py. Imports no library: memory is part of what is measured."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

WARM_UP = 3  # steps before `ready`: the first compiles, and on a GPU the next ones still allocate


def tell_steps(advance: Callable[[], Any], batch_size: int | None = None) -> None:
    """Makes batches until it is killed, and prints a line for each.

    Args:
        advance: makes a batch.
        batch_size: its images; None: as many as `advance` returns.
    """
    with own_stdout() as tell:
        for _ in range(WARM_UP):
            advance()
        tell("ready")
        while True:
            batch = advance()
            tell(f"step {len(batch) if batch_size is None else batch_size}")


@contextlib.contextmanager
def own_stdout() -> Iterator[Callable[[str], object]]:
    """A function that prints a line to stdout. What libraries print in this block goes to stderr."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as pipe:
        os.dup2(2, 1)
        try:
            yield lambda line: pipe.write(line.encode() + b"\n")
        except BrokenPipeError:
            sys.exit(0)  # the process that measures has ended
