"""TFRecords in the schema of TensorFlow Object Detection: keys, places of the records, DALI's index.

A record (tensorflow/core/lib/io/record_writer.h): uint64 length, masked CRC-32C of the length, data, masked
CRC-32C of the data. DALI's index (`<file>.idx`) has `offset size` per record. DALI trusts it blindly: one
that was made for a shorter file hides records, one for another file reads garbage. So an index is compared
with the file before it is used, and made again unless it is right.

The schema: tensorflow/models research/object_detection/dataset_tools/create_coco_tf_record.py and
google/automl efficientdet/dataset/create_coco_tfrecord.py. `image/object/class/label` holds COCO category ids
and `image/source_id` the image id in decimal digits. Optional: `image/filename`, `image/object/is_crowd`,
`image/object/area`.
"""

import dataclasses
import hashlib
import os
import pathlib
import stat
import struct
from collections.abc import Sequence

import google_crc32c
import numpy as np
import tensorflow as tf

from common.errors import UserError
from common.files import store_cached, write_bytes

BOX_KEYS = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
LABEL_KEY = "image/object/class/label"
CROWD_KEY = "image/object/is_crowd"
AREA_KEY = "image/object/area"
DALI_KEYS = (*BOX_KEYS, LABEL_KEY, CROWD_KEY)  # without which DALI does not read a record, even empty

FRAME = 16  # bytes of a record that are not data: 8 + 4 before, 4 after
HEADER = 12
_MAGIC = ((b"\x1f\x8b", "record-gzip"), (b"version http", "record-lfs-pointer"))


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
        fault: a row of issues.KINDS and words, where the file cannot be used; `spans` end before it.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str
    spans: np.ndarray = dataclasses.field(compare=False, repr=False)
    checksums: np.ndarray = dataclasses.field(compare=False, repr=False)
    fault: tuple[str, str] | None = None

    def name(self, number: int) -> str:
        """A record in words."""
        return f"{self.path} record {number}"


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Record files that DALI can read.

    Attributes:
        files: in the order in which they are read.
        indexes: the index of each.
        spans: int64 (I, 3), (number of the file, offset, size with frame) of each record, in that order.
        has_crowds: whether any object is a crowd; then every record has the key of crowds.
        has_empty_boxes: whether any other box has no area inside its image.
    """

    files: tuple[str, ...]
    indexes: tuple[str, ...]
    spans: np.ndarray
    has_crowds: bool
    has_empty_boxes: bool


def walk(file: str | os.PathLike) -> RecordFile:
    """Finds the records of a file by their headers, and checks each length; never waits for a pipe."""
    path, records = os.fspath(file), []
    size = mtime_ns = 0
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            fault = ("record-file-unreadable", f"{path} is not a regular file")
        else:
            with open(path, "rb", buffering=0) as stream:
                status = os.fstat(stream.fileno())
                size, mtime_ns = status.st_size, status.st_mtime_ns
                fault = _walk(path, stream.fileno(), size, records)
    except OSError as error:
        fault = ("record-file-unreadable", f"{path}: {error.strerror}")
    found = np.array(records, np.int64).reshape(-1, 3)
    spans, checksums = found[:, :2].copy(), found[:, 2].astype(np.uint32)
    digest = hashlib.sha256(spans.tobytes() + checksums.tobytes()).hexdigest()
    return RecordFile(path, size, mtime_ns, digest, spans, checksums, fault)


def _walk(
    path: str, descriptor: int, end: int, records: list[tuple[int, int, int]]
) -> tuple[str, str] | None:
    """Appends (offset, size, checksum of the data) of each record; returns the first fault."""
    offset = 0
    while offset < end:
        header = os.pread(descriptor, HEADER, offset)
        size = int.from_bytes(header[:8], "little") + FRAME
        if not _is_header(header) or offset + size > end:
            break
        checksum = os.pread(descriptor, 4, offset + size - 4)
        records.append((offset, size, int.from_bytes(checksum, "little")))
        offset += size
    if 0 < offset == end:
        return None
    return _fault(path, os.pread(descriptor, HEADER, offset), len(records), offset, end)


def _is_header(header: bytes) -> bool:
    return len(header) == HEADER and int.from_bytes(header[8:], "little") == masked_crc32c(header[:8])


def _fault(path: str, header: bytes, number: int, offset: int, end: int) -> tuple[str, str]:
    """Why record `number`, which begins at `offset` of `end` bytes, cannot be read."""
    if end == 0:
        return "record-file-empty", f"{path} (0 bytes)"
    where, left = f"{path} record {number} at byte {offset}", end - offset
    magic = [kind for beginning, kind in _MAGIC if header.startswith(beginning)]
    if number == 0 and magic and not _is_header(header):
        return magic[0], f"{path} ({end} bytes)"
    if len(header) < HEADER:
        return "record-truncated", f"{where} has {left} of the {HEADER} bytes of its header"
    length, checksum = struct.unpack("<QI", header)
    if _is_header(header):
        return "record-truncated", f"{where} needs {length + FRAME} bytes, {left} are left"
    return "not-a-record", f"{where} has the length {length} with the checksum {checksum:#010x}"


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecords (tensorflow/core/lib/hash/crc32c.h)."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """A record as it stands in a file: length and data, each with its checksum."""
    length = len(data).to_bytes(8, "little")
    first, second = (masked_crc32c(part).to_bytes(4, "little") for part in (length, data))
    return b"".join([length, first, data, second])


def read_record(file: str, offset: int, size: int) -> bytes:
    """The data of one record, whose span is given."""
    with open(file, "rb") as stream:
        stream.seek(offset + HEADER)
        return stream.read(size - FRAME)


def image_of(record: bytes) -> bytes:
    """The encoded image of a record."""
    return tf.train.Example.FromString(record).features.feature["image/encoded"].bytes_list.value[0]


# --- DALI's index ---


def record_spans(file: str | os.PathLike) -> np.ndarray:
    """`RecordFile.spans` of a file; UserError for one that is unreadable, empty, truncated or damaged."""
    walked = walk(file)
    if walked.fault:
        raise UserError(walked.fault[1])
    return walked.spans


def format_index(spans: np.ndarray | Sequence[tuple[int, int]]) -> bytes:
    """DALI's text, byte for byte what its tfrecord2idx writes."""
    return "".join(f"{offset} {size}\n" for offset, size in np.asarray(spans).tolist()).encode()


def write_index(file: str | os.PathLike) -> str:
    """Writes `<file>.idx` atomically and returns its path; `record_spans` raises."""
    path = f"{os.fspath(file)}.idx"
    write_bytes(path, format_index(record_spans(file)))
    return path


def ensure_index(file: str, spans: np.ndarray) -> tuple[str, str | None]:
    """Makes a file's index unless it is there and right.

    Where the directory cannot be written, the index goes to the user's cache directory.

    Args:
        file: the record file.
        spans: of its records.

    Returns:
        The path of the index; and "index-made", "index-stale", or None where it was right.
    """
    content, path = format_index(spans), pathlib.Path(f"{file}.idx")
    made = "index-stale" if os.path.lexists(path) else "index-made"
    try:
        if path.is_file() and path.read_bytes() == content:
            return os.fspath(path), None
        write_bytes(path, content)
    except OSError:  # data are often mounted read-only
        path = store_cached(content, ".idx")
    return os.fspath(path), made


def index_records(paths: Sequence[str | os.PathLike]) -> Records:
    """Record files without a data check, for programs that have no `datacheck`: every key is looked for.

    Raises:
        UserError: a file that cannot be read, or a record that lacks a key.
    """
    indexes, spans, lacking = [], [], set()
    has_crowds = has_empty_boxes = False
    for number, path in enumerate(paths):
        found = record_spans(path)
        indexes.append(ensure_index(os.fspath(path), found)[0])
        spans.append(np.insert(found, 0, number, axis=1))
        for record, (offset, size) in enumerate(found.tolist()):
            features = tf.train.Example.FromString(read_record(path, offset, size)).features.feature
            lacking |= {key for key in DALI_KEYS if key not in features}
            if absent := lacking - {CROWD_KEY}:
                raise UserError(f"{path} record {record} lacks {min(absent)}: convert the data set again")
            is_crowd = np.array(features[CROWD_KEY].int64_list.value, bool)
            boxes = np.clip([features[key].float_list.value for key in BOX_KEYS], 0, 1)
            is_empty = np.any(boxes[2:] <= boxes[:2], axis=0)
            has_empty_boxes |= bool(np.any(is_empty & ~is_crowd if is_crowd.size else is_empty))
            has_crowds |= bool(is_crowd.any())
    if has_crowds and lacking:
        raise UserError(f"{paths[0]}: some records lack {CROWD_KEY}: convert the data set again")
    files = tuple(map(os.fspath, paths))
    return Records(files, tuple(indexes), np.concatenate(spans), has_crowds, has_empty_boxes)
