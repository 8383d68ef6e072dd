"""Reads record files once: annotations, checksums of the data, headers of the images.

The cache keeps the result under a hash of everything that it depends on, so the next start does not read the
data. A result with faults that the user must correct in the files is not kept.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from common.annotations import Annotations
from common.datacheck import checked_annotations, images
from common.datacheck.images import ImageFacts, ImagePolicy
from common.datacheck.tfrecord_example import UNKNOWN, Example, parse
from common.files import load_cached, save_cached
from common.issues import Findings, Severity
from common.labels import LabelMap
from common.progress import Bar
from common.tfrecord import FRAME, HEADER, RecordFile, masked_crc32c

_VERSION = 3  # raise it when what is kept changes, or any check, those of images.py included
_THREADS = min(16, os.cpu_count() or 1)
_PART_BYTES = 2**24  # of data that are in memory at a time, for each thread
_PART_RECORDS = 2048
_NAMED = 4  # records of one id in a message
_FARTHEST = 2  # fraction of an image: boxes that reach farther are in pixels
_SLOW_BYTES, _SLOW_RECORDS, _SLOW_IMAGES = 2**29, 50_000, 500  # from which on a progress bar is shown

Columns = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """What record files hold.

    Attributes:
        annotations: of all records. Where `findings` stop, rows of what was reported mean nothing.
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
        """All about records and images, but not about boxes that are fixed."""
        return self.annotations.findings


def read(files: Sequence[RecordFile], label_map: LabelMap, policy: ImagePolicy) -> Content:
    """Reads record files, or loads what was read before.

    Args:
        files: what `walk` found; of damaged files, the records before the damage are read.
        label_map: of the category ids in the records.
        policy: how deep images are checked. What decoding every pixel found is used without it, too.
    """
    names = {
        deep: _cache_name(files, label_map, deep, policy.max_megapixels) for deep in (True, policy.decode)
    }
    for name in names.values():  # what every pixel showed comes first
        if content := _from_bytes(load_cached(name), name_files([file.path for file in files])):
            return content
    content = _scan(files, label_map, policy)
    if all(finding.severity is not Severity.ERROR for finding in content.findings):
        kept = (content.formats, content.is_usable.tobytes(), content.absent.tobytes())
        packed = checked_annotations.pack(content.annotations)
        save_cached(names[policy.decode], msgspec.msgpack.encode((*kept, packed)))
    return content


def name_files(files: Sequence[str | os.PathLike]) -> str:
    """Several files in a few words."""
    first = os.fspath(files[0])
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more files"


def record_name(files: Sequence[RecordFile], image_ids: np.ndarray, row: int) -> str:
    """One of all records, by its row, in words."""
    begins = np.cumsum([0, *(len(file.spans) for file in files)])
    number = int(np.searchsorted(begins, row, side="right")) - 1
    known = f" (image {image_ids[row]})" if image_ids[row] != UNKNOWN else ""
    return f"{files[number].name(row - begins[number])}{known}"


def parts(file: RecordFile) -> Iterator[tuple[int, int]]:
    """A file's records in runs, [begin, end), that are read at once."""
    begin, offsets = 0, file.spans[:, 0]
    while begin < len(offsets):
        end = int(np.searchsorted(offsets, offsets[begin] + _PART_BYTES))
        end = min(end, begin + _PART_RECORDS)
        yield begin, end
        begin = end


def contents(file: RecordFile, begin: int, end: int, findings: Findings) -> list[bytes | None]:
    """The data of the records [begin, end) of a file; None where they are damaged, which is reported."""
    found: list[bytes | None] = []
    try:
        with open(file.path, "rb", buffering=0) as stream:
            for number in range(begin, end):
                offset, size = file.spans[number].tolist()
                record = os.pread(stream.fileno(), size - FRAME, offset + HEADER)
                if masked_crc32c(record) != file.checksums[number]:
                    checksum = f"the checksum {file.checksums[number]:#010x}, not that of its data"
                    findings.add("record-damaged", f"{file.name(number)} at byte {offset} has {checksum}")
                    record = None
                found.append(record)
    except OSError as error:  # the file has gone
        findings.add("record-file-unreadable", f"{file.path}: {error.strerror}")
    return found + [None] * (end - begin - len(found))


def box_name(box: np.ndarray) -> str:
    """float32 (4,), a box as records store it, in words."""
    return f"the box xmin, ymin, xmax, ymax = {np.round(box.astype(np.float64), 6).tolist()}"


def _cache_name(files: Sequence[RecordFile], label_map: LabelMap, decode: bool, max_megapixels: float) -> str:
    state = [(os.fsencode(file.path), file.size, file.mtime_ns, file.digest) for file in files]
    key = msgspec.msgpack.encode((_VERSION, label_map.to_json(), decode, max_megapixels, state))
    return f"{hashlib.sha256(key).hexdigest()[:32]}.records"


def _from_bytes(kept: bytes | None, origin: str) -> Content | None:
    if kept is None:
        return None
    formats, is_usable, absent, packed = msgspec.msgpack.decode(kept)
    annotations = checked_annotations.unpack(packed, origin)
    if annotations is None:
        return None
    return Content(annotations, np.frombuffer(is_usable, np.bool_), np.frombuffer(absent, np.uint8), formats)


def _scan(files: Sequence[RecordFile], label_map: LabelMap, policy: ImagePolicy) -> Content:
    origin = name_files([file.path for file in files])
    findings = Findings(origin)
    runs = [(file, begin, end) for file in files for begin, end in parts(file)]
    num_records = sum(len(file.spans) for file in files)
    is_slow = (
        sum(file.size for file in files) > _SLOW_BYTES
        or num_records > _SLOW_RECORDS
        or (policy.decode and num_records > _SLOW_IMAGES)
    )
    bar = Bar("Checking records", len(runs)) if is_slow and runs else None
    known = frozenset(label_map.category_ids)
    inspect = functools.partial(images.inspect, decode=policy.decode, max_megapixels=policy.max_megapixels)
    blocks = [_columns_of([])]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for block, found in pool.map(lambda run: _scan_run(*run, known, inspect), runs):
            blocks.append(block)
            findings.extend(found)
            if bar:
                bar.step()
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    _check_ids(files, columns["image_ids"], findings)
    box_image = np.repeat(np.arange(num_records), columns["counts"])
    boxes_px = columns["boxes"].astype(np.float64) * columns["image_sizes"][box_image][:, [1, 0, 1, 0]]
    boxes_ltwh_px = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    box_areas = boxes_ltwh_px[:, 2] * boxes_ltwh_px[:, 3]
    annotations = Annotations(
        label_map=label_map,
        image_ids=columns["image_ids"],
        file_names=columns["file_names"].tolist(),
        image_sizes=columns["image_sizes"],
        box_image=box_image,
        boxes_ltwh_px=boxes_ltwh_px,
        category_ids=columns["category_ids"],
        is_crowd=columns["is_crowd"],
        areas=np.where(np.isnan(columns["areas"]), box_areas, columns["areas"]),
        origin=origin,
        findings=findings,
    )
    formats = collections.Counter(columns["formats"][columns["is_usable"]].tolist())
    return Content(annotations, columns["is_usable"], columns["absent"], dict(formats.most_common()))


def _scan_run(
    file: RecordFile, begin: int, end: int, known: frozenset[int], inspect: Callable[[bytes], ImageFacts]
) -> tuple[Columns, Findings]:
    """The records [begin, end) of a file as columns, and what is wrong with them."""
    findings = Findings(file.path)
    examples, facts = [], []
    for number, record in enumerate(contents(file, begin, end, findings), begin):
        example, encoded = Example(file.name(number)), None
        if record is not None:
            example, encoded = parse(record, file.name(number), known, findings)
        if encoded is not None:
            facts.append((len(examples), inspect(encoded)))
        examples.append(example)
    columns = _columns_of(examples)
    _check_boxes(examples, columns, findings)
    rows = [row for row, _ in facts]
    columns["is_usable"][rows] = images.check_images(
        [fact for _, fact in facts],
        columns["image_sizes"][rows],
        [examples[row].file_name for row in rows],
        lambda i: examples[rows[i]].name,
        findings,
    )
    columns["formats"][rows] = [fact.image_format for _, fact in facts]
    return columns, findings


def _columns_of(examples: Sequence[Example]) -> Columns:
    """The columns of examples, as in `Annotations` unless said; nothing is known about their images yet."""

    def chain(lists: Iterable[Sequence], dtype: type) -> np.ndarray:
        return np.array(list(itertools.chain.from_iterable(lists)), dtype)

    sides = [chain((example.sides[side] for example in examples), np.float32) for side in range(4)]
    return {
        "image_ids": np.array([example.image_id for example in examples], np.int64),
        "image_sizes": np.array([example.image_size for example in examples], np.int32).reshape(-1, 2),
        "counts": np.array([len(example.category_ids) for example in examples], np.int64),  # boxes
        "boxes": np.stack(sides, axis=1),  # (N, 4) ltrb normalised, as stored
        "category_ids": chain((example.category_ids for example in examples), np.int64),
        "is_crowd": chain((example.is_crowd for example in examples), np.bool_),
        "areas": chain((example.areas for example in examples), np.float64),  # NaN where there is none
        "absent": np.array([example.absent for example in examples], np.uint8),
        "is_usable": np.ones(len(examples), np.bool_),
        "file_names": np.array([example.file_name for example in examples], object),
        "formats": np.full(len(examples), "", object),
    }


def _check_boxes(examples: Sequence[Example], columns: Columns, findings: Findings) -> None:
    box_example = np.repeat(np.arange(len(examples)), columns["counts"])
    boxes = columns["boxes"]
    is_finite = np.isfinite(boxes).all(axis=1)
    is_negative = is_finite & np.any(boxes[:, 2:] < boxes[:, :2], axis=1)
    is_far = is_finite & ~is_negative & np.any(boxes > _FARTHEST, axis=1)
    kinds = {"box-not-finite": ~is_finite, "box-negative": is_negative, "box-in-pixels": is_far}
    for kind, which in kinds.items():
        for box in np.flatnonzero(which).tolist():
            findings.add(kind, f"{examples[box_example[box]].name} has {box_name(boxes[box])}")


def _check_ids(files: Sequence[RecordFile], image_ids: np.ndarray, findings: Findings) -> None:
    order = np.argsort(image_ids, kind="stable")
    unique, begins, counts = np.unique(image_ids[order], return_index=True, return_counts=True)
    repeated = np.flatnonzero((counts > 1) & (unique != UNKNOWN))

    def text(of: int) -> str:
        rows = order[begins[of] : begins[of] + min(counts[of], _NAMED)]
        names = ", ".join(record_name(files, image_ids, row) for row in rows)
        return f"image {unique[of]} is given {counts[of]} times: {names}"

    findings.add_each("repeated-image-id", repeated, text)
