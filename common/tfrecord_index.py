"""Which files a pattern names, and DALI's index of each: one line `offset size` per record, in `<file>.idx`.

DALI trusts an index blindly: one that was made for a shorter file hides records without a word, one for
another file reads garbage. So an index is compared with the file before it is used, and made again unless
it is right.

A record (tensorflow/core/lib/io/record_writer.h): uint64 length, masked CRC-32C of the length, data, masked
CRC-32C of the data.
"""

import glob
import os
import pathlib
import struct
from collections.abc import Sequence

from common import atomic, cache
from common.errors import UserError

FRAME = 16  # bytes of a record that are not data: 8 + 4 before, 4 after
_HEADER = struct.Struct("<QI")


def expand_pattern(pattern: str) -> list[str]:
    """The files that a glob (several with commas between them) matches, sorted: equal on all ranks.

    Raises:
        UserError: a pattern matches nothing.
    """
    files: set[str] = set()
    for part in filter(None, (part.strip() for part in pattern.split(","))):
        matches = {file for file in glob.glob(part, recursive=True) if os.path.isfile(file)}
        matches = {file for file in matches if not file.endswith((".idx", ".json", ".pbtxt"))}
        if not matches:
            raise UserError(f"no file matches {part!r}: check the path, and quote the pattern in the shell")
        files |= matches
    if not files:
        raise UserError(f"no file matches {pattern!r}: it is empty")
    return sorted(files)


def record_spans(file: str | os.PathLike) -> list[tuple[int, int]]:
    """(offset, size) of every record, frame included, found by walking the headers.

    Raises:
        UserError: unreadable, empty or truncated file, or a length that does not match its checksum.
    """
    file = os.fspath(file)
    spans = []
    try:
        with open(file, "rb", buffering=0) as stream:
            end = os.fstat(stream.fileno()).st_size
            offset = 0
            while offset < end:
                header = os.pread(stream.fileno(), _HEADER.size, offset)
                if len(header) < _HEADER.size:
                    raise UserError(f"{file} is cut off in the middle of a record header at byte {offset}")
                length, checksum = _HEADER.unpack(header)
                if checksum != masked_crc32c(header[:8]):
                    raise UserError(
                        f"{file} holds no TFRecord at byte {offset} (record {len(spans)}):"
                        " the checksum is wrong; the file is damaged, compressed or of another kind"
                    )
                if offset + length + FRAME > end:
                    raise UserError(
                        f"{file} is cut off: record {len(spans)} at byte {offset} needs"
                        f" {length + FRAME} bytes, {end - offset} are left; copy or write it again"
                    )
                spans.append((offset, length + FRAME))
                offset += length + FRAME
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    if not spans:
        raise UserError(f"{file} is empty: it holds no record")
    return spans


def format_index(spans: Sequence[tuple[int, int]]) -> bytes:
    """DALI's text, byte for byte what its tfrecord2idx writes."""
    return "".join(f"{offset} {size}\n" for offset, size in spans).encode()


def write_index(file: str | os.PathLike) -> str:
    """Writes `<file>.idx` atomically and returns its path; `record_spans` says what it raises."""
    path = f"{os.fspath(file)}.idx"
    atomic.write_bytes(path, format_index(record_spans(file)))
    return path


def ensure_indexes(files: Sequence[str | os.PathLike]) -> list[str]:
    """Makes every file's index unless it is there and right; returns their paths, in the order of the files.

    Where the directory cannot be written, the index goes to the user's cache directory.

    Raises:
        UserError: as `record_spans`.
    """
    return [ensure_index(file, record_spans(file)) for file in files]


def ensure_index(file: str | os.PathLike, spans: Sequence[tuple[int, int]]) -> str:
    """`ensure_indexes` for one file whose records are known."""
    content = format_index(spans)
    path = pathlib.Path(f"{os.fspath(file)}.idx")
    try:
        if not path.is_file() or path.read_bytes() != content:
            atomic.write_bytes(path, content)
    except OSError:  # the data is often mounted read-only
        path = cache.store(content, ".idx")
    return os.fspath(path)


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)  # the polynomial of RFC 3720, reflected
        table.append(byte)
    return table


_CRC32C = _crc32c_table()


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecords (tensorflow/core/lib/hash/crc32c.h). For headers: 1 us a byte."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
