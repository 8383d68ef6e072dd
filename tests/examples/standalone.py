"""Runs an example in an empty directory, and compares its batches."""

import pathlib
import shutil
import sys

import numpy as np

from tests.commands import run
from tests.conftest import ROOT


def run_alone(name: str, tmp_path: pathlib.Path, *arguments: object) -> str:
    """Runs an example with `python -I`, which cannot import the repository, and returns its output."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(ROOT / "examples" / name, alone)
    return run(sys.executable, "-I", name, *map(str, arguments), cwd=alone).stdout


def arrays(pipeline) -> list[np.ndarray]:
    return [np.asarray(output.as_tensor()) for output in pipeline.run()]


def assert_same_batch(pipeline, loader, where: str) -> None:
    for name, expected, got in zip(
        loader.element_spec, arrays(loader.pipeline), arrays(pipeline), strict=True
    ):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (name, where)
        assert got.tobytes() == expected.tobytes(), (name, where)
