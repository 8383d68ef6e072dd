"""What record files hold, read once: annotations, checksums of the data, headers of the images.

The answer is kept in the user's cache directory under a name that is made of everything that it depends on,
so that the next start reads no data. Faults that must be mended in the files are not kept.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from common import cache, progress
from common.annotations import Annotations
from common.datacheck import images, tfrecord_columns
from common.datacheck.tfrecord_example import UNKNOWN
from common.datacheck.tfrecord_walk import RecordFile
from common.issues import Findings, Severity
from common.labels import LabelMap
from common.tfrecord_index import name_files

_VERSION = 2  # raise it when what is kept changes, or any check, those of images.py included
_DIGEST = 32  # bytes of a SHA-256
_THREADS = min(16, os.cpu_count() or 1)
_NAMED = 4  # records of one id in a message
_SLOW_BYTES, _SLOW_RECORDS, _SLOW_IMAGES = 2**29, 50_000, 500  # from which on a progress bar is shown


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """What record files hold.

    Attributes:
        annotations: of all records. Where `findings` stop, rows of what was reported mean nothing.
        findings: all about records and images, but not about boxes that can be mended.
        is_usable: bool (I,), whether the image of a record can be used.
        absent: uint8 (I,), `Example.absent` of each record.
        formats: how many of the usable images have a format, by its name, the most frequent first.
    """

    annotations: Annotations
    is_usable: np.ndarray
    absent: np.ndarray
    formats: dict[str, int]

    @property
    def findings(self) -> Findings:
        return self.annotations.findings


def read(files: Sequence[RecordFile], label_map: LabelMap, *, decode: bool, max_megapixels: float) -> Content:
    """Reads record files, or remembers what was read.

    Args:
        files: what `walk_files` found; of damaged files, the records before the damage are read.
        label_map: of the category ids in the records.
        decode: look at every pixel. What that found is remembered without it, too.
        max_megapixels: larger images cannot be used.
    """
    names = {deep: _cache_name(files, label_map, deep, max_megapixels) for deep in (True, decode)}
    for name in names.values():  # what every pixel showed comes first
        content = _from_bytes(cache.load(name), name_files([file.path for file in files]))
        if content:
            return content
    content = _scan(files, label_map, decode, max_megapixels)
    if all(finding.severity is not Severity.STOPS for finding in content.findings):
        cache.save(names[decode], _to_bytes(content))
    return content


def record_names(files: Sequence[RecordFile], image_ids: np.ndarray, rows: np.ndarray) -> Iterator[str]:
    """Some of all records, by their rows, in words."""
    begins = np.cumsum([0, *(len(file.spans) for file in files)])
    for row in rows.tolist():
        number = int(np.searchsorted(begins, row, side="right")) - 1
        known = f" (image {image_ids[row]})" if image_ids[row] != UNKNOWN else ""
        yield f"{files[number].name(row - begins[number])}{known}"


def _cache_name(files: Sequence[RecordFile], label_map: LabelMap, decode: bool, max_megapixels: float) -> str:
    state = [(os.fsencode(file.path), file.size, file.mtime_ns, file.digest) for file in files]
    key = msgspec.msgpack.encode((_VERSION, label_map.to_json(), decode, max_megapixels, state))
    return f"{hashlib.sha256(key).hexdigest()[:32]}.records"


def _to_bytes(content: Content) -> bytes:
    columns = (content.is_usable.tobytes(), content.absent.tobytes(), content.annotations.to_bytes())
    kept = msgspec.msgpack.encode((content.formats, *columns))
    return hashlib.sha256(kept).digest() + kept


def _from_bytes(kept: bytes | None, origin: str) -> Content | None:
    if kept is None or hashlib.sha256(memoryview(kept)[_DIGEST:]).digest() != kept[:_DIGEST]:
        return None
    formats, is_usable, absent, annotations = msgspec.msgpack.decode(memoryview(kept)[_DIGEST:])
    annotations = Annotations.from_bytes(annotations, origin)
    if annotations is None:
        return None
    return Content(annotations, np.frombuffer(is_usable, np.bool_), np.frombuffer(absent, np.uint8), formats)


def _scan(files: Sequence[RecordFile], label_map: LabelMap, decode: bool, max_megapixels: float) -> Content:
    origin = name_files([file.path for file in files])
    findings = Findings(origin)
    parts = [(file, begin, end) for file in files for begin, end in tfrecord_columns.parts(file)]
    num_records = sum(len(file.spans) for file in files)
    is_slow = (
        sum(file.size for file in files) > _SLOW_BYTES
        or num_records > _SLOW_RECORDS
        or (decode and num_records > _SLOW_IMAGES)
    )
    bar = progress.Bar("Checking records", len(parts)) if is_slow and parts else None
    known = frozenset(label_map.category_ids)
    inspect = functools.partial(images.inspect, decode=decode, max_megapixels=max_megapixels)
    all_columns = [tfrecord_columns.columns_of([])]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for columns, found in pool.map(lambda part: tfrecord_columns.scan(*part, known, inspect), parts):
            all_columns.append(columns)
            findings.extend(found)
            if bar:
                bar.step()
    columns = {
        field.name: np.concatenate([getattr(columns, field.name) for columns in all_columns])
        for field in dataclasses.fields(tfrecord_columns.Columns)
    }
    _check_ids(files, columns["image_ids"], findings)
    box_image = np.repeat(np.arange(num_records), columns["counts"])
    boxes_ltwh_px, areas = _in_pixels(columns["boxes"], columns["image_sizes"][box_image], columns["areas"])
    annotations = Annotations(
        label_map=label_map,
        image_ids=columns["image_ids"],
        file_names=columns["file_names"].tolist(),
        image_sizes=columns["image_sizes"],
        box_image=box_image,
        boxes_ltwh_px=boxes_ltwh_px,
        category_ids=columns["category_ids"],
        is_crowd=columns["is_crowd"],
        areas=areas,
        origin=origin,
        findings=findings,
    )
    formats = collections.Counter(columns["formats"][columns["is_usable"]].tolist())
    return Content(annotations, columns["is_usable"], columns["absent"], dict(formats.most_common()))


def _check_ids(files: Sequence[RecordFile], image_ids: np.ndarray, findings: Findings) -> None:
    order = np.argsort(image_ids, kind="stable")
    unique, begins, counts = np.unique(image_ids[order], return_index=True, return_counts=True)
    repeated = np.flatnonzero((counts > 1) & (unique != UNKNOWN))

    def text(of: int) -> str:
        rows = order[begins[of] : begins[of] + min(counts[of], _NAMED)]
        names = ", ".join(record_names(files, image_ids, rows))
        return f"image {unique[of]} is given {counts[of]} times: {names}"

    findings.add_many("repeated-image-id", len(repeated), map(text, repeated.tolist()))


def _in_pixels(
    boxes: np.ndarray, image_sizes: np.ndarray, areas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """float64 (N, 4) ltwh, and the areas (N,), those of the boxes in place of NaN."""
    boxes_px = boxes.astype(np.float64) * image_sizes[:, [1, 0, 1, 0]]
    boxes_ltwh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    return boxes_ltwh_px, np.where(np.isnan(areas), boxes_ltwh_px[:, 2] * boxes_ltwh_px[:, 3], areas)
