"""Opens images in TFRecords, in MXNet's RecordIO files, and in WebDataset's tar archives.

TFRecords: `image/encoded` is the image, `image/filename` its name, and `image/class/label` its label.

RecordIO: dmlc-core include/dmlc/recordio.h describes the parts of a record. The header of an image is
IRHeader in python/mxnet/recordio.py of apache/mxnet.

WebDataset (webdataset/webdataset README, and dali/operators/reader/loader/webdataset_loader.cc of
NVIDIA/DALI): a sample is, for example, `0001.jpg` and `0001.cls`, which contains the label in digits.

Index files beside the data are ignored. A new index of the usable images is written into the cache.
"""

import itertools
import os
import struct
import tarfile
from collections.abc import Iterator, Sequence

import numpy as np
import nvidia.dali.tfrecord as dali_tfrecord
import tensorflow as tf

from common.args import IMAGE_SUFFIXES
from common.data import tfrecord
from common.data.check.image_headers import ImageFacts
from common.data.check.tfrecord import expand_pattern, missing_shards, walk_files
from common.data.check.tfrecord_scan import read_record
from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Content, Found, Image, Opening, Reader

_LABEL_KEY = "image/class/label"
_MAGIC = struct.pack("<I", 0xCED7230A)
_WHOLE, _FIRST, _LAST = 0, 1, 3  # types of the parts of a RecordIO record; 2 is a middle part


# --- TFRecord ---


def open_tfrecord(opening: Opening) -> Content:
    """Opens --source=tfrecord: comma-separated globs of record files."""
    return Content(_examples(opening), _load_example, _tfrecord_reader)


def _examples(opening: Opening) -> Iterator[Found]:
    files, issues = expand_pattern(opening.path), opening.issues
    issues.add_each("shard-missing", missing_shards(files), str)
    for file in walk_files(files, issues):
        for number in range(len(file.spans)):
            record = read_record(file, number, issues)
            if record is not None:
                owner = file.name(number)
                encoded, name, label = _parse_example(record, owner)
                name = name or f"{os.path.basename(file.path)}-{number}"
                yield Image(name, file.path, label, tuple(file.spans[number].tolist())), owner, encoded


def _parse_example(record: bytes, owner: str) -> tuple[bytes, str, int | None]:
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # google.protobuf.message.DecodeError, whose module TensorFlow hides
        raise UserError(f"{owner} is not a tf.train.Example: {error}") from error
    encoded, labels = features["image/encoded"].bytes_list.value, features[_LABEL_KEY].int64_list.value
    kind = features[_LABEL_KEY].WhichOneof("kind")
    if len(encoded) != 1 or len(labels) > 1 or kind not in (None, "int64_list"):
        raise UserError(f"{owner} needs one image/encoded (bytes) and at most one {_LABEL_KEY} (int64)")
    name = b"".join(features["image/filename"].bytes_list.value).decode("utf-8", "replace")
    return encoded[0], name, base.check_label(labels[0], owner) if labels else None


def _load_example(image: Image) -> np.ndarray:
    return np.frombuffer(tfrecord.image_of(tfrecord.read_record(image.file, *image.place)), np.uint8)


def _tfrecord_reader(images: Sequence[Image], labelled: bool) -> Reader:
    features = {"image/encoded": dali_tfrecord.FixedLenFeature([], dali_tfrecord.string, "")}
    if labelled:
        features[_LABEL_KEY] = dali_tfrecord.VarLenFeature(dali_tfrecord.int64, 0)
    indexes = base.store_indexes(images, "", lambda _, image: "{} {}\n".format(*image.place))
    arguments = {"path": list(indexes), "index_path": list(indexes.values()), "features": features}
    return Reader("tfrecord", arguments, "image/encoded", _LABEL_KEY if labelled else None)


# --- RecordIO ---


def open_recordio(opening: Opening) -> Content:
    """Opens --source=recordio: comma-separated globs of .rec files."""
    return Content(_recordio(opening), _load_recordio, _recordio_reader)


def _recordio(opening: Opening) -> Iterator[Found]:
    for file in opening.containers():
        for number, (begin, size, record) in enumerate(_walk(base.mapped(file), file)):
            owner = f"{file} record {number}"
            labels, encoded = _split(record, owner)
            label = base.check_label(labels[0], owner) if len(labels) == 1 else None
            yield Image(f"{os.path.basename(file)}-{number}", file, label, (begin, size)), owner, encoded


def _load_recordio(image: Image) -> np.ndarray:
    content = base.read_bytes(image.file, *image.place).tobytes()
    ((_, _, record),) = _walk(content, image.file)
    return np.frombuffer(_split(record, image.file)[1], np.uint8)


def _recordio_reader(images: Sequence[Image], labelled: bool) -> Reader | None:
    indexes = base.store_indexes(images, "", lambda number, image: f"{number}\t{image.place[0]}\n")
    if len(indexes) > 1:  # DALI 2.4 reads a wrong file if the last file has only one record
        return None
    arguments = {"path": list(indexes), "index_path": list(indexes.values())}
    return Reader("mxnet", arguments, label=1 if labelled else None)


def _walk(content: bytes | memoryview, file: str) -> Iterator[tuple[int, int, bytes]]:
    """Yields (begin, size with headers and padding, data) of each record."""
    at = 0
    while at < len(content):
        begin, kind = at, _FIRST
        pieces: list[bytes] = []
        while kind not in (_WHOLE, _LAST):
            word = int.from_bytes(content[at + 4 : at + 8], "little")
            kind, size = word >> 29, word & (1 << 29) - 1
            piece = bytes(content[at + 8 : at + 8 + size])
            is_first = kind in (_WHOLE, _FIRST)
            if content[at : at + 4] != _MAGIC or len(piece) < size or is_first == bool(pieces):
                raise UserError(f"{file} has no whole RecordIO record at byte {at}: copy or write it again")
            pieces.append(piece)
            at += 8 + (size + 3) // 4 * 4
        yield begin, at - begin, _MAGIC.join(pieces)


def _split(record: bytes, owner: str) -> tuple[tuple[float, ...], bytes]:
    try:
        count, label = struct.unpack_from("<If16x", record)  # number of labels that follow; a label
        labels = struct.unpack_from(f"<{count}f", record, 24) if count else (label,)
    except (struct.error, MemoryError, OverflowError) as error:
        raise UserError(f"{owner} ({len(record)} bytes) is not an image record: {error}") from error
    return labels, record[24 + 4 * count :]


# --- WebDataset ---


def open_webdataset(opening: Opening) -> Content:
    """Opens --source=webdataset: comma-separated globs of tar files."""
    return Content(_samples(opening), _load_member, _webdataset_reader)


def _samples(opening: Opening) -> Iterator[Found]:
    for file in opening.containers():
        content = base.mapped(file)
        for key, members in itertools.groupby(_members(file, content), lambda member: _key(member.name)):
            found = {member.name[len(key) :].lower(): member for member in members}
            label: int | None = None
            place: tuple[int, ...] = ()
            if member := found.get(".cls"):
                begin, end = member.offset_data, member.offset_data + min(member.size, 64)
                digits = bytes(content[begin:end]).rstrip()
                if not digits.isdigit():
                    raise UserError(
                        f"{file}: {member.name!r} contains {digits[:20]!r}: a label must be decimal digits"
                    )
                label, place = base.check_label(int(digits), f"{file}: {member.name!r}"), (begin, len(digits))
            member = next((found[suffix] for suffix in IMAGE_SUFFIXES if suffix in found), None)
            name = member.name if member else key
            encoded: memoryview | ImageFacts = ImageFacts(
                fault="image-missing", detail=f"it has {', '.join(found)}"
            )
            if member:
                begin, size = member.offset_data, member.size
                encoded, place = content[begin : begin + size], (begin, size, *place)
            yield Image(name, file, label, place), f"{file} sample {name!r}", encoded


def _members(file: str, content: memoryview) -> Iterator[tarfile.TarInfo]:
    """Yields the files of an archive, without links and hidden files."""
    try:
        with tarfile.open(file, "r:", errorlevel=2) as archive:
            members = archive.getmembers()
            end = archive.offset
    except tarfile.TarError as error:
        raise UserError(f"{file} is not a complete plain tar archive ({error}): write it again") from error
    block = content[end : end + tarfile.BLOCKSIZE]
    if len(block) < tarfile.BLOCKSIZE or any(block):  # tarfile stops at a damaged header
        raise UserError(f"{file} is damaged or cut off at byte {end}: copy or write it again")
    for member in members:
        if member.isfile() and not member.issparse() and not os.path.basename(member.name).startswith("."):
            yield member


def _key(name: str) -> str:
    """Returns the key of a sample, "a/b" for the file "a/b.seg.png"."""
    directory, slash, name = name.rpartition("/")
    return directory + slash + name.partition(".")[0]


def _load_member(image: Image) -> np.ndarray:
    return base.read_bytes(image.file, *image.place[:2])


def _webdataset_reader(images: Sequence[Image], labelled: bool) -> Reader:
    line = "image {} {} cls {} {}\n" if labelled else "image {} {}\n"
    indexes = base.store_indexes(images, "v1.1 {}\n", lambda _, image: line.format(*image.place))
    arguments = {
        "paths": list(indexes),
        "index_paths": list(indexes.values()),
        "ext": ["image", "cls"] if labelled else ["image"],
        "missing_component_behavior": "error",
    }
    return Reader("webdataset", arguments, label=1 if labelled else None, label_is_text=True)
