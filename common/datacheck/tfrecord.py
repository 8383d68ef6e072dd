"""Opens TFRecords for DALI: checks everything in them, and refuses what DALI would misread.

DALI checks no CRC. It returns uninitialised memory, or dies, at a record that lacks a key which is asked
for; and the records that google/automl writes of images without objects do. Such records are fixed: a
complete copy of each goes to the cache directory and is read in place of the original, which its file's
index then leaves out. Images that cannot be used are left out in the same way, if --on_bad_image=skip.
"""

import concurrent.futures
import dataclasses
import glob
import hashlib
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from common import tfrecord
from common.annotations import Annotations
from common.datacheck import tfrecord_scan
from common.datacheck.checked_annotations import report_fixes
from common.datacheck.images import ImagePolicy
from common.datacheck.tfrecord_example import absent_keys, complete
from common.datacheck.tfrecord_scan import name_files
from common.errors import UserError
from common.files import get_or_create, store_cached
from common.issues import Findings
from common.labels import LabelMap
from common.sources import TFRecordSource
from common.tfrecord import CROWD_KEY, DALI_KEYS, RecordFile, Records

_CROWD_BIT = 1 << DALI_KEYS.index(CROWD_KEY)
_THREADS = 16  # files that are walked at once
_NO_RECORDS = (".idx", ".json", ".pbtxt")  # what lies beside record files
_SHARD = re.compile(r"(?P<prefix>.*-)(?P<shard>\d{1,9})-of-(?P<count>\d{1,5})(?P<suffix>[^/]*)", re.DOTALL)


# --- files ---


def expand_pattern(pattern: str) -> list[str]:
    """What a glob (several with commas between them) matches, sorted: equal on all ranks.

    Pipes, directories and dangling links are among it, for `walk_files` to name; directories that `**`
    passes through are not.

    Raises:
        DataError: every pattern that matches nothing.
    """
    findings = Findings(pattern)
    files: set[str] = set()
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    for part in parts or [pattern]:
        matches = {file for file in glob.glob(part, recursive=True) if not file.endswith(_NO_RECORDS)}
        if part.endswith("**"):
            matches = {file for file in matches if not os.path.isdir(file)}
        if not matches:
            findings.add("no-record-file", repr(part))
        files |= matches
    findings.raise_if_stopping()
    return sorted(files)


def walk_files(files: Sequence[str | os.PathLike], findings: Findings) -> list[RecordFile]:
    """Where the records of files stand. Faults, and files that end before their index, are added."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        walked = list(pool.map(tfrecord.walk, files))
    for file in walked:
        if file.fault:
            findings.add(*file.fault)
    for file in walked if not findings.stopping else ():
        _check_complete(file, findings)
    return walked


def _check_complete(file: RecordFile, findings: Findings) -> None:
    path = pathlib.Path(f"{file.path}.idx")
    try:
        listed = path.read_bytes() if path.is_file() else b""
    except OSError:  # index_of makes another
        return
    num_listed, count = listed.count(b"\n"), len(file.spans)
    if num_listed > count and listed.startswith(tfrecord.format_index(file.spans)):
        findings.add("index-longer", f"{file.path} has {count} records, {path.name} lists {num_listed}")


def index_of(file: RecordFile, findings: Findings) -> str:
    """The path of a file's index, which is made where it is missing or wrong."""
    path, made = tfrecord.ensure_index(file.path, file.spans)
    if made:
        findings.add(made, file.path)
    return path


def store_index(spans: np.ndarray) -> str:
    """The path of an index in the cache, of some records of a file."""
    return os.fspath(store_cached(tfrecord.format_index(spans), ".idx"))


def missing_shards(files: Sequence[str | os.PathLike]) -> list[str]:
    """The files that the names of the others promise: `train-00002-of-00004` is one of four."""
    known = {os.fspath(file) for file in files}
    missing = set()
    for file in known:
        if match := _SHARD.fullmatch(file):
            digits = len(match["shard"])
            for shard in range(int(match["count"])):
                missing.add(f"{match['prefix']}{shard:0{digits}}-of-{match['count']}{match['suffix']}")
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
    findings = Findings(name_files(files))
    walked = walk_files(files, findings)
    content = tfrecord_scan.read(walked, label_map, policy)
    if policy.on_bad_image == "skip":
        content.findings.skip_images()
    findings.extend(content.findings)
    findings.raise_if_stopping()
    kept = np.flatnonzero(content.is_usable)
    annotations = content.annotations
    if len(kept) < len(content.is_usable):
        annotations = annotations.select(content.is_usable)
    annotations = dataclasses.replace(annotations, findings=findings)

    def name_record(row: int) -> str:
        return tfrecord_scan.record_name(walked, content.annotations.image_ids, kept[row])

    def name_box(row: int) -> str:
        box = tfrecord_scan.box_name(_fractions(annotations, row))
        return f"{name_record(annotations.box_image[row])} has {box}"

    if not annotations.num_images:
        findings.add("no-images", "no record has an image that can be read")
        findings.raise_if_stopping()
    report_fixes(annotations, name_record, name_box, findings)
    findings.raise_if_stopping()
    # DALI is asked for crowds only where there are any.
    asked = 0xFF if annotations.is_crowd.any() else 0xFF - _CROWD_BIT
    lacking = np.where(content.is_usable, content.absent & asked, 0).astype(np.uint8)
    rows = np.flatnonzero(lacking[kept])
    findings.add_each(
        "record-completed",
        rows,
        lambda row: f"{name_record(row)} lacks {', '.join(absent_keys(lacking[kept[row]]))}",
    )
    missing = missing_shards([file.path for file in walked])
    findings.add_many("shard-missing", len(missing), missing)
    return _lay_out(walked, annotations, content, lacking)


def _fractions(annotations: Annotations, row: int) -> np.ndarray:
    """A box as its record stores it."""
    left, top, width, height = annotations.boxes_ltwh_px[row]
    sides = annotations.image_sizes[annotations.box_image[row]][[1, 0, 1, 0]]
    return (np.array([left, top, left + width, top + height]) / sides).astype(np.float32)


def _lay_out(
    walked: Sequence[RecordFile],
    annotations: Annotations,
    content: tfrecord_scan.Content,
    lacking: np.ndarray,
) -> TFRecordSource:
    """Files, indexes and spans of the records that are read; makes what is missing.

    Args:
        walked: the user's files.
        annotations: of the records that are read.
        content: of all records.
        lacking: uint8 (R,), the bits of the keys that each record must be given first, as `Example.absent`.
    """
    files, indexes, spans, rows = [], [], [], []
    row_of = np.cumsum(content.is_usable) - 1

    def add(file: str, index: str, file_spans: np.ndarray, records: np.ndarray) -> None:
        spans.append(np.insert(file_spans, 0, len(files), axis=1))
        rows.append(row_of[records])
        files.append(file)
        indexes.append(index)

    begin = 0
    for file in walked:
        end = begin + len(file.spans)
        is_read = content.is_usable[begin:end] & (lacking[begin:end] == 0)
        if is_read.any():
            sound = file.spans[is_read]
            index = index_of(file, annotations.findings) if is_read.all() else store_index(sound)
            add(file.path, index, sound, begin + np.flatnonzero(is_read))
        if lacking[begin:end].any():
            completed = _complete_copy(file, lacking[begin:end])
            copied = tfrecord.record_spans(completed)
            add(completed, store_index(copied), copied, begin + np.flatnonzero(lacking[begin:end]))
        begin = end
    has_crowds = bool(annotations.is_crowd.any())
    has_empty = bool(annotations.target_boxes.num_dropped)
    records = Records(tuple(files), tuple(indexes), np.concatenate(spans), has_crowds, has_empty)
    paths = [file.path for file in walked]
    return TFRecordSource(paths, records, annotations, np.concatenate(rows), content.formats)


def _complete_copy(file: RecordFile, lacking: np.ndarray) -> str:
    """Copies some records of `file` to the cache directory, with empty lists under the keys they lack."""
    identity = hashlib.sha256(os.fsencode(os.path.abspath(file.path)))
    identity.update(f"\0{file.mtime_ns}\0{file.digest}\0".encode())
    identity.update(lacking.tobytes())

    def make() -> bytes:
        rows = np.flatnonzero(lacking).tolist()
        records = (tfrecord.read_record(file.path, *file.spans[row].tolist()) for row in rows)
        return b"".join(
            tfrecord.framed(complete(record, absent_keys(lacking[row])))
            for row, record in zip(rows, records, strict=True)
        )

    return os.fspath(get_or_create(f"{identity.hexdigest()[:32]}.tfrecord", make))
