"""Keeps the results of the image check in the cache directory, one file per image directory.

A long check saves its new results in parts, so that one that is killed goes on where it stopped.
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from common.data.check.image_headers import ImageFacts
from common.files import load_arrays, remove_cached, save_arrays

_VERSION = 9  # increase this when the check changes
UNKNOWN = -1  # the size of a file whose result is unknown, or must not be cached
# The state of a file: its size in bytes, times in ns, and the lower 63 bits of its inode number.
STATE = ("size", "modified", "changed", "inode")
_NO_STATE = (UNKNOWN, 0, 0, 0)
_FACTS = ("height", "width", "orientation", "checksum", "image_format")  # of an image without a fault
ROW = np.dtype(
    [
        *((field, "i8") for field in (*STATE, *_FACTS[:-1])),
        ("image_format", "S16"),
        ("decoded", "?"),  # see Result
    ]
)


class Result(NamedTuple):
    """The result for one file.

    Attributes:
        state: the values of STATE; None if the result must not be cached.
        decoded: False if the pixels were not decoded and no fault was found.
    """

    state: tuple[int, ...] | None
    facts: ImageFacts
    decoded: bool = False


@dataclasses.dataclass
class ImageTable:
    """The results for image files.

    Attributes:
        names: N different paths, below the image directory or absolute.
        rows: structured array (N,) of dtype ROW.
        faulty: row -> the facts about a file with a fault; the row itself only has the state.
    """

    names: Sequence[str] = ()
    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, ROW))
    faulty: dict[int, ImageFacts] = dataclasses.field(default_factory=dict)

    def select(self, names: Sequence[str]) -> "ImageTable":
        """Returns a copy of the rows for these names. The size of an unknown file is UNKNOWN."""
        if names == self.names:
            return ImageTable(names, self.rows.copy(), dict(self.faulty))
        row_of = dict(zip(self.names, itertools.count()))
        places = np.array([row_of.get(name, UNKNOWN) for name in names], np.int64)
        rows = np.zeros(len(names), ROW)
        rows["size"] = UNKNOWN
        rows[places >= 0] = self.rows[places[places >= 0]]
        faulty = np.flatnonzero(np.isin(places, list(self.faulty))).tolist()
        return ImageTable(names, rows, {row: self.faulty[int(places[row])] for row in faulty})

    def update(self, results: Sequence[tuple[int, Result]]) -> None:
        """Stores results, each of which comes with its row."""
        values = []
        for row, (state, facts, decoded) in results:
            self.faulty.pop(row, None)
            if facts.fault:
                self.faulty[row], facts = facts, ImageFacts()
            values.append((*(state or _NO_STATE), *(getattr(facts, field) for field in _FACTS), decoded))
        self.rows[[row for row, _ in results]] = np.array(values, ROW)

    def cacheable(self, rows: Sequence[int]) -> "ImageTable":
        """Returns those of these rows that may be cached."""
        array = np.array(rows, np.int64)
        rows = array[self.rows["size"][array] != UNKNOWN].tolist()
        faulty = {place: self.faulty[row] for place, row in enumerate(rows) if row in self.faulty}
        return ImageTable([self.names[row] for row in rows], self.rows[rows], faulty)

    def facts(self) -> list[ImageFacts]:
        columns = (self.rows[field].tolist() for field in _FACTS)
        facts = [
            ImageFacts(image_format.decode(), height, width, orientation, checksum=checksum)
            for height, width, orientation, checksum, image_format in zip(*columns, strict=True)
        ]
        for row, fact in self.faulty.items():
            facts[row] = fact
        return facts

    def digest(self) -> str:
        """Returns a digest that changes with any file or result."""
        digest = hashlib.sha256(self.rows.data)
        digest.update(msgspec.msgpack.encode(sorted(self.faulty.items())))
        digest.update(os.fsencode("\0".join(self.names)))
        return digest.hexdigest()

    def joined(self, *others: "ImageTable") -> "ImageTable":
        """Returns the rows of all tables. If several have a file, the row of the last one is used."""
        tables = (self, *others)
        row_of = dict(zip(itertools.chain.from_iterable(table.names for table in tables), itertools.count()))
        rows, first = list(row_of.values()), 0
        faulty: dict[int, ImageFacts] = {}
        for table in tables:
            faulty |= {first + row: facts for row, facts in table.faulty.items()}
            first += len(table.names)
        chosen = {place: faulty[row] for place, row in enumerate(rows) if row in faulty}
        return ImageTable(list(row_of), np.concatenate([table.rows for table in tables])[rows], chosen)


class ImageCache:
    """The cache file of an image directory."""

    def __init__(self, images_dir: str | os.PathLike) -> None:
        digest = hashlib.sha256(os.fsencode(os.path.realpath(images_dir))).hexdigest()[:32]
        self._name, self._parts = f"files-{_VERSION}-{digest}", 0

    def load(self) -> ImageTable:
        """Returns all results in the cache."""
        table = _load(self._name) or ImageTable()
        parts: list[ImageTable] = []
        while part := _load(self._part(len(parts))):
            parts.append(part)
        self._parts = len(parts)
        return table.joined(*parts) if parts else table

    def save(self, table: ImageTable) -> None:
        """Replaces the results in the cache."""
        _save(self._name, table)
        for number in range(self._parts):
            remove_cached(self._part(number))
        self._parts = 0

    def add(self, table: ImageTable) -> None:
        """Adds results, which is faster than to replace all."""
        _save(self._part(self._parts), table)
        self._parts += 1

    def _part(self, number: int) -> str:
        return f"{self._name}-{number}"


def _load(name: str) -> ImageTable | None:
    if not (stored := load_arrays(name)):
        return None
    faulty, arrays = stored
    names = os.fsdecode(arrays["names"].tobytes())
    faulty = dict(msgspec.convert(faulty, list[tuple[int, ImageFacts]]))
    return ImageTable(names.split("\0") if names else [], arrays["rows"].view(ROW), faulty)


def _save(name: str, table: ImageTable) -> None:
    names = np.frombuffer(os.fsencode("\0".join(table.names)), np.uint8)
    save_arrays(name, list(table.faulty.items()), {"names": names, "rows": table.rows.view(np.uint8)})
