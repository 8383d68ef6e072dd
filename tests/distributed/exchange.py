"""Nested dicts and lists with NumPy arrays in a file, for what a rank hands to the test that started it."""

import pathlib
from typing import Any

import msgspec
import numpy as np

_ARRAY = "array"


def write(path: pathlib.Path, value: Any) -> None:
    """Arrays keep their bits; tuples become lists."""
    path.write_bytes(msgspec.msgpack.encode(_plain(value)))


def read(path: pathlib.Path) -> Any:
    """What `write` was given."""
    return _restored(msgspec.msgpack.decode(path.read_bytes(), strict=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {_ARRAY: [array.dtype.str, list(array.shape), array.tobytes()]}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            dtype, shape, content = value[_ARRAY]
            return np.frombuffer(content, dtype).reshape(shape)
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
