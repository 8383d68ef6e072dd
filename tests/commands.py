"""Runs commands as a user starts them, in separate processes."""

import os
import subprocess

from tests.conftest import ROOT


def run(*command, cwd=ROOT) -> subprocess.CompletedProcess:
    """Returns the finished process, which must exit with 0. Users have no PYTHONPATH, so it is unset."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result
