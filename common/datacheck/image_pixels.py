"""Every pixel of an encoded image decoded, to find damage that its header and its end do not show.

A JPEG has no checksum: damage shows only where it leads to a code that does not exist, or to another number
of blocks than the picture has. A third of mixed damage to photographs does (of 1500 in coco128); the rest
cannot be detected. Decoders of WebP and JPEG 2000 accept even more. PNG has checksums; BMP has neither
checksums nor codes.
"""

import contextlib
import io
import re
import struct
import threading
import zlib

import numpy as np
import PIL.Image
import PIL.Jpeg2KImagePlugin
import PIL.JpegImagePlugin
import PIL.PngImagePlugin
import PIL.TiffImagePlugin
import PIL.WebPImagePlugin
import simplejpeg

from common.datacheck.image_headers import Fault, Header, damaged, end_of_jpeg

# The classes themselves: PIL.Image.open refuses large images by a setting of the whole process.
_PILLOW = {
    "JPEG": PIL.JpegImagePlugin.JpegImageFile,
    "JPEG2000": PIL.Jpeg2KImagePlugin.Jpeg2KImageFile,
    "PNG": PIL.PngImagePlugin.PngImageFile,
    "TIFF": PIL.TiffImagePlugin.TiffImageFile,
    "WEBP": PIL.WebPImagePlugin.WebPImageFile,
}
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
            bits, would make it almost black. A grey image that is 0 throughout passes; in colour, where
            Pillow gives only the upper bits, it does not.
    """
    if header.is_16_bit:
        _check_range(_load(content, header))
    elif decode and header.image_format == "JPEG":
        _check_jpeg(content, header)
    elif decode and header.image_format in _PILLOW:
        _load(content, header)


def _load(content: bytes, header: Header) -> PIL.Image.Image | None:
    """The image as Pillow decodes it; None for WebP of more than 179 megapixels, which it never decodes."""
    large = header.height * header.width > _LARGE
    kind = _PILLOW[header.image_format]
    with _one_large_image if large else contextlib.nullcontext():
        try:
            if header.image_format == "PNG":
                kind(io.BytesIO(content)).verify()  # the checksums
            image = kind(io.BytesIO(content))
            # A TIFF may be turned. Nothing may need more memory than the header was checked for.
            if image.height * image.width != header.height * header.width:
                raise ValueError(f"it says {header.width} x {header.height} and {image.size} pixels")
            image.load()
        except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
            raise damaged(str(error)) from error
        except PIL.Image.DecompressionBombError:
            return None
    return image


# --- JPEG ---

_NO_DAMAGE = re.compile("Unknown Adobe|Warning: unknown JFIF|Invalid SOS parameters|.*bad ICC marker")
_UNKNOWN_TO_TURBOJPEG = re.compile(".*(subsampling|color conversion)")  # libjpeg decodes these
_EXTRANEOUS = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")


def _check_jpeg(content: bytes, header: Header) -> None:
    try:
        # A grey picture of an eighth of the size needs all codes, and three quarters of the time.
        simplejpeg.decode_jpeg(content, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        message = str(error)
        if _UNKNOWN_TO_TURBOJPEG.match(message):
            _load(content, header)
        elif not _NO_DAMAGE.match(message) and not _is_padding(content[header.pixels_at :], message):
            raise damaged(message) from error


def _is_padding(scan: bytes, message: str) -> bool:
    """Whether TurboJPEG warns of a run of equal bytes before the end, with which some cameras fill up."""
    extraneous, end = _EXTRANEOUS.match(message), end_of_jpeg(scan)
    if not extraneous or end is None:
        return False
    return len(set(scan[end - int(extraneous[1]) : end])) == 1


# --- 12-bit data in 16 bits ---


def _check_range(image: PIL.Image.Image) -> None:
    values = np.asarray(image)
    if image.mode.startswith("I"):
        about, largest = "", int(values.max())
    else:  # of colours Pillow keeps the upper eight bits
        colors = values[..., :-1] if image.mode in ("LA", "RGBA", "RGBX") else values
        about, largest = "about ", int(colors.max()) * 256 + 255
    if 0 < largest < 4096:
        raise Fault("image-12-bit", f"its largest value is {about}{largest} of 65535")
