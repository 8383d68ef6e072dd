import subprocess
import sys

import pytest

from tests.commands import run_forked

# Prints what a program sees of its start, on both streams.
PROGRAM = """
import os, sys
print(__name__, sys.argv, os.getcwd(), sys.stdin.read(), [path for path in sys.path if path], flush=True)
print("PYTHONPATH" in os.environ, "tests" in sys.modules, not __package__, file=sys.stderr)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_forked_program_sees_and_returns_what_one_started_by_python_does(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # as run_forked does
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["program.py", "--flag=a b"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    expected = subprocess.run([sys.executable, *words], cwd=tmp_path, text=True, **streams)
    result = run_forked(*words, cwd=tmp_path, check=False)
    assert (result.returncode, result.stdout) == (expected.returncode, expected.stdout)
    with pytest.raises(AssertionError, match=r"program\.py"):
        run_forked(*words, cwd=tmp_path)
