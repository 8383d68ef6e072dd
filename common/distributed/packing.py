"""Plain values as bytes, on their way between ranks: MessagePack, which cannot run code as pickle can.

Dicts, lists, strings, bytes, numbers and None arrive as they were; tuples arrive as lists.
"""

from typing import Any

import msgspec
import numpy as np


def pack(value: Any) -> np.ndarray:
    """uint8 (bytes,) of a plain value; TypeError for anything else."""
    return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)


def unpack(data: np.ndarray) -> Any:
    """The value that `pack` was given."""
    return msgspec.msgpack.decode(data.tobytes())
