"""Image files, looked at before anything decodes them: what they are, and whether they can be used.

A look reads the header and the end (checks/image_formats.py); on demand, and always of 16-bit images, every
pixel (checks/image_pixels.py). What was seen in files is remembered until their size or their time changes.
"""

import concurrent.futures
import dataclasses
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from common.args import MAX_MEGAPIXELS
from common.datacheck import scan_cache
from common.datacheck.encoded_image import Encoded, Fault, Header
from common.datacheck.image_formats import read_header
from common.datacheck.image_pixels import check_pixels
from common.errors import UserError
from common.issues import Findings
from common.progress import Bar

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".jp2")

_CHUNK = 64  # files that a thread takes at once
_SILENT = 2.0  # seconds before a progress bar appears


@dataclasses.dataclass(frozen=True)
class ImagePolicy:
    """What is done about images that cannot be used.

    Attributes:
        on_bad_image: "stop", or "skip": unreadable images are left out and reported.
        max_megapixels: larger images count as unreadable (a 48 KB PNG can decode to 3.3 GB).
        decode: look at every pixel, not just at headers and ends of files.
    """

    on_bad_image: str = "stop"
    max_megapixels: float = MAX_MEGAPIXELS
    decode: bool = False

    def __post_init__(self) -> None:
        if not self.max_megapixels > 0:
            raise UserError(f"--max_megapixels={self.max_megapixels:g}: it must be above 0")


class ImageFacts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the header and the end of an image file say.

    Attributes:
        image_format: Pillow's name of it, "JPEG" for files with several pictures, too; "" where unknown.
        height, width: of the stored pixels, before any EXIF turn; 0 where unknown.
        orientation: of EXIF, 1 to 8; 1 where there is none.
        fault: a kind of findings.KINDS (severity IMAGE); "" where there is none.
        detail: of the fault, in words.
    """

    image_format: str = ""
    height: int = 0
    width: int = 0
    orientation: int = 1
    fault: str = ""
    detail: str = ""


def path_fault(name: str) -> bool:
    """Whether a file name leaves the image directory, or cannot stand in a list of files: absolute, with
    `..`, a NUL or a line feed."""
    return name.startswith("/") or "\0" in name or "\n" in name or (".." in name and ".." in name.split("/"))


def inspect(
    encoded: bytes | memoryview, *, decode: bool = False, max_megapixels: float = MAX_MEGAPIXELS
) -> ImageFacts:
    """Looks at an encoded image in memory.

    Args:
        encoded: the image.
        decode: look at every pixel. A JPEG has no checksum, so even that does not find all damage: see
            checks/image_pixels.py.
        max_megapixels: a larger image is at fault, and not decoded.
    """
    facts, _ = _inspect(Encoded.of(encoded), decode, max_megapixels)
    return limited(facts, max_megapixels)


def inspect_files(
    images_dir: str | os.PathLike,
    names: Sequence[str],
    *,
    decode: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> list[ImageFacts]:
    """Looks at image files, in parallel, and remembers what it saw.

    Nothing but regular files is opened: a pipe would hang the reader for ever.

    Args:
        images_dir: the directory of the images.
        names: paths below it, for none of which `path_fault` holds; links may lead elsewhere.
        decode: look at every pixel of every image, unless that was done before and the file has not changed.
        max_megapixels: larger images are at fault, and not decoded.

    Returns:
        One for each name, in order.

    Raises:
        UserError: there is no place for the cache.
    """
    images_dir = os.fspath(images_dir)
    states, absent = _list(images_dir, names)
    known = scan_cache.recall(images_dir, _VERSION, _Entry)
    depth = _DECODED if decode else _SEEN
    fresh = [
        name
        for name, state in states.items()
        if name not in known or not known[name].answers(state, depth, max_megapixels)
    ]
    try:
        for name, facts, seen in _look(images_dir, fresh, decode, max_megapixels):
            if facts.fault in _PASSING:
                absent[name] = facts
            else:
                known[name] = _Entry(states[name], seen, facts)
    finally:  # an interrupted look is not lost
        if fresh:
            scan_cache.remember(images_dir, _VERSION, known)
    found = [absent.get(name) or known[name].facts for name in names]
    return [limited(facts, max_megapixels) for facts in found]


def inspect_list(
    files: Sequence[str | os.PathLike], *, decode: bool = False, max_megapixels: float = MAX_MEGAPIXELS
) -> list[ImageFacts]:
    """`inspect_files` for files from anywhere."""
    paths = [os.path.abspath(file) for file in files]
    directory = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, directory) for path in paths]
    return inspect_files(directory, names, decode=decode, max_megapixels=max_megapixels)


def check_images(
    facts: Sequence[ImageFacts],
    image_sizes: np.ndarray,
    names: Sequence[str],
    describe: Callable[[int], str],
    findings: Findings,
) -> np.ndarray:
    """Compares images with what annotations say of them.

    Args:
        facts: of I images.
        image_sizes: (I, 2), (height, width) according to the annotations.
        names: their file names; "" where there is none.
        describe: gives the name of image i in messages: `image 12 ('a.jpg')`.
        findings: gets what is at fault or remarkable.

    Returns:
        bool (I,), which images can be decoded.
    """
    usable = np.ones(len(facts), np.bool_)
    for i, (fact, size, name) in enumerate(zip(facts, image_sizes.tolist(), names, strict=True)):
        if fact.fault:
            usable[i] = False
            findings.add(fact.fault, f"{describe(i)}: {fact.detail}" if fact.detail else describe(i))
            continue
        if size != [fact.height, fact.width]:
            turned = fact.orientation in _SWAPS_SIDES and size == [fact.width, fact.height]
            findings.add(
                "image-turned" if turned else "image-size-differs",
                f"{describe(i)} is {fact.width} x {fact.height} pixels, the annotations say"
                f" {size[1]} x {size[0]}",
            )
        elif fact.orientation != 1:
            findings.add("exif-turn", f"{describe(i)} has EXIF orientation {fact.orientation}")
        suffix = name.rpartition(".")[2].lower() if "." in name else ""
        if _FORMAT_OF.get(suffix, fact.image_format) != fact.image_format:
            findings.add("wrong-extension", f"{describe(i)} is {fact.image_format}")
    return usable


_SWAPS_SIDES = (5, 6, 7, 8)  # EXIF orientations
_SUFFIXES = {
    "JPEG": "jpg jpeg jpe jfif mpo",
    "PNG": "png apng",
    "WEBP": "webp",
    "BMP": "bmp dib",
    "TIFF": "tif tiff",
    "JPEG2000": "jp2 j2k j2c jpc jpf jpx jph",
    "PPM": "ppm pgm pbm pnm",
    "GIF": "gif",
    "AVIF": "avif",
    "HEIF": "heic heif",
}
_FORMAT_OF = {suffix: image_format for image_format, of in _SUFFIXES.items() for suffix in of.split()}


# --- one image ---

# How deep a look went: only at the header, the image being too large for more; at all that must be seen; at
# every pixel.
_HEADER, _SEEN, _DECODED = range(3)


def _inspect(encoded: Encoded, decode: bool, max_megapixels: float) -> tuple[ImageFacts, int]:
    """What is there, whatever its size, and how deep the look went."""
    header, fault = Header(), None
    depth = _DECODED if decode else _SEEN
    try:
        read_header(encoded, header)
        if decode or header.is_16_bit:
            if header.height * header.width <= max_megapixels * 1e6:
                check_pixels(encoded.whole(), header, decode=decode)
            else:
                depth = _HEADER if header.is_16_bit else _SEEN
    except Fault as found:
        fault = found
    if max(header.height, header.width) >= 2**31:
        fault = fault or Fault("image-damaged", f"{header.width} x {header.height} pixels")
        header.height = header.width = 0
    facts = ImageFacts(header.image_format, header.height, header.width, header.orientation)
    if fault:
        facts = msgspec.structs.replace(facts, fault=fault.kind, detail=fault.detail)
    return facts, depth


def limited(facts: ImageFacts, max_megapixels: float) -> ImageFacts:
    """The facts, at fault where the image is too large."""
    megapixels = facts.height * facts.width / 1e6
    if facts.fault or megapixels <= max_megapixels:
        return facts
    detail = f"{facts.width} x {facts.height} pixels are {megapixels:.4g} megapixels, the limit is"
    return msgspec.structs.replace(facts, fault="image-too-large", detail=f"{detail} {max_megapixels:g}")


def _inspect_file(path: str, decode: bool, max_megapixels: float) -> tuple[ImageFacts, int]:
    try:
        # Should a pipe have taken the file's place just now, it does not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return _os_fault(error), _HEADER
    try:
        size = os.fstat(descriptor).st_size
        encoded = Encoded(size, lambda offset, count: _read(descriptor, offset, count))
        return _inspect(encoded, decode, max_megapixels)
    except OSError as error:
        return _os_fault(error), _HEADER
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


def _os_fault(error: OSError) -> ImageFacts:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return ImageFacts(
        fault="image-missing" if missing else "image-unreadable",
        detail="" if missing else error.strerror or str(error),
    )


# --- many files ---

_VERSION = 2  # of the rules by which images are judged, for what is remembered
_PASSING = ("image-missing", "image-unreadable")  # faults that size and time of a file do not show


# What shows that a file has changed: size, times of its content and of its inode in ns, the inode's number.
# Size and time of the content alone survive tar, rsync and os.utime.
_State = tuple[int, int, int, int]


class _Entry(msgspec.Struct, gc=False, array_like=True):
    """A look at one file: its state then, how deep the look went, and what it saw."""

    state: _State
    depth: int
    facts: ImageFacts

    def answers(self, state: _State, depth: int, max_megapixels: float) -> bool:
        """Whether nobody needs to look again."""
        too_large = self.facts.height * self.facts.width > max_megapixels * 1e6
        deep_enough = self.depth >= depth or too_large or self.facts.fault != ""
        return deep_enough and self.state == state


def _list(images_dir: str, names: Sequence[str]) -> tuple[dict[str, _State], dict[str, ImageFacts]]:
    """The states of the regular files, and what is wrong with the others.

    One listing per directory: asking for each file in turn is slow on a network.
    """
    by_directory: dict[str, dict[str, str]] = {}
    for name in names:
        directory, _, base = name.rpartition("/")
        by_directory.setdefault(directory, {})[base] = name
    states: dict[str, _State] = {}
    absent = dict.fromkeys(names, ImageFacts(fault="image-missing"))
    for directory, name_of in by_directory.items():
        try:
            with os.scandir(os.path.join(images_dir, directory)) as entries:
                for entry in entries:
                    if entry.name in name_of:
                        name = name_of[entry.name]
                        state = _state(entry)
                        if isinstance(state, ImageFacts):
                            absent[name] = state
                        else:
                            states[name] = state
                            del absent[name]
        except OSError as error:
            absent.update(dict.fromkeys(name_of.values(), _os_fault(error)))
    return states, absent


def _state(entry: os.DirEntry) -> _State | ImageFacts:
    try:
        status = entry.stat()
    except FileNotFoundError:
        return ImageFacts(fault="image-missing", detail="a symbolic link to nothing")
    except OSError as error:
        return _os_fault(error)
    if stat.S_ISREG(status.st_mode):
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    what = next((said for is_kind, said in kinds if is_kind(status.st_mode)), "a device")
    return ImageFacts(fault="image-not-a-file", detail=what)


def _look(
    images_dir: str, names: Sequence[str], decode: bool, max_megapixels: float
) -> Iterator[tuple[str, ImageFacts, int]]:
    """(name, facts, depth) of files, in order."""

    def look_at(chunk: Sequence[str]) -> list[tuple[ImageFacts, int]]:
        return [_inspect_file(os.path.join(images_dir, name), decode, max_megapixels) for name in chunk]

    # Threads: reading and decoding release the interpreter, and a forked TensorFlow would hang.
    cores = len(os.sched_getaffinity(0))
    chunks = [names[i : i + _CHUNK] for i in range(0, len(names), _CHUNK)]
    start, bar, done = time.monotonic(), None, 0
    with concurrent.futures.ThreadPoolExecutor(cores + 2 if decode else min(8 * cores, 32)) as pool:
        for chunk, looks in zip(chunks, pool.map(look_at, chunks), strict=True):
            for name, (facts, depth) in zip(chunk, looks, strict=True):
                yield name, facts, depth
            done += len(chunk)
            if bar is None and time.monotonic() - start > _SILENT:
                bar, shown = Bar("Checking images", len(names)), 0
            while bar and shown < done:
                bar.step()
                shown += 1
