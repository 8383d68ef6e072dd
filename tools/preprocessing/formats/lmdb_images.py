"""Images in an LMDB of Caffe or Caffe2, in the order of its keys.

Schemas of the values: Datum in BVLC/caffe src/caffe/proto/caffe.proto, TensorProtos in
caffe2/proto/caffe2.proto of pytorch/pytorch.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from common.datacheck.images import ImagePolicy
from common.errors import UserError
from tools.preprocessing.formats import base
from tools.preprocessing.formats.base import Image, ImageSource, SourceFlags
from tools.preprocessing.reading import ReaderCall

if TYPE_CHECKING:
    import lmdb

_NAME = "data.mdb"
_PACKAGE = "lmdb==3.0.0"
# DALI's reader of each form, its arguments, and which output is the label.
_READERS = {
    "caffe": ("caffe", {}, 1),
    "caffe-alone": ("caffe", {"label_available": False}, None),
    "caffe2": ("caffe2", {}, 1),
    "caffe2-alone": ("caffe2", {"label_type": 4}, None),  # NO_LABEL of caffe2_parser.h
}
_FLOAT, _INT32, _STRING, _INT64 = 1, 2, 4, 10  # values of TensorProto.data_type

_ONE, _MANY = 1, 3  # FieldDescriptorProto.Label
_INT, _BYTES, _FLOATS = 5, 12, 2  # FieldDescriptorProto.Type
_SCHEMAS = {
    "Datum": [
        ("data", 4, _BYTES, _ONE),
        ("label", 5, _INT, _ONE),
        ("float_data", 6, _FLOATS, _MANY),
        ("encoded", 7, _INT, _ONE),
    ],
    "TensorProtos": [("protos", 1, _BYTES, _MANY)],
    "TensorProto": [
        ("data_type", 2, _INT, _ONE),
        ("float_data", 3, _FLOATS, _MANY),
        ("int32_data", 4, _INT, _MANY),
        ("string_data", 6, _BYTES, _MANY),
        ("int64_data", 10, 3, _MANY),
    ],
}


def open_lmdb(flags: SourceFlags) -> ImageSource:
    """--source=lmdb: the directory of one, or its file."""
    file = os.path.abspath(os.path.join(flags.path, _NAME) if os.path.isdir(flags.path) else flags.path)
    found = base.remembered(file, flags.policy, _check)
    with _reading(file) as transaction:
        keys = list(transaction.cursor().iternext(keys=True, values=False))

    def load(image: Image) -> np.ndarray:
        with _reading(file) as transaction:
            value = transaction.get(keys[image.place[0]]) or b""
        return np.frombuffer(_parse(value, f"{file}: record {image.name!r}")[0], np.uint8)

    def reader(kept: Sequence[Image]) -> ReaderCall | None:
        # DALI reads all values of a directory's data.mdb as the same form, and cannot leave out any.
        directory, name = os.path.split(file)
        forms = {image.form for image in kept}
        if len(kept) < len(found) or len(forms) > 1 or not forms <= _READERS.keys() or name != _NAME:
            return None
        operator, arguments, label = _READERS[forms.pop()]
        return ReaderCall(operator, {"path": directory, **arguments}, label=label)

    return base.make_source("lmdb", flags, found, load, reader)


@contextlib.contextmanager
def _reading(file: str) -> "Iterator[lmdb.Transaction]":
    """A transaction; UserError for a file that is cut off, damaged, or no LMDB."""
    try:
        import lmdb
    except ImportError as error:
        raise UserError(f"--source=lmdb needs a package: pip install {_PACKAGE}") from error
    try:
        with lmdb.open(
            os.fsencode(file), subdir=False, readonly=True, lock=False, readahead=False
        ) as environment:
            needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            size = os.path.getsize(file)
            if size < needed:  # reading behind the end of a memory map kills the process, DALI's too
                raise UserError(f"{file} is cut off: it has {size} bytes of {needed}: copy it again")
            with environment.begin() as transaction:
                yield transaction
    except lmdb.Error as error:
        raise UserError(f"{file} cannot be read as LMDB ({error}): copy or write it again") from error


def _check(file: str, policy: ImagePolicy) -> list[Image]:
    found = []
    with _reading(file) as transaction:
        for number, (key, value) in enumerate(transaction.cursor()):
            name = key.decode("utf-8", "backslashreplace")
            encoded, label, form = _parse(value, f"{file}: record {name!r}")
            label = base.check_label(label, f"{file}: record {name!r}")
            image = Image(name, file, label, (number,), form)
            found.append(image.checked(encoded, f"record {name!r}", policy))
    if not found:
        raise UserError(f"{file} holds no record")
    return found


def _parse(value: bytes, owner: str) -> tuple[bytes, int | float | None, str]:
    """(encoded image, label, form) of a value; form: a key of _READERS, "" where DALI would misread it."""
    try:
        protos = _MESSAGES["TensorProtos"].FromString(value).protos
        tensors = [_MESSAGES["TensorProto"].FromString(proto) for proto in protos]
        datum = _MESSAGES["Datum"].FromString(value)
    except DecodeError as error:
        raise UserError(f"{owner} is neither Caffe's Datum nor Caffe2's TensorProtos: {error}") from error
    has_pixels = datum.data and datum.HasField("encoded") and not datum.encoded
    if datum.float_data or has_pixels or (tensors and tensors[0].data_type != _STRING):
        raise UserError(
            f"{owner} holds raw pixels: write it with encoded images (convert_imageset --encoded)"
        )
    if not tensors:
        has_label = datum.HasField("label")
        return datum.data, datum.label if has_label else None, "caffe" if has_label else "caffe-alone"
    images, labels = list(tensors[0].string_data), []
    if len(tensors) > 1:
        kinds = {_FLOAT: "float_data", _INT32: "int32_data", _INT64: "int64_data"}
        labels = list(getattr(tensors[1], kinds.get(tensors[1].data_type, ""), ()))
    label = labels[0] if len(labels) == 1 else None
    form = ""
    if len(images) == 1 and len(tensors) == 1:
        form = "caffe2-alone"
    elif len(images) == 1 and len(tensors) == 2 and label is not None and tensors[1].data_type != _INT64:
        form = "caffe2"  # DALI takes a third tensor for a box
    return images[0] if images else b"", label, form


def _messages() -> dict[str, Any]:
    """Classes of protobuf for _SCHEMAS."""
    file = descriptor_pb2.FileDescriptorProto(name="image_records.proto", package="image_records")
    for name, fields in _SCHEMAS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in fields:
            message.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"image_records.{name}"))
        for name in _SCHEMAS
    }


_MESSAGES = _messages()
