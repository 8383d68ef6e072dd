"""WebDataset: tar files in which files of one name are a sample; their members, DALI's index and reader.

Format: https://github.com/webdataset/webdataset. A sample consists of neighbouring files whose names are
equal up to the first dot after the last slash:

    000042.jpg      an image, in any format that DALI decodes
    000042.json     {"image_id": 42, "file_name": "a.jpg", "width": 640, "height": 480, "annotations":
                     [{"bbox": [left, top, width, height], "category_id": 3, "iscrowd": 0, "area": 1200.5}]}

The json has the keys of COCO's lists `images` and `annotations`, with boxes in pixels. roboflow/rf-detr
src/rfdetr/datasets/webdataset/pack.py writes the same keys. Only `annotations` is required, and in it `bbox`
and `category_id`. In place of the json, a sample may have NumPy arrays, as fn.decoders.numpy reads them:

    000042.boxes.npy      float (N, 4), ltrb normalised
    000042.labels.npy     int (N,), category ids
    000042.image_id.npy   int ()
    000042.iscrowd.npy, 000042.areas.npy    optional, (N,), 0 or 1, and square pixels

DALI parses no json, so the index that DALI reads (format v1.2 of its tool wds2idx) carries the annotations.
It has a line `extension offset size name` for each image. With an image, the reader returns the text
`path:offset:name` (ReadSample in dali/operators/reader/loader/webdataset_loader.cc). The indexes of this
project have the checked boxes, labels and image id in place of the name, as hexadecimal digits.
"""

import dataclasses
import hashlib
import os
import resource
import stat
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.data_node import DataNode

from common.dali_ops import Nodes
from common.data import parts, storage
from common.data.annotations import Annotations
from common.data.check.issues import Fault
from common.data.check.recognition import HEAD, foreign
from common.data.sharding import check_shards, order
from common.errors import UserError
from common.files import file_type, get_or_create

_BLOCK = 512  # bytes; a tar file consists of such blocks
_OPEN_FILES = 2**16  # enough for several readers with parts.MAX_PARTS files
_SPARE_FILES = 32  # that are opened later
_AFTER_END = 2**16  # bytes after the last member that are checked; tar pads with up to 10 KiB
_INDEX = 1  # increase it when the indexes of `write_indexes` change
_HEADER = "v1.2 {}"  # first line of an index, with the number of images
_BOX_BYTES, _LABEL_BYTES = 16, 4  # float32 (4,), int32 ()
_TAIL_BYTES = 12  # after the labels: image id, int64, and number of boxes, int32
_MAGIC = ((b"\x1f\x8b", "file-gzip"), (b"version http", "file-lfs-pointer"))


class Member(NamedTuple):
    """A file in a tar file: its name, and the place of its content in bytes."""

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Tar files that DALI can read.

    Attributes:
        files: paths in the order in which they are read.
        indexes: path of each file's index, from `write_indexes`.
        spans: int64 (I, 3), for each image in reading order: index in `files`, offset, size.
    """

    files: tuple[str, ...]
    indexes: tuple[str, ...]
    spans: np.ndarray

    def image(self, number: int) -> bytes:
        """Returns one encoded image."""
        file, offset, size = self.spans[number].tolist()
        return storage.read(self.files[file], offset, size)


def is_tar(path: str | os.PathLike) -> bool:
    """Returns whether a file is a tar file, by its name or its first block; False if it cannot be read."""
    if os.fspath(path).endswith((".tar", ".tar.gz", ".tgz")):
        return True
    try:
        return os.path.isfile(path) and storage.read(path, 0, _BLOCK)[257:262] == b"ustar"
    except OSError:
        return False


def members(file: str, path: str) -> Iterator[Member]:
    """Yields the regular files of a tar file, by the headers.

    Args:
        file: the path of a local file.
        path: the path in messages.

    Raises:
        Fault: the file is damaged, cut off or no tar file. The members before the damage are yielded first.
        OSError: the file cannot be read.
    """
    if not stat.S_ISREG(mode := os.stat(file).st_mode):
        raise Fault("file-unreadable", f"{path} is {file_type(mode)}")
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if not size:
            raise Fault("file-empty", f"{path} (0 bytes)")
        for beginning, kind in _MAGIC:
            if os.pread(stream.fileno(), len(beginning), 0) == beginning:
                raise Fault(kind, f"{path} ({size} bytes)")
        try:
            with tarfile.open(None, "r:", stream) as archive:
                while member := archive.next():
                    archive.members.clear()  # type: ignore[attr-defined]  # saves memory
                    if member.isreg():
                        name = os.fsencode(member.name).decode(errors="replace")
                        yield Member(name, member.offset_data, member.size)
                end = archive.offset
        except tarfile.ReadError as error:
            head = os.pread(stream.fileno(), HEAD, 0)
            if head[257:262] != b"ustar":
                raise foreign(head, path) or Fault("not-a-tar", f"{path}: {error}") from error
            raise Fault("file-truncated", f"{path} ({size} bytes): {error}") from error
        # tarfile also stops at a damaged header, but a complete archive ends with blocks of zeros.
        rest = os.pread(stream.fileno(), _AFTER_END, end)
        if len(rest) < _BLOCK:
            raise Fault("file-truncated", f"{path} ends at byte {size} without the mark of a tar file's end")
        if any(rest[:_BLOCK]):
            raise Fault("not-a-tar", f"{path}: the header at byte {end} is damaged")
        if any(rest):
            text = "is a mark of the end, but files follow (do not join tar files with cat)"
            raise Fault("not-a-tar", f"{path}: at byte {end} {text}")


# --- DALI's index ---


def write_indexes(annotations: Annotations, spans: np.ndarray, num_files: int) -> tuple[str, ...]:
    """Writes the index of each file to the cache directory. Returns the paths.

    Args:
        annotations: the checked annotations of the images, in reading order.
        spans: `Shards.spans`.
    """
    identity = hashlib.sha256(annotations.fingerprint().encode() + spans.tobytes()).hexdigest()[:32]

    def path_of(file: int) -> str:
        name = f"{identity}-{file}-{_INDEX}.wds.idx"
        return os.fspath(
            get_or_create(name, lambda: _index(annotations, spans, np.flatnonzero(spans[:, 0] == file)))
        )

    return tuple(map(path_of, range(num_files)))


def _index(annotations: Annotations, spans: np.ndarray, rows: np.ndarray) -> bytes:
    targets = annotations.target_boxes
    labels = (targets.classes + 1).astype(np.int32)
    lines = [_HEADER.format(len(rows))]
    for row in rows.tolist():
        begin, end = targets.row_splits[row : row + 2].tolist()
        _, offset, size = spans[row].tolist()
        numbers = annotations.image_ids[row], np.int32(end - begin)
        parts = (targets.boxes[begin:end], labels[begin:end], *numbers)
        content = b"".join(part.tobytes() for part in parts)
        lines.append(f"image {offset} {size} {content.hex()}")
    return "\n".join([*lines, ""]).encode()


# --- in a DALI graph ---


def webdataset_reader(
    shards: Shards,
    *,
    training: bool,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    shuffle: str = "global",
    name: str = "reader",
) -> Nodes:
    """Reads WebDataset shards with their checked annotations, inside a DALI graph.

    Args:
        shards: the tar files of a checked data set (`WebDatasetSource.shards`), the same on all ranks.
        training, shard_id, num_shards, seed, name: as for `coco_reader`. The shards of these names are parts
            of the data set, whatever the number of tar files.
        shuffle: the order in training, "global" or "buffer"; see readers.py.

    Returns:
        (jpegs, boxes, labels, image_ids), see readers.py.

    Raises:
        UserError: there are fewer images than shards, or the host allows too few open files.
    """
    check_shards(len(shards.spans), num_shards)
    if storage.all_remote(shards.files):
        storage.check_dali()
    files, indexes = shards.files, shards.indexes
    if training and shuffle == "global":
        files, indexes = parts.cut(files, indexes, _HEADER)
    if not storage.is_remote(files[0]):
        _allow_open_files(len(files))
    jpegs = fn.readers.webdataset(
        paths=list(files),
        index_paths=list(indexes),
        ext="image",
        dont_use_mmap=True,  # a mapped file that becomes shorter would kill the process (SIGBUS)
        name=name,
        shard_id=shard_id,
        num_shards=num_shards,
        **order(training, seed, in_container=True),
    )
    digits = fn.get_property(jpegs, key="source_info")  # type: ignore[arg-type]
    tail = _from_hex(digits[-2 * _TAIL_BYTES :])
    count = fn.squeeze(fn.reinterpret(tail[8:], dtype=types.INT32), axes=[0])
    size = (_BOX_BYTES + _LABEL_BYTES) * count
    begin = digits.shape()[0] - 2 * (size + _TAIL_BYTES)
    content = _from_hex(digits[begin : begin + 2 * size])
    boxes = fn.reinterpret(content[: _BOX_BYTES * count], dtype=types.FLOAT, shape=[-1, 4])
    labels = fn.reinterpret(content[_BOX_BYTES * count :], dtype=types.INT32)
    image_ids = fn.squeeze(fn.reinterpret(tail[:8], dtype=types.INT64), axes=[0])
    return jpegs, boxes, labels, image_ids  # type: ignore[return-value]


def _allow_open_files(count: int) -> None:
    """Raises this process's limit of open files, usually 1,024: DALI keeps the file of each part open.

    Args:
        count: number of files that a reader opens.

    Raises:
        UserError: the host does not allow as many. DALI would end the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, min(hard, _OPEN_FILES))
    if count + len(os.listdir("/proc/self/fd")) + _SPARE_FILES > limit:
        raise UserError(
            f"DALI keeps {count} files of WebDataset open, but a process may open only {limit} here: raise "
            "the hard limit (ulimit -Hn), or use --shuffle=buffer and fewer shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _from_hex(digits: DataNode) -> DataNode:
    """Converts hexadecimal digits in lower case, uint8 (2 n,), to bytes, uint8 (n,)."""
    values = (digits & 15) + 9 * (digits // 64)  # the codes of a to f are 97 to 102, those of 0 to 9 below 64
    pairs = fn.reshape(values, shape=[-1, 2])
    return fn.cast(16 * pairs[:, 0] + pairs[:, 1], dtype=types.UINT8)
