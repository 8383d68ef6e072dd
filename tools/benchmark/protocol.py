"""The protocol of rounds.py, for the measured process. Imports no library, as its memory is measured, too."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

WARM_UP = 3  # steps before `ready`: the first compiles, and on a GPU the next ones still allocate memory


def tell_steps(advance: Callable[[], Any], batch_size: int | None = None) -> None:
    """Makes batches until the process is killed, and prints a line for each batch.

    Args:
        advance: makes a batch.
        batch_size: number of images in a batch; None: the length of what `advance` returns.
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
    """Yields a function that prints a line to stdout. What libraries print in this block goes to stderr."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as pipe:
        os.dup2(2, 1)
        try:
            yield lambda line: pipe.write(line.encode() + b"\n")
        except BrokenPipeError:
            sys.exit(0)  # the process that measures has ended
