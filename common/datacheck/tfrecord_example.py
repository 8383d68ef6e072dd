"""Reads one record in the schema of TensorFlow Object Detection (common/tfrecord.py), and checks all of it.

All keys of the objects may be missing where an image has none.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from common.issues import Findings
from common.tfrecord import AREA_KEY, BOX_KEYS, CROWD_KEY, DALI_KEYS, LABEL_KEY

UNKNOWN = -1  # an image id that was reported

_MAX_ID = 2**63 - 1
_MAX_DIGITS = 19
_MAX_SIDE = 2**31 - 1
_SHOWN = 8  # values in a message
_SHOWN_BYTES = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """What one record says.

    Attributes:
        name: of the record, for messages: `a.tfrecord record 5 (image 12)`.
        image_id: UNKNOWN where it was reported.
        file_name: "" where there is none.
        image_size: height and width in pixels, 0 where either was reported.
        sides: one list for each of BOX_KEYS, fractions of the image; empty where anything about the objects
            was reported, and so are the other lists.
        category_ids: one per box.
        is_crowd: one per box, 0 or 1.
        areas: one per box in square pixels, NaN where none is given.
        absent: bit i stands for DALI_KEYS[i], which the record lacks.
    """

    name: str
    image_id: int = UNKNOWN
    file_name: str = ""
    image_size: tuple[int, int] = (0, 0)
    sides: Sequence[Sequence[float]] = ((), (), (), ())
    category_ids: Sequence[int] = ()
    is_crowd: Sequence[int] = ()
    areas: Sequence[float] = ()
    absent: int = 0


def parse(
    record: bytes, name: str, known: frozenset[int], findings: Findings
) -> tuple[Example, bytes | None]:
    """Reads a serialized tf.train.Example, and hands on its encoded image: None where that was reported.

    Args:
        record: the data of one record.
        name: of the record, `a.tfrecord record 5`.
        known: the category ids that its labels may have.
        findings: gets everything that cannot be used, and what was found in its place.
    """
    features = _features(record, name, findings)
    if features is None:
        return Example(name), None

    image_id = _image_id(features, name, findings)
    if image_id != UNKNOWN:
        name = f"{name} (image {image_id})"
    file_name = b"".join(_values(features, "image/filename", "bytes_list", name, findings) or ())
    objects = _objects(features, name, known, findings) or {}
    example = Example(
        name=name,
        image_id=image_id,
        file_name=file_name.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}"),
        image_size=_image_size(features, name, findings),
        **objects,
    )
    return example, _value(features, "image/encoded", "bytes_list", name, findings)


def absent_keys(absent: int) -> tuple[str, ...]:
    """What the bits of `Example.absent` stand for."""
    return tuple(key for i, key in enumerate(DALI_KEYS) if absent >> i & 1)


def complete(record: bytes, keys: Sequence[str]) -> bytes:
    """The record with `keys` of its objects added: empty lists, and zeros for crowds."""
    count = len(tf.train.Example.FromString(record).features.feature[LABEL_KEY].int64_list.value)
    features = collections.defaultdict(tf.train.Feature)
    for key in keys:
        if key in BOX_KEYS:
            features[key].float_list.SetInParent()
        else:
            features[key].int64_list.value.extend([0] * count)
            features[key].int64_list.SetInParent()
    addition = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    # Protobuf reads two messages in a row as one; of a key in both, the later value counts.
    return record + addition


def _features(record: bytes, name: str, findings: Findings) -> Any | None:
    """The features of a record by key; None where it is no tf.train.Example, which is reported."""
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # google.protobuf.message.DecodeError, whose module TensorFlow hides
        findings.add("not-an-example", f"{name} ({len(record)} bytes): {error}")
        return None
    if not features:  # bytes of other kinds may pass for a message without any field that is known
        findings.add("not-an-example", f"{name} ({len(record)} bytes) has no feature")
        return None
    return features


def _image_id(features: Any, name: str, findings: Findings) -> int:
    source_id = _value(features, "image/source_id", "bytes_list", name, findings)
    if source_id is None:
        return UNKNOWN
    if not source_id.isdigit() or len(source_id) > _MAX_DIGITS or int(source_id) > _MAX_ID:
        rule = f"image ids are decimal digits, up to {_MAX_ID}"
        findings.add("record-value", f"{name} has the image/source_id {_shown([source_id])}: {rule}")
        return UNKNOWN
    return int(source_id)


def _image_size(features: Any, name: str, findings: Findings) -> tuple[int, int]:
    height = _value(features, "image/height", "int64_list", name, findings)
    width = _value(features, "image/width", "int64_list", name, findings)
    for key, value in (("image/height", height), ("image/width", width)):
        if value is not None and not 0 < value <= _MAX_SIDE:
            findings.add("record-value", f"{name} has the {key} {value}: it must be at least one pixel")
    fits = height and width and 0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE
    return (height, width) if fits else (0, 0)


def _objects(features: Any, name: str, known: frozenset[int], findings: Findings) -> dict[str, Any] | None:
    """The fields of Example that are about objects; None where they do not fit together."""
    labels = _values(features, LABEL_KEY, "int64_list", name, findings)
    sides = [_values(features, key, "float_list", name, findings) for key in BOX_KEYS]
    crowds = _values(features, CROWD_KEY, "int64_list", name, findings)
    areas = _values(features, AREA_KEY, "float_list", name, findings)
    lists = {LABEL_KEY: labels, **dict(zip(BOX_KEYS, sides, strict=True)), CROWD_KEY: crowds, AREA_KEY: areas}
    if any(values is None for values in lists.values()):
        return None
    lacking = [key for key in DALI_KEYS if key not in features or features[key].WhichOneof("kind") is None]
    if not _lengths_agree({key: len(values) for key, values in lists.items()}, lacking, name, findings):
        return None
    for label in sorted(set(labels) - known):
        categories = f"{len(known)} categories from {min(known)} to {max(known)}"
        findings.add("unknown-category", f"{name} has the label {label}, which none of {categories} has")
    if not set(crowds) <= {0, 1}:
        findings.add("record-value", f"{name} has {CROWD_KEY} {_shown(crowds)}: it must be 0 or 1")
    if not all(0 <= area < math.inf for area in areas):
        findings.add("record-value", f"{name} has {AREA_KEY} {_shown(areas)}: it must be a number, 0 or more")
    absent = sum(1 << DALI_KEYS.index(key) for key in lacking)
    if len(crowds) != len(labels):
        absent |= 1 << DALI_KEYS.index(CROWD_KEY)
    return {
        # Copies: the values themselves would keep the whole record in memory.
        "sides": [list(side) for side in sides],
        "category_ids": list(labels),
        "is_crowd": list(crowds) or [0] * len(labels),
        "areas": list(areas) or [math.nan] * len(labels),
        "absent": absent,
    }


def _lengths_agree(lengths: dict[str, int], lacking: Collection[str], name: str, findings: Findings) -> bool:
    """Whether there is one value per box under every key; crowds and areas may be left out."""
    if len(set(lengths.values())) == 1:
        return True
    needed = (LABEL_KEY, *BOX_KEYS)
    given = {key: n for key, n in lengths.items() if n or (key in needed and key not in lacking)}
    absent = [key for key in needed if key not in given]
    fullest = max(given, key=given.get)
    for key in absent:
        findings.add(
            "record-key-missing", f"{name} lacks {key}, but has {given[fullest]} values in {fullest}"
        )
    is_ragged = len(set(given.values())) > 1
    if is_ragged:
        listed = ", ".join(f"{key} {n}" for key, n in given.items())
        findings.add("record-ragged", f"{name} has lists of these lengths: {listed}")
    return not absent and not is_ragged


def _value(features: Any, key: str, kind: str, name: str, findings: Findings) -> Any:
    """The one value under a key; None where there is not one, which is reported."""
    values = _values(features, key, kind, name, findings)
    if values is None:
        return None
    if len(values) == 1:
        return values[0]
    if values:
        findings.add(
            "record-value", f"{name} has {len(values)} values in {key} instead of one: {_shown(values)}"
        )
    else:
        findings.add("record-key-missing", f"{name} lacks {key}")
    return None


def _values(features: Any, key: str, kind: str, name: str, findings: Findings) -> Sequence[Any] | None:
    """The values under a key, () where there are none; None where they are of another kind, which is
    reported."""
    if key not in features:
        return ()
    feature = features[key]
    found = feature.WhichOneof("kind")
    if found == kind:
        return getattr(feature, kind).value
    if found is None:
        return ()
    values = _shown(getattr(feature, found).value)
    findings.add("record-key-type", f"{name} has a {found} in {key}, {values}, instead of a {kind}")
    return None


def _shown(values: Sequence[Any]) -> str:
    first = [value[:_SHOWN_BYTES] if isinstance(value, bytes) else value for value in values[:_SHOWN]]
    if len(values) == 1:
        return repr(first[0])
    return repr(first)
