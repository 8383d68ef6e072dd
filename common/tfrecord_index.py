"""Which files a pattern names, where their records stand, and DALI's index of each: `offset size` per record.

DALI trusts an index (`<file>.idx`) blindly: one that was made for a shorter file hides records without a
word, one for another file reads garbage. So an index is compared with the file before it is used, and made
again unless it is right. All headers of a file are walked for that, and every length is held against its
checksum.
"""

import glob
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from common import atomic, cache
from common.datacheck.tfrecord_walk import walk
from common.issues import Findings

_NO_RECORDS = (".idx", ".json", ".pbtxt")  # what lies beside record files


def expand_pattern(pattern: str) -> list[str]:
    """What a glob (several with commas between them) matches, sorted: equal on all ranks.

    Pipes, directories and dangling links are among it, for `walk` to name; directories that `**` passes
    through are not.

    Raises:
        DataError: every pattern that matches nothing.
    """
    findings = Findings(pattern)
    files: set[str] = set()
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    for part in parts or [pattern]:
        matches = {file for file in glob.glob(part, recursive=True) if not file.endswith(_NO_RECORDS)}
        if part.endswith("**"):
            matches = {file for file in matches if not os.path.isdir(file)}
        if not matches:
            findings.add("no-record-file", repr(part))
        files |= matches
    findings.raise_if_stopping()
    return sorted(files)


def record_spans(file: str | os.PathLike) -> np.ndarray:
    """int64 (R, 2), offset and size in bytes of every record, frame included.

    Raises:
        DataError: unreadable, empty or truncated file, or a length that does not match its checksum.
    """
    findings = Findings(os.fspath(file))
    walked = walk(file, findings)
    findings.raise_if_stopping()
    return walked.spans


def format_index(spans: np.ndarray | Sequence[tuple[int, int]]) -> bytes:
    """DALI's text, byte for byte what its tfrecord2idx writes."""
    offsets, sizes = np.asarray(spans, np.int64).reshape(-1, 2).T
    space, newline = (np.full(len(offsets), ord(character), "<u4") for character in " \n")
    # Four characters, or fewer and zero bytes, in each column.
    text = np.stack([*_decimal(offsets), space, *_decimal(sizes), newline], axis=1)
    return text.tobytes().translate(None, delete=b"\0")


def write_index(file: str | os.PathLike) -> str:
    """Writes `<file>.idx` atomically and returns its path; `record_spans` says what it raises."""
    path = f"{os.fspath(file)}.idx"
    atomic.write_bytes(path, format_index(record_spans(file)))
    return path


def check_complete(file: str, spans: np.ndarray, findings: Findings) -> None:
    """Adds a finding where the index goes on behind the file's end: then the file was copied in part."""
    path = pathlib.Path(f"{file}.idx")
    try:
        listed = path.read_bytes() if path.is_file() else b""
    except OSError:  # ensure_index makes another
        return
    num_listed = listed.count(b"\n")
    if num_listed > len(spans) and listed.startswith(format_index(spans)):
        findings.add("index-longer", f"{file} has {len(spans)} records, {path.name} lists {num_listed}")


def ensure_index(file: str, spans: np.ndarray, findings: Findings) -> str:
    """Makes a file's index unless it is there and right; returns its path.

    Where the directory cannot be written, the index goes to the user's cache directory.

    Args:
        file: the record file.
        spans: of its records, as `record_spans` gives them.
        findings: what had to be made is added.
    """
    content = format_index(spans)
    path = pathlib.Path(f"{file}.idx")
    try:
        there = os.path.lexists(path)
        if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
            return os.fspath(path)
        findings.add("index-stale" if there else "index-made", file)
        atomic.write_bytes(path, content)
    except OSError:  # the data is often mounted read-only
        path = cache.store(content, ".idx")
    return os.fspath(path)


def missing_shards(files: Sequence[str | os.PathLike]) -> list[str]:
    """The files that the names of the others promise: `train-00002-of-00004` is one of four."""
    known = {os.fspath(file) for file in files}
    missing = set()
    for file in known:
        if match := _SHARD.fullmatch(file):
            digits = len(match["shard"])
            for shard in range(int(match["count"])):
                missing.add(f"{match['prefix']}{shard:0{digits}}-of-{match['count']}{match['suffix']}")
    return sorted(missing - known)


_SHARD = re.compile(r"(?P<prefix>.*-)(?P<shard>\d{1,9})-of-(?P<count>\d{1,5})(?P<suffix>[^/]*)", re.DOTALL)


def name_files(files: Sequence[str | os.PathLike]) -> str:
    """Several files in a few words."""
    first = os.fspath(files[0])
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more files"


def _decimal(numbers: np.ndarray) -> list[np.ndarray]:
    """int64 (R,), not negative -> uint32 (R,) each: four digits as ASCII, the highest first; zero bytes stand
    for leading zeros. Python's own formatting would take a third of the time of an index."""
    groups = []
    while numbers.any() or not groups:
        higher = numbers // 10_000
        group = _FOUR_DIGITS[numbers - 10_000 * higher + 10_000 * (higher == 0)]
        groups.append(group if groups else np.where(numbers == 0, ord("0"), group).astype("<u4"))
        numbers = higher
    return groups[::-1]


# 0000 to 9999, then the same without leading zeros.
_FOUR_DIGITS = np.frombuffer(
    b"".join(
        [b"%04d" % i for i in range(10_000)]
        + [(b"%d" % i if i else b"").rjust(4, b"\0") for i in range(10_000)]
    ),
    "<u4",
)
