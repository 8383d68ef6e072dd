"""Where derived files go that anybody could make again: the user's cache directory.

$XDG_CACHE_HOME/dali-detection, else ~/.cache/dali-detection, else a private directory under the system's
temporary one (a container's home may be read-only). Files are named by what they hold, so ranks that write
the same file at once write the same bytes, and renaming makes each write whole or absent.
"""

import contextlib
import hashlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Callable

from common import atomic
from common.errors import UserError


def directory() -> pathlib.Path:
    """The cache directory, made if need be and not writable by others.

    Raises:
        UserError: no place can be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [
        pathlib.Path(home) / "dali-detection",
        pathlib.Path(tempfile.gettempdir()) / f"dali-detection-{os.getuid()}",
    ]
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = place.stat()
        except OSError:
            continue
        # Somebody else may have made the predictable name under /tmp first.
        private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if private and os.access(place, os.W_OK | os.X_OK):
            return place
    raise UserError(
        f"neither {places[0]} nor {places[1]} can be written: set XDG_CACHE_HOME to a private directory"
    )


def store(content: bytes, suffix: str) -> pathlib.Path:
    """Writes `content` under a name made of its hash, unless it stands there already; returns the path."""
    path = directory() / f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
    try:
        if path.read_bytes() == content:
            return path
    except FileNotFoundError:
        pass
    write(path, lambda temporary: temporary.write_bytes(content))
    return path


def write(path: pathlib.Path, writer: Callable[[pathlib.Path], object]) -> None:
    """`atomic.write` of a file in the cache; UserError where it cannot be written."""
    try:
        atomic.write(path, writer)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; XDG_CACHE_HOME moves it elsewhere"
        ) from error


def made(name: str, make: Callable[[], bytes]) -> pathlib.Path:
    """The path of the file `name`, whole, made by `make` unless it stands there with its checksum beside it.

    Raises:
        UserError: it cannot be written.
    """
    path = directory() / name
    digest = load(f"{name}.sha256")
    try:
        with open(path, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").digest() == digest:
                return path
    except FileNotFoundError:
        pass
    content = make()
    write(path, lambda temporary: temporary.write_bytes(content))
    digest = hashlib.sha256(content).digest()
    write(path.with_name(f"{name}.sha256"), lambda temporary: temporary.write_bytes(digest))
    return path


def save(name: str, content: bytes) -> None:
    """Keeps `content` under a name of its own. A full disk is no error: the cache only saves time."""
    with contextlib.suppress(OSError):
        atomic.write_bytes(directory() / name, content)


def load(name: str) -> bytes | None:
    """What was saved under a name, whole; None where there is nothing."""
    try:
        return (directory() / name).read_bytes()
    except OSError:
        return None
