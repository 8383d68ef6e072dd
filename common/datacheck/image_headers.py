"""What the header and the end of an encoded image show, without decoding it.

Pillow reads the headers; nvImageCodec, the codec library of DALI, parses those of which it refuses more.
Added here: the end of the file, and the variants that DALI 2.4 refuses or decodes wrongly without an error
(lossless JPEG, JPEG 2000 of 9 to 16 bits, TIFFs with floats or JPEG inside, BMPs with swapped masks, PNMs of
another maximum). These and other rare variants are unsupported; test_image_headers.py compares with DALI.
"""

import functools
import os
import re
import struct
import warnings
import zlib
from typing import BinaryIO, TypeVar

import msgspec
import nvidia.nvimgcodec as nvimgcodec
import PIL.Image
from PIL import BmpImagePlugin, Jpeg2KImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin
from PIL.ImageFile import ImageFile

from common.datacheck.issues import Fault

warnings.filterwarnings("ignore", module="PIL.TiffImagePlugin")  # of damaged tags, in EXIF too
# What Pillow raises for damaged images.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError, struct.error, zlib.error)
_HEAD = 8192  # bytes that are read at once: most headers end within them

Plugin = TypeVar("Plugin", bound=ImageFile)
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
        self.stream = stream
        self.size = stream.seek(0, os.SEEK_END)
        self.facts, self.is_16_bit, self.pixels_at = ImageFacts(), False, 0
        self.head = self.at(0, min(self.size, _HEAD))

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; Fault where there are not so many."""
        content = b""
        if offset + count <= self.size:
            self.stream.seek(offset)
            content = self.stream.read(count)
        if len(content) < count:
            raise truncated(f"it ends after {self.size} bytes, and byte {offset + count - 1} is needed")
        return content

    def whole(self) -> bytes:
        """All bytes."""
        return self.at(0, self.size)


def read_header(image: Encoded) -> None:
    """Fills in what the header shows.

    Raises:
        Fault: the image is cut off, or cannot be used for another reason that shows without decoding. What
            was found before stands in `image.facts`.
    """
    if not image.head:
        raise Fault("image-empty")
    if image.head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise Fault("image-lfs-pointer")
    for signature, image_format, read in _FORMATS:
        if re.match(signature, image.head, re.DOTALL):
            image.facts.image_format = image_format
            return read(image)
    raise Fault("not-an-image", f"it begins with {image.head[:16]!r}")


def _open(image: Encoded, plugin: type[Plugin]) -> Plugin:
    """Pillow's view of the header; fills in size and orientation."""
    image.stream.seek(0)
    try:
        picture = plugin(image.stream)
    except PILLOW_ERRORS as error:
        if image.stream.tell() >= image.size:
            raise truncated(f"its header does not end within its {image.size} bytes") from error
        is_rare = plugin is TiffImagePlugin.TiffImageFile or re.match("cannot handle|Unsupported", str(error))
        fault = unsupported if is_rare else damaged
        raise fault(f"a {image.facts.image_format} whose header Pillow does not read ({error})") from error
    if max(picture.size) >= 2**31:
        raise damaged(f"{picture.width} x {picture.height} pixels")
    image.facts.width, image.facts.height = picture.size
    image.facts.orientation = _orientation(picture.info.get("exif", b""))
    return picture


def _parse_as_dali(image: Encoded, header: bytes) -> None:
    """Fills in the size by nvImageCodec; Fault where DALI refuses the header."""
    try:
        stream = nvimgcodec.CodeStream(header)
        image.facts.height, image.facts.width = stream.height, stream.width
    except RuntimeError as error:
        raise damaged(f"a {image.facts.image_format} whose header DALI does not read") from error


def _orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1 to 8; 1 where there is none or it makes no sense."""
    block = PIL.Image.Exif()
    try:
        block.load(exif)
    except PILLOW_ERRORS:
        return 1
    return _valid(block.get(0x0112))


def _valid(orientation: object) -> int:
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


# --- JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B ---

_LONGEST_SIDE = 65500  # of libjpeg
END = b"\xff\xd9"  # also of JPEG 2000; data of a scan do not contain it


def _jpeg(image: Encoded) -> None:
    picture = _open(image, JpegImagePlugin.JpegImageFile)
    # Pillow stops behind the header of the first scan. The end of a thumbnail in EXIF lies before it, ends of
    # further pictures behind it.
    scan = image.pixels_at = image.stream.tell()
    _parse_as_dali(image, image.at(0, scan))
    if max(picture.size) > _LONGEST_SIDE or not picture.quantization:
        kind = "" if picture.quantization else "lossless "
        raise unsupported(f"{kind}JPEG of {picture.width} x {picture.height} pixels")
    is_whole = scan + 2 <= image.size and image.at(image.size - 2, 2) == END
    if not is_whole and END not in image.at(scan, image.size - scan):
        raise truncated(f"a JPEG without its end-of-image marker, {image.size} bytes")


# --- PNG: https://www.w3.org/TR/png-3/ ---

_IEND = b"\0\0\0\0IEND\xaeB`\x82"


def _png(image: Encoded) -> None:
    is_whole = image.size > 45 and image.at(image.size - 12, 12) == _IEND
    if not is_whole and _IEND not in image.whole():  # something may follow it
        raise truncated(f"a PNG without its last chunk, {image.size} bytes")
    if not _open(image, PngImagePlugin.PngImageFile).tile:
        raise damaged("a PNG without a picture")
    image.is_16_bit = image.head[24] == 16


# --- WebP: https://developers.google.com/speed/webp/docs/riff_container ---


def _webp(image: Encoded) -> None:
    end = 8 + int.from_bytes(image.at(4, 4), "little")
    if image.size < end:
        raise truncated(f"a WebP of {end} bytes of which {image.size} are there")
    # Pillow would read the whole file, and refuse large pictures.
    _parse_as_dali(image, image.head)
    at = 12
    while image.at(12, 4) == b"VP8X" and at + 8 <= end:
        name, length = struct.unpack("<4sI", image.at(at, 8))
        if name == b"EXIF":
            image.facts.orientation = _orientation(image.at(at + 8, length))
        at += 8 + length + length % 2


# --- BMP: https://learn.microsoft.com/windows/win32/gdi/bitmap-storage ---

_BMP_LAYOUTS = ("1", "L", "P", "P;1", "P;4", "BGR", "BGRX", "BGRA")  # Pillow's raw modes


def _bmp(image: Encoded) -> None:
    decoder, _, start, arguments = _open(image, BmpImagePlugin.BmpImageFile).tile[0]
    layout, *options = arguments if isinstance(arguments, tuple) else (arguments,)
    if decoder != "raw" or layout not in _BMP_LAYOUTS:
        raise unsupported(f"BMP with the layout {layout}, decoder {decoder}")
    end = start + options[0] * image.facts.height  # bytes of a row
    if image.size < end:
        raise truncated(f"a BMP of {end} bytes of which {image.size} are there")


# --- TIFF: https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf ---

_PLAIN = (1, 5, 8, 32946, 32773)  # compressions: none, LZW, Deflate (2), PackBits
# Photometric interpretation, samples and bits per sample: grey, RGB with or without alpha, palette.
_LAYOUTS = ((1, 1, 8), (1, 1, 16), (2, 3, 8), (2, 3, 16), (2, 4, 8), (3, 1, 8))


def _tiff(image: Encoded) -> None:
    tags = _open(image, TiffImagePlugin.TiffImageFile).tag_v2
    layout = (tags.get(262), tags.get(277, 1), *set(tags.get(258, (1,))))
    compression, sample_formats, planar = tags.get(259, 1), set(tags.get(339, (1,))), tags.get(284, 1)
    is_plain = compression in _PLAIN and layout in _LAYOUTS and sample_formats == {1} and planar == 1
    at, length = (273, 279) if 273 in tags else (324, 325)
    offsets, sizes = tags.get(at, ()), tags.get(length, ())
    are_numbers = all(isinstance(number, int) for number in (*offsets, *sizes))  # damage: text
    if not is_plain or tags.next or not are_numbers or not sizes or len(sizes) != len(offsets):
        raise unsupported(
            f"TIFF with compression {compression}, photometric interpretation, samples and bits {layout},"
            f" sample formats {sample_formats}, planar configuration {planar}, next page at {tags.next}"
        )
    image.is_16_bit = layout[2] == 16
    image.facts.height, image.facts.width = tags[257], tags[256]  # Pillow's are turned
    image.facts.orientation = _valid(tags.get(274))
    end = max(map(sum, zip(offsets, sizes, strict=True)))
    if end > image.size:
        raise truncated(f"a TIFF of at least {end} bytes of which {image.size} are there")


# --- JPEG 2000: ISO/IEC 15444-1, annexes A (the codestream) and I (the boxes around it) ---

_CODESTREAM = b"\xff\x4f\xff\x51"


def _jpeg2000(image: Encoded) -> None:
    _open(image, Jpeg2KImagePlugin.Jpeg2KImageFile)
    content = image.whole()
    boxes, _, stream = content.partition(_CODESTREAM)
    if not any(stream[20:24]) or not any(stream[24:28]):  # nvImageCodec would divide by zero
        raise damaged("a JPEG 2000 file whose tiles have no width or height")
    _parse_as_dali(image, content)
    has_offset, count = any(stream[12:20]), int.from_bytes(stream[36:38])
    parts = stream[38 : 38 + 3 * count]  # of each component: bits - 1, distances across and down
    is_grey_stream = count == 1 and not boxes  # which DALI refuses
    if has_offset or is_grey_stream or set(parts) != {7, 1}:
        raise unsupported(f"JPEG 2000 with {count} components that are not plain 8 bits")
    if END not in stream[38 + 3 * count :]:
        raise truncated(f"a JPEG 2000 file without its end-of-codestream marker, {image.size} bytes")


def _refuse(image: Encoded) -> None:
    raise unsupported(image.facts.image_format)


_FORMATS = (
    (rb"\xff\xd8", "JPEG", _jpeg),
    (rb"\x89PNG\r\n\x1a\n", "PNG", _png),
    (rb"RIFF.{4}WEBP", "WEBP", _webp),
    (rb"BM", "BMP", _bmp),
    (rb"II[*+]\0|MM\0\*", "TIFF", _tiff),
    (rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", "JPEG2000", _jpeg2000),
    (rb"MM\0\+", "big-endian BigTIFF", _refuse),
    (rb"GIF8", "GIF", _refuse),
    (rb".{4}ftyp.{0,52}avi[fs]", "AVIF", _refuse),  # ISO/IEC 23008-12: brands of the file
    (rb".{4}ftyp.{0,52}(hei|hevc|mif1|msf1)", "HEIF", _refuse),
    (rb".{4}ftyp", "video", _refuse),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "JPEG XL", _refuse),
    (rb"P[1-7Ff][ \t\n\r]", "PNM", _refuse),
)
