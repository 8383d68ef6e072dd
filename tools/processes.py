"""Ends the processes that a tool has started."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def ended_afterwards(process: subprocess.Popen, grace: float = 0.0) -> Iterator[None]:
    """Ends a process and its process group after the `with` block, also after an error or an interrupt.

    Args:
        process: the leader of its process group.
        grace: seconds from SIGTERM to SIGKILL; with 0, SIGTERM is not sent. Horovod's launcher needs more
            than 5 (GRACEFUL_TERMINATION_TIME_S in horovod/runner/common/util/safe_shell_exec.py).
    """
    try:
        yield
    finally:
        first = [(signal.SIGTERM, grace)] if grace else []
        for number, seconds in [*first, (signal.SIGKILL, None)]:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, number)
                process.wait(seconds)
