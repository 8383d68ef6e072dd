"""What an encoded image says of itself in its header and at its end, without decoding it.

Knows all that DALI's `fn.decoders.image` reads on a CPU: JPEG, PNG, WebP, BMP, TIFF, JPEG 2000 and PNM. What
DALI 2.4 refuses of them, or turns into something else without a word (12-bit JPEG 2000 becomes almost black),
is unsupported; tests/common/datacheck/test_image_formats.py holds this against DALI.

The parsers are our own: Pillow identifies less than DALI decodes, turns TIFFs by their orientation, limits
the number of pixels by a setting of the whole process, and takes several times as long.
"""

import re
import struct
import zlib

from common.datacheck.encoded_image import Encoded, Fault, Header, damaged, truncated, unsupported
from common.datacheck.jpeg2000_format import read_jpeg2000
from common.datacheck.tiff_format import read_tiff


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
    header.image_format = _other_format(head)
    if header.image_format:
        raise unsupported(header.image_format)
    raise Fault("not-an-image", f"it begins with {head[:16]!r}")


# Formats that DALI does not decode.
_SIGNATURES = (
    (b"GIF8", "GIF"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"II\xbc", "JPEG XR"),
    (b"8BPS", "PSD"),
    (b"%PDF", "PDF"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"P7", "PAM"),
    (b"PF\n", "PFM"),
    (b"Pf\n", "PFM"),
    (b"\0\0\1\0", "ICO"),
    (b"DDS ", "DDS"),
    (b"qoif", "QOI"),
    (b"<svg", "SVG"),
    (b"\x59\xa6\x6a\x95", "Sun raster"),
)


def _other_format(head: bytes) -> str:
    if head[4:8] == b"ftyp":  # ISO/IEC 23008-12: a brand, a version, and brands that fit, too
        brands = head[8 : min(int.from_bytes(head[:4]), 64)]
        if b"avif" in brands or b"avis" in brands:
            return "AVIF"
        if any(brand in brands for brand in (b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1")):
            return "HEIF"
        return f"video of brand {head[8:12]!r}"
    return next((name for signature, name in _SIGNATURES if head.startswith(signature)), "")


# --- JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf, annex B ---

_SEGMENT = struct.Struct(">BBH")  # 0xFF, marker, length of what follows, itself included
_FRAME = struct.Struct(">BHHB")  # bits per sample, height, width, components
_DECODED_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)  # baseline, extended, progressive; with arithmetic coding
_OTHER_FRAMES = {0xC3: "lossless JPEG", 0xF7: "JPEG-LS"} | dict.fromkeys(
    (0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF), "hierarchical or lossless JPEG"
)
_START_OF_SCAN, _END_OF_IMAGE, _APP1, _QUANTIZATION = 0xDA, 0xD9, 0xE1, 0xDB
_LONGEST_SIDE = 65500  # of libjpeg
_BLOCKS = 10  # that a unit of an interleaved scan may have
_END = b"\xff\xd9"
_NEXT_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # not stuffed zeros, restarts, fill bytes


def _jpeg(encoded: Encoded, header: Header) -> None:
    at, tables, parts = 2, set(), b""
    while True:
        start, marker, length = _SEGMENT.unpack(encoded.at(at, 4))
        if start == 0xFF and marker == 0xFF:
            at += 1
            continue
        if start == 0xFF and marker == _END_OF_IMAGE:
            raise damaged("a JPEG without a picture")
        if start != 0xFF or marker == 0 or length < 2:
            raise damaged(f"there is no JPEG marker at byte {at}")
        if marker == _START_OF_SCAN:
            break
        if marker in _OTHER_FRAMES:
            raise unsupported(_OTHER_FRAMES[marker])
        if marker in _DECODED_FRAMES:
            bits, header.height, header.width, components = _FRAME.unpack(encoded.at(at + 4, 6))
            if bits != 8:
                raise unsupported(f"JPEG with {bits} bits per sample")
            if components not in (1, 3, 4):
                raise unsupported(f"JPEG with {components} components")
            if length != 8 + 3 * components:
                raise damaged(f"a JPEG whose frame of {components} components has {length} bytes")
            parts = _read_components(encoded.at(at + 10, 3 * components), header)
        elif marker == _QUANTIZATION:
            tables |= _read_quantization(encoded.at(at + 4, length - 2))
        elif marker == _APP1 and header.orientation == 1:
            segment = encoded.at(at + 4, length - 2)
            if segment.startswith(b"Exif\0\0"):
                header.orientation = exif_orientation(segment[6:])
        at += 2 + length
    if not header.width:
        raise damaged("a JPEG without a picture")
    if not header.height:  # it would come behind the scan
        raise unsupported("JPEG without its height in the header")
    if missing := sorted({*parts[2::3]} - tables):
        raise damaged(f"a JPEG without quantization table {missing[0]}, which it uses")
    blocks = sum((sampling >> 4) * (sampling & 15) for sampling in parts[1::3])
    in_scan = encoded.at(at + 4, 1)[0]  # components; fewer than the frame has: other scans follow
    if in_scan > 1 and 3 * in_scan == len(parts) and blocks > _BLOCKS:
        raise damaged(f"a JPEG whose sampling factors put {blocks} blocks together ({_BLOCKS} may be)")
    # The end of a thumbnail in EXIF lies before the scan, ends of further pictures behind it.
    scan = header.pixels_at = at + 2 + length
    if scan + 2 <= encoded.size and encoded.at(encoded.size - 2, 2) == _END:
        return
    if end_of_jpeg(encoded.at(scan, max(encoded.size - scan, 0))) is None:
        raise truncated(f"a JPEG without its end-of-image marker, {encoded.size} bytes")


def _read_components(components: bytes, header: Header) -> bytes:
    """The components of a frame: a byte each for number, sampling factors and quantization table."""
    if max(header.height, header.width) > _LONGEST_SIDE:
        raise unsupported(f"JPEG of {header.width} x {header.height} pixels, a side above {_LONGEST_SIDE}")
    for i, sampling in enumerate(components[1::3], start=1):
        if not (1 <= sampling >> 4 <= 4 and 1 <= sampling & 15 <= 4):
            factors = f"{sampling >> 4} x {sampling & 15}"
            raise damaged(f"a JPEG whose component {i} has sampling factors {factors} (1 to 4 exist)")
    return components


def _read_quantization(tables: bytes) -> set[int]:
    """The numbers of the tables that a segment defines."""
    numbers, at = set(), 0
    while at < len(tables):
        is_16_bit, number = divmod(tables[at], 16)
        at += 129 if is_16_bit else 65
        if number > 3 or at > len(tables):
            raise damaged(f"a JPEG whose quantization table {number} is cut off, or none of 0 to 3")
        numbers.add(number)
    return numbers


def end_of_jpeg(scan: bytes) -> int | None:
    """Where the end-of-image marker stands in bytes that begin with the data of a scan."""
    at = 0
    while marker := _NEXT_MARKER.search(scan, at):
        if marker[0] == _END:
            return marker.start()
        at = marker.end() + int.from_bytes(scan[marker.end() : marker.end() + 2])  # tables, another scan
    return None


def exif_orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1 to 8; 1 where there is none or it makes no sense."""
    try:
        order = {b"II*\0": "<", b"MM\0*": ">"}[exif[:4]]
        (offset,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, offset)
        for entry in range(entries):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, offset + 2 + 12 * entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except (KeyError, struct.error):
        pass
    return 1


# --- PNG: https://www.w3.org/TR/png-3/ ---

_CHUNK = struct.Struct(">I4s")  # length, type; then the data and a CRC
_IEND = b"\0\0\0\0IEND\xaeB`\x82"
_PALETTE = 3  # a color type
_PNG_BITS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type


def _png(encoded: Encoded, header: Header) -> None:
    length, name = _CHUNK.unpack(encoded.at(8, 8))
    if (length, name) != (13, b"IHDR"):
        raise damaged(f"a PNG whose first chunk is {name!r} of {length} bytes")
    fields = struct.unpack(">IIBBBBB", encoded.at(16, 13))
    header.width, header.height, bits, color, compression, filtering, interlace = fields
    if not header.width or not header.height or bits not in _PNG_BITS.get(color, ()):
        raise damaged(f"a PNG of {header.width} x {header.height} pixels, {bits} bits, color type {color}")
    if compression or filtering or interlace > 1:
        methods = f"compression {compression}, filter {filtering}, interlace {interlace}"
        raise damaged(f"a PNG of unknown methods: {methods}")
    _check_sum(encoded, 8, length)
    header.is_16_bit = bits == 16
    at, has_palette = 33, False
    while name != b"IDAT":
        length, name = _CHUNK.unpack(encoded.at(at, 8))
        if name == b"IEND":
            raise damaged("a PNG without a picture")
        is_name = name.isalpha() and name[2:3].isupper()
        if not is_name or (name[:1].isupper() and name not in (b"PLTE", b"IDAT")):
            raise damaged(f"a PNG with chunk {name!r} at byte {at}, which no decoder may skip")
        if name == b"PLTE" and color == _PALETTE:  # in others DALI does not mind it
            if has_palette or length % 3 or not 3 <= length <= 768:
                raise damaged(f"a PNG with a second palette, or one of {length} bytes")
            _check_sum(encoded, at, length)
            has_palette = True
        elif name == b"eXIf":
            header.orientation = exif_orientation(encoded.at(at + 8, length))
        at += 12 + length
    if color == _PALETTE and not has_palette:
        raise damaged("a PNG without its palette")
    while not length and name == b"IDAT":  # the data may begin with an empty part
        length, name = _CHUNK.unpack(encoded.at(at, 8))
        if name != b"IDAT":
            raise damaged("a PNG without a picture: its data are empty")
        at += 12 + length
    if encoded.at(encoded.size - 12, 12) == _IEND:
        return
    while name != b"IEND":  # something follows it, or it is missing
        length, name = _CHUNK.unpack(encoded.at(at, 8))
        at += 12 + length
    encoded.at(at - 4, 4)


def _check_sum(encoded: Encoded, at: int, length: int) -> None:
    """Raises Fault where the checksum of a PNG's chunk is wrong; decoders refuse it in those that matter."""
    content = encoded.at(at + 4, length + 8)
    if zlib.crc32(content[:-4]) != int.from_bytes(content[-4:]):
        raise damaged(f"the checksum of chunk {content[:4]!r} at byte {at} is wrong")


# --- WebP: https://developers.google.com/speed/webp/docs/riff_container ---


def _webp(encoded: Encoded, header: Header) -> None:
    (riff, form), name = struct.unpack("<I4s", encoded.at(4, 8)), encoded.at(12, 4)
    if form != b"WEBP":
        header.image_format = ""
        raise Fault("not-an-image", f"a RIFF file of type {form!r}")
    if name == b"VP8 ":
        sync, width, height = struct.unpack("<3sHH", encoded.at(23, 7))
        if sync != b"\x9d\x01\x2a":
            raise damaged("a WebP whose picture does not begin with a key frame")
        header.width, header.height = width & 0x3FFF, height & 0x3FFF
    elif name == b"VP8L":
        (bits,) = struct.unpack("<I", encoded.at(21, 4))
        header.width, header.height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif name == b"VP8X":
        canvas = encoded.at(24, 6)
        header.width = int.from_bytes(canvas[:3], "little") + 1
        header.height = int.from_bytes(canvas[3:], "little") + 1
    else:
        raise damaged(f"a WebP whose first chunk is {name!r}")
    end = 8 + riff
    if encoded.size < end:
        raise truncated(f"a WebP of {end} bytes of which {encoded.size} are there")
    if name == b"VP8X" and encoded.at(20, 1)[0] & 8:
        header.orientation = _webp_orientation(encoded, end)


def _webp_orientation(encoded: Encoded, end: int) -> int:
    at, is_odd = 12, False
    while at + 8 <= end:
        name, length = struct.unpack("<4sI", encoded.at(at, 8))
        if name == b"EXIF" and is_odd:  # DALI forgets the byte that fills up such a chunk, and gets lost
            raise unsupported("WebP with EXIF behind a chunk of odd length")
        if name == b"EXIF":
            return exif_orientation(encoded.at(at + 8, length).removeprefix(b"Exif\0\0"))
        at += 8 + length + length % 2
        is_odd |= length % 2 == 1
    raise damaged("a WebP that announces EXIF and has none (DALI refuses it)")


# --- BMP: https://learn.microsoft.com/windows/win32/gdi/bitmap-storage ---

_BMP_PLAIN = (1, 4, 8, 24, 32)  # bits per pixel
_BMP_MASKS = {  # of red, green and blue: others are refused or decoded with wrong colours
    16: ((0xF800, 0x07E0, 0x001F), (0x7C00, 0x03E0, 0x001F)),
    32: ((0xFF0000, 0x00FF00, 0x0000FF),),
}


def _bmp(encoded: Encoded, header: Header) -> None:
    start, header_size = struct.unpack("<II", encoded.at(10, 8))
    compression = data_size = colors = 0
    if header_size == 12:
        header.width, header.height, _, bits = struct.unpack("<4H", encoded.at(18, 8))
    elif header_size >= 40:
        fields = struct.unpack("<iiHHII8xI", encoded.at(18, 32))
        header.width, height, _, bits, compression, data_size, colors = fields
        header.height = abs(height)  # negative: the first row is the top one
    else:
        raise unsupported(f"BMP with a header of {header_size} bytes")
    if header.width <= 0 or not header.height or (bits <= 8 and colors > 1 << bits):
        header.width = max(header.width, 0)
        raise damaged(f"a BMP of {header.width} x {header.height} pixels, {bits} bits, {colors} colors")
    masks = struct.unpack("<3I", encoded.at(54, 12)) if compression == 3 else None
    plain = compression == 0 and bits in _BMP_PLAIN
    run_lengths = compression == 1 and bits == 8
    if not plain and not run_lengths and masks not in _BMP_MASKS.get(bits, ()):
        raise unsupported(f"BMP with {bits} bits per pixel and compression {compression}")
    if not run_lengths:
        data_size = (header.width * bits + 31) // 32 * 4 * header.height
    if encoded.size < start + data_size:
        raise truncated(f"a BMP of {start + data_size} bytes of which {encoded.size} are there")


# --- PNM: https://netpbm.sourceforge.net/doc/pnm.html ---

_PNM_NUMBER = re.compile(rb"(?:\s|#[^\n]*\n)*(\d{1,10})(?=[\s#])")


def _pnm(encoded: Encoded, header: Header) -> None:
    kind = encoded.head[1] - ord("0")
    numbers, at = [], 2
    for _ in range(2 if kind in (1, 4) else 3):
        number = _PNM_NUMBER.match(encoded.head, at)
        if not number:
            raise truncated("a PNM whose header is cut off")
        numbers.append(int(number[1]))
        at = number.end()
    header.width, header.height, largest = (*numbers, 255)[:3]
    header.pixels_at = at + 1
    if not header.width or not header.height:
        raise damaged(f"a PNM of {header.width} x {header.height} pixels")
    if largest not in (255, 65535):
        raise unsupported(f"PNM with values up to {largest}, which DALI does not scale")
    header.is_16_bit = largest == 65535
    channels, left = 3 if kind in (3, 6) else 1, max(encoded.size - header.pixels_at, 0)
    if kind <= 3:
        text = encoded.at(header.pixels_at, left)
        values = re.sub(rb"#[^\n]*", b"", text).split()
        if not b"".join(values).isdigit() or not text[-1:].isspace():
            raise damaged("a PNM whose numbers are no numbers, or do not end with a space (DALI refuses it)")
        present = len(b"".join(values)) if kind == 1 else len(values)
        needed, unit = header.width * header.height * channels, "values"
    else:
        row = (
            (header.width + 7) // 8 if kind == 4 else header.width * channels * (2 if header.is_16_bit else 1)
        )
        present, needed, unit = left, row * header.height, "bytes"
    if present < needed:
        raise truncated(f"a PNM of {needed} {unit} of which {present} are there")


_PARSERS = (
    (b"\xff\xd8", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WEBP", _webp),
    (b"BM", "BMP", _bmp),
    ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF", read_tiff),
    ((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"), "JPEG2000", read_jpeg2000),
    (tuple(f"P{kind}{space}".encode() for kind in range(1, 7) for space in " \t\n\r\v\f"), "PPM", _pnm),
)
