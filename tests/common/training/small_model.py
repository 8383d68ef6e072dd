"""Helpers: a small network, rows of results.csv, full disks."""

import contextlib
import csv
import errno
import os
import pathlib
import resource
from collections.abc import Iterator

import h5py
import keras
import numpy as np


def make_model(units: int = 6, seed: int = 0) -> keras.Sequential:
    """Returns a model with trainable weights, batch norm statistics and the random state of dropout."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Conv2D(units, 3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Flatten(), keras.layers.Dense(2)])


def values(*owners) -> list[np.ndarray]:
    """Returns all variables of models, optimizers and averaged weights."""
    return [np.asarray(variable) for owner in owners for variable in owner.variables]


def assert_same(actual, expected) -> None:
    """Compares two lists of arrays bit for bit."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def rows_of(run: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of a run's results.csv."""
    with (run / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def full_disk(*_) -> None:
    """Replaces a function that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Longer writes fail, even in TensorFlow's code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def weights_of(file: pathlib.Path, kinds: str = "f") -> dict[str, np.ndarray]:
    """Returns the arrays of a `.weights.h5` file by path, without the metadata."""
    arrays = {}

    def add(name: str, item) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind in kinds:
            arrays[name] = item[()]

    with h5py.File(file) as weights:
        weights.visititems(add)
    return arrays
