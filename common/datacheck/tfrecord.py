"""Opens TFRecords for DALI: checks everything in them, and refuses what DALI would misread.

DALI checks no CRC. It returns uninitialised memory, or dies, at a record that lacks a key which is asked
for; and the records that google/automl writes of images without objects do. Such records are fixed: a
complete copy of each goes to the cache directory and is read in place of the original, which its file's
index then leaves out. Images that cannot be used are left out in the same way, if --on_bad_image=skip.

The cache also keeps what was read, under a hash of everything that it depends on, so the next start does not
read the data. A result with faults that the user must correct in the files is not kept.
"""

import collections
import contextlib
import dataclasses
import functools
import glob
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from common import readers, tfrecord
from common.annotations import Annotations
from common.args import ImagePolicy
from common.dali_ops import Nodes
from common.datacheck import tfrecord_scan
from common.datacheck.coco import finish
from common.datacheck.images import in_threads
from common.datacheck.issues import Issues
from common.datacheck.tfrecord_scan import LACKS_BOXES, LACKS_CROWDS, Example, name_files
from common.datasets import Source
from common.errors import UserError
from common.files import get_or_create, load_cached, save_cached, store_cached
from common.labels import LabelMap
from common.tfrecord import BOX_KEYS, CROWD_KEY, LABEL_KEY, RecordFile, Records

_VERSION = 7  # raise it when what is kept changes, or any check, those of images.py included
_THREADS = 16  # files that are walked at once
_NO_RECORDS = (".idx", ".json", ".pbtxt")  # what lies beside record files
_SHARD = re.compile(r"(?P<prefix>.*-)(?P<shard>\d{1,9})-of-(?P<count>\d{1,5})(?P<suffix>[^/]*)", re.DOTALL)


@dataclasses.dataclass(frozen=True, eq=False)
class TFRecordSource(Source):
    """TFRecords in the schema of TensorFlow Object Detection.

    Attributes:
        records: what is read of the user's files.
        annotations: of all records that are read, in the order of those files.
        rows: int64 (I,), the row of the annotations that each of `records.spans` belongs to.
        names: of the records in words, one per row: `a.tfrecord record 5 (image 12)`.
        formats: how many images have a format, by Pillow's name of it, the most frequent first.
    """

    records: Records
    annotations: Annotations
    rows: np.ndarray
    names: Sequence[str]
    formats: dict[str, int]
    name = "tfrecord"

    @functools.cached_property
    def fingerprint(self) -> str:
        # Sizes and order, not paths: the same records may lie elsewhere tomorrow.
        digest = hashlib.sha256(self.annotations.fingerprint().encode())
        digest.update(self.records.spans.tobytes())
        return digest.hexdigest()

    def image_name(self, row: int) -> str:
        return self.names[row]

    def encoded(self, row: int) -> bytes:
        return self.records.image(int(np.flatnonzero(self.rows == row)[0]))

    def read(self, *, training: bool, **options: Any) -> Nodes:
        return readers.tfrecord_reader(self.records, self.label_map, training=training, **options)


# --- files ---


def expand_pattern(pattern: str) -> list[str]:
    """What a glob (several with commas between them) matches, sorted: equal on all ranks.

    Pipes, directories and dangling links are among it, for `walk_files` to name; directories that `**`
    passes through are not.

    Raises:
        DataError: every pattern that matches nothing.
    """
    issues, files = Issues(pattern), set()
    for part in [part.strip() for part in pattern.split(",") if part.strip()] or [pattern]:
        found = [file for file in glob.glob(part, recursive=True) if not file.endswith(_NO_RECORDS)]
        matches = [file for file in found if not (part.endswith("**") and os.path.isdir(file))]
        issues.add_each("no-record-file", [] if matches else [part], repr)
        files.update(matches)
    issues.raise_if_stopping()
    return sorted(files)


def walk_files(files: Sequence[str | os.PathLike], issues: Issues) -> list[RecordFile]:
    """Where the records of files stand. Faults, and files that end before their index, are added."""
    walked = list(in_threads(tfrecord.walk, files, _THREADS))
    for file in walked:
        if file.fault:
            issues.add(*file.fault)
    for file in walked if not issues.stopping else ():
        path, listed = pathlib.Path(f"{file.path}.idx"), b""
        with contextlib.suppress(OSError):  # index_of makes another
            listed = path.read_bytes() if path.is_file() else b""
        num_listed, count = listed.count(b"\n"), len(file.spans)
        if num_listed > count and listed.startswith(tfrecord.format_index(file.spans)):
            issues.add("index-longer", f"{file.path} has {count} records, {path.name} lists {num_listed}")
    return walked


def index_of(file: RecordFile, issues: Issues) -> str:
    """The path of a file's index, which is made where it is missing or wrong."""
    path, made = tfrecord.ensure_index(file.path, file.spans)
    if made:
        issues.add(made, file.path)
    return path


def missing_shards(files: Sequence[str | os.PathLike]) -> list[str]:
    """The files that the names of the others promise: `train-00002-of-00004` is one of four."""
    known = {os.fspath(file) for file in files}
    missing: set[str] = set()
    for match in filter(None, map(_SHARD.fullmatch, known)):
        digits = len(match["shard"])
        names = (f"{match['prefix']}{i:0{digits}}-of-{match['count']}" for i in range(int(match["count"])))
        missing.update(name + match["suffix"] for name in names)
    return sorted(missing - known)


def find_label_map(files: Sequence[str]) -> str:
    """The label map beside record files, as the converter writes it; UserError for none or two."""
    prefixes = {re.sub(r"(-\d+-of-\d+)?(\.tfrecords?)?$", "", file) for file in files}
    found = sorted(filter(os.path.isfile, (f"{prefix}.label_map.json" for prefix in prefixes)))
    if not found:
        raise UserError(
            f"no label map beside {files[0]} ({min(prefixes)}.label_map.json): give --label_map=FILE, json or"
            " pbtxt; or the conversion did not finish"
        )
    if len({LabelMap.load(path) for path in found}) > 1:
        raise UserError(f"{found[0]} and {found[1]} differ: give --label_map=FILE")
    return found[0]


# --- records ---


def open_records(
    files: Sequence[str | os.PathLike], label_map: LabelMap, *, policy: ImagePolicy = ImagePolicy()
) -> TFRecordSource:
    """Checks record files, their indexes, every annotation and every image in them.

    Data are read once; the result is kept while the files stay as they are. At every start, all lengths and
    the checksums that are stored with the data are compared.

    Args:
        files: the record files.
        label_map: of the category ids in the records.
        policy: about images that cannot be used.

    Raises:
        DataError: everything that would make training wrong, in all files: file, record, image id, key and
            value.
    """
    issues = Issues(name_files(files), policy)
    walked = walk_files(files, issues)
    examples = _read(walked, label_map, issues)
    annotations, is_usable = tfrecord_scan.check(examples, label_map, issues)
    issues.raise_if_stopping()
    kept = list(itertools.compress(examples, is_usable))
    names = [example.name for example in kept]
    annotations = annotations.select(is_usable)
    boxes = [box for example in kept for _, _, box, *_ in example.objects]

    def name_box(row: int) -> str:
        return f"{names[annotations.box_image[row]]} has {tfrecord_scan.box_name(boxes[row])}"

    annotations = finish(annotations, names.__getitem__, name_box, issues)
    # DALI is asked for crowds only where there are any.
    has_crowds = bool(annotations.is_crowd.any())
    least = LACKS_CROWDS if has_crowds else LACKS_BOXES
    lacking = np.array([example.lacks >= least for example in examples]) & is_usable
    issues.add_each("record-completed", np.flatnonzero(lacking[is_usable]), names.__getitem__)
    issues.add_each("shard-missing", missing_shards([file.path for file in walked]), str)
    counts = np.array([len(example.objects) for example in examples])
    files, indexes, spans, numbers = _lay_out(walked, counts, is_usable, lacking, issues)
    records = Records(files, indexes, spans, has_crowds, annotations.target_boxes.num_dropped > 0)
    rows = (np.cumsum(is_usable) - 1)[numbers]
    formats = collections.Counter(example.facts.image_format for example in kept if example.facts)
    return TFRecordSource(records, annotations, rows, names, dict(formats.most_common()))


def _read(walked: Sequence[RecordFile], label_map: LabelMap, issues: Issues) -> list[Example]:
    """`tfrecord_scan.scan`, or what it found before."""
    state = [(os.fsencode(file.path), file.size, file.mtime_ns, file.digest) for file in walked]
    of_policy = (issues.policy.decode, issues.policy.max_megapixels)
    key = msgspec.msgpack.encode((_VERSION, label_map.to_json(), of_policy, state))
    name = f"{hashlib.sha256(key).hexdigest()[:32]}.records"
    with contextlib.suppress(msgspec.MsgspecError):  # there is none, or it is damaged
        return msgspec.msgpack.decode(load_cached(name) or b"", type=list[Example])
    examples = tfrecord_scan.scan(walked, frozenset(label_map.category_ids), issues)
    if not issues.stopping:
        save_cached(name, msgspec.msgpack.encode(examples))
    return examples


def _lay_out(
    walked: Sequence[RecordFile],
    counts: np.ndarray,
    is_usable: np.ndarray,
    lacking: np.ndarray,
    issues: Issues,
) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray, np.ndarray]:
    """What is read; makes what is missing.

    Args:
        walked: the user's files.
        counts: int64 (R,), objects of each record in them.
        is_usable: bool (R,), which records are read.
        lacking: bool (R,), which of these must be completed first.
        issues: gets the indexes that were made.

    Returns:
        Files, indexes and spans of `Records`; int64 (I,), which record each span belongs to.
    """
    layout = []
    begins = np.cumsum([len(file.spans) for file in walked])[:-1]
    for file, numbers in zip(walked, np.split(np.arange(len(counts)), begins), strict=True):
        is_copied = lacking[numbers]
        is_read = is_usable[numbers] & ~is_copied
        if is_read.any():
            index = index_of(file, issues) if is_read.all() else _index(file.spans[is_read])
            layout.append((file.path, index, file.spans[is_read], numbers[is_read]))
        if is_copied.any():
            copy = _complete_copy(file, is_copied, counts[numbers])
            spans = tfrecord.record_spans(copy)
            layout.append((copy, _index(spans), spans, numbers[is_copied]))
    files, indexes, spans_read, numbers_read = zip(*layout, strict=True)
    with_file = [np.insert(spans, 0, i, axis=1) for i, spans in enumerate(spans_read)]
    return files, indexes, np.concatenate(with_file), np.concatenate(numbers_read)


def _index(spans: np.ndarray) -> str:
    """The path of an index in the cache, of some records of a file."""
    return os.fspath(store_cached(tfrecord.format_index(spans), ".idx"))


def _complete_copy(file: RecordFile, is_copied: np.ndarray, counts: np.ndarray) -> str:
    """Copies some records of `file` to the cache directory, each with all keys that DALI is asked for."""

    def make() -> bytes:
        spans = zip(file.spans[is_copied].tolist(), counts[is_copied].tolist(), strict=True)
        records = [complete(tfrecord.read_record(file.path, *span), count) for span, count in spans]
        return b"".join(map(tfrecord.framed, records))

    identity = hashlib.sha256(file.digest.encode() + is_copied.tobytes()).hexdigest()
    return os.fspath(get_or_create(f"{identity[:32]}.tfrecord", make))


def complete(record: bytes, num_objects: int) -> bytes:
    """The record with all keys of objects that DALI is asked for: none of its objects is a crowd."""
    crowds = tf.train.Int64List(value=[0] * num_objects)
    features = {CROWD_KEY: tf.train.Feature(int64_list=crowds)}
    if not num_objects:
        features[LABEL_KEY] = tf.train.Feature(int64_list=tf.train.Int64List())
        features |= dict.fromkeys(BOX_KEYS, tf.train.Feature(float_list=tf.train.FloatList()))
    addition = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    # Protobuf reads two messages in a row as one; of a key in both, the later value counts.
    return record + addition
