"""File names for pictures, made of whatever their sources are called."""

import os
import pathlib
import re

# jpeg, jp2, tiff, npy, ...; in img.0001 or a key like v1.25 the dot belongs to the name
_SUFFIX = re.compile(r"(?<=.)\.[A-Za-z][A-Za-z0-9]{0,4}$")
_MAX_BYTES = 230  # of a name without suffix: file systems take 255 with it, and a number may follow


class FileNames:
    """Gives every source's name a file name: its own path with another suffix, where that can be.

    It stays below the directory, is no hidden file, has no characters that do not print, and no two are the
    same: the second a.jpg is a-2.png.

    Args:
        suffix: of all files, ".png".
    """

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._numbers: dict[str, int] = {}

    def of(self, name: str) -> str:
        """The relative path for the next source; it is taken then."""
        parts = _safe_parts(name)
        if any(str(folder) in self._files for folder in pathlib.PurePosixPath(*parts).parents):
            parts = [_safe("_".join(parts))]
        stem = pathlib.PurePosixPath(*parts)
        candidate, number = f"{stem}{self._suffix}", self._numbers.get(str(stem), 1)
        while candidate in self._files or candidate in self._folders:
            number += 1
            candidate = f"{stem}-{number}{self._suffix}"
        self._numbers[str(stem)] = number
        self._files.add(candidate)
        self._folders |= {str(folder) for folder in stem.parents}
        return candidate


def _safe_parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part.strip(". ")]
    if parts:
        parts[-1] = _SUFFIX.sub("", parts[-1])
    return [_safe(part) for part in parts] or ["image"]


def _safe(part: str) -> str:
    printable = "".join(c if c.isprintable() and c != "\\" else "_" for c in part).lstrip(".")
    short = os.fsencode(printable)[:_MAX_BYTES].decode(errors="ignore")
    return short or "_"
