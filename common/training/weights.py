"""Weights files: Keras' own format, written whole or not at all, with metadata and a checksum inside.

Keras writes in place, so that a kill or a full disk loses the old file too, and it loads a `.weights.h5` with
a flipped bit, or with surplus layers, without an error.
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

# A weights file ends with this and the SHA-256 of all bytes before it. HDF5 readers, Keras' among them,
# ignore what follows their own data. It is checked before HDF5 sees the file, which a damaged one can crash.
_SEAL = b"\nsha256="
_SEAL_BYTES = len(_SEAL) + 64
_HEADER = "detection_metadata"  # a dataset: HDF5 attributes end at 64 KB


def save(model: "keras.Model", path: str | os.PathLike, metadata: Mapping[str, Any]) -> None:
    """Writes the model's weights in Keras' own format, atomically, with metadata and a checksum inside.

    Args:
        model: a built model.
        path: ends in `.weights.h5`.
        metadata: what JSON can hold; for example the label map and the config.

    Raises:
        OSError: it could not be written; what stood at `path` still does.
    """
    header = json.dumps({"metadata": dict(metadata), "weights": _manifest(model)}).encode()
    # What the file takes at most: the values, and a generous HDF5 overhead for each.
    values = sum(4096 + weight.value.dtype.size * math.prod(weight.shape) for weight in model.weights)

    def write(temporary: pathlib.Path) -> None:
        with temporary.open("wb") as file:  # HDF5 can crash the process on a full disk
            os.posix_fallocate(file.fileno(), 0, 2**20 + values + len(header))
        model.save_weights(temporary)
        with h5py.File(temporary, "r+") as file:
            file.create_dataset(_HEADER, data=np.frombuffer(header, np.uint8))
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
        with temporary.open("ab") as file:
            file.write(_SEAL + digest.encode())

    try:
        write_file(path, write)
    except (OSError, RuntimeError) as error:  # h5py raises either
        raise OSError(f"{path} cannot be written: {reason(error)}") from error


def load(model: "keras.Model", path: str | os.PathLike) -> dict[str, Any]:
    """Loads what `save` wrote into a model of the same structure.

    Returns:
        The metadata.

    Raises:
        UserError: the file is missing, damaged, not of this project, or does not fit the model.
    """
    header = _read_header(path)
    for in_file, in_model in itertools.zip_longest(header["weights"], _manifest(model), fillvalue=()):
        if in_file[1:] != in_model[1:]:
            found, wanted = (weight[::2] or "nothing" for weight in (in_file, in_model))
            raise UserError(f"weights {path} do not fit the model: {found} where the model has {wanted}")
    model.load_weights(path)
    return header["metadata"]


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """The metadata of a weights file; UserError where it is missing, damaged or not of this project."""
    return _read_header(path)["metadata"]


def find(path: str | os.PathLike) -> pathlib.Path:
    """The weights file that `path` means: itself, or the best (else the last) one of a run directory.

    Raises:
        UserError: there is none.
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
    """The path of a public file, ~/.keras/models/NAME, downloaded if it is not there.

    Args:
        address: of the file.
        name: under which it is kept.
        checksum: its MD5 or SHA-256 in hexadecimal digits; None where none is published.

    Raises:
        UserError: it cannot be downloaded, or its checksum is another.
    """
    import keras  # tools/describe_weights.py does without

    try:
        return keras.utils.get_file(name, address, cache_subdir="models", file_hash=checksum)
    except Exception as error:  # get_file raises a plain Exception without a network
        problem = reason(error).rpartition(" -- ")[2].rstrip(".")
        raise UserError(
            f"--init_from=imagenet: {address} cannot be downloaded ({problem}). Get it elsewhere and put it "
            f"at ~/.keras/models/{name}"
        ) from error


def _manifest(model: "keras.Model") -> list[list[Any]]:
    """[path, name, shape] of every weight in order: Keras loads a file with surplus layers without an error.

    Two models built in one process have different paths where layers have no names of their own, so the path
    ("dense_1/kernel") is for messages and the name ("kernel") for comparison.
    """
    return [[weight.path, weight.name, list(weight.shape)] for weight in model.weights]


def _read_header(path: str | os.PathLike) -> dict[str, Any]:
    with user_errors(f"weights {path}"):
        content = pathlib.Path(path).read_bytes()
    body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if not seal.startswith(_SEAL):
        raise UserError(f"weights {path}: the file is cut short, or was not written by this project")
    if seal.removeprefix(_SEAL) != hashlib.sha256(body).hexdigest().encode():
        raise UserError(f"weights {path}: the file is damaged, its checksum is wrong: use another copy")
    with h5py.File(path) as file:
        return json.loads(file[_HEADER][()].tobytes())


def reason(error: Exception) -> str:
    """One line of what went wrong; h5py and TensorFlow write several, about their insides."""
    number = getattr(error, "errno", None)
    text = os.strerror(number) if number else str(error).strip().splitlines()[0]
    return re.sub(r"\{\{function_node .*?\}\} | \[Op:\w+\]", "", text)
