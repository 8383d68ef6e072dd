"""Atomic writes of files and directories, and the user's cache directory.

A kill or a full disk leaves either the complete old file or directory, or the complete new one.

The cache directory is $XDG_CACHE_HOME/dali-detection, else ~/.cache/dali-detection, else a private directory
in the system's temporary directory. Cache files of the same name have the same content, so several ranks may
write the same file at once.
"""

import codecs
import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pathlib
import shutil
import stat
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from common.errors import UserError

TEMPORARY = ".tmp-"  # prefix of the names of unfinished files and directories
_UNUSED_SECONDS = 24 * 3600
_FORCED_AT_ONCE = 32  # files that are synced in parallel
_ALIGNMENT = 64  # bytes
_CHECKSUM = 8  # bytes at the beginning of a cache file, for a checksum of the others


def write_into(directory: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """Adds files to a directory, or replaces them. Other files in the directory stay unchanged.

    `writer` writes to a temporary directory. Then the files are synced to the disk and renamed, in the order
    of their names. An error before the renames changes nothing.

    Args:
        directory: an existing directory.
        writer: called once with the path of an empty directory on the same disk.

    Raises:
        OSError: for example, the disk is full or read-only. Errors of `writer` are passed on.
    """
    directory = pathlib.Path(directory)
    with _staged(directory) as staged:
        writer(staged)
        files = sorted(path for path in staged.rglob("*") if not path.is_dir())
        with concurrent.futures.ThreadPoolExecutor(_FORCED_AT_ONCE) as pool:
            list(pool.map(_force_to_disk, files))
        places = [directory / file.relative_to(staged) for file in files]
        for file, place in zip(files, places, strict=True):
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    for folder in {place.parent for place in places}:
        _force_to_disk(folder)


def write_file(path: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """Makes or replaces one file.

    Args:
        path: the file, in an existing directory.
        writer: called once with a temporary path that has the same file name.
    """
    path = pathlib.Path(path)
    write_into(path.parent, lambda staged: writer(staged / path.name))


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Makes or replaces one file with this content."""
    write_file(path, lambda temporary: temporary.write_bytes(content))


def write_directory(path: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """Makes or replaces the directory `path`; `writer` fills the new directory before it is renamed.

    While an old directory is replaced, `path` is missing for a moment.
    """
    path = pathlib.Path(path)
    with _staged(path.parent) as staged:
        new = staged / path.name
        new.mkdir()
        writer(new)
        for file in (*new.rglob("*"), new):
            _force_to_disk(file)
        if path.exists():
            os.replace(path, staged / f"old-{path.name}")
        os.replace(new, path)
    _force_to_disk(path.parent)


def remove_directory(path: str | os.PathLike) -> None:
    """Removes a directory. After a crash, the directory is either complete or gone."""
    path = pathlib.Path(path)
    shutil.rmtree(path.replace(path.with_name(f"{TEMPORARY}{uuid.uuid4().hex[:8]}")))


def remove_unfinished(directory: str | os.PathLike) -> None:
    """Removes unfinished files of killed processes. No process may be writing to `directory`."""
    for path in pathlib.Path(directory).glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _staged(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a temporary directory in `directory`, thus on the same disk."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=directory, ignore_cleanup_errors=True) as staged:
        yield pathlib.Path(staged)


def _force_to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encoding_of(path: str | os.PathLike) -> str:
    """Returns the encoding of a text file: UTF-16 if it begins with that byte order mark, else UTF-8.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        is_utf_16 = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if is_utf_16 else "utf-8-sig"


def file_type(mode: int) -> str:
    """Returns the type of a file that is not regular: "a directory", "a pipe", ..."""
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turns an OSError in the `with` block into a UserError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


def make_output_directory(path: str | os.PathLike) -> pathlib.Path:
    """Makes the directory --output_dir; UserError if that fails."""
    if os.fspath(path).startswith("s3:/"):
        raise UserError(f"--output_dir={path} is in a bucket: give a directory on a disk, and copy it later")
    with user_errors(f"--output_dir={path}"):
        if pathlib.Path(path).is_file():
            raise UserError(f"--output_dir={path} is a file: give a directory")
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    return pathlib.Path(path)


# --- the cache ---


def cache_directory() -> pathlib.Path:
    """Returns the cache directory; makes it if it is missing.

    Raises:
        UserError: none of the possible directories is private and writable.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = (f"{home}/dali-detection", f"{tempfile.gettempdir()}/dali-detection-{os.getuid()}")
    for place in map(pathlib.Path, places):
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = place.stat()
            # A directory in /tmp may belong to another user.
            is_private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_private and os.access(place, os.W_OK | os.X_OK):
                _remove_old_unfinished(place)
                return place
    raise UserError(f"neither {places[0]} nor {places[1]} is private and writable: set XDG_CACHE_HOME")


@functools.cache  # once per process
def _remove_old_unfinished(directory: pathlib.Path) -> None:
    """Removes unfinished files that a killed process left. Those of the last day may be in use."""
    for path in directory.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def store_cached(content: bytes, suffix: str) -> pathlib.Path:
    """Stores `content` in the cache, under its hash and `suffix`, and returns the file's path.

    Raises:
        UserError: the file cannot be written.
    """
    return get_or_create(f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}", lambda: content)


def get_or_create(name: str, make: Callable[[], bytes]) -> pathlib.Path:
    """Returns the path of the cache file `name`. If the file is missing, writes the bytes from `make` to it.

    Raises:
        UserError: the file cannot be written.
    """
    path = cache_directory() / name
    if not path.exists():
        with user_errors(f"cannot write {path} (to use another directory, set XDG_CACHE_HOME)"):
            write_bytes(path, make())
    return path


def save_cached(name: str, content: bytes) -> None:
    """Stores `content` for `load_cached`. Ignores errors such as a full disk."""
    with contextlib.suppress(OSError):
        write_bytes(cache_directory() / name, _checksum(content) + content)


def load_cached(name: str) -> bytes | None:
    """Returns what `save_cached` stored; None if it cannot be read, or is damaged."""
    with contextlib.suppress(OSError):
        content = memoryview((cache_directory() / name).read_bytes())
        if content[:_CHECKSUM] == _checksum(content[_CHECKSUM:]):
            return content[_CHECKSUM:].tobytes()
    return None


def _checksum(content: bytes | memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM, "little")


def save_arrays(name: str, details: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Stores arrays and `details`, a value for msgpack, for `load_arrays`. Ignores errors like `save_cached`.

    The file has a checksum of all that follows, the length of a header, uint64, the header, and the arrays,
    each at a multiple of 64 bytes.
    """
    columns = [(key, array.dtype.str, array.shape) for key, array in arrays.items()]
    header = msgspec.msgpack.encode((details, columns))

    def write(path: pathlib.Path) -> None:
        with open(path, "wb") as stream:
            stream.write(bytes(_CHECKSUM) + len(header).to_bytes(8, "little") + header)
            for array in arrays.values():
                stream.write(bytes(-stream.tell() % _ALIGNMENT))
                stream.write(np.ascontiguousarray(array).data)
            stream.flush()
            checksum = _checksum(np.memmap(path, np.uint8, "r")[_CHECKSUM:].data)
            stream.seek(0)
            stream.write(checksum)

    with contextlib.suppress(OSError):
        write_file(cache_directory() / name, write)


def load_arrays(name: str) -> tuple[Any, dict[str, np.ndarray]] | None:
    """Returns what `save_arrays` stored; None if it cannot be read, or is damaged.

    The arrays are read-only and mapped into memory, so processes on one host share it.
    """
    with contextlib.suppress(OSError, ValueError):  # a missing file, an empty file
        content = np.memmap(cache_directory() / name, np.uint8, "r").view(np.ndarray)
        if content[:_CHECKSUM].tobytes() == _checksum(content[_CHECKSUM:].data):
            return _split_arrays(content)
    return None


def _split_arrays(content: np.ndarray) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the details and the arrays in a file of `save_arrays`, uint8 (N,)."""
    begin = _CHECKSUM + 8
    place = begin + int.from_bytes(content[_CHECKSUM:begin].tobytes(), "little")
    details, columns = msgspec.msgpack.decode(content[begin:place].tobytes())
    arrays = {}
    for key, dtype, shape in columns:
        place += -place % _ALIGNMENT
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[key] = content[place : place + count].view(dtype).reshape(shape)
        place += count
    return details, arrays


def remove_cached(name: str) -> None:
    """Removes a file of `save_arrays` or `save_cached`, if there is one."""
    with contextlib.suppress(OSError):
        (cache_directory() / name).unlink()
