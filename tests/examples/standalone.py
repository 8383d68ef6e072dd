"""Runs an example in a directory without any other file."""

import pathlib
import shutil
import sys

from tests.commands import run
from tests.conftest import ROOT


def run_alone(name: str, tmp_path: pathlib.Path, *arguments: object) -> str:
    """Copies examples/`name` alone into a new directory below `tmp_path`, runs it there, returns its output.

    Python runs isolated (-I), so the example cannot import the repository.
    """
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(ROOT / "examples" / name, alone)
    return run(sys.executable, "-I", name, *map(str, arguments), cwd=alone).stdout
