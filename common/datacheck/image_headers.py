"""What the header and the end of an encoded image show, without decoding it.

Header, EXIF orientation and end of the file are read, and the variants are found that DALI 2.4 refuses or
decodes wrongly without an error (lossless JPEG, JPEG 2000 of 9 to 15 bits, TIFFs with floats or JPEG inside,
BMPs with masks, PNMs of another maximum). These and other rare variants are unsupported;
test_image_headers.py compares with DALI.
"""

import functools
import os
import re
import struct
import warnings
import zlib
from typing import Any, BinaryIO

import msgspec
import PIL.Image
import PIL.PngImagePlugin
import PIL.TiffImagePlugin
from nvidia import nvimgcodec

warnings.filterwarnings("ignore", module="PIL.TiffImagePlugin")  # of damaged tags, in EXIF too
# What Pillow raises for damaged images.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError, struct.error, zlib.error)
_HEAD = 8192  # bytes that are read at once: most headers end within them


class Fault(Exception):  # noqa: N818 (a property of the image, not an error of the program)
    """Why an image cannot be used: a row of issues.KINDS, and words to stand behind its name and a colon."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)


damaged = functools.partial(Fault, "image-damaged")
truncated = functools.partial(Fault, "image-truncated")
unsupported = functools.partial(Fault, "unsupported-format")


class ImageFacts(msgspec.Struct, gc=False, array_like=True):
    """What an image file contains.

    Attributes:
        image_format: Pillow's name of it, "JPEG" for files with several pictures, too; "" where unknown.
        height, width: of the stored pixels, before any EXIF turn; 0 where unknown.
        orientation: of EXIF or TIFF, 1 to 8; 1 where there is none.
        fault: a row of issues.KINDS (severity IMAGE); "" where there is none.
        detail: of the fault, in words.
    """

    image_format: str = ""
    height: int = 0
    width: int = 0
    orientation: int = 1
    fault: str = ""
    detail: str = ""


class Encoded:
    """An encoded image, of which as few bytes as possible are read.

    Args:
        stream: holds the image and nothing else.

    Attributes:
        facts: what is known of the image.
        is_16_bit: samples are 16 bits wide, and DALI keeps the upper eight.
        pixels_at: where the data of the first scan of a JPEG begin.
    """

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.size = stream.seek(0, os.SEEK_END)
        self.facts, self.is_16_bit, self.pixels_at = ImageFacts(), False, 0
        self.head = self.at(0, min(self.size, _HEAD))

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; Fault where there are not so many."""
        content = b""
        if offset + count <= self.size:
            self._stream.seek(offset)
            content = self._stream.read(count)
        if len(content) < count:
            raise truncated(f"it ends after {self.size} bytes, and byte {offset + count - 1} is needed")
        return content

    def whole(self) -> bytes:
        """All bytes."""
        return self.at(0, self.size)

    def rewound(self) -> BinaryIO:
        """The stream at its beginning."""
        self._stream.seek(0)
        return self._stream


def read_header(image: Encoded) -> None:
    """Fills in what the header shows.

    Raises:
        Fault: the image is cut off, or cannot be used for another reason that shows without decoding. What
            was found before stands in `image.facts`.
    """
    head, facts = image.head, image.facts
    if not head:
        raise Fault("image-empty")
    for signature, image_format, parse in _PARSERS:
        if head.startswith(signature):
            facts.image_format = image_format
            return parse(image)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise Fault("image-lfs-pointer")
    for pattern, image_format in _NOT_FOR_DALI:
        if re.match(pattern, head, re.DOTALL):
            facts.image_format = image_format
            raise unsupported(image_format)
    raise Fault("not-an-image", f"it begins with {head[:16]!r}")


_NOT_FOR_DALI = (
    (rb"GIF8", "GIF"),
    (rb".{4}ftyp.{0,52}avi[fs]", "AVIF"),  # ISO/IEC 23008-12: brands of the file
    (rb".{4}ftyp.{0,52}(hei|hevc|mif1|msf1)", "HEIF"),
    (rb".{4}ftyp", "video"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (rb"P[1-7Ff][ \t\n\r]", "PNM"),
)


def _set_size(facts: ImageFacts, height: int, width: int) -> None:
    if height <= 0 or width <= 0:
        raise damaged(f"a {facts.image_format} of {width} x {height} pixels")
    facts.height, facts.width = height, width


def _valid(orientation: Any) -> int:
    return orientation if orientation in range(1, 9) else 1


def _orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1 to 8; 1 where there is none or it makes no sense."""
    block = PIL.Image.Exif()
    try:
        block.load(exif)
        return _valid(block.get(0x0112))
    except PILLOW_ERRORS:
        return 1


# --- JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B ---

_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length of what follows, itself included
_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7)
_START_OF_SCAN, _END_OF_IMAGE, _APP1 = 0xDA, 0xD9, 0xE1
_LONGEST_SIDE = 65500  # of libjpeg
_END = b"\xff\xd9"
_NEXT_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # not stuffed zeros, restarts, fill bytes


def _jpeg(image: Encoded) -> None:
    at, exif, frame = 2, b"", (8, 0, 0, 3)
    while True:
        start, marker, length = _SEGMENT.unpack(image.at(at, 4))
        if start == marker == 0xFF:  # a fill byte
            at += 1
            continue
        if start != 0xFF or marker in (0, _END_OF_IMAGE) or length < 2:
            raise damaged(f"there is no JPEG segment at byte {at}")
        if marker == _START_OF_SCAN:
            break
        if marker in _OTHER_FRAMES:
            raise unsupported("lossless or hierarchical JPEG")
        if marker in _FRAMES:
            frame = struct.unpack(">BHHB", image.at(at + 4, 6))
        if marker == _APP1 and not exif and image.at(at + 4, min(length - 2, 6)) == b"Exif\0\0":
            exif = image.at(at + 4, length - 2)
        at += 2 + length
    bits, height, width, components = frame
    _set_size(image.facts, height, width)
    if components not in (1, 3, 4) or bits != 8 or max(height, width) > _LONGEST_SIDE:
        raise unsupported(f"JPEG of {width} x {height} pixels, {components} components, {bits} bits")
    image.facts.orientation = _orientation(exif)
    # The end of a thumbnail in EXIF lies before the scan, ends of further pictures behind it.
    scan = image.pixels_at = at + 2 + length
    if scan + 2 <= image.size and image.at(image.size - 2, 2) == _END:
        return
    if end_of_jpeg(image.at(scan, max(image.size - scan, 0))) is None:
        raise truncated(f"a JPEG without its end-of-image marker, {image.size} bytes")


def end_of_jpeg(scan: bytes) -> int | None:
    """Where the end-of-image marker stands in bytes that begin with the data of a scan."""
    at = 0
    while marker := _NEXT_MARKER.search(scan, at):
        if marker[0] == _END:
            return marker.start()
        at = marker.end() + int.from_bytes(scan[marker.end() : marker.end() + 2])  # tables, another scan
    return None


# --- PNG: https://www.w3.org/TR/png-3/ ---

_IEND = b"\0\0\0\0IEND\xaeB`\x82"


def _png(image: Encoded) -> None:
    is_whole = image.size > 45 and image.at(image.size - 12, 12) == _IEND
    if not is_whole and _IEND not in image.whole():  # something may follow it
        raise truncated(f"a PNG without its last chunk, {image.size} bytes")
    try:
        picture = PIL.PngImagePlugin.PngImageFile(image.rewound())
    except PILLOW_ERRORS as error:
        raise damaged(f"the header of the PNG cannot be read ({error})") from error
    if not picture.tile:
        raise damaged("a PNG without a picture")
    _set_size(image.facts, picture.height, picture.width)
    image.facts.orientation = _orientation(picture.info.get("exif", b""))
    image.is_16_bit = image.head[24] == 16


# --- WebP: https://developers.google.com/speed/webp/docs/riff_container ---


def _webp(image: Encoded) -> None:
    riff, form = struct.unpack("<I4s", image.at(4, 8))
    if form != b"WEBP":
        image.facts.image_format = ""
        raise Fault("not-an-image", f"a RIFF file of type {form!r}")
    end = 8 + riff
    if image.size < end:
        raise truncated(f"a WebP of {end} bytes of which {image.size} are there")
    try:  # as DALI does, which refuses more than Pillow
        stream = nvimgcodec.CodeStream(image.head if len(image.head) == _HEAD else image.whole())
        _set_size(image.facts, stream.height, stream.width)
    except RuntimeError as error:
        raise damaged("the header of the WebP cannot be read") from error
    at = 12
    while image.at(12, 4) == b"VP8X" and at + 8 <= end:
        name, length = struct.unpack("<4sI", image.at(at, 8))
        if name == b"EXIF":
            image.facts.orientation = _orientation(image.at(at + 8, length))
        at += 8 + length + length % 2


# --- BMP: https://learn.microsoft.com/windows/win32/gdi/bitmap-storage ---


def _bmp(image: Encoded) -> None:
    start, header_size, width, height, _, bits, compression = struct.unpack("<IIiiHHI", image.at(10, 24))
    if header_size < 40 or bits not in (1, 4, 8, 24, 32) or compression:
        raise unsupported(f"BMP with {bits} bits per pixel, compression {compression}, header {header_size}")
    _set_size(image.facts, abs(height), width)
    end = start + (width * bits + 31) // 32 * 4 * abs(height)
    if image.size < end:
        raise truncated(f"a BMP of {end} bytes of which {image.size} are there")


# --- TIFF: https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf ---

_PLAIN = (1, 5, 8, 32946, 32773)  # compressions: none, LZW, Deflate (2), PackBits
# Photometric interpretation, samples and bits per sample: grey, RGB with or without alpha, palette.
_LAYOUTS = ((1, 1, 8), (1, 1, 16), (2, 3, 8), (2, 3, 16), (2, 4, 8), (3, 1, 8))


def _tiff(image: Encoded) -> None:
    try:
        tags = PIL.TiffImagePlugin.TiffImageFile(image.rewound()).tag_v2
        bits, kinds = set(tags.get(258, (1,))), set(tags.get(339, (1,)))
        layout = (tags.get(262), tags.get(277, 1), max(bits))
        offsets, sizes = (tags.get(273, ()), tags.get(279, ())) if 273 in tags else (tags[324], tags[325])
        end = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    except PILLOW_ERRORS as error:
        raise unsupported(f"TIFF that Pillow does not read ({error})") from error
    _set_size(image.facts, tags[257], tags[256])
    compression, planar = tags.get(259, 1), tags.get(284, 1)
    is_plain = compression in _PLAIN and layout in _LAYOUTS and planar == 1 and len(bits) == 1
    if not is_plain or kinds != {1} or tags.next:
        samples = f"{layout[1]} samples of {layout[2]} bits, sample format {max(kinds)}"
        raise unsupported(
            f"TIFF with compression {compression}, photometric interpretation {layout[0]}, {samples}, planar"
            f" configuration {planar}{', several pages' if tags.next else ''}"
        )
    image.is_16_bit = layout[2] == 16
    image.facts.orientation = _valid(tags.get(274))
    if end > image.size:
        raise truncated(f"a TIFF of at least {end} bytes of which {image.size} are there")


# --- JPEG 2000: ISO/IEC 15444-1, annexes A (the codestream) and I (the boxes around it) ---

_CODESTREAM = b"\xff\x4f\xff\x51"
_SIZE = struct.Struct(">4x4x4I16xH")  # SOC and SIZ; right, bottom, left, top; components


def _jpeg2000(image: Encoded) -> None:
    at = image.head.find(_CODESTREAM)
    if at < 0:
        raise damaged("a JPEG 2000 file whose codestream has no header")
    width, height, left, top, count = _SIZE.unpack(image.at(at, _SIZE.size))
    parts = image.at(at + _SIZE.size, 3 * count)  # of each: bits - 1, distances across and down
    allowed = (1, 3, 4) if at else (3, 4)  # DALI refuses a grey codestream without boxes
    if left or top or count not in allowed or set(parts) != {7, 1}:
        raise unsupported(f"JPEG 2000 with {count} components that are not plain 8 bits")
    _set_size(image.facts, height, width)
    if _END not in image.whole()[at + _SIZE.size + 3 * count :]:
        raise truncated(f"a JPEG 2000 file without its end-of-codestream marker, {image.size} bytes")


_PARSERS = (
    (b"\xff\xd8", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WEBP", _webp),
    (b"BM", "BMP", _bmp),
    ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF", _tiff),
    ((b"\0\0\0\x0cjP  \r\n\x87\n", _CODESTREAM), "JPEG2000", _jpeg2000),
)
