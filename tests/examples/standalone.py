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
    """Compares the next batch of an example's pipeline to the next batch of an app's loader, bit for bit."""
    outputs = zip(loader.element_spec, arrays(pipeline), arrays(loader.pipeline), strict=True)
    for name, result, expected in outputs:
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), (name, where)
        assert result.tobytes() == expected.tobytes(), (name, where)
