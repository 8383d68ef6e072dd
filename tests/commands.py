"""Runs commands as a user starts them, in separate processes."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from tests.conftest import ROOT


def run(*command, cwd=ROOT) -> subprocess.CompletedProcess:
    """Returns the finished process, which must exit with 0. Users have no PYTHONPATH, so it is unset."""
    result = subprocess.run(command, cwd=cwd, env=_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result


def run_forked(
    *words: object, cwd: pathlib.Path, check: bool = True, eagerly: bool = False
) -> subprocess.CompletedProcess:
    """Does what `python words...` does, without the time that the import of TensorFlow takes.

    The result's stdout has the error messages, too. With `check`, the exit code must be 0. With `eagerly`,
    tf.functions run eagerly: two training steps then need a quarter of the time.
    """
    words = [*map(str, words)]
    with tempfile.NamedTemporaryFile() as output:
        server = _fork_server()
        try:
            server.stdin.write(json.dumps([words, str(cwd), output.name, eagerly]) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        except BaseException:  # the server is broken, or still waits for a command that a timeout has ended
            _fork_server.cache_clear()
            os.killpg(server.pid, signal.SIGKILL)
            raise
        result = subprocess.CompletedProcess(words, code, output.read().decode())
    assert code == 0 or not check, result.stdout[-4000:]
    return result


@functools.cache
def _fork_server() -> subprocess.Popen:
    """Ends with this process, because its standard input then ends."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, ROOT / "tests/fork_server.py"], env=_environment(), **streams)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
