"""Runs an example in a directory that contains no other file, and compares its batches with the app's."""

import pathlib
import shutil
import sys

import numpy as np

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


def arrays(pipeline) -> list[np.ndarray]:
    return [np.asarray(output.as_tensor()) for output in pipeline.run()]


def assert_same_batch(pipeline, loader, where: str) -> None:
    """Asserts that the next batch of an example's pipeline equals the next batch of the app's loader."""
    for name, expected, got in zip(
        loader.element_spec, arrays(loader.pipeline), arrays(pipeline), strict=True
    ):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (name, where)
        assert got.tobytes() == expected.tobytes(), (name, where)
