"""Which files --input means, in which order, and what the names of directories or a list say of them."""

import glob
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.errors import UserError
from tools.preprocessing.formats.base import check_label


class Found(NamedTuple):
    """Files that were found, not looked at yet.

    Attributes:
        files: absolute paths.
        names: relative to where the search began, or as the list writes them.
        labels: None where there is none.
        label_names: of the labels 0, 1, ...; () where they have none.
    """

    files: Sequence[str]
    names: Sequence[str]
    labels: Sequence[int | None]
    label_names: Sequence[str] = ()


def of_tree(path: str, suffixes: Sequence[str]) -> Found:
    """The files of a directory and of all below it, in the order of their names, directory by directory.

    A file's label is the number of the first directory on its way, of all that are there, by name: those of
    an empty directory and of its neighbours are the same as if it were full. Files that lie beside these
    directories have none, nor has any where no directory holds a file. Names that begin with a dot are
    passed over; symbolic links are followed. A path that is no directory is one file, or a glob.

    Args:
        path: --input.
        suffixes: of the files that are wanted, in lower case. One file that is named is taken as it is.

    Raises:
        UserError: there is none.
    """
    if not os.path.isdir(path):
        return _matches(path, suffixes)
    names = sorted(_below(path, suffixes), key=lambda name: name.split("/"))
    if not names:
        raise UserError(f"--input={path}: no file there ends in {', '.join(suffixes)}")
    with os.scandir(path) as entries:
        directories = sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
    number_of = {directory: number for number, directory in enumerate(directories)}
    labels = [number_of[name.split("/", 1)[0]] if "/" in name else None for name in names]
    is_flat = all(label is None for label in labels)
    files = [os.path.join(os.path.abspath(path), name) for name in names]
    return Found(files, names, labels, () if is_flat else directories)


def of_list(path: str) -> Found:
    """The files of a text file: on each line a path, or a path, blanks and a whole number, its label.

    Either all lines have a label or none has. Paths are relative to the list, and may hold blanks, but not
    begin or end with one. Empty lines and lines that begin with # say nothing (`./#1.jpg` is a file).

    Raises:
        UserError: it cannot be read, or holds no path, or a line that is none.
    """
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UserError(f"--input={path}: {error.strerror}") from error
    if "\0" in text:
        raise UserError(f"--input={path} is no text file: a list has one path a line")
    numbered = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    numbered = [(number, line) for number, line in numbered if line and line[0] != "#"]
    if not numbered:
        raise UserError(f"--input={path} lists no file: write one path a line, or a path and a label")
    parts = [line.rsplit(maxsplit=1) for _, line in numbered]
    is_labelled = [len(part) == 2 and _is_integer(part[1]) for part in parts]
    if all(is_labelled):
        names = [name for name, _ in parts]
        labels = [
            check_label(int(label), f"{path} line {number}")
            for (_, label), (number, _) in zip(parts, numbered, strict=True)
        ]
    elif any(is_labelled):
        number, line = numbered[is_labelled.index(False)]
        raise UserError(f"{path} line {number}, {line!r}, has no label, and others have: give all or none")
    else:
        names, labels = [line for _, line in numbered], [None] * len(numbered)
    directory = os.path.dirname(os.path.abspath(path))
    return Found([os.path.normpath(os.path.join(directory, name)) for name in names], names, labels)


def _matches(path: str, suffixes: Sequence[str]) -> Found:
    if os.path.exists(path):
        return Found([os.path.abspath(path)], [os.path.basename(path)], [None])
    if not glob.has_magic(path):
        raise UserError(f"--input={path}: there is no such file or directory")
    files = sorted(file for file in glob.glob(path, recursive=True) if file.lower().endswith(tuple(suffixes)))
    if not files:
        raise UserError(f"--input={path} matches no file that ends in {', '.join(suffixes)}")
    literal = path[: min(path.index(magic) for magic in "*?[" if magic in path)]
    begin = os.path.dirname(literal)
    names = [os.path.relpath(file, begin or ".") for file in files]
    return Found([os.path.abspath(file) for file in files], names, [None] * len(files))


def _below(
    directory: str, suffixes: Sequence[str], beginning: str = "", above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Names relative to the first `directory`, in no order.

    Args:
        directory: where to look.
        suffixes: of what is wanted.
        beginning: of the names that are found.
        above: the directories on the way, by their real paths: a link to one of them has no end.
    """
    here = os.path.realpath(directory)
    if here in above:
        return
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    for entry in entries:
        if entry.name[0] == ".":
            continue
        if entry.is_dir():
            yield from _below(entry.path, suffixes, f"{beginning}{entry.name}/", above | {here})
        elif entry.name.lower().endswith(tuple(suffixes)):
            yield beginning + entry.name


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()
