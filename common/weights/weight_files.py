"""Saves and loads weights files in Keras' format, completely or not at all, with metadata and a checksum.

Keras itself overwrites files in place, and loads a damaged `.weights.h5` without an error.
"""

import hashlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from common.errors import UserError
from common.files import user_errors, write_file

if TYPE_CHECKING:
    import keras

BEST = "best.weights.h5"
LAST = "last.weights.h5"

# A weights file ends with _SEAL and the SHA-256 of all bytes before _SEAL. HDF5 readers ignore this end.
# The hash is checked before HDF5 opens the file: a damaged file can crash HDF5.
_SEAL = b"\nsha256="
_SEAL_BYTES = len(_SEAL) + 64
_HEADER = "detection_metadata"  # an HDF5 dataset, because HDF5 attributes are limited to 64 KB


def save(model: "keras.Model", path: str | os.PathLike, metadata: Mapping[str, Any]) -> None:
    """Writes the model's weights in Keras' own format, with metadata and a checksum inside.

    Args:
        path: a path that ends in `.weights.h5`.
        metadata: a dict of JSON values, for example the label map and the config.

    Raises:
        OSError: the file could not be written; an older file at `path` is kept.
    """
    header = json.dumps({"metadata": dict(metadata), "weights": _manifest(model)}).encode()
    # Upper bound of the file size.
    values = sum(4096 + weight.value.dtype.size * math.prod(weight.shape) for weight in model.weights)

    def write(temporary: pathlib.Path) -> None:
        with temporary.open("wb") as file:  # reserves space: on a full disk HDF5 can crash
            os.posix_fallocate(file.fileno(), 0, 2**20 + values + len(header))
        model.save_weights(temporary)
        with h5py.File(temporary, "r+") as file:
            file.create_dataset(_HEADER, data=np.frombuffer(header, np.uint8))
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
        with temporary.open("ab") as file:
            file.write(_SEAL + digest.encode())

    try:
        write_file(path, write)
    except (OSError, RuntimeError) as error:  # h5py raises both
        raise OSError(f"{path} cannot be written: {reason(error)}") from error


def load(model: "keras.Model", path: str | os.PathLike) -> dict[str, Any]:
    """Loads a file that `save` has written into a model of the same structure.

    Returns:
        The metadata.

    Raises:
        UserError: the file is missing, damaged, not of this project, or does not fit the model.
    """
    header = _read_header(path)
    for in_file, in_model in itertools.zip_longest(header["weights"], _manifest(model), fillvalue=()):
        if in_file[1:] != in_model[1:]:
            file_weight, model_weight = (weight[::2] or "nothing" for weight in (in_file, in_model))
            raise UserError(
                f"weights {path} do not fit: the file has {file_weight} where the model has {model_weight}"
            )
    model.load_weights(path)
    return header["metadata"]


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the metadata of a weights file.

    Raises:
        UserError: the file is missing, damaged or not of this project.
    """
    return _read_header(path)["metadata"]


def find(path: str | os.PathLike) -> pathlib.Path:
    """Returns `path` if it is a file, or the best (else the last) weights file of a run directory.

    Raises:
        UserError: the file is missing.
    """
    path = pathlib.Path(path)
    for name in (BEST, LAST):
        if (path / name).exists():
            return path / name
    if path.is_dir():
        raise UserError(f"weights {path}: the directory holds neither {BEST} nor {LAST}")
    if not path.exists():
        raise UserError(f"weights {path}: no such file or run directory")
    return path


def download(address: str, name: str, checksum: str | None = None) -> str:
    """Downloads a public file to ~/.keras/models/NAME, if that file is missing; returns the path.

    Args:
        checksum: MD5 or SHA-256 of the file in hexadecimal digits; None if none is published.

    Raises:
        UserError: the file cannot be downloaded, or its checksum is wrong.
    """
    import keras  # tools/describe_weights.py works without Keras

    try:
        return keras.utils.get_file(name, address, cache_subdir="models", file_hash=checksum)
    except Exception as error:  # get_file raises a plain Exception without a network
        problem = reason(error).rpartition(" -- ")[2].rstrip(".")
        raise UserError(
            f"--init_from=imagenet: {address} cannot be downloaded ({problem}). Copy it from another "
            f"machine to {keras.src.backend.config.keras_home()}/models/{name}"
        ) from error


def _manifest(model: "keras.Model") -> list[list[Any]]:
    """Returns [path, name, shape] of each weight of a model.

    `load` compares the names and shapes. The paths are only for messages.
    """
    return [[weight.path, weight.name, list(weight.shape)] for weight in model.weights]


def _read_header(path: str | os.PathLike) -> dict[str, Any]:
    with user_errors(f"weights {path}"):
        content = pathlib.Path(path).read_bytes()
    body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if not seal.startswith(_SEAL):
        raise UserError(f"weights {path}: the file is incomplete, or was not written by this project")
    if seal.removeprefix(_SEAL) != hashlib.sha256(body).hexdigest().encode():
        raise UserError(f"weights {path}: the file is damaged (wrong checksum): use another copy")
    with h5py.File(path) as file:
        return json.loads(file[_HEADER][()].tobytes())


def reason(error: Exception) -> str:
    """Returns one line about an error of h5py or TensorFlow."""
    number = getattr(error, "errno", None)
    text = os.strerror(number) if number else str(error).strip().splitlines()[0]
    return re.sub(r"\{\{function_node .*?\}\} | \[Op:\w+\]", "", text)
