"""What was seen in containers, kept in the cache directory until they change."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from common.datacheck.images import ImagePolicy
from common.errors import UserError
from common.files import load_cached, save_cached
from tools.preprocessing.formats.base import Seen

_VERSION = 1  # of what is kept and of the checks, those of images.py included: raise it when they change


def seen_in(kind: str, state: Any, policy: ImagePolicy, look: Callable[[], Sequence[Seen]]) -> Sequence[Seen]:
    """What `look` returns, or returned when the container was in the same state; what it raises is not kept.

    Args:
        kind: of the source.
        state: of the container, of what msgpack can hold; `state_of` for files.
        policy: how deep the look goes.
        look: at all images.
    """
    key = msgspec.msgpack.encode((_VERSION, kind, policy.decode, policy.max_megapixels, state))
    name = f"{hashlib.sha256(key).hexdigest()[:32]}.images"
    if kept := load_cached(name):
        return msgspec.msgpack.decode(kept, type=list[Seen])
    seen = look()
    save_cached(name, msgspec.msgpack.encode(seen))
    return seen


def seen_in_files(
    kind: str, files: Sequence[str], policy: ImagePolicy, look: Callable[[str], Sequence[Seen]]
) -> tuple[list[Seen], np.ndarray]:
    """`seen_in` of several files in turn: what was seen, and the numbers of the files, int64 (N,)."""
    seen, counts = [], []
    for file in files:
        images = seen_in(kind, state_of(file), policy, functools.partial(look, file))
        seen += images
        counts.append(len(images))
    return seen, np.repeat(np.arange(len(files)), counts)


def state_of(path: str) -> tuple[bytes, int, int, int, int]:
    """What shows that a file has changed; UserError where it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    path = os.fsencode(os.path.abspath(path))
    return path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
