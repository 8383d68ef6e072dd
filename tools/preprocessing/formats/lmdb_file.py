"""An LMDB, opened only where it is whole: reading behind the end of a truncated one kills the process.

Layout: LMDB's mdb.c (MDB_page, MDB_meta, MDB_db), the same on every 64-bit machine of this byte order.
"""

import contextlib
import os
import struct
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    import lmdb

_MAGIC, _VERSION = 0xBEEFC0DE, 1
# Of a meta page behind its header: magic, version; the page size (md_pad of the first of two databases);
# the last page and the transaction, behind these databases of 48 bytes each.
_HEADER = 16
_META = struct.Struct("<II16xI92xQQ")
_NAME = "data.mdb"
_PACKAGE = "lmdb==3.0.0"

_open: "weakref.WeakValueDictionary[str, lmdb.Environment]" = weakref.WeakValueDictionary()


def data_file(path: str) -> str:
    """The file of the LMDB that --input names: by its directory, by the file there, or by a file of its own.

    Raises:
        UserError: there is none.
    """
    file = os.path.join(path, _NAME) if os.path.isdir(path) else path
    if not os.path.exists(file):
        missing = f" holds no {_NAME}" if file != path else ": there is no such file or directory"
        raise UserError(f"--input={path}{missing}: name the directory of an LMDB")
    if not os.path.isfile(file):
        raise UserError(f"{file} is no regular file: name the directory of an LMDB")
    return file


def environment(file: str) -> "lmdb.Environment":
    """An LMDB, open for reading, shared by all who ask for it: no process may open one twice.

    Raises:
        UserError: it is cut off, or none; or the package is missing.
    """
    lmdb = _package()
    _check_whole(file)
    key = os.path.realpath(file)
    found = _open.get(key)
    if found is None:
        try:
            found = lmdb.open(os.fsencode(file), subdir=False, readonly=True, lock=False, readahead=False)
        except lmdb.Error as error:
            raise UserError(f"{file} cannot be opened as LMDB: {error}") from error
        _open[key] = found
    return found


@contextlib.contextmanager
def reading(file: str, *, copies: bool = True) -> "Iterator[lmdb.Transaction]":
    """A look into an LMDB.

    Args:
        file: of the LMDB.
        copies: values are bytes; otherwise they are memory that lasts as long as this look.

    Raises:
        UserError: what `environment` raises; or a page that is damaged.
    """
    lmdb = _package()
    try:
        with environment(file).begin(buffers=not copies) as transaction:
            yield transaction
    except lmdb.Error as error:
        raise UserError(f"{file} is damaged ({error}): copy or write it again") from error


def _check_whole(file: str) -> None:
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            first = _meta(stream.read(_HEADER + _META.size))
            second = None
            if first:
                stream.seek(first[0])
                second = _meta(stream.read(_HEADER + _META.size))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    if first is None:
        raise UserError(f"{file} ({size} bytes) is no LMDB: copy it again, or name another")
    page_size, last_page, _ = first
    if second is not None and second[2] > first[2]:
        last_page = second[1]
    if second is None or size < (last_page + 1) * page_size:
        raise UserError(
            f"{file} is cut off: it has {size} bytes of the {(last_page + 1) * page_size} that its header"
            " says: copy it again"
        )


def _meta(page: bytes) -> tuple[int, int, int] | None:
    """(size of a page, last page, transaction) of a meta page; None where it is none."""
    if len(page) < _HEADER + _META.size:
        return None
    magic, version, page_size, last_page, transaction = _META.unpack_from(page, _HEADER)
    if (magic, version) != (_MAGIC, _VERSION) or page_size < 256 or page_size & (page_size - 1):
        return None
    return page_size, last_page, transaction


def _package() -> ModuleType:
    try:
        import lmdb
    except ImportError as error:
        raise UserError(f"--source=lmdb needs a package: pip install {_PACKAGE}") from error
    return lmdb
