"""Finds the records of a file by its headers alone, and checks every length against its checksum.

A record (tensorflow/core/lib/io/record_writer.h): uint64 length, masked CRC-32C of the length, data, masked
CRC-32C of the data. The data are not looked at, but their stored checksums are collected: with the lengths
they tell one content from another.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from common.issues import Findings

FRAME = 16  # bytes of a record that are not data: 8 + 4 before, 4 after
HEADER = 12

_WINDOW = 2**20  # bytes that are read at a time
_JUMP = 8192  # mean size from which on records are jumped over: a call costs about as much as copying so much
_BLOCK = 4096  # records that are jumped over at a time
_UNCHECKED = 65536  # records that are found before a look at their checksums
_THREADS = 16  # files that are walked at once; they wait for the disk more than they compute

_HEADER = struct.Struct("<Q4x")
# Around the beginning of a record: the checksum of the data before, then its own header.
_SEAM = np.dtype([("data_checksum", "<u4"), ("length", "<u8"), ("length_checksum", "<u4")])


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """Where the records of a file stand.

    Attributes:
        path: the file.
        size: of the file in bytes.
        mtime_ns: when it was written.
        digest: SHA-256 (hex) of spans and checksums, which stands for the content.
        spans: int64 (R, 2), offset and size in bytes of each record, frame included.
        checksums: uint32 (R,), masked CRC-32C of the data, as stored with them.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str
    spans: np.ndarray = dataclasses.field(compare=False, repr=False)
    checksums: np.ndarray = dataclasses.field(compare=False, repr=False)

    def name(self, number: int) -> str:
        """A record in words."""
        return f"{self.path} record {number}"


def walk_files(files: Sequence[str | os.PathLike], findings: Findings) -> list[RecordFile]:
    """`walk` of several files at once; findings in the order of the files."""
    own = [Findings(findings.origin) for _ in files]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        walked = list(pool.map(walk, files, own))
    for found in own:
        findings.extend(found)
    return walked


def walk(file: str | os.PathLike, findings: Findings) -> RecordFile:
    """Finds the records of a file and checks their lengths; never waits for a pipe.

    What cannot be used is added to `findings`; the records before it are returned.
    """
    path = os.fspath(file)
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            findings.add("record-file-unreadable", f"{path} is {_kind_of(mode)}")
            return _record_file(path, 0, 0, np.empty(0, _SEAM), b"")
        with open(path, "rb", buffering=0) as stream:
            descriptor = stream.fileno()
            status = os.fstat(descriptor)
            seams = _sound_seams(path, descriptor, status.st_size, findings)
            end = int((seams["length"] + FRAME).sum())
            last = os.pread(descriptor, 4, end - 4) if end else b""
    except OSError as error:
        findings.add("record-file-unreadable", f"{path}: {error.strerror}")
        return _record_file(path, 0, 0, np.empty(0, _SEAM), b"")
    return _record_file(path, status.st_size, status.st_mtime_ns, seams, last)


def masked_crc32c(rows: np.ndarray) -> np.ndarray:
    """The checksums of TFRecords (tensorflow/core/lib/hash/crc32c.h): uint8 (R, B) -> uint32 (R,)."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = _CRC32C[(crc ^ column) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def _crc32c_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, 0x82F63B78, 0).astype(np.uint32)  # RFC 3720, reflected
    return table


_CRC32C = _crc32c_table()


def _kind_of(mode: int) -> str:
    names = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "no regular file")


def _record_file(path: str, size: int, mtime_ns: int, seams: np.ndarray, last: bytes) -> RecordFile:
    sizes = seams["length"].astype(np.int64) + FRAME
    ends = np.cumsum(sizes)
    checksums = np.append(seams["data_checksum"][1:], np.frombuffer(last, "<u4"))
    spans = np.stack([ends - sizes, sizes], axis=1)
    digest = hashlib.sha256(spans.tobytes())
    digest.update(checksums.tobytes())
    return RecordFile(path, size, mtime_ns, digest.hexdigest(), spans, checksums)


def _sound_seams(path: str, descriptor: int, end: int, findings: Findings) -> np.ndarray:
    """_SEAM (R,) of all records, or of those before the first fault, which is added to `findings`."""
    if end == 0:
        findings.add("record-file-empty", f"{path} (0 bytes)")
    blocks, unchecked = [np.empty(0, _SEAM)], 0
    for seams in _seams(descriptor, end):
        blocks.append(seams)
        unchecked += len(seams)
        if unchecked > _UNCHECKED:  # once one length is wrong, all that follow it are
            if not _are_right(seams[-1:]).all():
                break
            unchecked = 0
    seams = np.concatenate(blocks)
    right = _are_right(seams)
    count = len(seams) if right.all() else int(np.argmin(right))
    # Lengths in the order of 2**63 are right only by design; they must not overflow.
    ends = np.cumsum(np.minimum(seams["length"][:count], 2**48).astype(np.int64) + FRAME)
    sound = int(np.searchsorted(ends, end, side="right"))
    offset = int(ends[sound - 1]) if sound else 0
    if offset == end:
        return seams[:sound]

    kind = _other_kind(os.pread(descriptor, 64, 0)) if count == 0 else None
    where, left = f"{path} record {sound} at byte {offset}", end - offset
    if kind:
        findings.add(kind, f"{path} ({end} bytes)")
    elif left < HEADER:
        findings.add("record-truncated", f"{where} has {left} of the {HEADER} bytes of its header")
    elif sound < count:
        needed = int(seams["length"][sound]) + FRAME
        findings.add("record-truncated", f"{where} needs {needed} bytes, {left} are left")
    else:
        seam = seams[sound]
        claim = f"the length {seam['length']} with the checksum {seam['length_checksum']:#010x}"
        findings.add("not-a-record", f"{where} has {claim}")
    return seams[:sound]


def _other_kind(beginning: bytes) -> str | None:
    """Of a file whose first length is wrong: a right one may begin like gzip."""
    if beginning.startswith(b"\x1f\x8b"):
        return "record-gzip"
    return "record-lfs-pointer" if beginning.startswith(b"version https://git-lfs") else None


def _are_right(seams: np.ndarray) -> np.ndarray:
    """bool (R,): whether each length matches its checksum."""
    lengths = np.ascontiguousarray(seams["length"]).view(np.uint8).reshape(-1, 8)
    return masked_crc32c(lengths) == seams["length_checksum"]


def _seams(descriptor: int, end: int) -> Iterator[np.ndarray]:
    """The seams of a file as its lengths chain them, in blocks, until they lead nowhere."""
    window = bytearray(_WINDOW)
    offset, far = 0, False
    while offset < end:
        begin = offset
        if far:
            seams, offset = _jump(descriptor, offset, end)
        else:
            seams, offset = _read_along(descriptor, offset, window)
        if not len(seams):
            return
        yield seams
        far = offset - begin > _JUMP * len(seams)


def _read_along(descriptor: int, offset: int, window: bytearray) -> tuple[np.ndarray, int]:
    """The seams within one window, which begins with the record at `offset`; and where the next record is."""
    lead = 0 if offset else 4  # no checksum stands before the first record
    window[:lead] = bytes(lead)
    filled = lead + os.preadv(descriptor, [memoryview(window)[lead:]], offset - 4 + lead)
    view = memoryview(window)[:filled]
    places = []
    add, unpack = places.append, _HEADER.unpack_from  # called once per record
    place = 4
    try:
        while True:
            (length,) = unpack(view, place)
            add(place)
            place += length + FRAME
    except (struct.error, OverflowError):  # beyond the window
        pass
    # A view of 16 bytes from each byte on.
    everywhere = np.ndarray((max(filled - FRAME + 1, 0),), _SEAM, window, 0, (1,))
    return everywhere[np.array(places, np.int64) - 4], offset - 4 + place


def _jump(descriptor: int, offset: int, end: int) -> tuple[np.ndarray, int]:
    """The seams of up to _BLOCK records from `offset` > 0 on, read one by one; and where the next one is."""
    seams = []
    add, unpack, pread = seams.append, _HEADER.unpack_from, os.pread  # called once per record
    try:
        for _ in range(_BLOCK):
            if offset >= end:
                break
            seam = pread(descriptor, FRAME, offset - 4)
            (length,) = unpack(seam, 4)
            add(seam)
            offset += length + FRAME
    except struct.error:  # less than a header is left
        pass
    return np.frombuffer(b"".join(seams), _SEAM), offset
