"""Reads the annotations of every TFRecord before DALI does, and refuses what DALI would misread.

Schema: TensorFlow Object Detection (tensorflow/models
    research/object_detection/dataset_tools/create_coco_tf_record.py
and google/automl efficientdet/dataset/create_coco_tfrecord.py). `image/object/class/label` holds COCO
category ids and `image/source_id` the image id in decimal digits. Optional: `image/filename`,
`image/object/is_crowd`, `image/object/area`, and all keys of the objects where an image has none.

DALI checks no CRC. It returns uninitialised memory, or dies, at a record that lacks a key which is asked
for; and the records that google/automl writes of images without objects do. Such records are mended: a
complete copy of each goes to the cache directory and is read in place of the original, which its file's
index then leaves out.
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from common import atomic, cache, progress, tfrecord_index
from common.annotations import Annotations
from common.errors import UserError
from common.labels import LabelMap

BOX_KEYS = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
LABEL_KEY = "image/object/class/label"
CROWD_KEY = "image/object/is_crowd"
AREA_KEY = "image/object/area"
_MAX_ID = 2**63 - 1
_SHOW_PROGRESS_BYTES = 2**30


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Record files that DALI can read without harm.

    Attributes:
        files: record files, mended ones included, in the order in which they are read.
        indexes: the index of each.
        spans: int64 (I, 3), (number of the file, offset, size with frame) of each record in the order of
            reading.
        annotations: of all records, in the order of the original files.
    """

    files: tuple[str, ...]
    indexes: tuple[str, ...]
    spans: np.ndarray
    annotations: Annotations


def open_records(files: Sequence[str | os.PathLike], label_map: LabelMap) -> Records:
    """Checks record files, their indexes and every annotation in them; remembers the answer while they are
    unchanged.

    Args:
        files: the record files.
        label_map: of the category ids in the records.

    Raises:
        UserError: a damaged file or a record outside the schema: file, record number, key and value.
    """
    state = []
    for file in map(os.fspath, files):
        try:
            status = os.stat(file)
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from error
        state.append((file, status.st_size, status.st_mtime_ns))
    return _open_records(tuple(state), label_map)


def scan_records(files: Sequence[str | os.PathLike], label_map: LabelMap) -> Annotations:
    """The annotations in record files, as `open_records` finds them. Boxes are those of float32 fractions."""
    return open_records(files, label_map).annotations


@functools.lru_cache(maxsize=8)
def _open_records(state: tuple[tuple[str, int, int], ...], label_map: LabelMap) -> Records:
    scans = []
    total = sum(size for _, size, _ in state)
    bar = progress.Bar("Checking records", len(state)) if total > _SHOW_PROGRESS_BYTES else None
    for file, _, _ in state:
        scans.append(list(_scan(file, label_map)))
        if bar:
            bar.step()
    annotations = _as_arrays([scan for of_file in scans for scan in of_file], label_map, _origin(state))
    has_crowds = bool(annotations.is_crowd.any())

    files, indexes, spans = [], [], []
    for (file, size, mtime), of_file in zip(state, scans, strict=True):
        file_spans = tfrecord_index.record_spans(file)
        additions = {
            i: scan.missing(has_crowds) for i, scan in enumerate(of_file) if scan.missing(has_crowds)
        }
        sound = [span for i, span in enumerate(file_spans) if i not in additions]
        if sound:
            index = (
                cache.store(tfrecord_index.format_index(sound), ".idx")
                if additions
                else tfrecord_index.ensure_index(file, sound)
            )
            spans += [(len(files), *span) for span in sound]
            files.append(file)
            indexes.append(os.fspath(index))
        if additions:
            mended = _mend(file, f"{size} {mtime}", file_spans, additions)
            mended_spans = tfrecord_index.record_spans(mended)
            spans += [(len(files), *span) for span in mended_spans]
            files.append(mended)
            indexes.append(tfrecord_index.ensure_index(mended, mended_spans))
    return Records(tuple(files), tuple(indexes), np.array(spans, np.int64), annotations)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Scan:
    """What one record says, and where it stands (for messages)."""

    where: str
    image_id: int
    file_name: str
    image_size: tuple[int, int]
    boxes: np.ndarray  # float32 (N, 4) ltrb normalised, as stored
    category_ids: list[int]
    is_crowd: list[int]
    areas: list[float] | None
    absent: tuple[str, ...]  # keys that DALI will ask for

    def missing(self, has_crowds: bool) -> tuple[str, ...]:
        """The keys to add before DALI reads this record; it asks for crowds only where there are any."""
        return tuple(key for key in self.absent if key != CROWD_KEY or has_crowds)


def _scan(file: str, label_map: LabelMap) -> Iterator[_Scan]:
    known = set(label_map.category_ids)
    spans = tfrecord_index.record_spans(file)
    number = 0
    try:
        for record in tf.data.TFRecordDataset(file).prefetch(8).as_numpy_iterator():
            yield _parse(record, known, f"{file} record {number}")
            number += 1
    except tf.errors.DataLossError as error:
        raise UserError(
            f"{file} record {number} at byte {spans[number][0]} is damaged: the checksum is wrong;"
            " copy or write it again"
        ) from error


def _parse(record: bytes, known: set[int], where: str) -> _Scan:
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # google.protobuf.message.DecodeError, whose module TensorFlow hides
        raise UserError(f"{where} is no tf.train.Example: {error}") from error

    def values(key: str, kind: str, count: int | None = None) -> Sequence[Any]:
        """The list of `kind` under `key`; () where the record lacks it, which `count` forbids."""
        found = features[key].WhichOneof("kind") if key in features else None
        if found not in (None, kind):
            raise UserError(f"{where} has a {found} in {key}, which must be a {kind}")
        found_values = getattr(features[key], kind).value if found else ()
        if count is not None and len(found_values) != count:
            raise UserError(f"{where} has {len(found_values)} values in {key}, which must be {count}")
        return found_values

    (source_id,) = values("image/source_id", "bytes_list", 1)
    if not source_id.isdigit() or int(source_id) > _MAX_ID:
        raise UserError(
            f"{where} has image/source_id {source_id!r}, which is no image id:"
            f" it must be decimal digits, up to {_MAX_ID}"
        )
    where = f"{where} (image {int(source_id)})"
    (encoded,) = values("image/encoded", "bytes_list", 1)
    if not encoded:
        raise UserError(f"{where} has an empty image/encoded")
    (height,) = values("image/height", "int64_list", 1)
    (width,) = values("image/width", "int64_list", 1)
    if not (0 < height < 2**31 and 0 < width < 2**31):
        raise UserError(f"{where} says that its image is {width} x {height} pixels")

    category_ids = list(values(LABEL_KEY, "int64_list"))
    count = len(category_ids)
    boxes = np.array([values(key, "float_list", count) for key in BOX_KEYS], np.float32).T
    for category_id in category_ids:
        if category_id not in known:
            raise UserError(
                f"{where} has the label {category_id}, which the label map lacks"
                f" ({len(known)} categories from {min(known)} to {max(known)})"
            )
    bad = ~np.isfinite(boxes).all(axis=1) | (boxes[:, 2] < boxes[:, 0]) | (boxes[:, 3] < boxes[:, 1])
    if bad.any():
        raise UserError(f"{where} has the box xmin, ymin, xmax, ymax = {boxes[bad][0].tolist()}")

    crowds = list(values(CROWD_KEY, "int64_list"))
    areas = list(values(AREA_KEY, "float_list"))
    for key, found, right in (
        (CROWD_KEY, crowds, set(crowds) <= {0, 1}),
        (AREA_KEY, areas, all(0 <= area < float("inf") for area in areas)),
    ):
        if len(found) not in (0, count) or not right:
            raise UserError(f"{where} has {key} {found[:8]} for its {count} boxes")
    absent = [key for key in (*BOX_KEYS, LABEL_KEY) if not _has_list(features, key)]
    if not _has_list(features, CROWD_KEY) or len(crowds) != count:
        absent.append(CROWD_KEY)
    return _Scan(
        where=where,
        image_id=int(source_id),
        file_name=b"".join(values("image/filename", "bytes_list")).decode("utf-8", "replace"),
        image_size=(height, width),
        boxes=boxes,
        category_ids=category_ids,
        is_crowd=crowds or [0] * count,
        areas=areas or None,
        absent=tuple(absent),
    )


def _has_list(features: Any, key: str) -> bool:
    return key in features and features[key].WhichOneof("kind") is not None


def _origin(state: tuple[tuple[str, int, int], ...]) -> str:
    first = state[0][0]
    return first if len(state) == 1 else f"{first} and {len(state) - 1} more files"


def _as_arrays(scans: list[_Scan], label_map: LabelMap, origin: str) -> Annotations:
    place: dict[int, str] = {}
    for scan in scans:
        if scan.image_id in place:
            raise UserError(
                f"{scan.where} is there already: {place[scan.image_id]}; image ids must be unique"
            )
        place[scan.image_id] = scan.where
    counts = [len(scan.category_ids) for scan in scans]
    if not any(counts):
        raise UserError(
            f"{origin}: no record holds an object: there is nothing to train on or to compare with"
        )
    box_image = np.repeat(np.arange(len(scans)), counts)
    image_sizes = np.array([scan.image_size for scan in scans], np.int32)
    boxes = np.concatenate([scan.boxes for scan in scans]).astype(np.float64)
    boxes_px = boxes * image_sizes[box_image][:, [1, 0, 1, 0]]
    boxes_ltwh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    areas = boxes_ltwh_px[:, 2] * boxes_ltwh_px[:, 3]
    for scan, begin in zip(scans, np.cumsum([0, *counts[:-1]]).tolist(), strict=True):
        if scan.areas:
            areas[begin : begin + len(scan.areas)] = scan.areas
    return Annotations(
        label_map=label_map,
        image_ids=np.array([scan.image_id for scan in scans], np.int64),
        file_names=[scan.file_name for scan in scans],
        image_sizes=image_sizes,
        box_image=box_image.astype(np.int64),
        boxes_ltwh_px=boxes_ltwh_px,
        category_ids=np.array([i for scan in scans for i in scan.category_ids], np.int64),
        is_crowd=np.array([c for scan in scans for c in scan.is_crowd], np.bool_),
        areas=areas,
        origin=origin,
    )


def _mend(
    file: str, version: str, spans: list[tuple[int, int]], additions: dict[int, tuple[str, ...]]
) -> str:
    """Copies some records of `file` to the cache directory, with empty lists under the keys they lack."""
    identity = f"{os.path.abspath(file)}\0{version}\0{sorted(additions.items())}"
    path = cache.directory() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.tfrecord"

    def write(temporary: pathlib.Path) -> None:
        with open(file, "rb") as stream, tf.io.TFRecordWriter(os.fspath(temporary)) as writer:
            for number, keys in additions.items():
                offset, size = spans[number]
                stream.seek(offset + tfrecord_index.FRAME - 4)
                record = stream.read(size - tfrecord_index.FRAME)
                # Protobuf reads two messages in a row as one; of a key in both, the later value counts.
                writer.write(record + _padding(record, keys))

    if not path.exists():
        atomic.write(path, write)
    return os.fspath(path)


def _padding(record: bytes, keys: tuple[str, ...]) -> bytes:
    count = len(tf.train.Example.FromString(record).features.feature[LABEL_KEY].int64_list.value)
    features = collections.defaultdict(tf.train.Feature)
    for key in keys:
        if key in BOX_KEYS:
            features[key].float_list.SetInParent()
        else:
            features[key].int64_list.value.extend([0] * count)
            features[key].int64_list.SetInParent()
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
