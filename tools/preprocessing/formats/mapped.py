"""Whole files as bytes that are read when they are looked at."""

import mmap
import os

from common.errors import UserError


def mapped(path: str) -> memoryview:
    """The content of a regular file.

    Raises:
        UserError: it cannot be read, is empty, or no regular file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is no regular file")
    try:
        with open(path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                raise UserError(f"{path} is empty (0 bytes): copy or write it again")
            return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def read_span(path: str, offset: int, size: int) -> bytes:
    """A part of a file; UserError where it is not there."""
    try:
        with open(path, "rb") as stream:
            content = os.pread(stream.fileno(), size, offset)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if len(content) < size:
        raise UserError(f"{path} has become shorter since it was checked")
    return content
