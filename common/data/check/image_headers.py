"""Checks the header and the end of an encoded image without decoding it.

Pillow reads the headers. For some formats nvImageCodec, DALI's codec library, reads them too. Rare variants
that DALI 2.4 rejects or decodes wrongly are reported as unsupported.
"""

import functools
import io
import os
import re
import struct
import warnings
import zlib
from typing import BinaryIO, TypeVar

import msgspec
import nvidia.nvimgcodec as nvimgcodec
import PIL.Image
from PIL import (
    BmpImagePlugin,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
)

from common.data.check.issues import Fault

warnings.filterwarnings("ignore", module="PIL.TiffImagePlugin")  # damaged tags
# The exceptions that Pillow raises for damaged images.
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, KeyError, EOFError, struct.error, zlib.error)
SWAPS_SIDES = 5  # EXIF orientations from this one on swap width and height
_HEAD = 8192  # bytes of the first read; most headers are shorter

Plugin = TypeVar("Plugin", bound=ImageFile.ImageFile)
damaged = functools.partial(Fault, "image-damaged")
truncated = functools.partial(Fault, "image-truncated")
unsupported = functools.partial(Fault, "unsupported-format")


class ImageFacts(msgspec.Struct, gc=False, array_like=True):
    """The properties of an image file and, if it has one, its fault.

    Attributes:
        image_format: Pillow's name of the format; "" if unknown. "JPEG" includes files with several images.
        height, width: size of the stored pixels, before any EXIF rotation; 0 if unknown.
        orientation: orientation tag of EXIF or TIFF, 1 to 8; 1 if there is none.
        fault: a key of issues.KINDS whose severity is IMAGE; "" without a fault.
        detail: text that describes the fault.
        checksum: a checksum of the size and both ends of the file, or of all bytes of an image in a record;
            equal images have equal ones. 0: not read.
    """

    image_format: str = ""
    height: int = 0
    width: int = 0
    orientation: int = 1
    fault: str = ""
    detail: str = ""
    checksum: int = 0


class Encoded:
    """Gives access to an encoded image, and reads as few of its bytes as possible.

    Args:
        stream: binary stream of the encoded image, without other data.

    Attributes:
        facts: what is known about the image so far.
        is_16_bit: whether each colour value has 16 bits.
        pixels_at: offset of the data of a JPEG's first scan.
    """

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.size = stream.seek(0, os.SEEK_END)
        self.facts, self.is_16_bit, self.pixels_at = ImageFacts(), False, 0
        self.head = self.at(0, min(self.size, _HEAD))

    def at(self, offset: int, count: int) -> bytes:
        """Returns `count` bytes from `offset` on; raises Fault if the file is too short."""
        content = b""
        if offset + count <= self.size:
            self.stream.seek(offset)
            content = self.stream.read(count)
        if len(content) < count:
            raise truncated(f"it ends after {self.size} bytes, and byte {offset + count - 1} is needed")
        return content

    def whole(self) -> bytes:
        return self.at(0, self.size)


def read_header(image: Encoded) -> None:
    """Reads the header and fills in `image.facts`.

    Raises:
        Fault: the image has a fault that is visible without decoding. `image.facts` then holds what was read.
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


def _open(image: Encoded, plugin: type[Plugin], header: bytes = b"") -> Plugin:
    """Lets Pillow read the header; fills in size and orientation.

    Args:
        header: what Pillow reads instead of the image.
    """
    image.stream.seek(0)
    try:
        picture = plugin(io.BytesIO(header) if header else image.stream)
    except PILLOW_ERRORS as error:
        if image.stream.tell() >= image.size:
            raise truncated(f"its header does not end within its {image.size} bytes") from error
        is_rare = plugin is TiffImagePlugin.TiffImageFile or re.match("cannot handle|Unsupported", str(error))
        fault = unsupported if is_rare else damaged
        raise fault(f"Pillow cannot read the {image.facts.image_format} header ({error})") from error
    if max(picture.size) >= 2**31:
        raise damaged(f"its header has {picture.width} x {picture.height} pixels")
    image.facts.width, image.facts.height = picture.size
    image.facts.orientation = _orientation(picture.info.get("exif", b""))
    return picture


def _parse_as_dali(image: Encoded, header: bytes) -> None:
    """Fills in the size that nvImageCodec reads. Raises Fault if nvImageCodec cannot read the header."""
    try:
        stream = nvimgcodec.CodeStream(header)
        image.facts.height, image.facts.width = stream.height, stream.width
    except RuntimeError as error:
        raise damaged(f"DALI cannot read the {image.facts.image_format} header") from error


def _orientation(exif: bytes) -> int:
    """Returns the orientation in an EXIF block, 1 to 8; 1 if it is missing or invalid."""
    block = PIL.Image.Exif()
    try:
        block.load(exif)
    except PILLOW_ERRORS:
        return 1
    return _valid(block.get(0x0112))


def _valid(orientation: object) -> int:
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


# --- JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B ---

_LONGEST_SIDE = 65500  # pixels, the limit of libjpeg
END = b"\xff\xd9"  # end marker of JPEG and JPEG 2000


def _jpeg(image: Encoded) -> None:
    picture = _open(image, JpegImagePlugin.JpegImageFile)
    # Pillow stops after the header of the first scan. The end marker must come later.
    scan = image.pixels_at = image.stream.tell()
    _parse_as_dali(image, image.at(0, scan))
    if max(picture.size) > _LONGEST_SIDE or not picture.quantization:
        kind = "" if picture.quantization else "lossless "
        raise unsupported(f"{kind}JPEG of {picture.width} x {picture.height} pixels")
    is_whole = scan + 2 <= image.size and image.at(image.size - 2, 2) == END
    if not is_whole and END not in image.at(scan, image.size - scan):
        raise truncated(f"a JPEG without its end-of-image marker, {image.size} bytes")


# --- PNG: https://www.w3.org/TR/png-3/ ---

_PNG = b"\x89PNG\r\n\x1a\n"
_IEND = b"\0\0\0\0IEND\xaeB`\x82"
_LONGEST_CHUNK = 7_999_988  # bytes; the limit of DALI's decoder for chunks before the pixels, except tEXt


# Chunks whose size Pillow limits: texts and color profiles.
_LIMITED = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def _png(image: Encoded) -> None:
    is_whole = image.size > 45 and image.at(image.size - 12, 12) == _IEND
    if not is_whole and _IEND not in image.whole():  # other data may follow the chunk
        raise truncated(f"a PNG without its last chunk, {image.size} bytes")
    header, at, name = image.at(0, 8), 8, b""
    while name not in (b"IDAT", b"IEND"):
        length, name = struct.unpack(">I4s", image.at(at, 8))
        if length > _LONGEST_CHUNK and name not in (b"IDAT", b"tEXt"):
            raise unsupported(
                f"a PNG with {length} bytes of metadata ({name.decode()}): save it without them"
            )
        if name not in _LIMITED:
            header += image.at(at, 8 if name == b"IDAT" else 12 + length)
        at += 12 + length
    if not _open(image, PngImagePlugin.PngImageFile, header).tile:
        raise damaged("a PNG without pixel data")
    image.is_16_bit = image.head[24] == 16


def png_without_metadata(content: bytes) -> bytes:
    """Returns a PNG without texts and color profiles, because Pillow refuses a PNG with large ones.

    Returns an image of another format unchanged.
    """
    parts, begin, at, name = [], 0, 8, b"" if content.startswith(_PNG) else b"IEND"
    while name != b"IEND" and at + 8 <= len(content):
        length, name = struct.unpack_from(">I4s", content, at)
        end = at + 12 + length
        if name in _LIMITED:
            parts.append(content[begin:at])
            begin = end
        at = end
    return b"".join([*parts, content[begin:]])


# --- WebP: https://developers.google.com/speed/webp/docs/riff_container ---


def _webp(image: Encoded) -> None:
    end = 8 + int.from_bytes(image.at(4, 4), "little")
    if image.size < end:
        raise truncated(f"a WebP of {end} bytes, of which only {image.size} are in the file")
    # Pillow is not used here: it would read the whole file and reject large images.
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
    # options[0] is the number of bytes of a row
    if image.size < (end := start + options[0] * image.facts.height):
        raise truncated(f"a BMP of {end} bytes, of which only {image.size} are in the file")


# --- TIFF: https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf ---

_PLAIN = (1, 5, 8, 32946, 32773)  # compressions: none, LZW, Deflate (two codes), PackBits
# Photometric interpretation, samples per pixel, bits per sample.
_LAYOUTS = ((1, 1, 8), (1, 1, 16), (2, 3, 8), (2, 3, 16), (2, 4, 8), (3, 1, 8))


def _tiff(image: Encoded) -> None:
    tags = _open(image, TiffImagePlugin.TiffImageFile).tag_v2
    layout = (tags.get(262), tags.get(277, 1), *set(tags.get(258, (1,))))
    compression, sample_formats, planar = tags.get(259, 1), set(tags.get(339, (1,))), tags.get(284, 1)
    is_plain = compression in _PLAIN and layout in _LAYOUTS and sample_formats == {1} and planar == 1
    at, length = (273, 279) if 273 in tags else (324, 325)
    offsets, sizes = tags.get(at, ()), tags.get(length, ())
    are_numbers = all(isinstance(number, int) for number in (*offsets, *sizes))  # damaged files may have text
    if not is_plain or tags.next or not are_numbers or not sizes or len(sizes) != len(offsets):
        raise unsupported(
            f"TIFF with compression {compression}, photometric interpretation, samples and bits {layout},"
            f" sample formats {sample_formats}, planar configuration {planar}, next page at {tags.next}"
        )
    image.is_16_bit = layout[2] == 16
    image.facts.height, image.facts.width = tags[257], tags[256]  # Pillow's size is after rotation
    image.facts.orientation = _valid(tags.get(274))
    if (end := max(map(sum, zip(offsets, sizes, strict=True)))) > image.size:
        raise truncated(f"a TIFF of at least {end} bytes, of which only {image.size} are in the file")


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
    parts = stream[38 : 38 + 3 * count]  # per component: bits - 1, horizontal and vertical subsampling
    is_grey_stream = count == 1 and not boxes  # DALI rejects such files
    if has_offset or is_grey_stream or set(parts) != {7, 1}:
        raise unsupported(f"JPEG 2000, {count} components, with unusual bits, subsampling or offset")
    if END not in stream[38 + 3 * count :]:
        raise truncated(f"a JPEG 2000 file without its end-of-codestream marker, {image.size} bytes")


def _refuse(image: Encoded) -> None:
    raise unsupported(image.facts.image_format)


def _refuse_video(image: Encoded) -> None:
    raise Fault("video")


_FORMATS = (
    (rb"\xff\xd8", "JPEG", _jpeg),
    (_PNG, "PNG", _png),
    (rb"RIFF.{4}WEBP", "WEBP", _webp),
    (rb"BM", "BMP", _bmp),
    (rb"II[*+]\0|MM\0\*", "TIFF", _tiff),
    (rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", "JPEG2000", _jpeg2000),
    (rb"MM\0\+", "big-endian BigTIFF", _refuse),
    (rb"GIF8", "GIF", _refuse),
    (rb".{4}ftyp.{0,52}avi[fs]", "AVIF", _refuse),  # ISO/IEC 23008-12: brands of the file
    (rb".{4}ftyp.{0,52}(hei|hevc|mif1|msf1)", "HEIF", _refuse),
    (rb".{4}ftyp|RIFF.{4}AVI |\x1aE\xdf\xa3|FLV\x01|OggS|\0\0\x01\xba", "video", _refuse_video),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "JPEG XL", _refuse),
    (rb"P[1-7Ff][ \t\n\r]", "PNM", _refuse),
)
