"""Checks images before they are used: format, size, orientation, damage, and whether DALI can decode them.

The check reads the header and the end of an image (image_headers.py). It decodes 16-bit images always, and
others on request. Decoding finds only a part of the damage, because only PNG has checksums.

The result for a file is cached until the file's size, times or inode change.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np
import PIL.Image
import simplejpeg

from common.args import IMAGE_SUFFIXES, ImagePolicy
from common.data.annotations import CocoImage
from common.data.check import image_headers
from common.data.check.image_cache import STATE, ImageCache, ImageTable, Result
from common.data.check.image_headers import PILLOW_ERRORS, SWAPS_SIDES, Encoded, ImageFacts, damaged
from common.data.check.issues import Fault, Issues
from common.data.image_files import difference, spelling
from common.files import file_type
from common.progress import Bar

_END = 4096  # bytes at each end of a file for its checksum
_CHUNK = 64  # files that a thread takes at once
_PART = 50_000  # new results that are saved at once
SAMPLE = 5_000  # files that --check=sample checks; of 0.1 % faulty files, it finds one in 99 % of cases
_ONE_LARGE = threading.Lock()  # saves memory
_CORES = len(os.sched_getaffinity(0))
_READERS, DECODERS = min(8 * _CORES, 32), _CORES + 2  # threads that read headers; threads that decode
_SLOW = (20_000, 500)  # images without a progress bar, without and with decoding
_FORMAT_OF = PIL.Image.registered_extensions() | {".mpo": "JPEG", ".dib": "BMP", ".heic": "HEIF"}


# --- one image ---


def inspect(encoded: bytes | memoryview, policy: ImagePolicy = ImagePolicy()) -> ImageFacts:
    """Inspects an image in memory, as `policy` asks. Does not decode images above `policy.max_megapixels`."""
    return _inspect(io.BytesIO(encoded), policy)


def _inspect(stream: BinaryIO, policy: ImagePolicy) -> ImageFacts:
    image = Encoded(stream)
    facts = image.facts
    try:
        image_headers.read_header(image)
        if facts.height * facts.width <= policy.max_megapixels * 1e6:
            _check_pixels(image, policy.decode)
    except Fault as fault:
        facts.fault, facts.detail = fault.args
    return limited(facts, policy.max_megapixels)


def limited(facts: ImageFacts, max_megapixels: float) -> ImageFacts:
    """Returns the facts, with the fault "image-too-large" if the image exceeds `max_megapixels`."""
    megapixels = facts.height * facts.width / 1e6
    if facts.fault or megapixels <= max_megapixels:
        return facts
    detail = f"{facts.width} x {facts.height} pixels are {megapixels:.4g} megapixels, the limit is"
    return msgspec.structs.replace(facts, fault="image-too-large", detail=f"{detail} {max_megapixels:g}")


_NO_DAMAGE = re.compile("Unknown Adobe|Warning: unknown JFIF|Invalid SOS parameters|.*bad ICC marker")
_UNKNOWN_TO_TURBOJPEG = re.compile(".*(subsampling|color conversion)")  # Pillow decodes such JPEGs
_EXTRANEOUS = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


def _check_pixels(image: Encoded, decode: bool) -> None:
    """Decodes an image with a valid header: always if it has 16 bits, else only if `decode` is true.

    Raises:
        Fault: the data are damaged, or all values of a 16-bit image are below 4096. DALI makes such an image
            almost black.
    """
    if image.is_16_bit:
        if picture := _load(image):
            _check_range(picture)
    elif decode and image.facts.image_format == "JPEG":
        _check_jpeg(image)
    elif decode and image.facts.image_format != "BMP":
        _load(image)


def _load(image: Encoded) -> PIL.Image.Image | None:
    """Decodes the image with Pillow. Returns None for WebP above 179 megapixels, which Pillow rejects."""
    facts, content = image.facts, image.whole()
    # PIL.Image.open would reject large images.
    open_picture, _ = PIL.Image.OPEN[facts.image_format]
    try:
        if facts.image_format == "PNG":
            content = image_headers.png_without_metadata(content)
            open_picture(io.BytesIO(content), "").verify()  # compares the checksums
        picture = open_picture(io.BytesIO(content), "")
        # Pillow may rotate a TIFF, so compare areas.
        if picture.height * picture.width != facts.height * facts.width:
            raise damaged(f"it has {facts.width} x {facts.height} pixels, but Pillow reads {picture.size}")
        with _ONE_LARGE if facts.height * facts.width > 25e6 else contextlib.nullcontext():
            picture.load()
    except PILLOW_ERRORS as error:
        raise damaged(str(error)) from error
    except PIL.Image.DecompressionBombError:
        return None
    return picture


def _check_jpeg(image: Encoded) -> None:
    content = image.whole()
    try:
        # This decodes to grey at an eighth of the size, but still reads all of the compressed data.
        simplejpeg.decode_jpeg(content, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        message = str(error)
        if _UNKNOWN_TO_TURBOJPEG.match(message):
            _load(image)
        elif not _NO_DAMAGE.match(message) and not _is_padding(content[image.pixels_at :], message):
            raise damaged(message) from error


def _is_padding(scan: bytes, message: str) -> bool:
    """Whether a decoder's warning is only about padding. Some cameras repeat one byte before the end."""
    extraneous, end = _EXTRANEOUS.match(message), scan.find(image_headers.END)
    return extraneous is not None and len(set(scan[end - int(extraneous[1]) : end])) == 1


def _check_range(picture: PIL.Image.Image) -> None:
    values = np.asarray(picture)
    if picture.mode.startswith("I"):
        precision, largest = "", int(values.max())
    else:  # Pillow keeps only the upper eight bits of colours
        colors = values[..., :-1] if picture.mode in ("LA", "RGBA", "RGBX") else values
        precision, largest = "about ", int(colors.max()) * 256 + 255
    if 0 < largest < 4096:
        raise Fault("image-12-bit", f"its largest value is {precision}{largest} of 65535")


# --- image files ---


def in_threads(function: Callable, parts: Sequence, threads: int, title: str | None = None) -> Iterator[Any]:
    """Yields `function(part)` for each part, in order. If `title` is given, shows a progress bar."""
    bar = Bar(title, len(parts)) if title else None
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:  # not processes: TensorFlow hangs after fork
        for result in pool.map(function, parts):
            yield result
            if bar:
                bar.step()


def inspect_files(
    images_dir: str | os.PathLike, names: Sequence[str], policy: ImagePolicy = ImagePolicy()
) -> list[ImageFacts]:
    """Inspects image files in parallel, and caches the results. Only regular files are opened.

    Args:
        images_dir: the directory of the images; each directory has its own cache file.
        names: paths below `images_dir` for which `path_fault` is false, or absolute paths. Symbolic
            links may point outside `images_dir`.
        policy: how thoroughly to check.

    Returns:
        The facts about each file, in the order of `names`.

    Raises:
        UserError: no directory for the cache is writable.
    """
    table = inspect_table(images_dir, names, policy)
    facts = [limited(fact, policy.max_megapixels) for fact in table.facts()]
    if len(facts) == len(names):
        return facts
    facts_by_name = dict(zip(table.names, facts, strict=True))
    return [facts_by_name[name] for name in names]


def inspect_table(images_dir: str | os.PathLike, names: Sequence[str], policy: ImagePolicy) -> ImageTable:
    """Like `inspect_files`, but returns a table with one row per file, without the limit on megapixels."""
    unique = list(dict.fromkeys(names))
    cache = ImageCache(images_dir)
    stored = cache.load()
    table = stored.select(unique)
    new: list[int] = []  # rows of new and changed files

    def look(start: int) -> list[tuple[int, Result]]:
        known = table.rows[[*STATE, "decoded"]][start : start + _CHUNK].tolist()
        paths = [os.path.join(images_dir, name) for name in unique[start : start + _CHUNK]]
        results = [_look(path, row, policy) for path, row in zip(paths, known, strict=True)]
        return [(row, result) for row, result in enumerate(results, start) if result]

    title = "Checking images" if len(unique) > _SLOW[policy.decode] else None
    threads, num_saved = DECODERS if policy.decode else _READERS, 0
    try:
        for results in in_threads(look, range(0, len(unique), _CHUNK), threads, title):
            table.update(results)
            new += [row for row, _ in results]
            if len(new) - num_saved >= _PART:
                cache.add(table.cacheable(new[num_saved:]))
                num_saved = len(new)
    finally:  # keep the results of an interrupted check, too
        if (cacheable := table.cacheable(new)).names:
            cache.save(stored.joined(cacheable))
    return table


def _look(path: str, known: tuple[int, ...], policy: ImagePolicy) -> Result | None:
    """Inspects a file. Returns None if its result in the cache can be used.

    `known` is the state of the file in the cache, and whether the file was decoded.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return Result(None, ImageFacts(fault="image-not-a-file", detail=file_type(status.st_mode)))
        state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino % 2**63)
        if known[:-1] == state and known[-1] >= policy.decode:
            return None
        # O_NONBLOCK: opening must not block if a pipe has just replaced the file.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            facts = _inspect(stream, policy)
            facts.checksum = _checksum(stream.fileno(), status.st_size)
    except OSError as error:
        fault, detail = "image-unreadable", error.strerror or str(error)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            fault, detail = "image-missing", "a dangling symbolic link" if os.path.islink(path) else ""
        return Result(None, ImageFacts(fault=fault, detail=detail))
    is_kept = facts.fault != "image-too-large"
    return Result(state if is_kept else None, facts, policy.decode or facts.fault != "")


def _checksum(descriptor: int, size: int) -> int:
    """Returns a checksum of an open file's size and of the bytes at both ends."""
    checksum = zlib.crc32(os.pread(descriptor, _END, 0))
    checksum = zlib.crc32(os.pread(descriptor, _END, max(size - _END, 0)), checksum)
    return size % 2**31 << 32 | checksum


# --- against annotations ---


def path_fault(name: str) -> bool:
    """Whether a file name can lead outside the image directory, or contains a NUL or a line feed."""
    return name.startswith("/") or "\0" in name or "\n" in name or (".." in name and ".." in name.split("/"))


def add_fault(facts: ImageFacts, name: str, issues: Issues) -> bool:
    """Adds the image's fault, if any, to `issues`; returns whether there is one."""
    if facts.fault:
        issues.add(facts.fault, f"{name}: {facts.detail}" if facts.detail else name)
    return bool(facts.fault)


def check_files(
    images_dir: str | os.PathLike, images: Sequence[CocoImage], describe: Callable[[int], str], issues: Issues
) -> tuple[np.ndarray, list[ImageFacts], str]:
    """Inspects image files (`inspect_files`) and compares them with the annotations (`check_images`).

    Args:
        images: the I images of the annotations; `file_name` is "" if it is missing.
        describe: i -> the name of image i for messages.
        issues: receives errors and warnings; its policy sets how images are checked.

    Returns:
        bool (I,), whether each image can be decoded; the facts about each image; and the result of
        `state_of_files`.
    """
    names = [image.file_name for image in images]
    outside = ImageFacts(fault="path-leaves-directory", detail=f"it is not below {os.fspath(images_dir)}")
    facts = {name: outside for name in names if path_fault(name)}
    inside = [name for name in names if name and name not in facts]
    table = inspect_table(images_dir, files_to_check(inside, issues.policy), issues.policy)
    limit = issues.policy.max_megapixels
    facts |= zip(table.names, (limited(fact, limit) for fact in table.facts()), strict=True)
    similar = _similar_facts(images_dir, table)
    facts |= similar
    usable = check_images([facts.get(name) for name in names], images, describe, issues)
    unchecked = [row for row, name in enumerate(names) if name and name not in facts]
    usable[unchecked] = True
    issues.add_each("image-unchecked", unchecked, describe)
    return usable, [facts.get(name, ImageFacts()) for name in names], _digest(table, similar)


def files_to_check(names: Sequence[str], policy: ImagePolicy) -> list[str]:
    """Returns the different names of the files that `policy.check` selects."""
    unique = list(dict.fromkeys(names)) if policy.check != "none" else []
    if policy.check == "all" or len(unique) <= SAMPLE:
        return unique
    rows = np.random.default_rng(0).choice(len(unique), SAMPLE, replace=False)
    return [unique[row] for row in np.sort(rows).tolist()]


def state_of_files(images_dir: str | os.PathLike, names: Sequence[str], policy: ImagePolicy) -> str:
    """Inspects image files. The result changes if a file or a result changes that `check_files` uses."""
    table = inspect_table(images_dir, files_to_check(names, policy), policy)
    return _digest(table, _similar_facts(images_dir, table))


def _digest(table: ImageTable, similar: dict[str, ImageFacts]) -> str:
    return hashlib.sha256(table.digest().encode() + msgspec.msgpack.encode(list(similar.items()))).hexdigest()


def _similar_facts(images_dir: str | os.PathLike, table: ImageTable) -> dict[str, ImageFacts]:
    """Returns facts for each missing file with a similar name. They show this name."""
    missing = [table.names[row] for row, fact in table.faulty.items() if fact.fault == "image-missing"]
    texts = similar_files(images_dir, missing)
    return {name: ImageFacts(fault="image-missing", detail=text) for name, text in texts.items()}


def similar_files(directory: str | os.PathLike, missing: Sequence[str]) -> dict[str, str]:
    """Returns missing name -> text about a file below `directory` with a similar name, where there is one.

    Names are similar if they differ in case, in the Unicode normal form, in \\ and /, or, if there is no such
    file, in the folder, or else in the extension of an image.
    """
    similar: dict[str, str] = {}
    for folder, _, files in os.walk(os.fspath(directory)) if missing else ():
        for file in sorted(files):
            path = os.path.relpath(os.path.join(folder, file), os.fspath(directory))
            stem, suffix = os.path.splitext(path)
            similar[spelling(path)] = path
            similar.setdefault(spelling("/" + file), path)
            if suffix.lower() in IMAGE_SUFFIXES:
                similar.setdefault(spelling(stem + "/"), path)
    texts = {}
    for name in missing:
        path = os.path.normpath(name.replace("\\", "/"))
        keys = path, "/" + os.path.basename(path), os.path.splitext(path)[0] + "/"
        file = next((similar[spelling(key)] for key in keys if spelling(key) in similar), None)
        if file and os.path.exists(os.path.join(directory, file)):  # not a dangling link
            texts[name] = f"{file!r} exists{_advice(file, name, path)}"
    return texts


def _advice(file: str, name: str, path: str) -> str:
    """Returns in what an existing file differs from a name, whose separators in `path` are /."""
    if spelling(file) == spelling(name):
        return f", {difference(file, name)}"
    if path != os.path.normpath(name):
        return ": name it with /, relative to the image directory"
    is_same_name = spelling(os.path.basename(file)) == spelling(os.path.basename(path))
    return "" if is_same_name else ", with another extension: correct the name"


def check_images(
    facts: Sequence[ImageFacts | None],
    images: Sequence[CocoImage],
    describe: Callable[[int], str],
    issues: Issues,
) -> np.ndarray:
    """Compares images with their annotations.

    Args:
        facts: the facts about I images; None for an image whose fault is already reported.
        images: the same images in the annotations. Unknown sizes are 0, unknown file names are "".
        describe: i -> the name of image i for messages, for example `image 12 ('a.jpg')`.

    Returns:
        bool (I,), whether each image can be decoded.
    """
    for i, (fact, image) in enumerate(zip(facts, images, strict=True)):
        if fact is None:
            continue
        if fact.fault:
            add_fault(fact, describe(i), issues)
            continue
        stored = (fact.width, fact.height)
        size = (image.width or fact.width, image.height or fact.height)
        if size != stored:
            turned = fact.orientation >= SWAPS_SIDES and size == stored[::-1]
            if turned and issues.policy.coco_pixels == "turned":
                continue
            text = "{} is {} x {} pixels, the annotations have {} x {}".format(describe(i), *stored, *size)
            issues.add("image-turned" if turned else "image-size-differs", text)
        elif fact.orientation != 1 and issues.policy.coco_pixels != "turned":
            issues.add("exif-turn", f"{describe(i)} has EXIF orientation {fact.orientation}")
        suffix = os.path.splitext(image.file_name)[1].lower()
        if _FORMAT_OF.get(suffix, fact.image_format) != fact.image_format:
            issues.add("wrong-extension", f"{describe(i)} is {fact.image_format}")
    return np.array([fact is not None and not fact.fault for fact in facts], np.bool_)
