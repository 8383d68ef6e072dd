"""Reads record files once. Checks the checksum, the annotations and the image header of each record.

A record of an image without objects may lack all keys of objects.
"""

import dataclasses
import itertools
import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from common.args import ImagePolicy
from common.data import storage, tfrecord
from common.data.annotations import NONE, OBJECT, Annotations, CocoImage, sizes_of, to_annotations
from common.data.check import images
from common.data.check.image_headers import ImageFacts
from common.data.check.issues import Issues
from common.data.check.repeated_images import checksum_of
from common.data.labels import LabelMap
from common.data.storage import Stat
from common.data.tfrecord import AREA_KEY, BOX_KEYS, CROWD_KEY, ID_KEY, LABEL_KEY, TEXT_KEY, RecordFile

LACKS_CROWDS, LACKS_BOXES = 1, 2  # values of ParsedRecord.lacks
_THREADS = min(16, os.cpu_count() or 1)
_PART = 64  # number of records that a thread checks at a time
_FARTHEST = 2  # largest edge of a normalised box
_SLOW_BYTES = 2**29  # a progress bar is shown if all files together are larger
_MAX_ID, _MAX_DIGITS = 2**63 - 1, 19
_SHOWN, _SHOWN_BYTES = 8, 40  # numbers of values that a message shows, and of bytes per value


# --- one record ---


class ParsedRecord(msgspec.Struct, gc=False, array_like=True):
    """The content of one record.

    Attributes:
        name: the name of the record for messages: `a.tfrecord record 5 (image 12)`.
        image_id: the image id; NONE if image/source_id is absent or no number (`check` then chooses one).
        has_digits: whether image/source_id has the id as the digits that DALI reads.
        file_name: the file name; if there is none, a name in image/source_id, or else "".
        image_size: (height, width) in pixels; (0, 0) if one of them is invalid.
        objects: rows of OBJECT, with boxes ltrb normalised as stored; empty if any value is invalid.
        lacks: LACKS_BOXES if a key of boxes or labels is missing; LACKS_CROWDS if only the key of crowds is
            missing or empty; else 0.
        facts: the facts about the image; None if the record has no valid image data.
    """

    name: str
    image_id: int = NONE
    has_digits: bool = False
    file_name: str = ""
    image_size: tuple[int, int] = (0, 0)
    objects: list[tuple[int, int, tuple[float, float, float, float], int, int, float]] = []
    lacks: int = 0
    facts: ImageFacts | None = None


def _is_id(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MAX_DIGITS and int(text) <= _MAX_ID


_NAME_KEY, _IMAGE_KEY = "image/filename", "image/encoded"
_SIZE_KEYS = ("image/height", "image/width")
_ONE = (*_SIZE_KEYS, _IMAGE_KEY)  # keys with exactly one value
_NEEDED = (LABEL_KEY, *BOX_KEYS)  # keys with one value per object
_LISTS = (*_NEEDED, TEXT_KEY, CROWD_KEY, AREA_KEY)  # the last three are optional
_PIXELS = range(1, 2**31)
# For each key: the type of its values, a test of one value, and the rule that a message shows.
_KEYS = {
    **dict.fromkeys(_SIZE_KEYS, ("int64_list", _PIXELS.__contains__, "it must be one number of pixels")),
    _IMAGE_KEY: ("bytes_list", None, "it must be one image"),
    _NAME_KEY: ("bytes_list", None, ""),
    LABEL_KEY: ("int64_list", None, ""),
    TEXT_KEY: ("bytes_list", None, ""),
    **dict.fromkeys(BOX_KEYS, ("float_list", None, "")),
    CROWD_KEY: ("int64_list", (0, 1).__contains__, "it must be 0 or 1"),
    AREA_KEY: ("float_list", lambda area: 0 <= area < math.inf, "it must be a number, 0 or more"),
}


def parse(
    record: bytes, name: str, known: Mapping[int, Sequence[str]], issues: Issues
) -> tuple[ParsedRecord, bytes | None]:
    """Parses a serialized tf.train.Example. Returns its content, and the encoded image or None.

    Args:
        record: the data of one record.
        name: the name of the record for messages, `a.tfrecord record 5`.
        known: the category ids that labels may have, each with the names of its class.
        issues: receives every missing or invalid value.
    """
    example, values, absent = ParsedRecord(name), {}, set()
    try:
        features = tf.train.Example.FromString(record).features.feature
        if not features:  # other bytes can parse as an empty message
            raise ValueError("it has no feature")
    except Exception as error:  # protobuf's DecodeError
        issues.add("not-an-example", f"{name} ({len(record)} bytes): {error}")
        return example, None
    source_id = list(features[ID_KEY].bytes_list.value)
    example.has_digits = len(source_id) == 1 and _is_id(source_id[0])
    stored_ids = source_id if example.has_digits else features[ID_KEY].int64_list.value
    if len(stored_ids) == 1 and int(stored_ids[0]) >= 0:
        example.image_id = int(stored_ids[0])
        example.name = f"{name} (image {example.image_id})"
    for key, (kind, is_right, rule) in _KEYS.items():
        stored_kind = features[key].WhichOneof("kind")
        of_key = getattr(features[key], stored_kind or kind).value
        if stored_kind is None:
            absent.add(key)
        if stored_kind not in (kind, None):
            text = f"has a {stored_kind} in {key}, {_shown(of_key)}, instead of a {kind}"
            issues.add("record-key-type", f"{example.name} {text}")
        elif key in _ONE and not of_key:
            issues.add("record-key-missing", f"{example.name} lacks {key}")
        elif (key in _ONE and len(of_key) > 1) or (is_right and not all(map(is_right, of_key))):
            issues.add("record-value", f"{example.name} has {key} {_shown(of_key)}: {rule}")
        else:
            values[key] = of_key
    names = [*values.get(_NAME_KEY, ())] or ([] if example.has_digits else source_id)
    file_name = b"".join(names).decode("utf-8", "replace")
    example.file_name = file_name.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if values.keys() >= set(_SIZE_KEYS):
        example.image_size = tuple(values[key][0] for key in _SIZE_KEYS)
    for label in sorted(set(values.get(LABEL_KEY, ())) - known.keys()):
        categories = f"{len(known)} categories from {min(known)} to {max(known)}"
        text = f"has the label {label}, which none of {categories} has"
        issues.add("unknown-category", f"{example.name} {text}")
    # `_add_objects` compares the lengths of the two lists.
    pairs = set(zip(values.get(LABEL_KEY, ()), values.get(TEXT_KEY, ()), strict=False))
    for label, text in sorted(pair for pair in pairs if pair[0] in known and pair[1]):
        class_text = text.decode("utf-8", "replace")
        # Datumaro leaves letters outside ASCII out of the texts.
        short_names = [name.encode("ascii", "ignore").decode() for name in known[label]]
        if _plain(class_text) not in map(_plain, [*known[label], *short_names]):
            stored = f"{TEXT_KEY} {_shown([class_text])}"
            listed = f"the name {known[label][0]!r} in the label map"
            issues.add("class-text", f"{example.name} has for label {label} {stored}, but {listed}")
    if values.keys() >= set(_LISTS):
        _add_objects(example, values, absent, issues)
    return example, values.get(_IMAGE_KEY, (None,))[0]


def _plain(name: str) -> str:
    """Returns a name for comparisons, which ignore case, blanks and Unicode's normal forms."""
    return unicodedata.normalize("NFKC", "".join(name.split())).casefold()


def _add_objects(
    example: ParsedRecord, values: dict[str, Sequence[Any]], absent: set[str], issues: Issues
) -> None:
    """Fills in `example.objects`; reports keys that do not have one value per box."""
    lengths = {key: len(values[key]) for key in _LISTS}
    fullest = max(lengths, key=lengths.__getitem__)
    count = lengths[fullest]
    missing = [key for key in _NEEDED if count and key in absent]
    for key in missing:
        text = f"lacks {key}, but has {count} values in {fullest}"
        issues.add("record-key-missing", f"{example.name} {text}")
    stored_lengths = {key: n for key, n in lengths.items() if n or (key in _NEEDED and key not in absent)}
    if len(set(stored_lengths.values())) > 1:
        listed = ", ".join(f"{key} {n}" for key, n in stored_lengths.items())
        issues.add("record-ragged", f"{example.name} has lists of these lengths: {listed}")
    elif not missing:
        # Copies the values, because references to them would keep the whole record in memory.
        boxes = zip(*(values[key] for key in BOX_KEYS), strict=True)
        others = (list(values[CROWD_KEY]) or [0] * count, list(values[AREA_KEY]) or [math.nan] * count)
        ids = ([example.image_id] * count, values[LABEL_KEY])
        example.objects = list(zip(*ids, boxes, [NONE] * count, *others, strict=True))
        if not absent.isdisjoint(_NEEDED):
            example.lacks = LACKS_BOXES
        elif CROWD_KEY in absent or lengths[CROWD_KEY] < count:
            example.lacks = LACKS_CROWDS


def _shown(values: Sequence[Any]) -> str:
    first = [value[:_SHOWN_BYTES] if isinstance(value, bytes | str) else value for value in values[:_SHOWN]]
    return repr(first[0] if len(values) == 1 else first)


# --- many records ---


def name_files(files: Sequence[str | os.PathLike]) -> str:
    """Returns a short name of one or several files."""
    first, others = os.fspath(files[0]), len(files) - 1
    return f"{first} and {others} more {'file' if others == 1 else 'files'}" if others else first


def box_name(box: Sequence[float]) -> str:
    """Describes a box for messages."""
    return f"the box xmin, ymin, xmax, ymax = {[round(float(edge), 6) for edge in box]}"


def scan(
    files: Sequence[RecordFile], known: Mapping[int, Sequence[str]], issues: Issues
) -> list[ParsedRecord]:
    """Reads and checks all records of the files.

    Args:
        files: results of `walk`. In a damaged file, only the records before the damage are read.
        known: the category ids that labels may have, each with the names of its class.
        issues: receives the errors in records, not those in images; its policy sets how images are checked.
    """
    parts = [(file, begin) for file in files for begin in range(0, len(file.spans), _PART)]
    title = "Checking records" if sum(file.size for file in files) > _SLOW_BYTES else None
    examples: list[ParsedRecord] = []
    for part_examples, part_issues in images.in_threads(
        lambda part: _scan_part(part[0], part[1], known, issues.policy), parts, _THREADS, title
    ):
        examples += part_examples
        issues.extend(part_issues)
    return examples


def scan_object(
    stored: Stat, known: Mapping[int, Sequence[str]], policy: ImagePolicy
) -> tuple[RecordFile, list[ParsedRecord], Issues]:
    """Downloads an object, and reads and checks its records like `scan`. Returns the damage as issues."""
    with storage.local_copy(stored.path) as copy:
        file, issues, examples = tfrecord.walk(copy, stored.path), Issues(stored.path), list[ParsedRecord]()
        if file.fault:
            issues.add(*file.fault)
        for begin in range(0, len(file.spans), _PART):
            part_examples, part_issues = _scan_part(file, begin, known, policy, copy)
            examples += part_examples
            issues.extend(part_issues)
    return file, examples, issues


def check(
    examples: Sequence[ParsedRecord], label_map: LabelMap, issues: Issues
) -> tuple[Annotations, np.ndarray]:
    """Checks the ids, boxes and images of the parsed records, and makes annotations from them.

    Images without an id get the lowest free numbers from 1 on, in the order of the records.

    Args:
        issues: receives errors in ids, boxes and images.

    Returns:
        The annotations of all records; and bool (I,), whether each image can be used. If there are errors,
        the annotations of invalid records are meaningless.
    """
    if not issues.stopping:
        _number_images(examples, issues)
    table = np.array(list(itertools.chain.from_iterable(e.objects for e in examples)), OBJECT)
    boxes, box_image = table["bbox"], np.repeat(np.arange(len(examples)), [len(e.objects) for e in examples])
    of_records = [CocoImage(e.image_id, e.file_name, e.image_size[1], e.image_size[0]) for e in examples]
    image_sizes = sizes_of(of_records)
    is_finite = np.isfinite(boxes).all(axis=1)
    is_negative = is_finite & np.any(boxes[:, 2:] < boxes[:, :2], axis=1)
    is_far = is_finite & ~is_negative & np.any(boxes > _FARTHEST, axis=1)
    kinds = {"box-not-finite": ~is_finite, "box-negative": is_negative, "box-in-pixels": is_far}
    for kind, which in kinds.items():
        rows = np.flatnonzero(which)
        issues.add_each(kind, rows, lambda i: f"{examples[box_image[i]].name} has {box_name(boxes[i])}")
    ids, names = [example.image_id for example in examples], [example.name for example in examples]
    issues.add_repeats("repeated-image-id", "image", ids, names.__getitem__)
    facts = [example.facts for example in examples]
    is_usable = images.check_images(facts, of_records, names.__getitem__, issues)
    boxes_px = boxes * image_sizes[box_image][:, [1, 0, 1, 0]]
    table["bbox"] = np.concatenate([boxes_px[:, :2], boxes_px[:, 2:] - boxes_px[:, :2]], axis=1)
    annotations = to_annotations(of_records, table, box_image, label_map, issues.origin)
    checksums = np.array([fact.checksum if fact else 0 for fact in facts], np.int64)
    return dataclasses.replace(annotations, checksums=checksums), is_usable


def drop_repeated(
    examples: Sequence[ParsedRecord], annotations: Annotations, issues: Issues
) -> tuple[Annotations, np.ndarray]:
    """Drops boxes that repeat another one of the same image, also from `examples`.

    Args:
        annotations: the annotations of all `examples`.
        issues: receives box-repeated.

    Returns:
        The annotations without these boxes; and bool (I,), whether each record has such a box.
    """
    is_repeated, has_repeated = annotations.is_repeated, np.zeros(len(examples), np.bool_)
    has_repeated[annotations.box_image[is_repeated]] = True
    for number in np.flatnonzero(has_repeated).tolist():
        begin, end = annotations.row_splits[number : number + 2]
        example, repeats = examples[number], is_repeated[begin:end]
        for _, _, box, *_ in itertools.compress(example.objects, repeats):
            issues.add("box-repeated", f"{example.name} has {box_name(box)}")
        example.objects = list(itertools.compress(example.objects, ~repeats))
    return annotations.select_boxes(~is_repeated), has_repeated


def _number_images(examples: Sequence[ParsedRecord], issues: Issues) -> None:
    ids = {example.image_id for example in examples}
    numbers = itertools.filterfalse(ids.__contains__, itertools.count(1))
    unnumbered = [example for example in examples if example.image_id == NONE]
    for example in unnumbered:
        example.image_id = next(numbers)
        example.name = f"{example.name} (image {example.image_id})"
        issues.add("record-numbered", f"{example.name} {example.file_name!r}")
    # datitran/raccoon_dataset generate_tfrecord.py writes a record for each box (each row of its csv).
    file_names = [example.file_name for example in unnumbered]
    issues.add_repeats("repeated-record", "image", file_names, lambda row: unnumbered[row].name)


def _scan_part(
    file: RecordFile, begin: int, known: Mapping[int, Sequence[str]], policy: ImagePolicy, copy: str = ""
) -> tuple[list[ParsedRecord], Issues]:
    """Reads up to _PART records of a file, from number `begin` on; of an object, from its local `copy`."""
    issues, examples = Issues(file.path), []
    try:
        for number in range(begin, min(begin + _PART, len(file.spans))):
            example, encoded = ParsedRecord(file.name(number)), None
            record = read_record(file, number, issues, copy)
            if record is not None:
                example, encoded = parse(record, example.name, known, issues)
            if encoded is not None:
                example.facts = images.inspect(encoded, policy)
                example.facts.checksum = checksum_of(encoded)
            examples.append(example)
    except OSError as error:  # for example, the file was removed
        issues.add("file-unreadable", f"{file.path}: {error.strerror}")
    return examples, issues


def read_record(file: RecordFile, number: int, issues: Issues, copy: str = "") -> bytes | None:
    """Returns the data of a record; None if it is damaged. Raises OSError if the file is gone."""
    offset, size = file.spans[number].tolist()
    record = tfrecord.read_record(copy or file.path, offset, size)
    if tfrecord.masked_crc32c(record) == file.checksums[number]:
        return record
    checksum = f"the checksum {file.checksums[number]:#010x}, which does not match its data"
    issues.add("record-damaged", f"{file.name(number)} at byte {offset} has {checksum}")
    return None
