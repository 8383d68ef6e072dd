"""Files and directories that are either the old ones or the new ones, never half of each.

Writing to the file itself loses the old content too when the process is killed or the disk is full.
"""

import os
import pathlib
import shutil
import uuid
from collections.abc import Callable

TEMPORARY = ".tmp-"  # how the name of everything unfinished begins


def write(path: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """Replaces `path` by what `writer` writes, in one step that a crash cannot split.

    The new content goes to a temporary name in the same directory, is forced to the disk, and takes the place
    of `path` by a rename. Whatever goes wrong before the rename leaves the old file as it was.

    Args:
        path: the file to make or replace; its directory exists.
        writer: called once with the temporary path, which ends like `path` does (Keras looks at the suffix).

    Raises:
        OSError: the disk is full, read-only, ...; and whatever `writer` raises.
    """
    path = pathlib.Path(path)
    temporary = _temporary(path)
    try:
        writer(temporary)
        _force_to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _force_to_disk(path.parent)  # the rename itself


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """`write` of bytes at hand."""
    write(path, lambda temporary: temporary.write_bytes(content))


def write_directory(path: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """`write` for several files that belong together: `writer` fills a new directory, which becomes `path`.

    A directory that stands at `path` is removed just before the rename, so for a moment there is neither.
    """
    path = pathlib.Path(path)
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        writer(temporary)
        for file in temporary.iterdir():
            _force_to_disk(file)
        _force_to_disk(temporary)
        if path.exists():
            remove_directory(path)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _force_to_disk(path.parent)


def rename(path: str | os.PathLike, target: str | os.PathLike) -> None:
    """os.replace that has reached the disk when it returns."""
    os.replace(path, target)
    _force_to_disk(pathlib.Path(target).parent)


def remove_directory(path: str | os.PathLike) -> None:
    """Removes a directory so that a crash leaves either all of it under its name or nothing."""
    temporary = _temporary(pathlib.Path(path))
    os.replace(path, temporary)
    shutil.rmtree(temporary)


def remove_unfinished(directory: str | os.PathLike) -> None:
    """Removes what killed processes left unfinished in `directory`; nobody else may be writing there."""
    for path in pathlib.Path(directory).glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{TEMPORARY}{uuid.uuid4().hex[:8]}-{path.name}")


def _force_to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
