"""What the header and the end of an encoded image show, without decoding it.

nvImageCodec, the codec library of DALI, reads size, channels and bits (of PNG: Pillow). Added here: the EXIF
orientation, the end of the file, and the variants that DALI 2.4 refuses or decodes wrongly without an error
(lossless JPEG, JPEG 2000 of 9 to 15 bits, TIFFs with floats or JPEG inside, BMPs with masks, PNMs of another
maximum). These and other rare variants are unsupported; test_image_headers.py compares with DALI.
"""

import dataclasses
import functools
import io
import re
import struct
import warnings
from collections.abc import Callable

import PIL.Image
import PIL.PngImagePlugin
import PIL.TiffImagePlugin
from nvidia import nvimgcodec

warnings.filterwarnings("ignore", module="PIL.TiffImagePlugin")  # of damaged tags, in EXIF too
_HEAD = 8192  # bytes that are read at once: most headers end within them


class Fault(Exception):  # noqa: N818 (a property of the image, not an error of the program)
    """Why an image cannot be used.

    Attributes:
        kind: a row of issues.KINDS.
        detail: in words, to stand behind the name of the file and a colon.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


damaged = functools.partial(Fault, "image-damaged")
truncated = functools.partial(Fault, "image-truncated")
unsupported = functools.partial(Fault, "unsupported-format")


@dataclasses.dataclass(slots=True)
class Header:
    """What was found, as far as the parser came.

    Attributes:
        image_format: Pillow's name of the format.
        height, width: of the stored pixels.
        orientation: of EXIF or TIFF, 1 to 8.
        is_16_bit: samples are 16 bits wide, and DALI keeps the upper eight.
        pixels_at: where the data of the first scan of a JPEG begin.
    """

    image_format: str = ""
    height: int = 0
    width: int = 0
    orientation: int = 1
    is_16_bit: bool = False
    pixels_at: int = 0


class Encoded:
    """The bytes of an image, of which as few as possible are read.

    Args:
        size: their number.
        read: gives `count` bytes from `offset` on, fewer at the end.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes]):
        self.size = size
        self._read = read
        self.head = read(0, min(size, _HEAD))

    @classmethod
    def of(cls, content: bytes | memoryview) -> "Encoded":
        """An image in memory."""
        return cls(len(content), lambda offset, count: bytes(content[offset : offset + count]))

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; Fault where there are not so many."""
        end = offset + count
        if end <= len(self.head):
            return self.head[offset:end]
        content = self._read(offset, count) if end <= self.size else b""
        if len(content) < count:
            raise truncated(f"it ends after {self.size} bytes, and byte {end - 1} is needed")
        return content

    def whole(self) -> bytes:
        """All bytes."""
        return self.at(0, self.size)


def read_header(encoded: Encoded, header: Header) -> None:
    """Fills in `header`.

    Raises:
        Fault: the image is cut off, or cannot be used for another reason that shows without decoding. What
            was found before stands in `header`.
    """
    head = encoded.head
    if not head:
        raise Fault("image-empty")
    for signature, image_format, parse in _PARSERS:
        if head.startswith(signature):
            header.image_format = image_format
            parse(encoded, header)
            return
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise Fault("image-lfs-pointer")
    brands = head[8:64] if head[4:8] == b"ftyp" else b""  # ISO/IEC 23008-12
    names = [name for signature, name in _SIGNATURES if head.startswith(signature)]
    names += [name for brand, name in _BRANDS.items() if brand in brands]
    if brands or names:
        header.image_format = names[0] if names else f"video of brand {brands[:4]!r}"
        raise unsupported(header.image_format)
    raise Fault("not-an-image", f"it begins with {head[:16]!r}")


# Formats that DALI does not decode.
_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"hei": "HEIF",
    b"hevc": "HEIF",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
}
_SIGNATURES = (
    (b"GIF8", "GIF"),
    ((b"\xff\x0a", b"\0\0\0\x0cJXL "), "JPEG XL"),
    (b"8BPS", "PSD"),
    (b"%PDF", "PDF"),
    (b"v/1\x01", "OpenEXR"),
    (tuple(f"P{kind}{space}".encode() for kind in "1234567Ff" for space in " \t\n\r"), "PNM"),
    (b"\0\0\1\0", "ICO"),
    (b"DDS ", "DDS"),
    (b"qoif", "QOI"),
    (b"<svg", "SVG"),
)


def _read_size(content: bytes, header: Header) -> nvimgcodec.CodeStream:
    """Fills in size and depth from an image or enough of its beginning."""
    try:
        stream = nvimgcodec.CodeStream(content)
        height, width = stream.height, stream.width
    except RuntimeError as error:
        raise damaged(f"the header of the {header.image_format} cannot be read") from error
    if height <= 0 or width <= 0:  # of large numbers nvImageCodec makes negative ones
        raise damaged(f"a {header.image_format} of {width} x {height} pixels")
    header.height, header.width, header.is_16_bit = height, width, stream.precision == 16
    if stream.precision not in (8, 16):
        raise unsupported(f"{header.image_format} with {stream.precision} bits per sample")
    return stream


def _orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1 to 8; 1 where there is none or it makes no sense."""
    block = PIL.Image.Exif()
    try:
        block.load(exif)
        orientation = block.get(0x0112, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, EOFError, OSError, struct.error):
        return 1
    return orientation if orientation in range(1, 9) else 1


# --- JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B ---

_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length of what follows, itself included
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7)
_START_OF_SCAN, _END_OF_IMAGE, _APP1 = 0xDA, 0xD9, 0xE1
_LONGEST_SIDE = 65500  # of libjpeg
_END = b"\xff\xd9"
_NEXT_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # not stuffed zeros, restarts, fill bytes


def _jpeg(encoded: Encoded, header: Header) -> None:
    at, exif = 2, b""
    while True:
        start, marker, length = _SEGMENT.unpack(encoded.at(at, 4))
        if start == marker == 0xFF:  # a fill byte
            at += 1
            continue
        if start != 0xFF or marker in (0, _END_OF_IMAGE) or length < 2:
            raise damaged(f"there is no JPEG segment at byte {at}")
        if marker == _START_OF_SCAN:
            break
        if marker in _OTHER_FRAMES:
            raise unsupported("lossless or hierarchical JPEG")
        if marker == _APP1 and not exif and encoded.at(at + 4, min(length - 2, 6)) == b"Exif\0\0":
            exif = encoded.at(at + 4, length - 2)
        at += 2 + length
    stream = _read_size(encoded.at(0, at + 4), header)
    if (
        stream.num_channels not in (1, 3, 4)
        or header.is_16_bit
        or max(stream.height, stream.width) > _LONGEST_SIDE
    ):
        size = f"{header.width} x {header.height} pixels"
        raise unsupported(f"JPEG of {size}, {stream.num_channels} components, {stream.precision} bits")
    if exif:
        header.orientation = _orientation(exif)
    # The end of a thumbnail in EXIF lies before the scan, ends of further pictures behind it.
    scan = header.pixels_at = at + 2 + length
    if scan + 2 <= encoded.size and encoded.at(encoded.size - 2, 2) == _END:
        return
    if end_of_jpeg(encoded.at(scan, max(encoded.size - scan, 0))) is None:
        raise truncated(f"a JPEG without its end-of-image marker, {encoded.size} bytes")


def end_of_jpeg(scan: bytes) -> int | None:
    """Where the end-of-image marker stands in bytes that begin with the data of a scan."""
    at = 0
    while marker := _NEXT_MARKER.search(scan, at):
        if marker[0] == _END:
            return marker.start()
        at = marker.end() + int.from_bytes(scan[marker.end() : marker.end() + 2])  # tables, another scan
    return None


# --- PNG: https://www.w3.org/TR/png-3/ ---

_CHUNK = struct.Struct(">I4s")  # length, type; then the data and a CRC
_IEND = b"\0\0\0\0IEND\xaeB`\x82"


def _png(encoded: Encoded, header: Header) -> None:
    at, name = 8, b""
    while name != b"IDAT":
        length, name = _CHUNK.unpack(encoded.at(at, 8))
        if name == b"IEND":
            raise damaged("a PNG without a picture")
        if name == b"eXIf":
            header.orientation = _orientation(encoded.at(at + 8, length))
        at += 12 + length
    try:  # nvImageCodec would need the whole file
        header.width, header.height = PIL.PngImagePlugin.PngImageFile(
            io.BytesIO(encoded.at(0, at - length - 4))
        ).size
    except (SyntaxError, ValueError, OSError, struct.error) as error:
        raise damaged(f"the header of the PNG cannot be read ({error})") from error
    if not header.height or not header.width:
        raise damaged(f"a PNG of {header.width} x {header.height} pixels")
    header.is_16_bit = encoded.head[24] == 16
    is_whole = encoded.at(encoded.size - 12, 12) == _IEND
    if not is_whole and _IEND not in encoded.at(at, max(encoded.size - at, 0)):  # something may follow it
        raise truncated(f"a PNG without its last chunk, {encoded.size} bytes")


# --- WebP: https://developers.google.com/speed/webp/docs/riff_container ---


def _webp(encoded: Encoded, header: Header) -> None:
    riff, form = struct.unpack("<I4s", encoded.at(4, 8))
    if form != b"WEBP":
        header.image_format = ""
        raise Fault("not-an-image", f"a RIFF file of type {form!r}")
    end = 8 + riff
    if encoded.size < end:
        raise truncated(f"a WebP of {end} bytes of which {encoded.size} are there")
    _read_size(encoded.head if len(encoded.head) == _HEAD else encoded.whole(), header)
    at = 12
    while encoded.at(12, 4) == b"VP8X" and at + 8 <= end:
        name, length = struct.unpack("<4sI", encoded.at(at, 8))
        if name == b"EXIF":
            header.orientation = _orientation(encoded.at(at + 8, length))
        at += 8 + length + length % 2


# --- BMP: https://learn.microsoft.com/windows/win32/gdi/bitmap-storage ---


def _bmp(encoded: Encoded, header: Header) -> None:
    start, header_size, _, _, _, bits, compression = struct.unpack("<IIiiHHI", encoded.at(10, 24))
    if header_size < 40 or bits not in (1, 4, 8, 24, 32) or compression:
        raise unsupported(f"BMP with {bits} bits per pixel, compression {compression}, header {header_size}")
    _read_size(encoded.head, header)
    end = start + (header.width * bits + 31) // 32 * 4 * header.height
    if encoded.size < end:
        raise truncated(f"a BMP of {end} bytes of which {encoded.size} are there")


# --- TIFF: https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf ---

_PLAIN = (1, 5, 8, 32946, 32773)  # compressions: none, LZW, Deflate (2), PackBits
# Photometric interpretation, samples and bits per sample: grey, RGB with or without alpha, palette.
_LAYOUTS = ((1, 1, 8), (1, 1, 16), (2, 3, 8), (2, 3, 16), (2, 4, 8), (3, 1, 8))


def _tiff(encoded: Encoded, header: Header) -> None:
    whole = encoded.whole()
    _read_size(whole, header)
    try:
        tags = PIL.TiffImagePlugin.TiffImageFile(io.BytesIO(whole)).tag_v2
        bits, kinds = set(tags.get(258, (1,))), set(tags.get(339, (1,)))
        layout = (tags.get(262), tags.get(277, 1), max(bits))
        offsets, sizes = (tags.get(273, ()), tags.get(279, ())) if 273 in tags else (tags[324], tags[325])
        end = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    except (SyntaxError, ValueError, TypeError, KeyError, EOFError, OSError, struct.error) as error:
        raise unsupported(f"TIFF that Pillow does not read ({error})") from error
    compression, planar = tags.get(259, 1), tags.get(284, 1)
    is_plain = compression in _PLAIN and layout in _LAYOUTS and planar == 1 and len(bits) == 1
    if not is_plain or kinds != {1} or tags.next:
        raise unsupported(
            f"TIFF with compression {compression}, photometric interpretation {layout[0]},"
            f" {layout[1]} samples of {layout[2]} bits, sample format {max(kinds)},"
            f" planar configuration {planar}{', several pages' if tags.next else ''}"
        )
    header.is_16_bit = layout[2] == 16  # of a palette, nvImageCodec names the bits of its colours
    header.orientation = tags.get(274, 1) if tags.get(274, 1) in range(1, 9) else 1
    if end > encoded.size:
        raise truncated(f"a TIFF of at least {end} bytes of which {encoded.size} are there")


# --- JPEG 2000: ISO/IEC 15444-1, annexes A (the codestream) and I (the boxes around it) ---

_CODESTREAM = b"\xff\x4f\xff\x51"
_SIZE = struct.Struct(">4x4x4I16xH")  # SOC and SIZ; right, bottom, left, top; components


def _jpeg2000(encoded: Encoded, header: Header) -> None:
    at = encoded.head.find(_CODESTREAM)
    if at < 0:
        raise damaged("a JPEG 2000 file whose codestream has no header")
    _, _, left, top, count = _SIZE.unpack(encoded.at(at, _SIZE.size))
    parts = encoded.at(at + _SIZE.size, 3 * count)  # of each: bits - 1, distances across and down
    allowed = (1, 3, 4) if at else (3, 4)  # DALI refuses a grey codestream without boxes
    if left or top or count not in allowed or set(parts) != {7, 1}:
        raise unsupported(f"JPEG 2000 with {count} components that are not plain 8 bits")
    _read_size(encoded.whole(), header)
    if (
        _END not in encoded.at(encoded.size - 2, 2)
        and _END not in encoded.whole()[at + _SIZE.size + 3 * count :]
    ):
        raise truncated(f"a JPEG 2000 file without its end-of-codestream marker, {encoded.size} bytes")


_PARSERS = (
    (b"\xff\xd8", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WEBP", _webp),
    (b"BM", "BMP", _bmp),
    ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF", _tiff),
    ((b"\0\0\0\x0cjP  \r\n\x87\n", _CODESTREAM), "JPEG2000", _jpeg2000),
)
