"""Implements the candidate's side of the protocol in rounds.py.

This module imports only the standard library, because imports would add to the candidate's memory.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

WARM_UP = 3  # steps before `ready`: the first ones compile and allocate memory


def tell_steps(advance: Callable[[], object], batch_size: int) -> None:
    """Calls `advance` until the process is killed, and prints a line after each call."""
    with own_stdout() as tell:
        for _ in range(WARM_UP):
            advance()
        tell("ready")
        while True:
            advance()
            tell(f"step {batch_size}")


@contextlib.contextmanager
def own_stdout() -> Iterator[Callable[[str], object]]:
    """Yields a function that prints a line to stdout. What libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as pipe:
        os.dup2(2, 1)
        try:
            yield lambda line: pipe.write(line.encode() + b"\n")
        except BrokenPipeError:
            sys.exit(0)
