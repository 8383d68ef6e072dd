"""Opens TFRecords for DALI: checks all of their content, and rejects what DALI would misread.

If a record lacks a requested key, DALI returns uninitialised memory or crashes. So such a record is copied to
the cache directory with all keys, and the index of the original file omits it. Records that repeat a box are
copied without the repetition. If a record in a bucket has to be copied, all of its data set are. With
--on_bad_image=skip, the index also omits records whose images cannot be used.

The cache also stores the parsed records, so the next start does not read the data. Record files in a bucket
are downloaded once, one by one; their results are cached until their ETags change.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.dali_ops import Nodes
from common.data import readers, storage, tfrecord
from common.data.annotations import NONE, Annotations
from common.data.check import tfrecord_scan
from common.data.check.boxes import report_annotations
from common.data.check.images import in_threads
from common.data.check.issues import Issues
from common.data.check.repeated_images import checksums_of, equal_rows
from common.data.check.tfrecord_scan import LACKS_BOXES, LACKS_CROWDS, ParsedRecord, name_files
from common.data.image_files import SYSTEM_NAMES
from common.data.labels import LabelMap
from common.data.sources import Source
from common.data.storage import Stat
from common.data.tfrecord import BOX_KEYS, CROWD_KEY, ID_KEY, LABEL_KEY, RecordFile, Records
from common.data.webdataset import is_tar
from common.errors import UserError
from common.files import get_or_create, load_cached, save_cached, store_cached

_VERSION = 9  # increase this when any check changes, also one of images.py
_THREADS = 16  # files whose record headers are read at once
_DOWNLOADS = 4  # objects that are downloaded and checked at once
_SLOW_BYTES = 2**27  # a progress bar is shown if the objects to download are larger together
_NO_RECORDS = (".idx", ".json", ".pbtxt")  # files next to record files that are not records themselves
_SHARD = re.compile(r"(?P<prefix>.*-)(?P<shard>\d{1,9})-of-(?P<count>\d{1,5})(?P<suffix>[^/]*)", re.DOTALL)


@dataclasses.dataclass(eq=False)
class TFRecordSource(Source):
    """TFRecords in the schema of TensorFlow Object Detection.

    Attributes:
        records: the files, indexes and spans that DALI reads.
        annotations: the annotations of all records that are read, in the order of the user's files.
        rows: int64 (I,), for each record in `records.spans` the index of its image in `annotations`.
        names: the name of each image's record for messages: `a.tfrecord record 5 (image 12)`.
        formats: Pillow's name of a format -> the number of images, the most frequent first.
    """

    records: Records
    annotations: Annotations
    rows: np.ndarray
    names: Sequence[str]
    formats: dict[str, int]
    objects: Sequence[Stat] = ()
    name = "tfrecord"

    @functools.cached_property
    def fingerprint(self) -> str:
        # Paths are not included, because the user may move the files.
        digest = hashlib.sha256(self.annotations.fingerprint().encode())
        digest.update(self.records.spans.tobytes())
        return digest.hexdigest()

    def image_name(self, row: int) -> str:
        return self.names[row]

    def encoded(self, row: int) -> bytes:
        return self.records.image(int(self._record_of_row[row]))

    @functools.cached_property
    def _record_of_row(self) -> np.ndarray:
        return np.argsort(self.rows)

    def read(self, *, training: bool, **options: Any) -> Nodes:
        return readers.tfrecord_reader(self.records, self.label_map, training=training, **options)


# --- files ---


def expand_pattern(pattern: str) -> list[str]:
    """Returns the sorted files that match a glob, or several globs with commas between them.

    In a glob, `{000..012}` stands for these numbers, as in the patterns of WebDataset.

    Raises:
        DataError: a pattern matches nothing; the message lists all such patterns.
    """
    issues, files = Issues(pattern), set()
    parts = [part.strip() for part in pattern.split(",") if part.strip()] or [pattern]
    for part in itertools.chain.from_iterable(map(_expand_numbers, parts)):
        existing = storage.match(part)
        paths = [file for file in existing if not file.endswith(_NO_RECORDS)]
        paths = [file for file in paths if os.path.basename(file).lower() not in SYSTEM_NAMES]
        matches = [file for file in paths if not (part.endswith("**") and os.path.isdir(file))]
        if not matches:
            others = f" ({existing[0]!r} has no records)" if existing else ""
            issues.add("no-record-file", f"{part!r}{others}")
        files.update(matches)
    issues.raise_if_stopping()
    return sorted(files)


def _expand_numbers(pattern: str) -> list[str]:
    """Replaces the first `{000..012}` of a pattern by each of these numbers, and so on."""
    match = re.search(r"\{(\d{1,6})\.\.(\d{1,6})\}", pattern)
    if not match or int(match[1]) > int(match[2]):
        return [pattern]
    numbers = [f"{number:0{len(match[1])}}" for number in range(int(match[1]), int(match[2]) + 1)]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [before + number + rest for rest in _expand_numbers(after) for number in numbers]


def walk_files(files: Sequence[str | os.PathLike], issues: Issues) -> list[RecordFile]:
    """Finds the records in each file.

    Reports damaged files, and files that have fewer records than their index lists.
    """
    walked = list(in_threads(tfrecord.walk, files, _THREADS))
    for file in walked:
        if file.fault:
            issues.add(*file.fault)
    for file in walked if not issues.stopping else ():
        path, listed = pathlib.Path(f"{file.path}.idx"), b""
        with contextlib.suppress(OSError):  # index_of replaces an unreadable index
            listed = path.read_bytes() if path.is_file() else b""
        num_listed, count = listed.count(b"\n"), len(file.spans)
        if num_listed > count and listed.startswith(tfrecord.format_index(file.spans)):
            issues.add("index-longer", f"{file.path} has {count} records, {path.name} lists {num_listed}")
    return walked


def index_of(file: RecordFile, issues: Issues) -> str:
    """Returns the path of a file's index; writes it if it is missing or wrong."""
    path, change = tfrecord.ensure_index(file.path, file.spans)
    if change:
        issues.add(change, file.path)
    return path


def missing_shards(files: Sequence[str | os.PathLike]) -> list[str]:
    """Returns the missing files of numbered series, such as `train-00002-of-00004`."""
    known = {os.fspath(file) for file in files}
    missing: set[str] = set()
    for match in filter(None, map(_SHARD.fullmatch, known)):
        digits = len(match["shard"])
        names = (f"{match['prefix']}{i:0{digits}}-of-{match['count']}" for i in range(int(match["count"])))
        missing.update(name + match["suffix"] for name in names)
    return sorted(missing - known)


def find_label_map(files: Sequence[str]) -> str:
    """Returns the path of the label map that tools/convert.py wrote next to `files`, records or shards.

    Raises:
        UserError: there is no label map, or there are different ones.
        DataError: there is no label map, because the files are of another format.
    """
    prefixes = {
        re.sub(r"(-\d+(-of-\d+)?)?\.tar$|(-\d+-of-\d+)?(\.tfrecords?)?$", "", file, count=1) for file in files
    }
    label_maps = sorted(filter(storage.is_file, (f"{prefix}.label_map.json" for prefix in prefixes)))
    if not label_maps:
        issues = Issues(files[0])
        unread = storage.is_remote(files[0]) or is_tar(files[0])
        fault = None if unread else tfrecord.walk(files[0]).fault
        if fault and fault[0] == "foreign-format":
            issues.add(*fault)
        issues.raise_if_stopping()
        if files[0].lower().endswith(IMAGE_SUFFIXES):
            raise UserError(
                f"{files[0]} is an image: the pattern is for TFRecords or WebDataset; for image files, give"
                " their directory and a COCO json"
            )
        raise UserError(
            f"no label map next to {files[0]} ({min(prefixes)}.label_map.json): give --label_map=FILE (json"
            " or pbtxt), or convert the data again if the conversion did not finish"
        )
    if len({LabelMap.load(path) for path in label_maps}) > 1:
        raise UserError(f"label maps {label_maps[0]} and {label_maps[1]} differ: give --label_map=FILE")
    return label_maps[0]


# --- records ---


def open_records(
    files: Sequence[str | os.PathLike], label_map: LabelMap, *, policy: ImagePolicy = ImagePolicy()
) -> TFRecordSource:
    """Checks record files and their indexes, and every annotation and image in the files.

    The data are read once, and the result is cached until the files change.

    Args:
        label_map: the categories of the ids in the records.

    Raises:
        DataError: the files have errors that would make training wrong. The message lists all of them.
    """
    issues = Issues(name_files(files), policy)
    walked, examples, objects = _read(files, label_map, issues)
    has_id = np.array([example.image_id != NONE for example in examples], bool)
    has_digits = np.array([example.has_digits for example in examples], bool)
    annotations, is_usable = tfrecord_scan.check(examples, label_map, issues)
    issues.raise_if_stopping()
    annotations, has_repeated = tfrecord_scan.drop_repeated(examples, annotations, issues)
    usable = list(itertools.compress(examples, is_usable))
    names = [example.name for example in usable]
    annotations = annotations.select(is_usable)
    for rows in equal_rows(checksums_of(annotations)):
        issues.add("repeated-image", " = ".join(names[row] for row in rows))
    boxes = [box for example in usable for _, _, box, *_ in example.objects]

    def name_box(row: int) -> str:
        return f"{names[annotations.box_image[row]]} has {tfrecord_scan.box_name(boxes[row])}"

    annotations = report_annotations(annotations, names.__getitem__, name_box, issues)
    # Records must have the key of crowds only if the data set has crowds.
    has_crowds = bool(annotations.is_crowd.any())
    limit = LACKS_CROWDS if has_crowds else LACKS_BOXES
    lacking = np.array([example.lacks >= limit for example in examples], bool) | ~has_digits
    # `check` has reported the records without an id.
    issues.add_each("record-completed", np.flatnonzero((lacking & has_id)[is_usable]), names.__getitem__)
    issues.add_each("shard-missing", missing_shards([file.path for file in walked]), str)
    is_completed = (lacking | has_repeated) & is_usable
    if objects and is_completed.any():
        is_completed = is_usable  # DALI reads either objects or copies
    files, indexes, spans, numbers = _lay_out(walked, examples, is_usable, is_completed, issues)
    records = Records(files, indexes, spans, has_crowds, annotations.target_boxes.num_dropped > 0)
    rows = (np.cumsum(is_usable) - 1)[numbers]
    formats = collections.Counter(example.facts.image_format for example in usable if example.facts)
    objects = objects if storage.is_remote(files[0]) else ()
    return TFRecordSource(records, annotations, rows, names, dict(formats.most_common()), objects)


def _read(
    files: Sequence[str | os.PathLike], label_map: LabelMap, issues: Issues
) -> tuple[list[RecordFile], list[ParsedRecord], tuple[Stat, ...]]:
    """Returns the files, the parsed records of all files, and the files that are in a bucket."""
    names = zip(label_map.names, label_map.aliases or label_map.names, strict=True)
    known = dict(zip(label_map.category_ids, names, strict=True))
    of_policy = (issues.policy.decode, issues.policy.max_megapixels)
    rules = (_VERSION, (label_map.to_json(), label_map.aliases), of_policy)
    if storage.all_remote(files):
        return _read_objects([os.fspath(file) for file in files], known, rules, issues)
    walked = walk_files(files, issues)
    state = [(os.fsencode(file.path), file.size, file.mtime_ns, file.digest) for file in walked]
    name = _cache_name((*rules, state))
    with contextlib.suppress(msgspec.MsgspecError):  # no cached result, or a damaged one
        return walked, msgspec.msgpack.decode(load_cached(name) or b"", type=list[ParsedRecord]), ()
    examples = tfrecord_scan.scan(walked, known, issues)
    if not issues.stopping:
        save_cached(name, msgspec.msgpack.encode(examples))
    return walked, examples, ()


class _Checked(msgspec.Struct, gc=False, array_like=True):
    """The result for one object, as the cache stores it: fields of its RecordFile, and its records."""

    digest: str
    spans: bytes
    checksums: bytes
    examples: list[ParsedRecord]


def _read_objects(
    paths: Sequence[str], known: Mapping[int, Sequence[str]], rules: tuple, issues: Issues
) -> tuple[list[RecordFile], list[ParsedRecord], tuple[Stat, ...]]:
    """Does the same as `_read` for objects: the results are cached, or else come from one download each."""
    stats = storage.stat(paths)
    for path in paths:
        if path not in stats:
            raise storage.StoreError(f"{path}: there is no such object: correct the path, or upload it again")
    objects = tuple(stats[path] for path in paths)
    results = {}
    for stored in objects:
        with contextlib.suppress(msgspec.MsgspecError):  # no cached result, or a damaged one
            cached = msgspec.msgpack.decode(load_cached(_cache_name((*rules, stored))) or b"", type=_Checked)
            spans = np.frombuffer(cached.spans, np.int64).reshape(-1, 2)
            checksums = np.frombuffer(cached.checksums, np.uint32)
            file = RecordFile(stored.path, stored.size, 0, cached.digest, spans, checksums)
            results[stored] = file, cached.examples
    new = [stored for stored in objects if stored not in results]
    title = "Checking record files" if sum(stored.size for stored in new) > _SLOW_BYTES else None
    scan = functools.partial(tfrecord_scan.scan_object, known=known, policy=issues.policy)
    for stored, result in zip(new, in_threads(scan, new, _DOWNLOADS, title), strict=True):
        file, examples, file_issues = result
        results[stored] = file, examples
        issues.extend(file_issues)
        if not file_issues.stopping:
            checked = _Checked(file.digest, file.spans.tobytes(), file.checksums.tobytes(), examples)
            save_cached(_cache_name((*rules, stored)), msgspec.msgpack.encode(checked))
    walked = [results[stored][0] for stored in objects]
    return walked, [example for stored in objects for example in results[stored][1]], objects


def _cache_name(key: object) -> str:
    return f"{hashlib.sha256(msgspec.msgpack.encode(key)).hexdigest()[:32]}.records"


def _lay_out(
    walked: Sequence[RecordFile],
    examples: Sequence[ParsedRecord],
    is_usable: np.ndarray,
    is_completed: np.ndarray,
    issues: Issues,
) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray, np.ndarray]:
    """Selects the files and spans that DALI reads; writes missing indexes and completed copies.

    Args:
        examples: the R records of these files.
        is_usable: bool (R,), whether the record is read.
        is_completed: bool (R,), whether the record lacks a key that DALI needs or repeats a box, so that a
            copy is read.
        issues: receives the indexes that were written.

    Returns:
        (files, indexes, spans, numbers). The first three are fields of `Records`. `numbers`, int64 (I,), has
        the record number of each span.
    """
    layout = []
    begins = np.cumsum([len(file.spans) for file in walked])[:-1]
    for file, numbers in zip(walked, np.split(np.arange(len(examples)), begins), strict=True):
        is_copied = is_completed[numbers]
        is_read = is_usable[numbers] & ~is_copied
        if is_read.any():
            index = index_of(file, issues) if is_read.all() else _index(file.spans[is_read])
            layout.append((file.path, index, file.spans[is_read], numbers[is_read]))
        if is_copied.any():
            copy = _complete_copy(file, is_copied, [examples[number] for number in numbers])
            spans = tfrecord.record_spans(copy)
            layout.append((copy, _index(spans), spans, numbers[is_copied]))
    files, indexes, spans_read, numbers_read = zip(*layout, strict=True)
    with_file = [np.insert(spans, 0, i, axis=1) for i, spans in enumerate(spans_read)]
    return files, indexes, np.concatenate(with_file), np.concatenate(numbers_read)


def _index(spans: np.ndarray) -> str:
    return os.fspath(store_cached(tfrecord.format_index(spans), ".idx"))


def _complete_copy(file: RecordFile, is_copied: np.ndarray, examples: Sequence[ParsedRecord]) -> str:
    """Copies the selected records, with all keys, to a file in the cache. Returns its path."""
    copied = list(itertools.compress(examples, is_copied))

    def make() -> bytes:
        spans = zip(file.spans[is_copied].tolist(), copied, strict=True)
        with storage.local_copy(file.path) as local:
            records = [complete(tfrecord.read_record(local, *span), example) for span, example in spans]
        return b"".join(map(tfrecord.framed, records))

    ids = np.array([example.image_id for example in copied])
    key = b"%d" % _VERSION + file.digest.encode() + is_copied.tobytes() + ids.tobytes()
    identity = hashlib.sha256(key).hexdigest()
    return os.fspath(get_or_create(f"{identity[:32]}.tfrecord", make))


def complete(record: bytes, example: ParsedRecord) -> bytes:
    """Returns the record with all keys that DALI needs, and with the objects of `example`.

    Args:
        example: what was parsed from `record`, with its image id.
    """
    _, labels, boxes, _, is_crowd, _ = zip(*example.objects, strict=True) if example.objects else [()] * 6
    image_id = tf.train.BytesList(value=[b"%d" % example.image_id])
    features = {ID_KEY: tf.train.Feature(bytes_list=image_id)}
    for key, integers in ((LABEL_KEY, labels), (CROWD_KEY, is_crowd)):
        features[key] = tf.train.Feature(int64_list=tf.train.Int64List(value=integers))
    for side, key in enumerate(BOX_KEYS):
        edges = tf.train.FloatList(value=[box[side] for box in boxes])
        features[key] = tf.train.Feature(float_list=edges)
    addition = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    # Protobuf parses two concatenated messages as one, with the features of the last.
    return record + addition
