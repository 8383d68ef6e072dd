"""Opens TFRecords for DALI: everything in them is checked before, and what DALI would misread is refused.

DALI checks no CRC. It returns uninitialised memory, or dies, at a record that lacks a key which is asked
for; and the records that google/automl writes of images without objects do. Such records are mended: a
complete copy of each goes to the cache directory and is read in place of the original, which its file's
index then leaves out. Images that cannot be used are left out in the same way, if --on_bad_image=skip.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from common import cache, tfrecord_index
from common.annotations import Annotations
from common.datacheck import tfrecord_columns, tfrecord_content, tfrecord_walk
from common.datacheck.coco_checks import LARGE_ID
from common.datacheck.images import ImagePolicy
from common.datacheck.tfrecord_example import CROWD_KEY, DALI_KEYS, absent_keys, complete
from common.datacheck.tfrecord_walk import RecordFile
from common.issues import Findings
from common.labels import LabelMap

_CROWD_BIT = 1 << DALI_KEYS.index(CROWD_KEY)


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Record files that DALI can read without harm.

    Attributes:
        files: record files, mended ones included, in the order in which they are read.
        indexes: the index of each.
        spans: int64 (I, 3), (number of the file, offset, size with frame) of each record in the order of
            reading.
        rows: int64 (I,), the row of the annotations that each span belongs to.
        annotations: of all records, in the order of the original files.
        formats: how many images have a format, by Pillow's name of it, the most frequent first.
    """

    files: tuple[str, ...]
    indexes: tuple[str, ...]
    spans: np.ndarray
    rows: np.ndarray
    annotations: Annotations
    formats: dict[str, int]


def open_records(
    files: Sequence[str | os.PathLike], label_map: LabelMap, *, policy: ImagePolicy = ImagePolicy()
) -> Records:
    """Checks record files, their indexes, every annotation and every image in them.

    Data are read once and remembered while the files stay as they are, from one start to the next: every
    time, all lengths and the checksums that are stored with the data are compared.

    Args:
        files: the record files.
        label_map: of the category ids in the records.
        policy: about images that cannot be used.

    Raises:
        DataError: everything that would make training wrong, in all files: file, record, image id, key and
            value.
    """
    findings = Findings(tfrecord_index.name_files(files))
    walked = tuple(tfrecord_walk.walk_files(files, findings))
    if not findings.stopping:
        for file in walked:
            tfrecord_index.check_complete(file.path, file.spans, findings)
    if findings.stopping:
        findings.extend(_read(walked, label_map, policy).findings)
        findings.raise_if_stopping()
    return _lay_out(walked, _accept(walked, label_map, policy))


@dataclasses.dataclass(frozen=True, eq=False)
class _Accepted:
    """What can be used of record files.

    Attributes:
        annotations: of the records that are read.
        is_kept: bool (R,), which of all records are read.
        lacking: uint8 (R,), the bits of the keys that each must be given first, as in `Example.absent`.
        formats: as in `Records`.
    """

    annotations: Annotations
    is_kept: np.ndarray
    lacking: np.ndarray
    formats: dict[str, int]


def _read(walked: Sequence[RecordFile], label_map: LabelMap, policy: ImagePolicy) -> tfrecord_content.Content:
    content = tfrecord_content.read(
        walked, label_map, decode=policy.decode, max_megapixels=policy.max_megapixels
    )
    if policy.on_bad_image == "skip":
        content.findings.skip_images()
    return content


@functools.lru_cache(maxsize=8)
def _accept(walked: tuple[RecordFile, ...], label_map: LabelMap, policy: ImagePolicy) -> _Accepted:
    content = _read(walked, label_map, policy)
    findings = content.findings
    findings.raise_if_stopping()
    kept = np.flatnonzero(content.is_usable)
    annotations = content.annotations
    if len(kept) < len(content.is_usable):
        annotations = annotations.select(content.is_usable)

    def names(rows: np.ndarray) -> Iterator[str]:
        return tfrecord_content.record_names(walked, content.annotations.image_ids, kept[rows])

    _check(annotations, names, findings)
    findings.raise_if_stopping()
    # DALI is asked for crowds only where there are any.
    asked = 0xFF if annotations.is_crowd.any() else 0xFF - _CROWD_BIT
    lacking = np.where(content.is_usable, content.absent & asked, 0).astype(np.uint8)
    rows = np.flatnonzero(lacking[kept])
    findings.add_many(
        "record-completed",
        len(rows),
        (
            f"{name} lacks {', '.join(absent_keys(absent))}"
            for name, absent in zip(names(rows), lacking[kept[rows]].tolist(), strict=True)
        ),
    )
    return _Accepted(annotations, content.is_usable, lacking, content.formats)


def _check(
    annotations: Annotations, names: Callable[[np.ndarray], Iterator[str]], findings: Findings
) -> None:
    """Adds what there is to say about sound records, as coco_checks.py does about a json."""
    if not annotations.num_images:
        findings.add("no-images", "no record has an image that can be read")
        return
    boxes, is_clipped = annotations.clipped_boxes
    has_area = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
    is_target = has_area & ~annotations.is_crowd
    if not is_target.any():
        findings.add("no-boxes", f"none of {len(boxes)} boxes is more than a crowd or an empty box")
    for kind, which in (
        ("box-outside", is_target & is_clipped),
        ("box-empty", ~annotations.is_crowd & ~has_area),
        ("crowd", annotations.is_crowd),
    ):
        rows = np.flatnonzero(which)
        texts = (
            f"{name} has {tfrecord_columns.box_name(_fractions(annotations, row))}"
            for name, row in zip(names(annotations.box_image[rows]), rows.tolist(), strict=True)
        )
        findings.add_many(kind, len(rows), texts)
    counts = np.bincount(annotations.box_image[is_target], minlength=annotations.num_images)
    for kind, which in (
        ("image-without-boxes", counts == 0),
        ("large-id", annotations.image_ids >= LARGE_ID),
    ):
        rows = np.flatnonzero(which)
        findings.add_many(kind, len(rows), names(rows))
    for category in annotations.label_map.categories():
        if category["id"] >= LARGE_ID:
            findings.add("large-id", f"category {category['id']} ({category['name']!r})")


def _fractions(annotations: Annotations, row: int) -> np.ndarray:
    """A box as its record stores it."""
    left, top, width, height = annotations.boxes_ltwh_px[row].tolist()
    image_height, image_width = annotations.image_sizes[annotations.box_image[row]].tolist()
    right, bottom = left + width, top + height
    return np.array(
        [left / image_width, top / image_height, right / image_width, bottom / image_height], np.float32
    )


def _lay_out(walked: Sequence[RecordFile], accepted: _Accepted) -> Records:
    """Files, indexes and spans of the records that are read; makes what is missing."""
    files, indexes, spans, rows = [], [], [], []
    findings = Findings(accepted.annotations.origin)  # of this opening: the accepted ones may be opened again
    findings.extend(accepted.annotations.findings)
    missing = tfrecord_index.missing_shards([file.path for file in walked])
    findings.add_many("shard-missing", len(missing), missing)
    row_of = np.cumsum(accepted.is_kept) - 1

    def add(file: str, index: str | os.PathLike, file_spans: np.ndarray, records: np.ndarray) -> None:
        spans.append(np.insert(file_spans, 0, len(files), axis=1))
        rows.append(row_of[records])
        files.append(file)
        indexes.append(os.fspath(index))

    begin = 0
    for file in walked:
        end = begin + len(file.spans)
        lacking = accepted.lacking[begin:end]
        is_read = accepted.is_kept[begin:end] & (lacking == 0)
        if is_read.all():
            index = tfrecord_index.ensure_index(file.path, file.spans, findings)
            add(file.path, index, file.spans, np.arange(begin, end))
        elif is_read.any():
            sound = file.spans[is_read]
            index = cache.store(tfrecord_index.format_index(sound), ".idx")
            add(file.path, index, sound, begin + np.flatnonzero(is_read))
        if lacking.any():
            mended = _mend(file, lacking)
            mended_spans = tfrecord_index.record_spans(mended)
            index = cache.store(tfrecord_index.format_index(mended_spans), ".idx")
            add(mended, index, mended_spans, begin + np.flatnonzero(lacking))
        begin = end
    return Records(
        tuple(files),
        tuple(indexes),
        np.concatenate(spans),
        np.concatenate(rows),
        dataclasses.replace(accepted.annotations, findings=findings),
        accepted.formats,
    )


def _mend(file: RecordFile, lacking: np.ndarray) -> str:
    """Copies some records of `file` to the cache directory, with empty lists under the keys they lack."""
    identity = hashlib.sha256(os.fsencode(os.path.abspath(file.path)))
    identity.update(f"\0{file.mtime_ns}\0{file.digest}\0".encode())
    identity.update(lacking.tobytes())
    path = cache.directory() / f"{identity.hexdigest()[:32]}.tfrecord"

    def write(temporary: pathlib.Path) -> None:
        with open(file.path, "rb") as stream, tf.io.TFRecordWriter(os.fspath(temporary)) as writer:
            for number in np.flatnonzero(lacking).tolist():
                offset, size = file.spans[number].tolist()
                stream.seek(offset + tfrecord_walk.HEADER)
                record = stream.read(size - tfrecord_walk.FRAME)
                writer.write(complete(record, absent_keys(lacking[number])))

    if not path.exists():
        cache.write(path, write)
    return os.fspath(path)
