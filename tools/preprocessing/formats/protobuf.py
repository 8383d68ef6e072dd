"""The fields of a protobuf message, without its schema compiled.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LONGEST = 10  # bytes of a varint


class WireError(ValueError):
    """Bytes that are no message of protobuf; why, in words."""


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field in its order: whole numbers as int64, all else as the bytes that hold it.

    Raises:
        WireError: the bytes are no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("field 0")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, _signed(value)
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise WireError(f"wire type {kind}")
        if size > len(message) - at:
            raise WireError(f"field {number} needs {size} bytes, {len(message) - at} are left")
        yield number, message[at : at + size]
        at += size


def integers(value: int | memoryview) -> list[int]:
    """The int64 of a repeated field's entry: one number, or many packed; WireError where it is neither."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(_signed(number))
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a place, and where it ends."""
    number = 0
    for i, byte in enumerate(message[at : at + _LONGEST]):
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return number, at + i + 1
    raise WireError("a number without an end")


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >> 63 else number
