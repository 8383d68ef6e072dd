"""Checks image files: which cannot be used, and which differ from their annotations.

The cache keeps the results for a file until its size or times change.
"""

import concurrent.futures
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from common.args import MAX_MEGAPIXELS
from common.datacheck.image_headers import Encoded
from common.datacheck.images import (
    ImageFacts,
    ImagePolicy,
    check_images,
    inspect_encoded,
    limited,
    path_fault,
)
from common.files import file_type, load_cached, save_cached
from common.issues import Findings
from common.progress import Bar

_CHUNK = 64  # files that a thread takes at once
_CORES = len(os.sched_getaffinity(0))
_READERS, _DECODERS = min(8 * _CORES, 32), _CORES + 2  # threads
_SLOW = (20_000, 500)  # images from which on a progress bar is shown: headers only, every pixel


def inspect_files(
    images_dir: str | os.PathLike,
    names: Sequence[str],
    *,
    decode: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> list[ImageFacts]:
    """Inspects image files in parallel, and keeps the results in the cache.

    Only regular files are opened: a pipe would block the reader.

    Args:
        images_dir: the directory of the images.
        names: paths below it, for none of which `path_fault` holds; links may lead elsewhere.
        decode: decode every pixel of every image, except of files that were decoded before and are unchanged.
        max_megapixels: larger images are at fault, and not decoded.

    Returns:
        One for each name, in order.

    Raises:
        UserError: there is no place for the cache.
    """
    images_dir = os.fspath(images_dir)
    paths = {name: os.path.join(images_dir, name) for name in names}
    states = dict(zip(paths, _in_threads(_state, list(paths.values()), _READERS), strict=True))
    absent = {name: state for name, state in states.items() if isinstance(state, ImageFacts)}
    known = _recall(images_dir)
    fresh = []
    for name, state in states.items():
        entry = known.get(name)
        if name not in absent and (entry is None or entry.state != state or (decode and not entry.decoded)):
            fresh.append(name)
    found = _in_threads(
        lambda path: _inspect_file(path, decode, max_megapixels),
        [paths[name] for name in fresh],
        _DECODERS if decode else _READERS,
        bar=len(fresh) > _SLOW[decode],
    )
    try:
        for name, facts in zip(fresh, found, strict=True):
            known.pop(name, None)
            if facts.fault in _PASSING:
                absent[name] = facts
            else:
                known[name] = _Entry(states[name], decode or facts.fault != "", facts)
    finally:  # an interrupted check is not lost
        if fresh:
            _remember(images_dir, known)
    return [limited(absent.get(name) or known[name].facts, max_megapixels) for name in names]


def inspect_list(
    paths: Sequence[str | os.PathLike], *, decode: bool = False, max_megapixels: float = MAX_MEGAPIXELS
) -> list[ImageFacts]:
    """`inspect_files` for files in several directories."""
    paths = [os.path.abspath(path) for path in paths]
    directory = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, directory) for path in paths]
    return inspect_files(directory, names, decode=decode, max_megapixels=max_megapixels)


def check_files(
    images_dir: str | os.PathLike,
    names: Sequence[str],
    image_sizes: np.ndarray,
    describe: Callable[[int], str],
    policy: ImagePolicy,
    findings: Findings,
) -> tuple[np.ndarray, list[ImageFacts]]:
    """Inspects image files and compares them with what annotations contain (`inspect_files`, `check_images`).

    Args:
        images_dir: the directory of the images.
        names: paths below it, of I images; "" where there is none.
        image_sizes: (I, 2), (height, width) in pixels; 0 where the annotations have none.
        describe: gives the name of image i in messages.
        policy: about images that cannot be used.
        findings: gets what is at fault or remarkable.

    Returns:
        bool (I,), which images can be decoded; and what is known of each.
    """
    rows, facts = [], [ImageFacts()] * len(names)
    for row, name in enumerate(names):
        if path_fault(name):
            findings.add("path-leaves-directory", f"{describe(row)} is not below {os.fspath(images_dir)}")
        elif name:
            rows.append(row)
    safe = [names[row] for row in rows]
    found = inspect_files(images_dir, safe, decode=policy.decode, max_megapixels=policy.max_megapixels)
    for row, fact in zip(rows, found, strict=True):
        facts[row] = fact
    usable = np.zeros(len(names), np.bool_)
    usable[rows] = check_images(found, image_sizes[rows], safe, lambda i: describe(rows[i]), findings)
    return usable, facts


# --- one file ---


def _inspect_file(path: str, decode: bool, max_megapixels: float) -> ImageFacts:
    try:
        # Should a pipe have taken the file's place just now, it does not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return _os_fault(error, path)
    try:
        size = os.fstat(descriptor).st_size
        encoded = Encoded(size, lambda offset, count: _read(descriptor, offset, count))
        return inspect_encoded(encoded, decode, max_megapixels)
    except OSError as error:
        return _os_fault(error, path)
    finally:
        os.close(descriptor)


def _read(descriptor: int, offset: int, count: int) -> bytes:
    content = os.pread(descriptor, count, offset)
    while 0 < len(content) < count:  # Linux gives 2 GiB at most
        more = os.pread(descriptor, count - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


def _os_fault(error: OSError, path: str) -> ImageFacts:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        detail = "a symbolic link to nothing" if os.path.islink(path) else ""
        return ImageFacts(fault="image-missing", detail=detail)
    return ImageFacts(fault="image-unreadable", detail=error.strerror or str(error))


# --- many files ---

_VERSION = 3  # of the rules by which images are judged, for what is remembered
_PASSING = ("image-missing", "image-unreadable", "image-too-large")  # not a matter of the file alone

# What shows that a file has changed: size, times of its content and of its inode in ns, the inode's number.
# Size and time of the content alone survive tar, rsync and os.utime.
_State = tuple[int, int, int, int]
_Found = TypeVar("_Found")


class _Entry(msgspec.Struct, gc=False, array_like=True):
    """What was found in a file: its state then, whether every pixel was decoded, and the facts."""

    state: _State
    decoded: bool
    facts: ImageFacts


def _remember(directory: str, entries: Mapping[str, _Entry]) -> None:
    """Keeps `entries` in the cache. Of two processes that write at once, the last one stays."""
    names = os.fsencode("\0".join(entries))  # they need not be UTF-8, msgpack's text must be
    content = msgspec.msgpack.encode((_VERSION, names, list(entries.values())))
    save_cached(_cache_name(directory), content)


def _recall(directory: str) -> dict[str, _Entry]:
    """What `_remember` kept; nothing where it is damaged or another version's."""
    content = load_cached(_cache_name(directory))
    try:
        version, names, entries = msgspec.msgpack.decode(content or b"", type=tuple[int, bytes, list[_Entry]])
    except msgspec.MsgspecError:
        return {}
    if version != _VERSION or not entries:
        return {}
    return dict(zip(os.fsdecode(names).split("\0"), entries, strict=True))


def _cache_name(directory: str) -> str:
    path = os.fsencode(os.path.realpath(directory))
    return f"files-{hashlib.sha256(path).hexdigest()[:32]}.msgpack"


def _state(path: str) -> _State | ImageFacts:
    """What shows whether a regular file has changed; or why there is none. Opens nothing."""
    try:
        status = os.stat(path)
    except OSError as error:
        return _os_fault(error, path)
    if stat.S_ISREG(status.st_mode):
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return ImageFacts(fault="image-not-a-file", detail=file_type(status.st_mode))


def _in_threads(
    look: Callable[[str], _Found], paths: Sequence[str], threads: int, *, bar: bool = False
) -> Iterator[_Found]:
    """`look(path)` of each path, in order. Threads: a forked TensorFlow would hang."""
    chunks = [paths[i : i + _CHUNK] for i in range(0, len(paths), _CHUNK)]
    progress = Bar("Checking images", len(chunks)) if bar else None
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for found in pool.map(lambda chunk: list(map(look, chunk)), chunks):
            yield from found
            if progress:
                progress.step()
