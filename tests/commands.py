"""Runs commands as a user starts them, in separate processes."""

import os
import subprocess

from tests.conftest import ROOT


def run(*command, cwd=ROOT) -> subprocess.CompletedProcess:
    """PYTHONPATH is unset, because users run the commands without it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done
