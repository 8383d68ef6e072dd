"""Runs an example in an empty directory, compares its batches, and makes its network small."""

import pathlib
import shutil
import sys

import numpy as np

from tests.commands import run
from tests.conftest import ROOT

# {app: changes of examples/train_{app}.py, so that TensorFlow compiles its network faster}
SMALL_NETWORK = {
    "efficientdet": {
        "HEAD_REPEATS, ANCHORS = 64, 3, 3, 9": "HEAD_REPEATS, ANCHORS = 64, 1, 1, 9",
        "(3, 3, 2, 6, 80), (3, 5, 1, 6, 112)": "(1, 3, 2, 6, 80), (1, 5, 1, 6, 112)",
        "(4, 5, 2, 6, 192)": "(1, 5, 2, 6, 192)",
        "(2, 3, 2, 6, 24), (2, 5, 2, 6, 40)": "(1, 3, 2, 6, 24), (1, 5, 2, 6, 40)",
    },
    "yolov4": {
        "layers.Conv2D(filters, kernel, strides": "layers.Conv2D(filters // 8, kernel, strides",
        "csp_stage(x, 256, 8, 128)": "csp_stage(x, 256, 1, 128)",
        "csp_stage(c3, 512, 8, 256)": "csp_stage(c3, 512, 1, 256)",
        "csp_stage(c4, 1024, 4, 512)": "csp_stage(c4, 1024, 1, 512)",
        "for i in range(count):": "for i in range(1):",
    },
}


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


def source_with_small_network(app: str) -> str:
    """Returns the changed source of examples/train_{app}.py. Other tests train its unchanged network."""
    source = (ROOT / f"examples/train_{app}.py").read_text()
    for old, new in SMALL_NETWORK[app].items():
        assert old in source
        source = source.replace(old, new)
    return source
