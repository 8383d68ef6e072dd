"""Cuts record files into parts, so that DALI shuffles the whole data set: --shuffle=global.

DALI permutes the files of a reader at the start of each epoch, but not the records in a file. So `cut` gives
DALI each file several times, each time with an index of another part of its records. DALI permutes the parts
and draws the records from a buffer, which holds many parts at once.

A part consists of short runs of neighbouring records, drawn at random from one file. So records that are
stored together are far apart in an epoch, while a disk reads more than one record at a time. Parts are always
the same: their indexes are written once, to the cache directory, and the order of the records depends only on
the seed.
"""

import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np

from common.files import cache_directory, user_errors, write_into

# If one of these numbers changes, increase _VERSION, and LOADER_VERSION in loader.py.
RUN = 16  # records
MAX_PARTS = 1024  # of all files together. DALI opens the file of each part of WebDataset, and keeps it open
_VERSION = 1


def cut(
    files: Sequence[str], indexes: Sequence[str], header: str = ""
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Cuts files into about MAX_PARTS parts of similar size, or fewer with RUN records. No file is too small.

    Args:
        files: paths of the record files.
        indexes: path of DALI's index of each file.
        header: first line of an index, with {} for the number of records; "" if there is no such line.

    Returns:
        For each part, the path of its file; and the path of its index.

    Raises:
        UserError: the indexes cannot be written.
    """
    digest, sizes, num_headers = hashlib.sha256(), [], 1 if header else 0
    for index in indexes:
        content = pathlib.Path(index).read_bytes()
        digest.update(content)
        sizes.append(content.count(b"\n") - num_headers)
    digest.update(repr(sizes).encode())
    part_size = max(RUN, -(-sum(sizes) // MAX_PARTS))
    num_parts = [-(-size // part_size) for size in sizes]  # of each file; 0 if it has no usable record
    directory = cache_directory() / f"{digest.hexdigest()[:32]}-{part_size}-{_VERSION}.parts"
    paths = [directory / f"{number:06}.idx" for number in range(sum(num_parts))]

    def write(staged: pathlib.Path) -> None:
        names = (staged / path.name for path in paths)
        for file, count in enumerate(num_parts):
            lines = pathlib.Path(indexes[file]).read_text().splitlines()[num_headers:]
            for rows in np.array_split(_order(len(lines), file), count) if count else ():
                content = [header.format(len(rows))] * num_headers + [lines[row] for row in rows.tolist()]
                next(names).write_text("\n".join([*content, ""]))

    if not all(path.exists() for path in paths):
        with user_errors(f"cannot write {directory} (to use another directory, set XDG_CACHE_HOME)"):
            directory.mkdir(exist_ok=True)
            write_into(directory, write)
    return tuple(np.repeat(files, num_parts).tolist()), tuple(map(str, paths))


def _order(size: int, file: int) -> np.ndarray:
    """Returns the numbers from 0 to size - 1, int64, in the order that is cut into parts: permuted runs."""
    # All versions of NumPy give the same numbers, so all hosts have the same parts.
    draws = np.random.PCG64(file).random_raw(-(-size // RUN))
    order = np.argsort(draws, kind="stable")[:, None] * RUN + np.arange(RUN)
    return order[order < size]
