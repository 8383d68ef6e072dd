"""Opens images in an LMDB database of Caffe or Caffe2, in the order of the database's keys.

A value is a protobuf message: Datum of BVLC/caffe (src/caffe/proto/caffe.proto), or TensorProtos of
pytorch/pytorch (caffe2/proto/caffe2.proto).
"""

import collections
import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Content, Found, Image, Opening, Reader

if TYPE_CHECKING:
    import lmdb

_NAME = "data.mdb"
_PACKAGE = "lmdb==3.0.0"
_READERS = {  # format of all values in a file -> DALI's reader
    "caffe": Reader("caffe", {}, label=1),
    "caffe-alone": Reader("caffe", {"label_available": False}),
    "caffe2": Reader("caffe2", {}, label=1),
    "caffe2-alone": Reader("caffe2", {"label_type": 4}),  # NO_LABEL of caffe2_parser.h
}
_FLOAT, _INT32, _INT64 = 1, 2, 10  # values of TensorProto.data_type
_NUMBERS = {_FLOAT: 3, _INT32: 4, _INT64: 10}  # data_type -> field of TensorProto


def open_lmdb(opening: Opening) -> Content:
    """Opens --source=lmdb: the directory of a database, or its file."""
    path = opening.path
    file = os.path.abspath(os.path.join(path, _NAME) if os.path.isdir(path) else path)
    base.check_file(file)
    with _reading(file) as transaction:
        count = transaction.stat()["entries"]

    def reader(images: Sequence[Image], labelled: bool) -> Reader | None:
        # DALI reads only a file named data.mdb, and only if all values have the same format.
        directory, name = os.path.split(file)
        found = _READERS.get(images[0].form)
        if found is None or name != _NAME or [image.form for image in images] != count * [images[0].form]:
            return None
        return found._replace(arguments={"path": directory, **found.arguments})

    return Content(_values(file), _load, reader)


def _values(file: str) -> Iterator[Found]:
    with _reading(file) as transaction:
        for entry in transaction.cursor():
            key, value = map(bytes, entry)
            owner = f"{file}: record {os.fsdecode(key)!r}"
            encoded, label, form = _parse(value, owner)
            label = None if label is None else base.check_label(label, owner)
            yield Image(os.fsdecode(key), file, label, form=form), owner, encoded


def _load(image: Image) -> np.ndarray:
    with _reading(image.file) as transaction:
        value = bytes(transaction.get(os.fsencode(image.name)) or b"")
    return np.frombuffer(_parse(value, f"{image.file}: record {image.name!r}")[0], np.uint8)


@contextlib.contextmanager
def _reading(file: str) -> "Iterator[lmdb.Transaction]":
    """Yields a transaction. Raises UserError for a file that cannot be read."""
    try:
        import lmdb
    except ImportError as error:
        raise UserError(f"--source=lmdb needs a package: pip install {_PACKAGE}") from error
    try:
        options = {"subdir": False, "readonly": True, "lock": False, "readahead": False}
        with lmdb.open(os.fsencode(file), **options) as environment:
            needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            size = os.path.getsize(file)
            if size < needed:  # reading a mapped file beyond its end kills the process
                raise UserError(f"{file} is cut off after {size} of {needed} bytes: copy it again")
            with environment.begin() as transaction:
                yield transaction
    except lmdb.Error as error:
        raise UserError(f"{file} cannot be read as LMDB ({error}): copy or write it again") from error


def _parse(value: bytes, owner: str) -> tuple[bytes, float | None, str]:
    """Returns the encoded image, its label, and a key of _READERS.

    The key is "" if DALI would misread the value.
    """
    try:
        fields = _fields(value)
        tensors = [_fields(tensor) for tensor in fields[1] if isinstance(tensor, bytes)]
        encoded = b"".join(tensors[0][6] if tensors else fields[4])
    except (DecodeError, TypeError) as error:
        raise UserError(f"{owner} is neither Caffe's Datum nor Caffe2's TensorProtos: {error}") from error
    if not tensors:  # a Datum: field 4 is the data, field 5 the label
        label = _number(fields[5], _INT32)
        return encoded, label, "caffe-alone" if label is None else "caffe"
    # TensorProtos: the image, then its label. DALI interprets a third tensor as a box.
    label, form = None, "caffe2-alone"
    if len(tensors) > 1:
        kind = (tensors[1][2] or [0])[0]
        label = _number(tensors[1][_NUMBERS.get(kind, 0)], kind)
        form = "" if label is None or kind == _INT64 or len(tensors) > 2 else "caffe2"
    return encoded, label, form


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Returns field number -> values: unsigned whole numbers, or bytes."""
    found: dict[int, list[Any]] = collections.defaultdict(list)
    for field in UnknownFieldSet(Empty.FromString(message)):
        found[field.field_number].append(field.data)
    return found


def _number(values: list[Any], kind: int) -> float | None:
    """Returns the only number in a protobuf field; None if there is no number or several."""
    packed = values[0] if len(values) == 1 else b""
    if isinstance(packed, int) and kind == _FLOAT:
        packed = (packed % 2**32).to_bytes(4, "little")
    if isinstance(packed, int):
        number = packed
    elif kind == _FLOAT:
        return struct.unpack("<f", packed)[0] if len(packed) == 4 else None
    elif sum(byte < 128 for byte in packed) == 1:
        number = sum((byte & 127) << 7 * place for place, byte in enumerate(packed))
    else:
        return None
    return number - 2**64 if number >= 2**63 else number
