"""Images in NumPy files, (H, W, C), uint8 or float32."""

import dataclasses
import io
import os
import tokenize
from collections.abc import Sequence

import numpy as np
from numpy.lib import format as npy

from common.datacheck import images
from common.datacheck.images import ImageFacts
from common.errors import UserError
from common.issues import Findings
from common.reader_calls import Call, ReaderCall
from common.shards import order
from tools.preprocessing.formats import base, file_names
from tools.preprocessing.formats.base import Given, ImageSource, Part, Seen

_DTYPES = (np.dtype("u1"), np.dtype("<f4"))
# What NumPy raises at headers that are none.
_NO_HEADER = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError)
_READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NumpyImages(ImageSource):
    """Arrays in files.

    Attributes:
        files: absolute paths.
        is_plain: DALI reads all headers: it takes them by their letters.
    """

    kind = "numpy"
    is_decoded = True
    files: Sequence[str]
    is_plain: bool
    names: Sequence[str]
    labels: np.ndarray
    label_names: Sequence[str]

    def encoded(self, i: int) -> bytes:
        raise TypeError(f"{self.files[i]} is an array, not an encoded image")

    def sample(self, i: int) -> tuple[np.ndarray, int]:
        try:
            image = np.load(self.files[i], allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.files[i]}: {error}") from error
        return np.ascontiguousarray(image), int(self.labels[i])

    def _call(self, part: Part) -> Call:
        has_labels = bool((self.labels != base.NO_LABEL).any())  # DALI's reader gives none
        if has_labels or not self.is_plain or not all(map(base.is_text, self.files)):
            return self._external_call(part)
        arguments = {"files": list(self.files)} | part.shard | order(part.training, part.seed)
        return ReaderCall("numpy", arguments, label=None, layout="HWC")


def open_numpy(given: Given) -> NumpyImages:
    """--source=numpy: a directory of .npy files, one, a glob, or a list of them that ends in .txt."""
    if given.path.endswith(".txt"):
        found = file_names.of_list(given.path)
    else:
        found = file_names.of_tree(given.path, (".npy",))
    # Of the files no more is remembered than the headers: they are read in no time.
    seen = [
        _look(file, name, given.policy.max_megapixels)
        for file, name in zip(found.files, found.names, strict=True)
    ]
    findings = Findings(given.path)
    kept = base.judge(seen, findings, given.policy, lambda row: repr(found.names[row]))
    base.check_one_kind([seen[row] for row in kept], given.path)
    given.on_report(findings)
    labels = base.column_of([found.labels[row] for row in kept])
    return NumpyImages(
        files=[found.files[row] for row in kept],
        is_plain=all(seen[row].place == _PLAIN for row in kept),
        names=[found.names[row] for row in kept],
        labels=labels,
        label_names=found.label_names or base.names_of(labels, given.label_map),
    )


_PLAIN = (1,)


def _look(path: str, name: str, max_megapixels: float) -> Seen:
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            return _faulty(name, "image-not-a-file", "")
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                return _faulty(name, "image-empty", "")
            try:
                version = npy.read_magic(stream)
                if version not in _READ_HEADER:
                    return _faulty(name, "unsupported-format", f"NumPy's format {version}, no plain array")
                shape, is_fortran, dtype = _READ_HEADER[version](stream)
            except _NO_HEADER as error:
                return _faulty(name, "not-an-image", " ".join(str(error).split()))
            begin = stream.tell()
            stream.seek(0)
            header = stream.read(begin)
    except FileNotFoundError:
        return _faulty(name, "image-missing", "")
    except OSError as error:
        return _faulty(name, "image-unreadable", error.strerror or str(error))
    if dtype.hasobject:
        return _faulty(name, "unsupported-format", "an array of Python objects, which nobody unpickles here")
    if dtype not in _DTYPES:
        return _faulty(name, "unsupported-format", f"an array of {dtype}: uint8 or float32 is read")
    if len(shape) != 3 or 0 in shape:
        return _faulty(name, "unsupported-format", f"the shape {shape}: height, width, channels are read")
    needed = begin + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size < needed:
        return _faulty(name, "image-truncated", f"it has {size} bytes of {needed}")
    facts = images.limited(ImageFacts("NPY", shape[0], shape[1]), max_megapixels)
    is_plain = size == needed and header == _header_of(shape, is_fortran, dtype)
    return Seen(name, facts, form=dtype.name, place=_PLAIN if is_plain else ())


def _faulty(name: str, fault: str, detail: str) -> Seen:
    return Seen(name, ImageFacts(fault=fault, detail=detail))


def _header_of(shape: tuple[int, ...], is_fortran: bool, dtype: np.dtype) -> bytes:
    """What NumPy writes before such an array."""
    stream = io.BytesIO()
    fields = {"descr": npy.dtype_to_descr(dtype), "fortran_order": is_fortran, "shape": shape}
    npy.write_array_header_1_0(stream, fields)
    return stream.getvalue()
