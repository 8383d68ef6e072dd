"""Images in TFRecords and in MXNet's RecordIO.

TFRecords are in the schema of TensorFlow Object Detection or of ImageNet's records: `image/encoded` is read;
`image/filename` is its name, and `image/class/label` its label where it has one.

The format of RecordIO: dmlc-core include/dmlc/recordio.h. A record is a magic number, a word with its length
and which part of a record it is, the data, and zeros up to a multiple of four bytes. Where data hold the
magic number, it is left out and the record is cut there. The header of an image: python/mxnet/recordio.py
(IRHeader) of apache/mxnet. Indexes beside `.rec` files are not needed: DALI gets one from the cache.
"""

import os
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import nvidia.dali.tfrecord as dali_tfrecord
import tensorflow as tf

from common.datacheck.images import ImagePolicy
from common.datacheck.issues import Issues
from common.datacheck.tfrecord import expand_pattern, index_of, missing_shards, walk_files
from common.datacheck.tfrecord_scan import name_files
from common.errors import UserError
from common.files import store_cached
from common.tfrecord import format_index, record_spans
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Image, ImageSource, SourceFlags
from tools.preprocessing.reading import ReaderCall

_LABEL_KEY = "image/class/label"
_HEADER, _FOOTER = 12, 4  # bytes around the data of a TFRecord
_MAGIC = struct.pack("<I", 0xCED7230A)
_WHOLE, _FIRST, _LAST = 0, 1, 3  # parts of a record of RecordIO; 2 is a middle one


# --- TFRecord ---


def open_tfrecord(flags: SourceFlags) -> ImageSource:
    """--source=tfrecord: a glob of record files, or several with commas between them."""
    if os.path.isdir(flags.path):
        pattern = os.path.join(flags.path, "*.tfrecord")
        raise UserError(f"--input={flags.path} is a directory: name the files in it, '{pattern}'")
    files = expand_pattern(flags.path)
    if not base.are_utf8(files):
        raise UserError(f"--input={flags.path}: rename the files: TensorFlow knows UTF-8 names only")
    issues = Issues(name_files(files))
    missing = missing_shards(files)
    issues.add_many("shard-missing", len(missing), missing)
    found = []
    for file in walk_files(files, issues):
        if not file.fault:
            index_of(file, issues)
            found += base.remembered(file.path, flags.policy, _check_examples)
    return base.make_source("tfrecord", flags, found, _load_example, _tfrecord_reader, issues=issues)


def _tfrecord_reader(found: Sequence[Image]) -> ReaderCall | None:
    labelled = base.are_labelled(found)
    if labelled is None:  # DALI returns uninitialised memory for a key that is missing
        return None
    features = {"image/encoded": dali_tfrecord.FixedLenFeature((), dali_tfrecord.string, "")}
    if labelled:
        features[_LABEL_KEY] = dali_tfrecord.VarLenFeature(dali_tfrecord.int64, 0)
    places: dict[str, list[tuple[int, ...]]] = {}
    for image in found:
        places.setdefault(image.file, []).append(image.place)
    indexes = [store_cached(format_index(spans), ".idx") for spans in places.values()]
    arguments = {"path": list(places), "index_path": list(map(os.fspath, indexes)), "features": features}
    return ReaderCall("tfrecord", arguments, "image/encoded", _LABEL_KEY if labelled else None)


def _check_examples(file: str, policy: ImagePolicy) -> list[Image]:
    found = []
    spans = record_spans(file).tolist()
    try:
        for number, record in enumerate(tf.data.TFRecordDataset(file).as_numpy_iterator()):
            owner = f"{file} record {number}"
            encoded, name, label = _parse_example(record, owner)
            name = name or f"{os.path.basename(file)}-{number}"
            found.append(Image(name, file, label, tuple(spans[number])).checked(encoded, owner, policy))
    except tf.errors.DataLossError as error:
        owner = f"{file} record {len(found)}"
        raise UserError(f"{owner} is damaged ({error.message}): copy or write it again") from error
    return found


def _parse_example(record: bytes, owner: str) -> tuple[bytes, str, int | None]:
    """(encoded image, file name, label) of a record."""
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # google.protobuf.message.DecodeError, whose module TensorFlow hides
        raise UserError(f"{owner} is no tf.train.Example: {error}") from error
    encoded, labels = features["image/encoded"].bytes_list.value, features[_LABEL_KEY].int64_list.value
    kind = features[_LABEL_KEY].WhichOneof("kind")
    if len(encoded) != 1 or len(labels) > 1 or kind not in (None, "int64_list"):
        raise UserError(f"{owner} lacks one image/encoded (bytes) and at most one {_LABEL_KEY} (int64)")
    name = b"".join(features["image/filename"].bytes_list.value).decode("utf-8", "replace")
    label = base.check_label(labels[0], owner) if labels else None
    return encoded[0], name.replace("\0", "\N{REPLACEMENT CHARACTER}"), label


def _load_example(image: Image) -> np.ndarray:
    offset, size = image.place
    record = base.read_bytes(image.file, offset + _HEADER, size - _HEADER - _FOOTER)
    encoded, _, _ = _parse_example(record.tobytes(), f"{image.file} at byte {offset}")
    return np.frombuffer(encoded, np.uint8)


# --- RecordIO ---


def open_recordio(flags: SourceFlags) -> ImageSource:
    """--source=recordio: a glob of .rec files, or several with commas between them."""
    files = expand_pattern(flags.path)
    found = [image for file in files for image in base.remembered(file, flags.policy, _check_recordio)]
    return base.make_source("recordio", flags, found, _load_recordio, _recordio_reader)


def _recordio_reader(found: Sequence[Image]) -> ReaderCall | None:
    labelled = base.are_labelled(found)
    files = list({image.file: None for image in found})
    # DALI 2.4 looks for the last record of several files in the wrong one if it is alone there.
    if len(files) > 1 or labelled is None:
        return None
    index = "".join(f"{number}\t{image.place[0]}\n" for number, image in enumerate(found))
    arguments = {"path": files, "index_path": [os.fspath(store_cached(index.encode(), ".idx"))]}
    return ReaderCall("mxnet", arguments, label=1 if labelled else None)


def _check_recordio(file: str, policy: ImagePolicy) -> list[Image]:
    found = []
    for number, (begin, size, record) in enumerate(_walk(base.mapped(file), file)):
        owner = f"{file} record {number}"
        labels, encoded = _split(record, owner)
        label = base.check_label(labels[0], owner) if len(labels) == 1 else None
        image = Image(f"{os.path.basename(file)}-{number}", file, label, (begin, size))
        found.append(image.checked(encoded, owner, policy))
    return found


def _load_recordio(image: Image) -> np.ndarray:
    content = base.read_bytes(image.file, *image.place).tobytes()
    ((_, _, record),) = _walk(content, image.file)
    return np.frombuffer(_split(record, image.file)[1], np.uint8)


def _walk(content: bytes | memoryview, file: str) -> Iterator[tuple[int, int, bytes]]:
    """(begin, size with frames, data) of each record."""
    at = 0
    while at < len(content):
        begin, kind, parts = at, _FIRST, []
        while kind not in (_WHOLE, _LAST):
            word = int.from_bytes(content[at + 4 : at + 8], "little")
            kind, size = word >> 29, word & (1 << 29) - 1
            part = bytes(content[at + 8 : at + 8 + size])
            is_first = kind in (_WHOLE, _FIRST)
            if content[at : at + 4] != _MAGIC or len(part) < size or is_first == bool(parts):
                raise UserError(f"{file} has no whole RecordIO record at byte {at}: copy or write it again")
            parts.append(part)
            at += 8 + (size + 3) // 4 * 4
        yield begin, at - begin, _MAGIC.join(parts)


def _split(record: bytes, owner: str) -> tuple[tuple[float, ...], bytes]:
    """(labels, encoded image) of a record."""
    try:
        count, label = struct.unpack_from("<If16x", record)  # number of labels that follow; two ids
        labels = struct.unpack_from(f"<{count}f", record, 24) if count else (label,)
    except (struct.error, MemoryError, OverflowError) as error:
        raise UserError(f"{owner} ({len(record)} bytes) is no image record: {error}") from error
    return labels, record[24 + 4 * count :]
