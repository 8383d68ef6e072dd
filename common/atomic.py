"""Files and directories that are either the old ones or the new ones, never half of each.

Writing to the file itself loses the old content too when the process is killed or the disk is full.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator

from common.errors import UserError

TEMPORARY = ".tmp-"  # how the name of everything unfinished begins
_FORCED_AT_ONCE = 32  # files: a disk takes so many in hardly more than the milliseconds that one takes


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


def write_into(directory: str | os.PathLike, writer: Callable[[pathlib.Path], object]) -> None:
    """`write` for files that go to a directory where others may stand, which stay.

    `writer` fills a directory beside them, with sub-directories if it likes; when it has returned, each file
    takes its place by a rename, in the order of their names. Whatever goes wrong before leaves everything as
    it was, down to directories that were made for this.

    Args:
        directory: made if need be, with its parents.
        writer: called once with the path of an empty directory on the same disk.

    Raises:
        OSError: the disk is full, read-only, a directory stands where a file should go, ...; and whatever
            `writer` raises.
    """
    directory = pathlib.Path(directory)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        staged = _temporary(directory / "files")
        staged.mkdir()
        try:
            writer(staged)
            _move_all(staged, directory)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()  # which only removes what is empty
        raise


def make_output_directory(path: str | os.PathLike) -> pathlib.Path:
    """Makes the directory of --output_dir, before the work for its files; UserError where that fails."""
    try:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir={path}: {error.strerror}") from error
    return pathlib.Path(path)


@contextlib.contextmanager
def writing(directory: str | os.PathLike) -> Iterator[None]:
    """Around the writing of results: UserError where it fails, for example because the disk is full."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output_dir={directory}: {error.strerror or error}") from error


def _move_all(source: pathlib.Path, target: pathlib.Path) -> None:
    files = sorted(path for path in source.rglob("*") if not path.is_dir())
    with concurrent.futures.ThreadPoolExecutor(_FORCED_AT_ONCE) as pool:
        list(pool.map(_force_to_disk, files))
    folders = {target}
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
        folders.add(place.parent)
    for folder in folders:
        _force_to_disk(folder)


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
