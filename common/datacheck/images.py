"""Checks images before anything decodes them: format, size, orientation, damage, whether DALI can use them.

A check reads the header and the end (image_headers.py); on demand, and always of 16-bit images, every pixel.
A JPEG has no checksum: damage shows only where it leads to a code that does not exist, or to another number
of blocks than the picture has. A third of mixed damage to photographs does (of 1500 in coco128); the rest
cannot be detected. Decoders of WebP and JPEG 2000 accept even more. PNG has checksums; BMP has neither
checksums nor codes.

The cache keeps the results for a file until its size or times change.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np
import PIL.Image
import simplejpeg

from common.annotations import CocoImage
from common.args import ImagePolicy
from common.datacheck import image_headers
from common.datacheck.image_headers import PILLOW_ERRORS, Encoded, ImageFacts, damaged
from common.datacheck.issues import Fault, Issues
from common.files import file_type, load_cached, save_cached
from common.progress import Bar

_VERSION = 5  # of the rules by which images are judged, for what the cache keeps
_CHUNK = 64  # files that a thread takes at once
_ONE_LARGE = threading.Lock()  # images of more than 25 megapixels are decoded one at a time, for memory
_CORES = len(os.sched_getaffinity(0))
_READERS, DECODERS = min(8 * _CORES, 32), _CORES + 2  # threads
_SLOW = (20_000, 500)  # images from which on a progress bar is shown: headers only, every pixel
_SWAPS_SIDES = 5  # the first of the EXIF orientations that do
_FORMAT_OF = PIL.Image.registered_extensions() | {".mpo": "JPEG", ".dib": "BMP", ".heic": "HEIF"}


# --- one image ---


def inspect(encoded: bytes | memoryview, policy: ImagePolicy = ImagePolicy()) -> ImageFacts:
    """Inspects an image in memory, as deep as `policy` asks; one that is too large is never decoded."""
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
    """The facts, at fault where the image is too large."""
    megapixels = facts.height * facts.width / 1e6
    if facts.fault or megapixels <= max_megapixels:
        return facts
    detail = f"{facts.width} x {facts.height} pixels are {megapixels:.4g} megapixels, the limit is"
    return msgspec.structs.replace(facts, fault="image-too-large", detail=f"{detail} {max_megapixels:g}")


_NO_DAMAGE = re.compile("Unknown Adobe|Warning: unknown JFIF|Invalid SOS parameters|.*bad ICC marker")
_UNKNOWN_TO_TURBOJPEG = re.compile(".*(subsampling|color conversion)")  # libjpeg decodes these
_EXTRANEOUS = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


def _check_pixels(image: Encoded, decode: bool) -> None:
    """Decodes an image whose header is sound: every image if `decode`, otherwise only those of 16 bits.

    Raises:
        Fault: damage; or 12-bit data in 16 bits: no value reaches 4096, so DALI, which keeps the upper eight
            bits, would make it almost black. A grey image that is 0 throughout passes; in colour, where
            Pillow gives only the upper bits, it does not.
    """
    if image.is_16_bit:
        if picture := _load(image):
            _check_range(picture)
    elif decode and image.facts.image_format == "JPEG":
        _check_jpeg(image)
    elif decode and image.facts.image_format != "BMP":
        _load(image)


def _load(image: Encoded) -> PIL.Image.Image | None:
    """The image as Pillow decodes it; None for WebP of more than 179 megapixels, which it never decodes."""
    facts, content = image.facts, image.whole()
    # The function itself: PIL.Image.open refuses large images by a setting of the whole process.
    open_picture, _ = PIL.Image.OPEN[facts.image_format]
    try:
        if facts.image_format == "PNG":
            open_picture(io.BytesIO(content), "").verify()  # the checksums
        picture = open_picture(io.BytesIO(content), "")
        # A TIFF may be turned. Nothing may need more memory than the header was checked for.
        if picture.height * picture.width != facts.height * facts.width:
            raise damaged(f"its header has {facts.width} x {facts.height} and {picture.size} pixels")
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
        # A grey picture of an eighth of the size needs all codes, and three quarters of the time.
        simplejpeg.decode_jpeg(content, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        message = str(error)
        if _UNKNOWN_TO_TURBOJPEG.match(message):
            _load(image)
        elif not _NO_DAMAGE.match(message) and not _is_padding(content[image.pixels_at :], message):
            raise damaged(message) from error


def _is_padding(scan: bytes, message: str) -> bool:
    """Whether TurboJPEG warns of a run of equal bytes before the end, with which some cameras fill up."""
    extraneous, end = _EXTRANEOUS.match(message), scan.find(image_headers.END)
    return extraneous is not None and len(set(scan[end - int(extraneous[1]) : end])) == 1


def _check_range(picture: PIL.Image.Image) -> None:
    values = np.asarray(picture)
    if picture.mode.startswith("I"):
        about, largest = "", int(values.max())
    else:  # of colours Pillow keeps the upper eight bits
        colors = values[..., :-1] if picture.mode in ("LA", "RGBA", "RGBX") else values
        about, largest = "about ", int(colors.max()) * 256 + 255
    if 0 < largest < 4096:
        raise Fault("image-12-bit", f"its largest value is {about}{largest} of 65535")


# --- image files ---


def in_threads(function: Callable, parts: Sequence, threads: int, title: str | None = None) -> Iterator[Any]:
    """What `function` returns for each part, in order, with a progress bar where there is a title."""
    bar = Bar(title, len(parts)) if title else None
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:  # a forked TensorFlow would hang
        for found in pool.map(function, parts):
            yield found
            if bar:
                bar.step()


class _Entry(msgspec.Struct, gc=False, array_like=True):
    """What was found in a file.

    Attributes:
        state: size, times of its content and of its inode in ns, the inode's number: size and time of the
            content alone survive tar, rsync and os.utime. None where the fault may pass.
        decoded: whether every pixel was decoded, or that could find nothing else.
        facts: what was found.
    """

    state: tuple[int, int, int, int] | None
    decoded: bool
    facts: ImageFacts


def inspect_files(
    images_dir: str | os.PathLike, names: Sequence[str], policy: ImagePolicy = ImagePolicy()
) -> list[ImageFacts]:
    """Inspects image files in parallel, and keeps the results in the cache.

    Only regular files are opened: a pipe would block the reader.

    Args:
        images_dir: the directory of the images; the cache keeps a file for each.
        names: paths below it, for none of which `path_fault` holds, or absolute ones; links may lead
            elsewhere.
        policy: how deep to look. Files that were decoded before and are unchanged are not decoded again.

    Returns:
        One for each name, in order.

    Raises:
        UserError: the disk has not enough space for the cache.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(images_dir))).hexdigest()[:32]
    cache = f"files-{_VERSION}-{digest}.msgpack"
    try:  # names need not be UTF-8, which msgpack's text must be
        known = msgspec.msgpack.decode(load_cached(cache) or b"", type=dict[bytes, _Entry])
    except msgspec.MsgspecError:
        known = {}

    def look(part: Sequence[str]) -> dict[str, _Entry]:
        paths = {name: os.path.join(images_dir, name) for name in part}
        return {name: _look(path, known.get(os.fsencode(name)), policy) for name, path in paths.items()}

    found: dict[str, _Entry] = {}
    unique = list(dict.fromkeys(names))
    chunks = [unique[i : i + _CHUNK] for i in range(0, len(unique), _CHUNK)]
    title = "Checking images" if len(unique) > _SLOW[policy.decode] else None
    try:
        for entries in in_threads(look, chunks, DECODERS if policy.decode else _READERS, title):
            found |= entries
    finally:  # an interrupted check is not lost
        kept = {os.fsencode(name): entry for name, entry in found.items() if entry.state}
        if any(known.get(name) is not entry for name, entry in kept.items()):
            save_cached(cache, msgspec.msgpack.encode(known | kept))
    return [limited(found[name].facts, policy.max_megapixels) for name in names]


def _look(path: str, known: _Entry | None, policy: ImagePolicy) -> _Entry:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return _Entry(None, False, ImageFacts(fault="image-not-a-file", detail=file_type(status.st_mode)))
        state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        if known and known.state == state and known.decoded >= policy.decode:
            return known
        # Should a pipe have taken the file's place just now, it does not block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            facts = _inspect(stream, policy)
    except OSError as error:
        fault, detail = "image-unreadable", error.strerror or str(error)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            fault, detail = "image-missing", "a symbolic link to nothing" if os.path.islink(path) else ""
        return _Entry(None, False, ImageFacts(fault=fault, detail=detail))
    is_kept = facts.fault != "image-too-large"
    return _Entry(state if is_kept else None, policy.decode or facts.fault != "", facts)


# --- against annotations ---


def path_fault(name: str) -> bool:
    """Whether a file name leaves the image directory, or cannot stand in a list of files: absolute, with
    `..`, a NUL or a line feed."""
    return name.startswith("/") or "\0" in name or "\n" in name or (".." in name and ".." in name.split("/"))


def add_fault(facts: ImageFacts, name: str, issues: Issues) -> bool:
    """Adds the fault, if there is one, of an image with this name; returns whether there is one."""
    if facts.fault:
        issues.add(facts.fault, f"{name}: {facts.detail}" if facts.detail else name)
    return bool(facts.fault)


def check_files(
    images_dir: str | os.PathLike, images: Sequence[CocoImage], describe: Callable[[int], str], issues: Issues
) -> tuple[np.ndarray, list[ImageFacts]]:
    """Inspects image files and compares them with what annotations contain (`inspect_files`, `check_images`).

    Args:
        images_dir: the directory of the images.
        images: I, by the annotations; a file name "" where there is none.
        describe: gives the name of image i in messages.
        issues: gets what is at fault or remarkable, by its policy.

    Returns:
        bool (I,), which images can be decoded; and what is known of each.
    """
    names = [image.file_name for image in images]
    outside = ImageFacts(fault="path-leaves-directory", detail=f"it is not below {os.fspath(images_dir)}")
    facts = {name: outside for name in names if path_fault(name)}
    inside = [name for name in names if name and name not in facts]
    facts |= zip(inside, inspect_files(images_dir, inside, issues.policy), strict=True)
    usable = check_images([facts.get(name) for name in names], images, describe, issues)
    return usable, [facts.get(name, ImageFacts()) for name in names]


def check_images(
    facts: Sequence[ImageFacts | None],
    images: Sequence[CocoImage],
    describe: Callable[[int], str],
    issues: Issues,
) -> np.ndarray:
    """Compares images with their annotations.

    Args:
        facts: of I images; None where another fault was reported.
        images: by the annotations: sizes, 0 where they have none, and file names, "" where there is none.
        describe: gives the name of image i in messages: `image 12 ('a.jpg')`.
        issues: gets what is at fault or remarkable.

    Returns:
        bool (I,), which images can be decoded.
    """
    for i, (fact, image) in enumerate(zip(facts, images, strict=True)):
        if fact is None or add_fault(fact, describe(i), issues):
            continue
        stored = (fact.width, fact.height)
        size = (image.width or fact.width, image.height or fact.height)
        if size != stored:
            turned = fact.orientation >= _SWAPS_SIDES and size == stored[::-1]
            text = "{} is {} x {} pixels, the annotations have {} x {}".format(describe(i), *stored, *size)
            issues.add("image-turned" if turned else "image-size-differs", text)
        elif fact.orientation != 1:
            issues.add("exif-turn", f"{describe(i)} has EXIF orientation {fact.orientation}")
        suffix = os.path.splitext(image.file_name)[1].lower()
        if _FORMAT_OF.get(suffix, fact.image_format) != fact.image_format:
            issues.add("wrong-extension", f"{describe(i)} is {fact.image_format}")
    return np.array([fact is not None and not fact.fault for fact in facts], np.bool_)
