"""Atomic writes, and the user's cache directory.

Writing to a file itself loses the old content too when the process is killed or the disk is full. Here a file
or directory is either the old one or the new one, never half of each.

The cache directory holds what can be made again: $XDG_CACHE_HOME/dali-detection, else
~/.cache/dali-detection, else a private directory under the system's temporary one (a container's home may be
read-only). Names in it tell the content, so ranks that write the same file at once write the same bytes.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator

from common.errors import UserError

TEMPORARY = ".tmp-"  # how the name of everything unfinished begins
_FORCED_AT_ONCE = 32  # files: a disk takes so many in hardly more than the milliseconds that one takes


def write_into(directory: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """Adds files to a directory where others may stand, which stay.

    `writer` fills a directory beside them, with sub-directories where it wants some. After it has returned,
    each file is forced to the disk and takes its place by a rename, in the order of their names. An error
    before leaves all files as they were.

    Args:
        directory: exists.
        writer: called once with the path of an empty directory on the same disk.

    Raises:
        OSError: the disk is full, read-only, a directory stands where a file should go, ...; and whatever
            `writer` raises.
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
    """Replaces one file by what `writer` writes, as `write_into` does.

    Args:
        path: the file to make or replace; its directory exists.
        writer: called once with a temporary path, which ends like `path` does (Keras reads the suffix).
    """
    path = pathlib.Path(path)
    write_into(path.parent, lambda staged: writer(staged / path.name))


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """`write_file` of bytes."""
    write_file(path, lambda temporary: temporary.write_bytes(content))


def write_directory(path: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """Replaces the directory `path` by a new one, which `writer` fills, in one step.

    An older directory at `path` is moved away just before the rename, so for a moment there is neither.
    """
    path = pathlib.Path(path)
    with _staged(path.parent) as staged:
        new = staged / path.name
        new.mkdir()
        writer(new)
        for file in (*new.iterdir(), new):
            _force_to_disk(file)
        if path.exists():
            os.replace(path, staged / f"old-{path.name}")
        os.replace(new, path)
    _force_to_disk(path.parent)


def remove_directory(path: str | os.PathLike) -> None:
    """Removes a directory so that a crash leaves either all of it under its name or nothing."""
    temporary = _temporary(pathlib.Path(path).parent)
    os.replace(path, temporary)
    shutil.rmtree(temporary)


def remove_unfinished(directory: str | os.PathLike) -> None:
    """Removes what killed processes left unfinished in `directory`; no other process may write there."""
    for path in pathlib.Path(directory).glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _staged(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new directory in `directory`, and so on the same disk; removed with all that is left in it."""
    staged = _temporary(directory)
    staged.mkdir()
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _temporary(directory: pathlib.Path) -> pathlib.Path:
    return directory / f"{TEMPORARY}{uuid.uuid4().hex[:8]}"


def _force_to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- results ---


def file_type(mode: int) -> str:
    """What a file that is not regular is, in words."""
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Around reading and writing: UserError that begins with `what` for any OSError, as of a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


def make_output_directory(path: str | os.PathLike) -> pathlib.Path:
    """Makes the directory of --output_dir, before the work for its files; UserError where that fails."""
    with user_errors(f"--output_dir={path}"):
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    return pathlib.Path(path)


# --- the cache ---


def cache_directory() -> pathlib.Path:
    """The cache directory, made if need be and not writable by others.

    Raises:
        UserError: no place can be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = (f"{home}/dali-detection", f"{tempfile.gettempdir()}/dali-detection-{os.getuid()}")
    for place in map(pathlib.Path, places):
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = place.stat()
            # Another user may have made the predictable name under /tmp first.
            is_private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_private and os.access(place, os.W_OK | os.X_OK):
                return place
    raise UserError(f"neither {places[0]} nor {places[1]} is private and writable: set XDG_CACHE_HOME")


def store_cached(content: bytes, suffix: str) -> pathlib.Path:
    """The path of a file in the cache with `content`, named by its hash and written unless it is there.

    Raises:
        UserError: it cannot be written.
    """
    return get_or_create(f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}", lambda: content)


def get_or_create(name: str, make: Callable[[], bytes]) -> pathlib.Path:
    """The path of the file `name` in the cache, made by `make` unless it is there.

    Raises:
        UserError: it cannot be written.
    """
    path = cache_directory() / name
    if not path.exists():
        with user_errors(f"cannot write {path} (XDG_CACHE_HOME moves it)"):
            write_bytes(path, make())
    return path


def save_cached(name: str, content: bytes) -> None:
    """Keeps `content` for `load_cached`. A full disk is not an error: the cache only saves time."""
    with contextlib.suppress(OSError):
        write_bytes(cache_directory() / name, content)


def load_cached(name: str) -> bytes | None:
    """The content of a file of the cache; None where there is none, or it cannot be read."""
    with contextlib.suppress(OSError):
        return (cache_directory() / name).read_bytes()
    return None
