"""Every pixel of an encoded image decoded, to find damage that its header and its end do not show.

A JPEG has no checksum. Its data are codes of variable length, and damage shows only where it leads to a code
that does not exist, or to more or fewer blocks than the picture has: of mixed damage to photographs a
third (of 1500 in coco128). The rest is a picture that looks wrong, and nobody can tell it from one that was
meant so. Decoders of WebP and JPEG 2000 put up with even more. PNG has checksums; BMP and PNM have neither
checksums nor codes.
"""

import contextlib
import io
import re
import struct
import threading
import zlib

import numpy as np
import PIL.BmpImagePlugin
import PIL.Image
import PIL.Jpeg2KImagePlugin
import PIL.JpegImagePlugin
import PIL.PngImagePlugin
import PIL.TiffImagePlugin
import PIL.WebPImagePlugin
import simplejpeg

from common.datacheck.encoded_image import Fault, Header, damaged
from common.datacheck.image_formats import end_of_jpeg

# The classes themselves: PIL.Image.open refuses large images by a setting of the whole process.
_PILLOW = {
    "BMP": PIL.BmpImagePlugin.BmpImageFile,
    "JPEG": PIL.JpegImagePlugin.JpegImageFile,
    "JPEG2000": PIL.Jpeg2KImagePlugin.Jpeg2KImageFile,
    "PNG": PIL.PngImagePlugin.PngImageFile,
    "TIFF": PIL.TiffImagePlugin.TiffImageFile,
    "WEBP": PIL.WebPImagePlugin.WebPImageFile,
}
_RUN_LENGTHS = b"\1\0\0\0"  # compression in the header of a BMP
_LARGE = 25_000_000  # pixels
_one_large_image = threading.Lock()  # several at once could fill the memory


def check_pixels(content: bytes, header: Header, *, decode: bool) -> None:
    """Looks at the pixels of an image whose header is sound.

    Args:
        content: the encoded image.
        header: what read_header found.
        decode: decode every image, not only those of 16 bits.

    Raises:
        Fault: damage; or 12-bit data in 16 bits: no value reaches 4096, so DALI, which keeps the upper eight
            bits, would make it almost black. A grey image that is 0 throughout passes; in colour, where only
            the upper bits are at hand, it does not.
    """
    if header.is_16_bit:
        _check_range(content, header)
    if header.image_format == "PPM" or not decode:
        return
    if header.image_format == "JPEG":
        _check_jpeg(content, header)
    elif header.image_format == "PNG":
        _check_png(content, header)
    elif header.image_format != "BMP" or content[30:34] == _RUN_LENGTHS:
        _load(content, header)


def _load(content: bytes, header: Header) -> PIL.Image.Image | None:
    """The image as Pillow decodes it; None for what DALI decodes and Pillow does not: variants of TIFF, and
    WebP of more than 179 megapixels."""
    large = header.height * header.width > _LARGE
    with _one_large_image if large else contextlib.nullcontext():
        try:
            image = _PILLOW[header.image_format](io.BytesIO(content))
            # A TIFF may be turned. Nothing may need more memory than the header was checked for.
            if image.height * image.width != header.height * header.width:
                raise ValueError(f"it says {header.width} x {header.height} and {image.size} pixels")
            image.load()
        except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
            if header.image_format == "TIFF" and isinstance(error, SyntaxError):
                return None
            raise damaged(str(error)) from error
        except PIL.Image.DecompressionBombError:
            return None
    return image


# --- JPEG ---

_NO_DAMAGE = re.compile("Unknown Adobe|Warning: unknown JFIF|Invalid SOS parameters|.*bad ICC marker")
_NOT_ITS_BUSINESS = re.compile(".*(subsampling|color conversion)")  # of TurboJPEG: libjpeg decodes these
_EXTRANEOUS = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


def _check_jpeg(content: bytes, header: Header) -> None:
    try:
        # A grey picture of an eighth of the size: all codes are read all the same, in three quarters of the
        # time that the whole one takes.
        simplejpeg.decode_jpeg(content, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        said = str(error)
        if _NOT_ITS_BUSINESS.match(said):
            _load(content, header)
        elif not _NO_DAMAGE.match(said) and not _is_padding(content[header.pixels_at :], said):
            raise damaged(said) from error


def _is_padding(scan: bytes, said: str) -> bool:
    """Whether what TurboJPEG wonders at is a run of equal bytes before the end: some cameras fill up so."""
    extraneous, end = _EXTRANEOUS.match(said), end_of_jpeg(scan)
    if not extraneous or end is None:
        return False
    return len(set(scan[end - int(extraneous[1]) : end])) == 1


# --- PNG ---

_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_PASSES = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
_PIECE = 1 << 20  # bytes inflated at once: the whole may be a thousand times the file


def _check_png(content: bytes, header: Header) -> None:
    """All checksums, and whether the data inflate to as many bytes as the picture has."""
    view, at, name = memoryview(content), 8, b""
    inflate, present = zlib.decompressobj(), 0
    while name != b"IEND":
        if at + 8 > len(content) or at + 12 + int.from_bytes(content[at : at + 4]) > len(content):
            raise damaged(f"the chunk at byte {at} reaches beyond the end")
        length, name = struct.unpack_from(">I4s", content, at)
        (checksum,) = struct.unpack_from(">I", content, at + 8 + length)
        if zlib.crc32(view[at + 4 : at + 8 + length]) != checksum:
            raise damaged(f"the checksum of chunk {name!r} at byte {at} is wrong")
        data = view[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        while len(data) and not inflate.eof:
            try:
                present += len(inflate.decompress(data, _PIECE))
            except zlib.error as error:
                raise damaged(str(error)) from error
            data = inflate.unconsumed_tail
        at += 12 + length
    needed = _png_size(content, header)
    if present < needed:
        raise damaged(f"the data of {needed} bytes end after {present}")


def _png_size(content: bytes, header: Header) -> int:
    """Bytes of the picture before compression, those that name a row's filter included."""
    bits, color, _, _, interlaced = content[24:29]
    bits *= _SAMPLES[color]
    size = 0
    for top, left, down, across in _PASSES if interlaced else ((0, 0, 1, 1),):
        rows, columns = -(-(header.height - top) // down), -(-(header.width - left) // across)
        size += rows * (1 + (columns * bits + 7) // 8) if rows > 0 and columns > 0 else 0
    return size


# --- 12-bit data in 16 bits ---


def _check_range(content: bytes, header: Header) -> None:
    about = ""
    if header.image_format == "PPM":
        largest = int(_pnm_values(content, header).max())
    else:
        image = _load(content, header)
        if image is None:
            return
        values = np.asarray(image)
        if image.mode.startswith("I"):
            largest = int(values.max())
        else:  # of colours Pillow keeps the upper eight bits: of JPEG 2000 rounded, of others cut
            colors = values[..., :-1] if image.mode in ("LA", "RGBA", "RGBX") else values
            rounded = header.image_format == "JPEG2000" and colors.any()
            about, largest = "about ", int(colors.max()) * 256 + (-128 if rounded else 255)
    if 0 < largest < 4096:
        raise Fault("image-12-bit", f"its largest value is {about}{largest} of 65535")


def _pnm_values(content: bytes, header: Header) -> np.ndarray:
    count = header.height * header.width * (3 if content[1] in b"36" else 1)
    if content[1] in b"56":
        return np.frombuffer(content, ">u2", count, header.pixels_at)
    text = re.sub(rb"#[^\n]*", b"", content[header.pixels_at :])
    try:
        return np.array([int(value) for value in text.split()[:count]])
    except ValueError as error:
        raise damaged(str(error)) from error
