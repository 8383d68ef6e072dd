"""TFRecords in the schema of TensorFlow Object Detection: keys, offsets of records, DALI's index and reader.

A record consists of the uint64 length of the data, the masked CRC-32C of this length, the data, and their
masked CRC-32C (tensorflow/core/lib/io/record_writer.h). DALI's index (`<file>.idx`) has a line `offset
size` for each record. DALI does not check the index, so it is compared with the file and made again if it is
wrong.

The schema is that of tensorflow/models research/object_detection/dataset_tools/create_coco_tf_record.py and
google/automl efficientdet/dataset/create_coco_tfrecord.py. `image/object/class/label` holds COCO category ids
and `image/source_id` the image id in decimal digits. The keys `image/filename`, `image/object/is_crowd` and
`image/object/area` are optional. So is `image/object/class/text`, which has the names of the labels.

Other programs write a file name into `image/source_id` (datitran/raccoon_dataset generate_tfrecord.py), leave
it empty (openvinotoolkit/datumaro datumaro/plugins/tf_detection_api_format/exporter.py, which CVAT uses), or
leave it out. The data check numbers such images.
"""

import dataclasses
import errno
import hashlib
import os
import pathlib
import stat
from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np
import nvidia.dali.tfrecord as dali_tfrecord
import tensorflow as tf
from nvidia.dali import fn, types
from nvidia.dali import math as dali_math
from nvidia.dali.data_node import DataNode

from common.dali_ops import Nodes, select_boxes
from common.data import parts, storage
from common.data.check.recognition import HEAD, foreign
from common.data.labels import LabelMap
from common.data.sharding import check_shards, order
from common.errors import UserError
from common.files import store_cached, write_bytes

BOX_KEYS = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
LABEL_KEY = "image/object/class/label"
TEXT_KEY = "image/object/class/text"
CROWD_KEY = "image/object/is_crowd"
AREA_KEY = "image/object/area"
ID_KEY = "image/source_id"
DALI_KEYS = (*BOX_KEYS, LABEL_KEY, CROWD_KEY)  # every record needs these keys; they may be empty

FRAME = 16  # bytes of a record that are not data: 8 + 4 before the data, 4 after them
HEADER = 12  # bytes of a record before its data
_MAGIC = ((b"\x1f\x8b", "file-gzip"), (b"version http", "file-lfs-pointer"))


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """The offsets of the records in a file.

    Attributes:
        path: the user's path, for messages; s3://... for an object.
        size: size of the file in bytes.
        mtime_ns: time when the file was written.
        digest: SHA-256 (hex) of `spans` and `checksums`.
        spans: int64 (R, 2), offset and size of each record in bytes. The size includes FRAME.
        checksums: uint32 (R,), masked CRC-32C of each record's data, as stored in the file.
        fault: the first fault, as (key of issues.KINDS, message), or None. `spans` stops before the fault.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str
    spans: np.ndarray = dataclasses.field(compare=False, repr=False)
    checksums: np.ndarray = dataclasses.field(compare=False, repr=False)
    fault: tuple[str, str] | None = None

    def name(self, number: int) -> str:
        return f"{self.path} record {number}"


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Record files that DALI can read.

    Attributes:
        files: paths in the order in which they are read.
        indexes: path of each file's index.
        spans: int64 (I, 3), for each record in reading order: index in `files`, offset, size including FRAME.
        has_crowds: whether any object is a crowd. If so, every record has CROWD_KEY.
        has_empty_boxes: whether there may be boxes without an area inside their image.
    """

    files: tuple[str, ...]
    indexes: tuple[str, ...]
    spans: np.ndarray
    has_crowds: bool
    has_empty_boxes: bool

    def data(self, number: int) -> bytes:
        """Returns the data of one record."""
        file, offset, size = self.spans[number].tolist()
        return read_record(self.files[file], offset, size)

    def image(self, number: int) -> bytes:
        """Returns the encoded image of one record."""
        return image_of(self.data(number))


def walk(file: str | os.PathLike, path: str = "") -> RecordFile:
    """Finds the records of a file by their headers and checks each length. For a pipe, returns a fault.

    Args:
        path: the object that `file` is a copy of.
    """
    path = path or os.fspath(file)
    records: list[tuple[int, int, int]] = []
    fault: tuple[str, str] | None
    size = mtime_ns = 0
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with open(file, "rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            size, mtime_ns = status.st_size, status.st_mtime_ns
            fault = _walk(path, stream.fileno(), size, records)
    except OSError as error:
        fault = ("file-unreadable", f"{path}: {error.strerror}")
    table = np.array(records, np.int64).reshape(-1, 3)
    spans, checksums = table[:, :2].copy(), table[:, 2].astype(np.uint32)
    digest = hashlib.sha256(spans.tobytes() + checksums.tobytes()).hexdigest()
    return RecordFile(path, size, mtime_ns, digest, spans, checksums, fault)


def _walk(
    path: str, descriptor: int, end: int, records: list[tuple[int, int, int]]
) -> tuple[str, str] | None:
    """Appends (offset, size, checksum of the data) of each record to `records`. Returns the first fault."""
    offset = 0
    while offset < end:
        header, left = os.pread(descriptor, HEADER, offset), end - offset
        where = f"{path} record {len(records)} at byte {offset}"
        length, checksum = (int.from_bytes(part, "little") for part in (header[:8], header[8:]))
        if len(header) < HEADER or checksum != masked_crc32c(header[:8]):
            for beginning, kind in _MAGIC:
                if not records and header.startswith(beginning):
                    return kind, f"{path} ({end} bytes)"
            if not records and (foreign_format := foreign(os.pread(descriptor, HEAD, 0), path)):
                return foreign_format.args
            if len(header) < HEADER:
                return "file-truncated", f"{where} has {left} of the {HEADER} bytes of its header"
            return "not-a-record", f"{where} has length {length} with the wrong checksum {checksum:#010x}"
        if length + FRAME > left:
            return "file-truncated", f"{where} needs {length + FRAME} bytes, but only {left} are left"
        data_checksum = os.pread(descriptor, 4, offset + HEADER + length)
        records.append((offset, length + FRAME, int.from_bytes(data_checksum, "little")))
        offset += length + FRAME
    return None if end else ("file-empty", f"{path} (0 bytes)")


def masked_crc32c(data: bytes) -> int:
    """Returns the checksum that TFRecords use (tensorflow/core/lib/hash/crc32c.h)."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Returns the bytes of a record file for one record."""
    length = len(data).to_bytes(8, "little")
    first, second = (masked_crc32c(part).to_bytes(4, "little") for part in (length, data))
    return b"".join([length, first, data, second])


def read_record(file: str | os.PathLike, offset: int, size: int) -> bytes:
    """Reads the data of the record with this offset and size. Of an object, with one request."""
    return storage.read(file, offset + HEADER, size - FRAME)


def image_of(record: bytes) -> bytes:
    """Returns the encoded image in a record's data."""
    return tf.train.Example.FromString(record).features.feature["image/encoded"].bytes_list.value[0]


# --- DALI's index ---


def record_spans(file: str | os.PathLike, path: str = "") -> np.ndarray:
    """Returns `RecordFile.spans`; UserError if the file, a copy of `path`, is unreadable or damaged."""
    walked = walk(file, path)
    if walked.fault:
        raise UserError(walked.fault[1])
    return walked.spans


def format_index(spans: np.ndarray | Sequence[tuple[int, int]]) -> bytes:
    """Returns the text of an index, as DALI's tfrecord2idx writes it."""
    return "".join(f"{offset} {size}\n" for offset, size in np.asarray(spans).tolist()).encode()


def write_index(file: str | os.PathLike) -> str:
    """Makes `<file>.idx` if it is missing or wrong, and returns its path.

    Raises:
        UserError: the file is unreadable or damaged.
    """
    return ensure_index(os.fspath(file), record_spans(file))[0]


def ensure_index(file: str, spans: np.ndarray) -> tuple[str, str | None]:
    """Makes a file's index if it is missing or wrong.

    The index of an object, and one that cannot be written next to its file, is in the cache directory.

    Args:
        spans: offset and size of each record in this file.

    Returns:
        The path of the index, and "index-made" if an index was missing, "index-stale" if the old index was
        wrong, or None if it was right, or belongs to an object.
    """
    if storage.is_remote(file):
        return os.fspath(store_cached(format_index(spans), ".idx")), None
    content, path = format_index(spans), pathlib.Path(f"{file}.idx")
    change = "index-stale" if os.path.lexists(path) else "index-made"
    try:
        if path.is_file() and path.read_bytes() == content:
            return os.fspath(path), None
        write_bytes(path, content)
    except OSError:  # data are often mounted read-only
        path = store_cached(content, ".idx")
    return os.fspath(path), change


def index_records(paths: Sequence[str | os.PathLike]) -> Records:
    """Opens record files without the checks of common/data/check. Checks only that no record lacks a key.

    Raises:
        UserError: a file cannot be read, or a record lacks a key.
    """
    indexes, spans, lacking, has_crowds = [], [], set(), False
    for number, path in enumerate(paths):
        with storage.local_copy(path) as copy:
            record_table = record_spans(copy, os.fspath(path))
            for record, (offset, size) in enumerate(record_table.tolist()):
                features = tf.train.Example.FromString(read_record(copy, offset, size)).features.feature
                lacking |= {*DALI_KEYS, "image/encoded", "image/source_id"} - {*features}
                if absent := lacking - {CROWD_KEY}:
                    advice = "convert the data set again"
                    raise UserError(f"record {record} of {path} lacks {min(absent)}: {advice}")
                has_crowds |= any(features[CROWD_KEY].int64_list.value)
        indexes.append(ensure_index(os.fspath(path), record_table)[0])
        spans.append(np.insert(record_table, 0, number, axis=1))
    if has_crowds and lacking:
        raise UserError(f"some records lack {CROWD_KEY}: convert the data set of {paths[0]} again")
    files = tuple(os.fspath(path) for path in paths)
    return Records(files, tuple(indexes), np.concatenate(spans), has_crowds, has_empty_boxes=True)


# --- in a DALI graph ---


def tfrecord_reader(
    records: Records | Sequence[str | os.PathLike],
    label_map: LabelMap,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    shuffle: str = "global",
    name: str = "reader",
) -> Nodes:
    """Reads TFRecords in the schema of TensorFlow Object Detection, inside a DALI graph.

    Pass the records of a checked data set (`TFRecordSource.records`): DALI checks neither data nor keys.

    Args:
        records: the files with their indexes, or paths, in the same order on all ranks. For paths, this
            function checks indexes and keys, but not the data.
        label_map: the categories whose ids are in the records.
        training, shard_id, num_shards, seed, name: as for `coco_reader`.
        shuffle: the order in training, "global" or "buffer"; see readers.py.

    Returns:
        (jpegs, boxes, labels, image_ids), see readers.py.

    Raises:
        UserError: there are fewer images than shards, a path cannot be read, or a record lacks a key.
    """
    if not isinstance(records, Records):
        records = index_records(records)
    check_shards(len(records.spans), num_shards)
    if storage.all_remote(records.files):
        storage.check_dali()
    files, indexes = records.files, records.indexes
    if training and shuffle == "global":
        files, indexes = parts.cut(files, indexes)
    text = dali_tfrecord.FixedLenFeature([], dali_tfrecord.string, "")
    features: dict[str, Any] = dict.fromkeys(("image/encoded", "image/source_id"), text)
    features |= dict.fromkeys(BOX_KEYS, dali_tfrecord.VarLenFeature(dali_tfrecord.float32, 0.0))
    whole_numbers = (LABEL_KEY, CROWD_KEY) if records.has_crowds else (LABEL_KEY,)
    features |= dict.fromkeys(whole_numbers, dali_tfrecord.VarLenFeature(dali_tfrecord.int64, 0))
    record: dict[str, DataNode] = fn.readers.tfrecord(  # type: ignore[assignment]
        path=list(files),
        index_path=list(indexes),
        features=features,
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        **order(training, seed, in_container=True),
    )
    boxes = dali_math.clamp(fn.stack(*(record[key] for key in BOX_KEYS), axis=1), 0.0, 1.0)
    is_same = fn.expand_dims(record[LABEL_KEY], axes=[1]) == _constant(np.array(label_map.category_ids))
    numbers = types.Constant(np.arange(1, label_map.num_classes + 1, dtype=np.int32), device="cpu")
    labels = fn.reductions.sum(fn.cast(is_same, dtype=types.INT32) * numbers, axes=[1], dtype=types.INT32)
    if records.has_crowds:  # sets the area of crowds to 0, so that select_boxes drops them
        no_crowd = fn.cast(record[CROWD_KEY] == 0, dtype=types.FLOAT)
        boxes = boxes * fn.expand_dims(no_crowd, axes=[1])
    if records.has_crowds or records.has_empty_boxes:
        boxes, labels, _ = select_boxes(boxes, labels)
    return record["image/encoded"], boxes, labels, parse_integer(record["image/source_id"])


def parse_integer(digits: DataNode) -> DataNode:
    """Converts ASCII digits, uint8 (n,) with n up to 19, to int64 ()."""
    powers = _constant(10 ** np.arange(18, -1, -1))
    values = fn.cast(digits, dtype=types.INT64) - ord("0")
    return fn.reductions.sum(values * powers[19 - digits.shape()[0] :], dtype=types.INT64)


def _constant(numbers: np.ndarray) -> DataNode:
    """Returns a constant, int64 (n,). DALI's own constants have 32 bits."""
    halves = types.Constant(numbers.view(np.int32).reshape(-1, 2), device="cpu")
    return fn.squeeze(fn.reinterpret(halves, dtype=types.INT64), axes=[1])
