"""Reads record files once: annotations, checksums of the data, headers of the images, and all that is wrong.

The schema is that of TensorFlow Object Detection (common/tfrecord.py). All keys of the objects may be missing
where an image has none.
"""

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from common import tfrecord
from common.annotations import NONE, OBJECT, Annotations, CocoImage, repeats, sizes_of, to_annotations
from common.args import ImagePolicy
from common.datacheck import images
from common.datacheck.image_headers import ImageFacts
from common.datacheck.issues import Issues
from common.labels import LabelMap
from common.tfrecord import AREA_KEY, BOX_KEYS, CROWD_KEY, LABEL_KEY, RecordFile

LACKS_CROWDS, LACKS_BOXES = 1, 2  # which keys that DALI asks for a record does not have
_THREADS = min(16, os.cpu_count() or 1)
_PART = 64  # records that a thread has in memory at a time
_NAMED = 4  # records of one id in a message
_FARTHEST = 2  # fraction of an image: boxes that reach farther are in pixels
_SLOW_BYTES = 2**29  # of files from which on a progress bar is shown
_MAX_ID, _MAX_DIGITS = 2**63 - 1, 19
_SHOWN, _SHOWN_BYTES = 8, 40  # values in a message, bytes of one


# --- one record ---


# A row per object: ltrb as stored, in fractions of the image; area in square pixels, NaN where none is given.
_OBJECT = np.dtype([("box", "4f4"), ("category_id", "i8"), ("iscrowd", "?"), ("area", "f8")])


class Example(msgspec.Struct, gc=False, array_like=True):
    """What one record contains.

    Attributes:
        name: of the record, for messages: `a.tfrecord record 5 (image 12)`.
        image_id: NONE where it was reported.
        file_name: "" where there is none.
        image_size: height and width in pixels, 0 where either was reported.
        objects: rows of _OBJECT; none where anything about the objects was reported.
        lacks: 0, LACKS_CROWDS, or LACKS_BOXES where any other key is missing.
        facts: of its image; None where that was reported.
    """

    name: str
    image_id: int = NONE
    file_name: str = ""
    image_size: tuple[int, int] = (0, 0)
    objects: list[tuple[tuple[float, float, float, float], int, int, float]] = []
    lacks: int = 0
    facts: ImageFacts | None = None


def _is_id(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MAX_DIGITS and int(text) <= _MAX_ID


_PIXELS = range(1, 2**31)

# Keys with one value: its kind, whether it can be used, and what it must be.
_ONE = {
    "image/source_id": ("bytes_list", _is_id, f"image ids are decimal digits, up to {_MAX_ID}"),
    "image/height": ("int64_list", _PIXELS.__contains__, "it must be one number of pixels"),
    "image/width": ("int64_list", _PIXELS.__contains__, "it must be one number of pixels"),
    "image/encoded": ("bytes_list", lambda image: True, "it must be one image"),
}


# Keys with one value per object; the last two may be left out.
_LISTS = dict.fromkeys((LABEL_KEY, *BOX_KEYS), "float_list") | {
    LABEL_KEY: "int64_list",
    CROWD_KEY: "int64_list",
    AREA_KEY: "float_list",
}
_NEEDED = (LABEL_KEY, *BOX_KEYS)


class Features:
    """The features of a record by key, and where their faults go."""

    def __init__(self, features: Any, name: str, issues: Issues):
        self.features, self.name, self._issues = features, name, issues

    def report(self, kind: str, text: str) -> None:
        self._issues.add(kind, f"{self.name} {text}")

    def values(self, key: str, kind: str) -> Sequence[Any] | None:
        """The values under a key, () where there are none; None where they are of another kind."""
        feature = self.features[key]  # protobuf makes an empty one where there is none
        found = feature.WhichOneof("kind")
        if found in (kind, None):
            return getattr(feature, kind).value
        values = _shown(getattr(feature, found).value)
        self.report("record-key-type", f"has a {found} in {key}, {values}, instead of a {kind}")
        return None

    def value(self, key: str) -> Any:
        """The one value under a key of _ONE; None where it cannot be used."""
        kind, is_right, rule = _ONE[key]
        values = self.values(key, kind)
        if values is not None and len(values) == 1 and is_right(values[0]):
            return values[0]
        if values:
            self.report("record-value", f"has the {key} {_shown(values)}: {rule}")
        elif values is not None:
            self.report("record-key-missing", f"lacks {key}")
        return None

    def lacks(self, key: str) -> bool:
        return self.features[key].WhichOneof("kind") is None


def parse(record: bytes, name: str, known: frozenset[int], issues: Issues) -> tuple[Example, bytes | None]:
    """Reads a serialized tf.train.Example, and hands on its encoded image: None where that was reported.

    Args:
        record: the data of one record.
        name: of the record, `a.tfrecord record 5`.
        known: the category ids that its labels may have.
        issues: gets everything that cannot be used, and what was found in its place.
    """
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # google.protobuf.message.DecodeError, whose module TensorFlow hides
        issues.add("not-an-example", f"{name} ({len(record)} bytes): {error}")
        return Example(name), None
    if not features:  # bytes of other kinds may pass for a message without any field that is known
        issues.add("not-an-example", f"{name} ({len(record)} bytes) has no feature")
        return Example(name), None
    read = Features(features, name, issues)
    source_id = read.value("image/source_id")
    image_id = NONE if source_id is None else int(source_id)
    if image_id != NONE:
        read.name = f"{name} (image {image_id})"
    file_name = b"".join(read.values("image/filename", "bytes_list") or ()).decode("utf-8", "replace")
    example = Example(read.name, image_id, file_name.replace("\0", "\N{REPLACEMENT CHARACTER}"))
    size = (read.value("image/height"), read.value("image/width"))
    if None not in size:
        example.image_size = size
    _add_objects(example, read, known)
    return example, read.value("image/encoded")


def _add_objects(example: Example, read: Features, known: frozenset[int]) -> None:
    """Fills in what is about objects, where that fits together."""
    lists = {key: read.values(key, kind) for key, kind in _LISTS.items()}
    if None in lists.values() or not _lengths_agree(read, {key: len(of) for key, of in lists.items()}):
        return
    labels, crowds, areas = lists[LABEL_KEY], lists[CROWD_KEY], lists[AREA_KEY]
    for label in sorted(set(labels) - known):
        categories = f"{len(known)} categories from {min(known)} to {max(known)}"
        read.report("unknown-category", f"has the label {label}, which none of {categories} has")
    if not set(crowds) <= {0, 1}:
        read.report("record-value", f"has {CROWD_KEY} {_shown(crowds)}: it must be 0 or 1")
    if not all(0 <= area < math.inf for area in areas):
        read.report("record-value", f"has {AREA_KEY} {_shown(areas)}: it must be a number, 0 or more")
    # Copies: the values themselves would keep the whole record in memory.
    boxes = zip(*(lists[key] for key in BOX_KEYS), strict=True)
    others = (list(crowds) or [0] * len(labels), list(areas) or [math.nan] * len(labels))
    example.objects = list(zip(boxes, labels, *others, strict=True))
    if any(map(read.lacks, _NEEDED)):
        example.lacks = LACKS_BOXES
    elif read.lacks(CROWD_KEY) or len(crowds) != len(labels):
        example.lacks = LACKS_CROWDS


def _lengths_agree(read: Features, lengths: dict[str, int]) -> bool:
    """Whether there is one value per box under every key; crowds and areas may be left out."""
    fullest = max(lengths, key=lengths.get)
    absent = [key for key in _NEEDED if lengths[fullest] and read.lacks(key)]
    given = {key: n for key, n in lengths.items() if n or (key in _NEEDED and not read.lacks(key))}
    for key in absent:
        read.report("record-key-missing", f"lacks {key}, but has {lengths[fullest]} values in {fullest}")
    is_ragged = len(set(given.values())) > 1
    if is_ragged:
        listed = ", ".join(f"{key} {n}" for key, n in given.items())
        read.report("record-ragged", f"has lists of these lengths: {listed}")
    return not absent and not is_ragged


def _shown(values: Sequence[Any]) -> str:
    first = [value[:_SHOWN_BYTES] if isinstance(value, bytes) else value for value in values[:_SHOWN]]
    return repr(first[0] if len(values) == 1 else first)


# --- many records ---


def name_files(files: Sequence[str | os.PathLike]) -> str:
    """Several files in a few words."""
    first = os.fspath(files[0])
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more files"


def box_name(box: Sequence[float]) -> str:
    """A box as records store it, in words."""
    return f"the box xmin, ymin, xmax, ymax = {[round(float(edge), 6) for edge in box]}"


def scan(
    files: Sequence[RecordFile], known: frozenset[int], policy: ImagePolicy, issues: Issues
) -> list[Example]:
    """Reads record files.

    Args:
        files: what `walk` found; of damaged files, the records before the damage are read.
        known: the category ids that labels may have.
        policy: how deep images are checked.
        issues: gets what is wrong with single records, but not with their images.
    """
    parts = [(file, begin) for file in files for begin in range(0, len(file.spans), _PART)]
    title = "Checking records" if sum(file.size for file in files) > _SLOW_BYTES else None
    examples: list[Example] = []
    for of_part, found in images.in_threads(
        lambda part: _scan_part(*part, known, policy), parts, _THREADS, title
    ):
        examples += of_part
        issues.extend(found)
    return examples


def check(examples: Sequence[Example], label_map: LabelMap, issues: Issues) -> tuple[Annotations, np.ndarray]:
    """Checks the records of all files together.

    Args:
        examples: of all records.
        label_map: the categories.
        issues: gets faults of ids, boxes and images.

    Returns:
        The annotations of all records, and bool (I,), which images can be used. Where `issues` stop, rows
        of what was reported mean nothing.
    """
    objects = np.array(list(itertools.chain.from_iterable(e.objects for e in examples)), _OBJECT)
    boxes, box_image = objects["box"], np.repeat(np.arange(len(examples)), [len(e.objects) for e in examples])
    of_records = [CocoImage(e.image_id, e.file_name, e.image_size[1], e.image_size[0]) for e in examples]
    image_sizes = sizes_of(of_records)
    _check_boxes(boxes, [examples[row].name for row in box_image], issues)
    for image_id, rows in repeats(example.image_id for example in examples):
        names = ", ".join(examples[row].name for row in rows[:_NAMED])
        issues.add("repeated-image-id", f"image {image_id} is given {len(rows)} times: {names}")
    facts, names = [example.facts for example in examples], [example.file_name for example in examples]
    is_usable = images.check_images(facts, image_sizes, names, lambda i: examples[i].name, issues)
    boxes_px = boxes.astype(np.float64) * image_sizes[box_image][:, [1, 0, 1, 0]]
    table = np.empty(len(objects), OBJECT)
    table["bbox"] = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    for key in ("category_id", "iscrowd", "area"):
        table[key] = objects[key]
    return to_annotations(of_records, table, box_image, label_map, issues.origin), is_usable


def _scan_part(
    file: RecordFile, begin: int, known: frozenset[int], policy: ImagePolicy
) -> tuple[list[Example], Issues]:
    """_PART records of a file from `begin` on, and what is wrong with them."""
    issues, examples = Issues(file.path), []
    try:
        for number in range(begin, min(begin + _PART, len(file.spans))):
            examples.append(_scan_record(file, number, known, policy, issues))
    except OSError as error:  # the file has gone
        issues.add("record-file-unreadable", f"{file.path}: {error.strerror}")
    return examples, issues


def read_record(file: RecordFile, number: int, issues: Issues) -> bytes | None:
    """The data of a record; None where it is damaged, which is reported. OSError where the file has gone."""
    offset, size = file.spans[number].tolist()
    record = tfrecord.read_record(file.path, offset, size)
    if tfrecord.masked_crc32c(record) == file.checksums[number]:
        return record
    checksum = f"the checksum {file.checksums[number]:#010x}, not that of its data"
    issues.add("record-damaged", f"{file.name(number)} at byte {offset} has {checksum}")
    return None


def _scan_record(
    file: RecordFile, number: int, known: frozenset[int], policy: ImagePolicy, issues: Issues
) -> Example:
    name, record = file.name(number), read_record(file, number, issues)
    if record is None:
        return Example(name)
    example, encoded = parse(record, name, known, issues)
    if encoded is not None:
        options = {"decode": policy.decode, "max_megapixels": policy.max_megapixels}
        example.facts = images.inspect(encoded, **options)
    return example


def _check_boxes(boxes: np.ndarray, names: Sequence[str], issues: Issues) -> None:
    is_finite = np.isfinite(boxes).all(axis=1)
    is_negative = is_finite & np.any(boxes[:, 2:] < boxes[:, :2], axis=1)
    is_far = is_finite & ~is_negative & np.any(boxes > _FARTHEST, axis=1)
    kinds = {"box-not-finite": ~is_finite, "box-negative": is_negative, "box-in-pixels": is_far}
    for kind, which in kinds.items():
        issues.add_each(kind, np.flatnonzero(which), lambda i: f"{names[i]} has {box_name(boxes[i])}")
