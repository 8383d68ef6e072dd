"""The samples of a tar archive, as WebDataset lays them out: files that follow each other and have the same
path up to the first dot of their name.

Layout: webdataset/webdataset README, and dali/operators/reader/loader/webdataset_loader.cc of NVIDIA/DALI.
"""

import tarfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.errors import UserError

_BLOCK = 512  # bytes
_GZIP = b"\x1f\x8b"


class Component(NamedTuple):
    """One file of a sample: its whole name, and where its content lies in the archive."""

    name: str
    offset: int
    size: int


class Sample(NamedTuple):
    """A sample: the path that its files share, and these by what follows the dot, in lower case."""

    key: str
    components: dict[str, Component]


def walk(path: str) -> Iterator[Sample]:
    """All samples of an archive, in its order.

    Directories, links and names that begin with a dot are passed over.

    Raises:
        UserError: it is no tar, or not whole.
    """
    try:
        with tarfile.open(path, "r:", errorlevel=2) as archive:
            key, components = None, {}
            for member in archive:
                directory, slash, base = member.name.rpartition("/")
                if not member.isfile() or base.startswith("."):
                    continue
                if member.issparse():
                    raise UserError(f"{path}: {member.name!r} is a sparse file: write it as a whole one")
                stem, _, extension = base.partition(".")
                if directory + slash + stem != key:
                    if components:
                        yield Sample(key, components)
                    key, components = directory + slash + stem, {}
                components[extension.lower()] = Component(member.name, member.offset_data, member.size)
            if components:
                yield Sample(key, components)
            _check_end(archive, path)
    except tarfile.TarError as error:
        raise UserError(f"{path}: {_reason(path, str(error))}") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _check_end(archive: tarfile.TarFile, path: str) -> None:
    """UserError where Python's reader stopped at anything but the empty block that ends an archive."""
    with open(path, "rb") as stream:
        stream.seek(archive.offset)
        block = stream.read(_BLOCK)
    if len(block) < _BLOCK or any(block):
        what = "is damaged" if len(block) == _BLOCK else "is cut off"
        raise UserError(f"{path} {what} at byte {archive.offset}: copy or write it again")


def _reason(path: str, reason: str) -> str:
    with open(path, "rb") as stream:
        begin = stream.read(len(_GZIP))
    if not begin:
        return "is empty (0 bytes): copy or write it again"
    if begin == _GZIP:
        return "it is gzip-compressed: gunzip it, DALI reads plain tar"
    if "unexpected end" in reason:
        return "it is cut off: copy or write it again"
    return f"it is no tar archive ({reason})"


def first_of(sample: Sample, extensions: Sequence[str]) -> Component | None:
    """The first of some components that a sample has."""
    return next((sample.components[name] for name in extensions if name in sample.components), None)
