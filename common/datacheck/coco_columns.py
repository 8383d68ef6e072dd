"""The records of a COCO json -> columns of numbers, with a finding for every value that cannot be used.

Each record is decoded into a typed struct. Where that fails, the values of the record are checked one by one:
each fault is reported with the record's id, and the other values are used. One annotation is decoded at a
time, so memory stays small.

Decoding is strict: "12" and true are not numbers, and 1.5 is not an id. Unused keys are skipped.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from common.datacheck.coco_parse import decode_record, shown
from common.issues import Findings
from common.labels import is_text

NONE = -1  # stands for an id that is absent or was reported
_SHOWN = 4  # things that share something, named before "..."
# The fields of `Objects`, in their order.
_OBJECT_ROW = np.dtype("i8, i8, i8, 4f8, ?, f8")

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Image(msgspec.Struct, gc=False):
    id: _Id
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    width: _Side
    height: _Side


class _Object(msgspec.Struct, gc=False):
    image_id: _Id
    category_id: _Id
    bbox: tuple[float, float, float, float]
    id: _Id | None = None
    iscrowd: Annotated[int, msgspec.Meta(ge=0, le=1)] | bool = 0
    area: Annotated[float, msgspec.Meta(ge=0)] | None = None


# What a struct gets in place of a value that was reported.
_NOTHING = {
    _Image: {"id": NONE, "file_name": "", "width": 0, "height": 0},
    _Object: {"image_id": NONE, "category_id": NONE, "bbox": (math.nan,) * 4},
}


@dataclasses.dataclass(frozen=True)
class Images:
    """The columns of `images`, in the order of the file.

    Attributes:
        ids: int64 (I,), NONE where it was reported.
        file_names: "" where it was reported.
        sizes: int32 (I, 2), height and width in pixels, 0 where it was reported.
    """

    ids: np.ndarray
    file_names: list[str]
    sizes: np.ndarray

    def name(self, row: int) -> str:
        """An image in words: `image 12 ('a.jpg')`."""
        number = f"images[{row}]" if self.ids[row] == NONE else f"image {self.ids[row]}"
        return f"{number} ({self.file_names[row]!r})" if self.file_names[row] else number

    def repeat_name(self, rows: list[int]) -> str:
        """Images that have one id, in words."""
        files = some([repr(self.file_names[row]) for row in rows])
        return f"image {self.ids[rows[0]]} is given {len(rows)} times: {files}"


@dataclasses.dataclass(frozen=True)
class Objects:
    """The columns of `annotations`, in the order of the file.

    Attributes:
        ids: int64 (N,), NONE where there is none or it was reported.
        image_ids: int64 (N,), NONE where it was reported.
        category_ids: int64 (N,), NONE where it was reported.
        boxes_ltwh_px: float64 (N, 4), finite, or NaN where it was reported.
        is_crowd: bool (N,).
        areas: float64 (N,), NaN where there is none or it was reported.
    """

    ids: np.ndarray
    image_ids: np.ndarray
    category_ids: np.ndarray
    boxes_ltwh_px: np.ndarray
    is_crowd: np.ndarray
    areas: np.ndarray

    @functools.cached_property
    def is_negative(self) -> np.ndarray:
        """bool (N,): boxes with a negative side."""
        return np.any(self.boxes_ltwh_px[:, 2:] < 0, axis=1)

    def name(self, row: int) -> str:
        """An annotation in words: `annotation 7 (image 3)`."""
        image = "" if self.image_ids[row] == NONE else f"image {self.image_ids[row]}"
        if self.ids[row] == NONE:
            return f"annotations[{row}] ({', '.join(filter(None, ('no id', image)))})"
        return f"annotation {self.ids[row]}" + (f" ({image})" if image else "")

    def box_name(self, row: int) -> str:
        """An annotation with its box, in words."""
        return f"{self.name(row)} has bbox {self.boxes_ltwh_px[row].tolist()}"

    def repeat_name(self, rows: list[int]) -> str:
        """Annotations that have one id, in words."""
        places = some([f"annotations[{row}]" for row in rows])
        return f"annotation {self.ids[rows[0]]} is given {len(rows)} times: {places}"


def some(items: Sequence[Any]) -> str:
    """The first few of them in words."""
    return ", ".join([*map(str, items[:_SHOWN]), *(["..."] if len(items) > _SHOWN else [])])


def images_of(records: Sequence[msgspec.Raw], findings: Findings) -> Images:
    """Decodes `images`.

    Args:
        records: from `coco_parse.cut`.
        findings: gets missing-key and wrong-type.
    """
    images = list(_decoded(records, _Image, "images", findings))
    return Images(
        ids=np.fromiter((image.id for image in images), np.int64, len(images)),
        file_names=[image.file_name for image in images],
        sizes=np.array([(image.height, image.width) for image in images], np.int32).reshape(-1, 2),
    )


def objects_of(records: Sequence[msgspec.Raw], findings: Findings) -> Objects:
    """Decodes `annotations`.

    Args:
        records: from `coco_parse.cut`.
        findings: gets missing-key, wrong-type, box-length and box-not-finite.
    """
    rows = (
        (
            NONE if o.id is None else o.id,
            o.image_id,
            o.category_id,
            o.bbox,
            o.iscrowd,
            math.nan if o.area is None else o.area,
        )
        for o in _decoded(records, _Object, "annotations", findings)
    )
    table = np.fromiter(rows, _OBJECT_ROW, len(records))
    return Objects(*(np.ascontiguousarray(table[name]) for name in table.dtype.names))


def _decoded(records: Sequence[msgspec.Raw], struct: type, key: str, findings: Findings) -> Iterator[Any]:
    """One struct a record, whatever the record is."""
    decode = msgspec.json.Decoder(struct).decode
    for number, record in enumerate(records):
        try:
            yield decode(record)
        except ValueError:  # of msgspec, or of a string that is no UTF-8
            yield _salvaged(decode_record(record), struct, key, number, findings)


def _salvaged(record: Any, struct: type, key: str, number: int, findings: Findings) -> Any:
    """What is good in a record, with a finding for each value that is not."""
    good = dict(_NOTHING[struct])
    if not isinstance(record, dict):
        findings.add("wrong-type", f"{key}[{number}] is {shown(record)}: an object is needed")
        return struct(**good)
    name = _record_name(record, key, number)
    for field in _fields(struct):
        if field.name not in record:
            if field.required:
                findings.add("missing-key", f"{name} has no {field.name}")
            continue
        value = record[field.name]
        fault = _fault(value, field)
        if fault is None:
            good[field.name] = value
        else:
            kind, reason = fault
            findings.add(kind, f"{name} has {field.name} {shown(value)}{reason}")
    return struct(**good)


_fields = functools.cache(msgspec.structs.fields)


def _record_name(record: dict[str, Any], key: str, number: int) -> str:
    """`image 7 ('b.jpg')`, `annotation 3 (image 7)`, or `annotations[2] (no id, image 7)`."""
    record_id = record.get("id")
    has_id = type(record_id) is int and record_id >= 0
    about = [] if has_id else [f"id {shown(record_id)}" if "id" in record else "no id"]
    if "image_id" in record:
        about.append(f"image {shown(record['image_id'])}")
    if "file_name" in record:
        about.append(shown(record["file_name"]))
    name = f"{key[:-1]} {shown(record_id)}" if has_id else f"{key}[{number}]"
    return f"{name} ({', '.join(about)})" if about else name


def _fault(value: Any, field: msgspec.structs.FieldInfo) -> tuple[str, str] | None:
    """The kind of a fault and, in words, what was expected; None for a good value."""
    if field.name == "bbox" and isinstance(value, list):
        if len(value) != 4:
            return "box-length", ""
        numbers = all(isinstance(side, int | float) for side in value)
        if numbers and not all(abs(side) <= sys.float_info.max for side in value):
            return "box-not-finite", ""
    elif isinstance(value, float) and not math.isfinite(value):
        return "wrong-type", ": a finite number is needed"
    elif isinstance(value, str) and not is_text(value):
        return "wrong-type", ", which no UTF-8 can spell"
    try:
        msgspec.convert(value, field.type)
    except ValueError as error:  # of msgspec, or of a string that UTF-8 cannot spell
        reason = str(error).partition(" - at ")[0]
        return "wrong-type", f": {reason[:1].lower()}{reason[1:]}"
    return None
