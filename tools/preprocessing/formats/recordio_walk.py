"""The records of an MXNet RecordIO file, found without its index.

Format: dmlc-core include/dmlc/recordio.h. A record is a magic number, a word with its length and which part
of a record it is, the data, and zeros up to a multiple of four bytes. Where data hold the magic number, it
is left out and the record is cut there. Images have a header of their own: python/mxnet/recordio.py
(IRHeader) of apache/mxnet.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from common.errors import UserError

_MAGIC = 0xCED7230A
_WORDS = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")  # number of labels that follow (0: the one here), label, two ids
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


class Record(NamedTuple):
    """A record.

    Attributes:
        offset, size: of it in its file, frames included.
        encoded: the image.
        labels: as many as it has.
    """

    offset: int
    size: int
    encoded: bytes | memoryview
    labels: tuple[float, ...]


def walk(content: memoryview, path: str) -> Iterator[Record]:
    """All records of a file.

    Raises:
        UserError: the first place that is none, or cut off.
    """
    at = number = 0
    while at < len(content):
        where = f"{path} record {number} at byte {at}"
        data, end = _join(content, at, where)
        labels, begin = _labels(data, where)
        yield Record(at, end - at, data[begin:], labels)
        at, number = end, number + 1


def image_of(record: bytes, path: str) -> bytes:
    """The image of one record, frames included."""
    (found,) = walk(memoryview(record), path)
    return bytes(found.encoded)


def _join(content: memoryview, at: int, where: str) -> tuple[bytes | memoryview, int]:
    """The data of the record that begins at a place, and where the next one does."""
    part, kind, at = _part(content, at, where)
    if kind == _WHOLE:
        return part, at
    if kind != _FIRST:
        raise UserError(f"{where} begins with a later part of a record: copy or write the file again")
    parts = [part]
    while kind != _LAST:
        part, kind, at = _part(content, at, where)
        if kind not in (_MIDDLE, _LAST):
            raise UserError(f"{where} lacks its last part: copy or write the file again")
        parts.append(part)
    return _MAGIC.to_bytes(4, "little").join(parts), at


def _part(content: memoryview, at: int, where: str) -> tuple[memoryview, int, int]:
    """(data, which part of a record, end) of what begins at a place."""
    left = len(content) - at
    if left < _WORDS.size:
        raise UserError(f"{where} is cut off: {left} bytes are left of its header: copy the file again")
    magic, word = _WORDS.unpack_from(content, at)
    if magic != _MAGIC:
        raise UserError(
            f"{where} does not begin with RecordIO's magic number: the file is damaged, or of another kind"
        )
    kind, size = word >> 29, word & (1 << 29) - 1
    begin = at + _WORDS.size
    end = begin + (size + 3) // 4 * 4
    if begin + size > len(content):
        raise UserError(f"{where} is cut off: it needs {end - at} bytes and has {left}: copy the file again")
    return content[begin : begin + size], kind, min(end, len(content))


def _labels(data: bytes | memoryview, where: str) -> tuple[tuple[float, ...], int]:
    """The labels of a record, and where its image begins."""
    if len(data) < _HEADER.size:
        raise UserError(f"{where} has {len(data)} bytes, less than an image's header: no image record")
    count, label, _, _ = _HEADER.unpack_from(data)
    if count == 0:
        return (label,), _HEADER.size
    if count > (len(data) - _HEADER.size) // 4:
        raise UserError(f"{where} promises {count} labels in {len(data)} bytes: no image record")
    return struct.unpack_from(f"<{count}f", data, _HEADER.size), _HEADER.size + 4 * count
