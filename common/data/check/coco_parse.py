"""Parses a COCO json into structs and reports every value that cannot be used.

msgspec decodes valid files. If it refuses a file, Python's json module reads the file, and this module checks
each value. Invalid values are reported with the id of their record; the other values are used.

Decoding is strict: "12" and true are not numbers, and 1.5 is not an id. But 1.0 is an id: pandas writes a
column of integers as floats if one of its values is missing.
"""

import codecs
import contextlib
import json
import math
import os
import pathlib
import re
import reprlib
import stat
import sys
import types
from typing import Any

import msgspec

from common.data.annotations import NONE, CocoFile, CocoImage, CocoObject
from common.data.check.issues import Fault, Issues
from common.data.check.recognition import HEAD, foreign, recognise_path
from common.data.labels import is_text
from common.files import file_type

_REPR = reprlib.Repr()
_REPR.maxlist, _REPR.maxdict, _REPR.maxstring = 8, 4, 80
shown = _REPR.repr  # shortens a value for a message
_NEAR = 20  # characters that a message shows before and after an error
_DIGITS = 4000  # Python raises an error above 4300 digits
_NO_JSON = (
    ("file-empty", rb"\s*\Z"),
    ("file-lfs-pointer", rb"version https://git-lfs"),
    ("file-gzip", rb"\x1f\x8b"),
    # UTF-16 starts with a byte order mark, or with an opening bracket of two bytes.
    ("json-utf-16", rb"\xff\xfe(?!\0\0)|\xfe\xff|\{\0[^\0]\0|\0\{\0[^\0]"),
)
_PART = re.compile(r"[\w.+\\-]*\s*")  # the rest of a number, literal or escape in a truncated file
LISTS: dict[str, Any] = {"images": CocoImage, "annotations": CocoObject, "categories": Any}
# The values that replace missing and invalid values in a struct.
_NOTHING: dict[type[msgspec.Struct], dict[str, Any]] = {
    CocoImage: {"id": NONE, "file_name": "", "width": 0, "height": 0},
    CocoObject: {"image_id": NONE, "category_id": NONE, "bbox": (math.nan,) * 4},
}
_LARGEST_FLOAT = 2**53  # a float holds each integer up to this one


class _AnyImage(msgspec.Struct, gc=False):
    """Like CocoImage, but with any values in place of integers."""

    file_name: str
    id: Any
    width: Any
    height: Any


class _AnyObject(msgspec.Struct, gc=False):
    """Like CocoObject, but with any values in place of integers."""

    bbox: tuple[float, float, float, float]
    image_id: Any
    category_id: Any
    id: Any = None
    iscrowd: Any = 0
    area: float | None = None


class _AnyFile(msgspec.Struct):
    images: list[_AnyImage]
    annotations: list[_AnyObject]
    categories: list[Any]


_STRICT = (
    ("images", ("id", "width", "height"), list[CocoImage]),
    ("annotations", ("id", "image_id", "category_id", "iscrowd"), list[CocoObject]),
)


class CocoExtra(msgspec.Struct):
    """Keys of an annotation that are not COCO's, or that only matter together with these."""

    attributes: Any = None
    ignore: Any = None
    segmentation: list[msgspec.Raw] | dict[str, msgspec.Raw] | None = None


class _Extras(msgspec.Struct):
    annotations: list[CocoExtra]


def parse(path: str, issues: Issues) -> dict[str, list | None]:
    """Reads and decodes a COCO json.

    Args:
        issues: receives file-*, foreign-format, json-*, repeated-key, missing-key, wrong-type, box-length,
            box-not-finite.

    Returns:
        `images` and `annotations` as lists of structs, with the values of the file, `categories` as a list of
        JSON values. Values of _NOTHING replace invalid values. An invalid list is None. `extras` is a list
        with a CocoExtra for each annotation; None if no annotation has a key that matters.
    """
    nothing = dict.fromkeys((*LISTS, "extras"))
    try:
        content = _read(path)
        if all(content.count(f'"{key}"'.encode()) == 1 for key in LISTS):  # msgspec drops repeated lists
            with contextlib.suppress(ValueError, RecursionError):
                lists = _decode(content)
                if b'"rotation"' in content or b'"ignore"' in content:
                    lists["extras"] = msgspec.json.decode(content, type=_Extras).annotations
                return nothing | lists | {"categories": list(map(_with_integers, lists["categories"]))}
        if fault := foreign(content[:HEAD], path):
            raise fault
        document = _load(content, issues)
    except Fault as fault:
        issues.add(*fault.args)
        return nothing
    lists = nothing | {key: _list(document, key, struct, issues) for key, struct in LISTS.items()}
    if lists["annotations"]:
        records = [record if isinstance(record, dict) else {} for record in document["annotations"]]
        keys = CocoExtra.__struct_fields__
        lists["extras"] = [CocoExtra(*map(record.get, keys)) for record in records]
    return lists


def _decode(content: bytes) -> dict[str, Any]:
    """Decodes a valid COCO json. Raises ValueError if a value is invalid, RecursionError if it is nested."""
    try:
        return msgspec.structs.asdict(msgspec.json.decode(content, type=CocoFile))
    except msgspec.ValidationError:
        lists = msgspec.structs.asdict(msgspec.json.decode(content, type=_AnyFile))
    # The file may be valid except for integral floats. To check each value in Python takes 12 times as long.
    for key, names, strict_type in _STRICT:
        for record in lists[key]:
            for name in names:
                if type(value := getattr(record, name)) is float:
                    setattr(record, name, _integer(value))
        lists[key] = msgspec.convert(lists[key], strict_type, from_attributes=True)
    return lists


def _read(path: str) -> bytes:
    """Reads a file without its byte order mark. Raises Fault if it cannot be a json."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode) and (formats := recognise_path(path)):
            row, file = next(iter(formats.items()))
            raise Fault("foreign-format", row.message(file))
        if not stat.S_ISREG(mode):
            raise Fault("file-unreadable", f"it is {file_type(mode)}")
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise Fault("file-unreadable", error.strerror or str(error)) from error
    text = content.removeprefix(codecs.BOM_UTF8)
    for kind, pattern in _NO_JSON:
        if re.match(pattern, text):
            beginning = f" and begins with {text[:4].hex(' ')}" if text.strip() else ""
            raise Fault(kind, f"it has {len(content)} bytes{beginning}")
    return text


def _load(content: bytes, issues: Issues) -> dict[str, Any]:
    """Parses a JSON object; raises Fault for anything else."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        for key in LISTS if len(record) < len(pairs) else ():
            if (count := sum(name == key for name, _ in pairs)) > 1:
                issues.add("repeated-key", f"the file has {count} lists `{key}`")
                record[key] = ...
        return record

    text = content.decode("utf-8", "surrogateescape")
    try:
        document = json.loads(text, object_pairs_hook=to_dict, parse_int=lambda digits: int(digits[:_DIGITS]))
    except RecursionError as error:
        raise Fault("json-malformed", "its brackets are nested too deeply") from error
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated") or _PART.fullmatch(text, error.pos)
        if is_cut and error.msg != "Extra data":
            tail = text.rstrip()[-2 * _NEAR :]
            raise Fault("file-truncated", f"it ends after {len(content)} bytes with {tail!r}") from error
        near = text[max(error.pos - _NEAR, 0) : error.pos + _NEAR]
        position = len(text[: error.pos].encode("utf-8", "surrogateescape"))
        raise Fault("json-malformed", f"{error.msg} at byte {position}, near {near!r}") from error
    if not isinstance(document, dict):
        head = text[: 2 * _NEAR]
        raise Fault("wrong-type", f"the file begins with {head!r}: an object with three lists is needed")
    return document


def _list(document: dict[str, Any], key: str, struct: Any, issues: Issues) -> list | None:
    """Returns the records of one list, with invalid values replaced; None for an invalid list."""
    records = document.get(key)
    if key not in document:
        issues.add("missing-key", f"the file has no list `{key}`")
    elif not isinstance(records, list | types.EllipsisType):
        issues.add("wrong-type", f"`{key}` is {shown(records)}: a list is needed")
    elif records is not ...:
        if struct is Any:
            return list(map(_with_integers, records))
        return [_salvaged(record, struct, key, number, issues) for number, record in enumerate(records)]
    return None


def _with_integers(category: Any) -> Any:
    """Returns a category whose `id` is an integer if it was an integral float."""
    if not isinstance(category, dict) or "id" not in category:
        return category
    return category | {"id": _integer(category["id"])}


def _integer(value: Any) -> Any:
    """Converts an integral float to an integer. Returns other values unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_FLOAT:
        return int(value)
    return value


def _salvaged(record: Any, struct: type[msgspec.Struct], key: str, number: int, issues: Issues) -> Any:
    """Returns the struct of a record; adds an issue for each invalid value."""
    good = dict(_NOTHING[struct])
    if not isinstance(record, dict):
        issues.add("wrong-type", f"{key}[{number}] is {shown(record)}: an object is needed")
        return struct(**good)
    for field in _FIELDS[struct]:
        try:
            if field.name in record:
                good[field.name] = _checked(record[field.name], field)
            elif field.required:
                raise Fault("missing-key", f"has no {field.name}")
        except Fault as fault:
            kind, text = fault.args
            issues.add(kind, f"{record_name(record, key, number)} {text}")
    return struct(**good)


_FIELDS = {struct: msgspec.structs.fields(struct) for struct in _NOTHING}


def record_name(record: dict[str, Any], key: str, number: int) -> str:
    """Returns `annotation 3 (image 7)` for messages; without an id `annotations[2] (no id, image 7)`."""
    record_id = record.get("id")
    has_id = type(record_id) is int and record_id >= 0
    details = [] if has_id else [f"id {shown(record_id)}" if "id" in record else "no id"]
    if "image_id" in record:
        details.append(f"image {shown(record['image_id'])}")
    if "file_name" in record:
        details.append(shown(record["file_name"]))
    name = f"{key[:-1]} {shown(record_id)}" if has_id else f"{key}[{number}]"
    return f"{name} ({', '.join(details)})" if details else name


def _checked(value: Any, field: msgspec.structs.FieldInfo) -> Any:
    """Converts a value to the field's type; raises a Fault if it is invalid."""
    has = f"has {field.name} {shown(value)}"
    value = _integer(value)
    if field.name == "bbox" and isinstance(value, list):
        if len(value) != 4:
            raise Fault("box-length", has)
        numbers = all(isinstance(side, int | float) for side in value)
        if numbers and not all(abs(side) <= sys.float_info.max for side in value):
            raise Fault("box-not-finite", has)
    if isinstance(value, float) and not math.isfinite(value):
        raise Fault("wrong-type", f"{has}: a finite number is needed")
    if isinstance(value, str) and not is_text(value):
        raise Fault("wrong-type", f"{has}, which cannot be encoded in UTF-8")
    try:
        return msgspec.convert(value, field.type)
    except ValueError as error:
        reason = str(error).partition(" - at ")[0]
        raise Fault("wrong-type", f"{has}: {reason[:1].lower()}{reason[1:]}") from error
