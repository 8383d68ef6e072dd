"""What was found out about the files of a directory, kept in the cache from run to run.

One file per directory, replaced as a whole: of two processes that write at once, the last one stays. What is
damaged or of another version counts as nothing.
"""

import hashlib
import os
import zlib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from common import cache

Entry = TypeVar("Entry", bound=msgspec.Struct)


def remember(directory: str | os.PathLike, version: int, entries: Mapping[str, msgspec.Struct]) -> None:
    """Keeps `entries`, by file name, in place of what was kept before."""
    # Names need not be UTF-8, msgpack's text must be.
    names = os.fsencode("\0".join(entries))
    content = msgspec.msgpack.encode((version, names, list(entries.values())))
    cache.save(_name(directory), zlib.crc32(content).to_bytes(4) + content)


def recall(directory: str | os.PathLike, version: int, entry_type: type[Entry]) -> dict[str, Entry]:
    """What `remember` kept under the same version; nothing where nothing was."""
    content = cache.load(_name(directory)) or b""
    if zlib.crc32(content[4:]) != int.from_bytes(content[:4]):
        return {}
    try:
        kept, names, entries = msgspec.msgpack.decode(content[4:], type=tuple[int, bytes, list[entry_type]])
    except msgspec.MsgspecError:  # another version's
        return {}
    if kept != version or not entries:
        return {}
    return dict(zip(os.fsdecode(names).split("\0"), entries, strict=True))


def _name(directory: str | os.PathLike) -> str:
    path = os.fsencode(os.path.realpath(directory))
    return f"files-{hashlib.sha256(path).hexdigest()[:32]}.msgpack"
