"""The bytes of a COCO json -> its records, not decoded yet; or why the file is not a json.

This is fast and needs little memory: polygons are not decoded, and records are views of the file's bytes.
"""

import codecs
import json
import os
import pathlib
import re
import reprlib
import stat
from typing import Any

import msgspec

from common.files import file_type
from common.issues import Findings

_REPR = reprlib.Repr()
_REPR.maxlist, _REPR.maxdict, _REPR.maxstring = 8, 4, 80
_NEAR = 20  # bytes shown before and after the place of a fault
# NaN and Infinity are no JSON, but Python's json writes and reads them. They are marked, then cut as objects,
# which are wrong for every key that is used, and which no string can hold unbroken.
_LITERAL = re.compile(rb"[NI-](?<=[\s\[,:].)(?:aN|nfinity|Infinity)(?=[\s\],}])")
_MARKED = re.compile(rb'\{"\\u0000":"(NaN|-?Infinity)"\}')
_MARK = rb'{"\\u0000":"\g<0>"}'


# With a byte order mark or the bracket of an object; a UTF-32 mark begins like that of UTF-16.
_UTF_16 = re.compile(rb"\xff\xfe(?!\0\0)|\xfe\xff|\{\0[^\0]\0|\0\{\0[^\0]")
_LISTS = ("images", "annotations", "categories")


class _Key:
    """A key of the document. It equals no other: a dict holds a repeated key as often as it is given."""

    __slots__ = ("text",)

    def __init__(self, text: str):
        self.text = text


_Document = dict[_Key, msgspec.Raw]
_decode_document = msgspec.json.Decoder(_Document, dec_hook=lambda _, text: _Key(text)).decode


def read(path: str, findings: Findings) -> bytes | None:
    """The bytes of a file that may be a json, without a byte order mark; None, with a finding, where it is
    none. Never waits for a pipe."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            findings.add("json-not-a-file", f"it is {file_type(mode)}")
            return None
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        findings.add("json-unreadable", error.strerror)
        return None
    size = f"it has {len(content)} bytes"
    content = content.removeprefix(codecs.BOM_UTF8)
    if not content or content.isspace():
        findings.add("json-empty", size)
    elif content.startswith(b"version https://git-lfs"):
        findings.add("json-lfs-pointer", size)
    elif content.startswith(b"\x1f\x8b"):
        findings.add("json-gzip", f"{size} and begins with 1f 8b")
    elif _UTF_16.match(content):
        findings.add("json-utf-16", f"{size} and begins with {content[:4].hex(' ')}")
    else:
        return content
    return None


def cut(content: bytes, findings: Findings) -> dict[str, list[msgspec.Raw] | None] | None:
    """Cuts a COCO json into records.

    Args:
        content: the json.
        findings: gets json-truncated, json-malformed, repeated-key, missing-key and wrong-type.

    Returns:
        The records of `images`, `annotations` and `categories`, to be decoded by msgspec or, where that
        fails, by `decode_record`; None for a list that is missing, given twice or none. None where the file
        is no JSON.
    """
    document = _cut(content, findings)
    if document is None:
        return None
    return {key: _list([document[k] for k in document if k.text == key], key, findings) for key in _LISTS}


def decode_record(record: msgspec.Raw) -> Any:
    """What Python's json makes of a record; where it makes nothing of it, the text."""
    text = _MARKED.sub(rb"\1", bytes(record)).decode("utf-8", "surrogateescape")
    try:
        return json.loads(text)  # takes what msgspec refuses: 1e999, and bytes that are no UTF-8
    except (ValueError, RecursionError):  # integers of more than 4300 digits, deep brackets
        return text


def shown(value: Any) -> str:
    """A value in a message, not too long."""
    return _REPR.repr(value)


def _cut(content: bytes, findings: Findings) -> _Document | None:
    """The parts of a json by their keys, undecoded."""
    found = _decode(content, content)
    if isinstance(found, dict):
        return found
    kind, words, position = found
    if content[position : position + 1] in (b"N", b"I"):
        found = _decode(_LITERAL.sub(_MARK, content), content)
        if isinstance(found, dict):
            return found
        if found[0] == "json-truncated":  # otherwise the literal is the first fault
            kind, words, _ = found
    findings.add(kind, words)
    return None


def _decode(version: bytes, content: bytes) -> _Document | tuple[str, str, int]:
    """A json's parts; or the kind of what is wrong, in words, and where.

    Args:
        version: the json as it is, or marked.
        content: the json as it is, for the words.
    """
    try:
        return _decode_document(version)
    except msgspec.ValidationError:
        head = content[: 2 * _NEAR].decode("utf-8", "replace")
        return "wrong-type", f"the file begins with {head!r}: an object of three lists is needed", 0
    except RecursionError:
        return "json-malformed", "its brackets are nested too deeply", 0
    except UnicodeDecodeError as error:
        return "json-malformed", f"the key {shown(error.object)} is no UTF-8", 0
    except msgspec.DecodeError as error:
        said = re.fullmatch(r"JSON is malformed: (.*) \(byte (\d+)\)", str(error))
        position = int(said[2]) if said else len(version)  # the rest is "Input data was truncated"
    if position >= len(version.rstrip()):
        tail = content.rstrip()[-2 * _NEAR :].decode("utf-8", "replace")
        return "json-truncated", f"it ends after {len(content)} bytes with {tail!r}", position
    near = version[max(position - _NEAR, 0) : position + _NEAR].decode("utf-8", "replace")
    return "json-malformed", f"{said[1]} at byte {position}, near {near!r}", position


def _list(parts: list[msgspec.Raw], key: str, findings: Findings) -> list[msgspec.Raw] | None:
    """The records of the one part that a key should have."""
    if not parts:
        findings.add("missing-key", f"the file has no list `{key}`")
        return None
    if len(parts) > 1:
        findings.add("repeated-key", f"the file has {len(parts)} lists `{key}`")
        return None
    (part,) = parts
    try:
        return msgspec.json.decode(part, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        findings.add("wrong-type", f"`{key}` is {shown(decode_record(part))}: a list is needed")
        return None
