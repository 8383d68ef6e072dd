"""Runs an example in a directory that contains no other file."""

import pathlib
import shutil
import sys

from tests.commands import run
from tests.conftest import ROOT


def run_alone(name: str, tmp_path: pathlib.Path, *arguments: object) -> str:
    """Copies only examples/`name` to a new directory in `tmp_path`, runs it there and returns its output.

    Python runs isolated (-I), so the example cannot import the repository.
    """
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(ROOT / "examples" / name, alone)
    return run(sys.executable, "-I", name, *map(str, arguments), cwd=alone).stdout
