"""What one value of an LMDB holds: Caffe's Datum, or Caffe2's TensorProtos.

Schemas: BVLC/caffe src/caffe/proto/caffe.proto, and caffe2/proto/caffe2.proto of pytorch/pytorch.
"""

import struct
from typing import NamedTuple

from tools.preprocessing.formats.protobuf import WireError, fields, integers

# Fields of caffe.Datum.
_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _FLOAT_DATA, _ENCODED = range(1, 8)
_DATUM = dict.fromkeys((_CHANNELS, _HEIGHT, _WIDTH, _LABEL, _ENCODED), int) | dict.fromkeys(
    (_DATA, _FLOAT_DATA), memoryview
)
# Fields of caffe2.TensorProto, and values of its data_type.
_PROTOS = 1
_DATA_TYPE, _FLOATS, _INT32S, _BYTE_DATA, _STRINGS, _INT64S = 2, 3, 4, 5, 6, 10
_FLOAT, _INT32, _BYTE, _STRING, _INT64 = 1, 2, 3, 4, 10
_NEITHER = "neither Caffe's Datum nor Caffe2's TensorProtos"
_UNENCODED = "raw pixels, which DALI takes for others: write it with encoded images"


class Record(NamedTuple):
    """One value.

    Attributes:
        encoded: the image; None where there is none.
        label: None where there is not exactly one.
        form: of the value, as DALI's readers tell apart: "caffe", "caffe2-int32" and "caffe2-float" with a
            label, "caffe-alone" and "caffe2-alone" without; "other" where they would misread it.
    """

    encoded: memoryview | None
    label: int | float | None
    form: str


def parse(value: memoryview) -> Record:
    """Reads a value of either kind.

    Raises:
        ValueError: it is neither, or holds pixels instead of an encoded image. The text goes behind the name
            of the record.
    """
    try:
        content = list(fields(value))
        if content and all(number == _PROTOS and isinstance(of, memoryview) for number, of in content):
            return _caffe2([of for _, of in content])
    except WireError as error:
        raise ValueError(f"is {_NEITHER}: {error}") from error
    return _caffe(dict(content))


def _caffe(datum: dict[int, int | memoryview]) -> Record:
    if not all(isinstance(value, _DATUM.get(number, ())) for number, value in datum.items()):
        raise ValueError(f"is {_NEITHER}")
    if _FLOAT_DATA in datum or (_DATA in datum and datum.get(_ENCODED) == 0):
        raise ValueError(f"is a Datum of {_UNENCODED} (convert_imageset --encoded)")
    label = datum.get(_LABEL)
    return Record(datum.get(_DATA), label, "caffe-alone" if label is None else "caffe")


def _caffe2(protos: list[memoryview]) -> Record:
    kind, values = _tensor(protos[0])
    if kind == _BYTE:
        raise ValueError(f"holds {_UNENCODED}")
    if kind != _STRING:
        raise ValueError(f"begins with a tensor of data_type {kind}, and an encoded image has {_STRING}")
    encoded = values[0] if values else None
    if len(protos) == 1:
        return Record(encoded, None, "caffe2-alone" if len(values) == 1 else "other")
    kind, labels = _tensor(protos[1])
    label = labels[0] if len(labels) == 1 and kind in (_FLOAT, _INT32, _INT64) else None
    forms = {_FLOAT: "caffe2-float", _INT32: "caffe2-int32"}
    is_plain = len(protos) == 2 and len(values) == 1 and label is not None  # DALI takes a third one for a box
    return Record(encoded, label, forms.get(kind, "other") if is_plain else "other")


def _tensor(message: memoryview) -> tuple[int, list]:
    """(data_type, values) of a TensorProto."""
    kind, values = _FLOAT, {_FLOATS: [], _INT32S: [], _INT64S: [], _STRINGS: []}
    for number, value in fields(message):
        if number == _DATA_TYPE and isinstance(value, int):
            kind = value
        elif number in (_INT32S, _INT64S):
            values[number] += integers(value)
        elif number == _FLOATS and isinstance(value, memoryview) and len(value) % 4 == 0:
            values[number] += [x for (x,) in struct.iter_unpack("<f", value)]
        elif number == _STRINGS and isinstance(value, memoryview):
            values[number].append(value)
    of = {_FLOAT: _FLOATS, _INT32: _INT32S, _INT64: _INT64S, _STRING: _STRINGS}
    return kind, values[of[kind]] if kind in of else []
