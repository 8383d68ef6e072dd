"""Samples for the tests of outputs, and the outputs without flags that a test does not care about."""

import numpy as np

from tools.preprocessing.outputs import check_output
from tools.preprocessing.samples import Sample


def images(count, shape=(20, 31, 3), dtype=np.uint8):
    """Images of which no two are alike, nor symmetric."""
    random = np.random.default_rng(3)
    if dtype == np.uint8:
        return [random.integers(0, 256, shape, np.uint8) for _ in range(count)]
    return [random.normal(size=shape).astype(dtype) for _ in range(count)]


def samples(of, names=None, labels=None, layout="HWC"):
    """The images `of` as samples, one at a time."""
    names = names or [f"{i}.jpg" for i in range(len(of))]
    labels = labels or [-1] * len(of)
    return (
        Sample(i, name, label, image, layout)
        for i, (name, label, image) in enumerate(zip(names, labels, of, strict=True))
    )


def output(path, **options):
    return check_output(str(path), **{"overwrite": False, "inputs": (), "has_labels": False} | options)


def left(directory):
    """Everything below a directory, hidden files too."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))
