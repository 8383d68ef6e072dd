"""Encodes one image in many variants. DALI decodes those in VARIANTS correctly, but not those in REFUSED."""

import base64
import io
import struct
import zlib
from collections.abc import Sequence

import cv2
import numpy as np
import PIL.Image

HEIGHT, WIDTH = 36, 52
_ROWS, _COLUMNS = np.mgrid[:HEIGHT, :WIDTH]
RGB = np.stack([_COLUMNS * 4 + 40, _ROWS * 6 + 20, 220 - _COLUMNS * 2 - _ROWS], axis=-1).astype(np.uint8)
GREY = RGB[..., 0].copy()
GREY_RGB = np.repeat(GREY[..., None], 3, axis=-1)
RGBA = np.dstack([RGB, np.full_like(GREY, 200)])


def pillow(image_format: str, pixels: np.ndarray = RGB, mode: str | None = None, **options) -> bytes:
    """Encodes RGB or grey pixels, in `mode` if given."""
    stream = io.BytesIO()
    image = PIL.Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(stream, image_format, **options)
    return stream.getvalue()


def opencv(suffix: str, pixels: np.ndarray, *options: int) -> bytes:
    """OpenCV expects the channels blue, green, red."""
    return cv2.imencode(suffix, pixels[..., [2, 1, 0, 3][: pixels.shape[2]]], options)[1].tobytes()


def exif(orientation: int, order: str = "<") -> bytes:
    """Returns EXIF data with an orientation."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    return start + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def png(
    bits: int, color: int, rows: Sequence[bytes], *chunks: tuple[bytes, bytes], interlaced=False
) -> bytes:
    """Returns a PNG. `rows` have no filter bytes."""
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bits, color, 0, 0, interlaced)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [(b"IHDR", header), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, content) for name, content in parts)


def early_end(jpeg: bytes) -> bytes:
    """Puts an end-of-image marker into the scan."""
    middle = len(jpeg) * 2 // 3
    return jpeg[:middle] + b"\xff\xd9" + bytes(58) + jpeg[middle + 60 :]


def chunk(name: bytes, content: bytes) -> bytes:
    """Returns a chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _interlaced_png() -> bytes:
    starts = ((0, 0), (0, 4), (4, 0), (0, 2), (2, 0), (0, 1), (1, 0))  # (row, column) of Adam7's 7 passes
    steps = ((8, 8), (8, 8), (8, 4), (4, 4), (4, 2), (2, 2), (2, 1))
    rows = []
    for (top, left), (down, across) in zip(starts, steps, strict=True):
        rows += [row.tobytes() for row in RGB[top::down, left::across]]
    return png(8, 2, rows, interlaced=True)


def bmp(
    bits: int, rows: Sequence[bytes], *, header_size=40, compression=0, masks=(), palette=b"", top_down=False
) -> bytes:
    """Returns a BMP. `rows` begins with the bottom row and has no padding."""
    padded = rows if compression == 1 else [row.ljust(-(-len(row) // 4) * 4, b"\0") for row in rows]
    data = b"".join(padded)
    start = 14 + header_size + 4 * len(masks) + len(palette)
    height = -HEIGHT if top_down else HEIGHT
    if header_size == 12:
        header = struct.pack("<IHHHH", 12, WIDTH, HEIGHT, 1, bits)
    else:
        fields = (header_size, WIDTH, height, 1, bits, compression, len(data), 0, 0, 0, 0)
        header = struct.pack("<IiiHHIIiiII", *fields).ljust(header_size, b"\0")
    masks = struct.pack(f"<{len(masks)}I", *masks)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + header + masks + palette + data


def tiff(
    pixels, colors, *, bits=8, kind=1, planar=False, tiled=False, big=False, order="<", without=(), **tags
) -> bytes:
    """Returns an uncompressed TIFF.

    Args:
        pixels: (HEIGHT, WIDTH, samples), integers of `bits` bits, or floats for kind 3.
        colors: photometric interpretation, 2 for RGB.
        kind: 1 unsigned, 2 signed, 3 float.
        planar: if True, each sample has its own strip.
        tiled: if True, pixels are in tiles of 16 x 16 instead of one strip.
        without: numbers of the tags to leave out.
        tags: additional tags, for example `tag320=(...)`.
    """
    samples = pixels.shape[2]
    parts = [pixels[..., i : i + 1] for i in range(samples)] if planar else [pixels]
    if tiled:
        padded = np.pad(pixels, ((0, -HEIGHT % 16), (0, -WIDTH % 16), (0, 0)))
        parts = [padded[t : t + 16, x : x + 16] for t in range(0, HEIGHT, 16) for x in range(0, WIDTH, 16)]
    blocks = [_packed(part, bits, kind, order) for part in parts]
    offset, sizes = "Q" if big else "I", tuple(map(len, blocks))
    entries = {256: (WIDTH,), 257: (HEIGHT,), 258: (bits,) * samples, 259: (1,), 262: (colors,)}
    entries |= {277: (samples,), 284: (2 if planar else 1,), 339: (kind,) * samples}
    if tiled:
        entries |= {322: (16,), 323: (16,), 324: sizes, 325: sizes}
    else:
        entries |= {273: sizes, 278: (HEIGHT,), 279: sizes}
    entries |= {int(name.removeprefix("tag")): values for name, values in tags.items()}
    entries = {tag: values for tag, values in sorted(entries.items()) if tag not in without}
    formats = {tag: "I" if tag in (273, 279, 324, 325) else "H" for tag in entries}
    packed = {tag: struct.pack(f"{order}{len(v)}{formats[tag]}", *v) for tag, v in entries.items()}
    offset_bytes = struct.calcsize(offset)
    header_bytes, count_bytes, entry_bytes = (16, 8, 20) if big else (8, 2, 12)
    directory_end = header_bytes + count_bytes + len(entries) * entry_bytes + offset_bytes
    # Values that do not fit into their directory entry follow the directory.
    long_values = {tag: content for tag, content in packed.items() if len(content) > offset_bytes}
    position = directory_end + sum(map(len, long_values.values()))
    starts = [position + sum(sizes[:i]) for i in range(len(sizes))]
    starts_tag = 324 if tiled else 273
    packed[starts_tag] = struct.pack(f"{order}{len(starts)}I", *starts)
    if starts_tag in long_values:
        long_values[starts_tag] = packed[starts_tag]
    result = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if big else 42)
    fields, values = ("HHQQ", (8, 0, 16, len(entries))) if big else ("IH", (8, len(entries)))
    result += struct.pack(f"{order}{fields}", *values)
    position = directory_end
    for tag, content in packed.items():
        result += struct.pack(f"{order}HH{offset}", tag, 3 if formats[tag] == "H" else 4, len(entries[tag]))
        if tag in long_values:
            result += struct.pack(f"{order}{offset}", position)
            position += len(content)
        else:
            result += content.ljust(offset_bytes, b"\0")
    return result + bytes(offset_bytes) + b"".join(long_values.values()) + b"".join(blocks)


def _packed(pixels: np.ndarray, bits: int, kind: int, order: str) -> bytes:
    if kind == 3 or bits in (8, 16, 32, 64):
        return pixels.astype(f"{order}{'.uif'[kind]}{bits // 8}").tobytes()
    values = pixels.reshape(len(pixels), -1).astype(np.int64)
    digits = (values[..., None] >> np.arange(bits - 1, -1, -1) & 1).astype(np.uint8)
    return np.packbits(digits.reshape(len(pixels), -1), axis=1).tobytes()


def _moved(codestream: bytes) -> bytes:
    """Moves the picture of a JPEG 2000 codestream by 3 pixels to the right on its reference grid."""
    x_end, y_end = struct.unpack(">II", codestream[8:16])
    return codestream[:8] + struct.pack(">4I", x_end + 3, y_end, 3, 0) + codestream[24:]


def scaled(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Scales 8-bit pixels to `bits` bits; returns (HEIGHT, WIDTH, samples)."""
    return np.round(np.atleast_3d(pixels) / 255.0 * (2**bits - 1)).astype(np.int64)


# JPEGs that Pillow and OpenCV cannot write, made by `cjpeg -arithmetic` and `cjpeg -optimize -sample 4x2`.
_ARITHMETIC_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcp"
    "LDAxNDQ0Hyc5PTgyPC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIy"
    "MjIyMjIyMjIyMjIyMjL/yQARCAAkADQDASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AI4GrBd1eKb551yv"
    "1vtBOSgt7lRvPcQ1rHSzKxLHQfy/F01BEEDUo8Hl/wCXR6gDFkq07ifsKXht53UT69Jzqv7HJJipw00eG1EVSn2J73iNuMTJ"
    "ce4IkIJxsUz54qmdHmy5Kpv6axF0EcG5hC/9DN+9YDcHncK2BaZIAXvDIfe2wJbVDp1aI52tGyyJBmI9HNiFqTvoWX/psgmV"
    "PhAtVIpSkP/Z"
)
_SAMPLED_4_2_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcp"
    "LDAxNDQ0Hyc5PTgyPC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIy"
    "MjIyMjIyMjIyMjIyMjL/wAARCAAkADQDAUIAAhEBAxEB/8QAGAABAQEBAQAAAAAAAAAAAAAABAADBQf/xAAdEAACAgIDAQAA"
    "AAAAAAAAAAAAAgRhA1EBITER/8QAFwEBAQEBAAAAAAAAAAAAAAAABgQHBf/EABsRAAICAwEAAAAAAAAAAAAAAAAEASIFEjEh"
    "/9oADAMBAAIRAxEAPwDz9ItCEi0ISLRukWjRItCEi0ISLQhItC55rpRjWuHLSLQhItG3EXrwhqRaEJFo34i9eEE2WrDlNqhz"
    "Ui0bpFoQkWhCRaNEi0ISLRukWhCRaKXmumR45rhzEi0bpFo34i9eENSLQhItG3EXrwgmy1YcptUOSmNdCExro3TGuhCY10RE"
    "R1Hpn0y/GzPghMa6EJjXRtxjX54RERBNmZ2HKczof//Z"
)
_GREY_PALETTE = bytes(value for i in range(256) for value in (i, i, i, 0))
_BOTTOM_UP = [row.tobytes() for row in GREY[::-1]]
_BGR = [row.tobytes() for row in RGB[::-1, :, ::-1]]
_BGRA = [row.tobytes() for row in RGBA[::-1, :, [2, 1, 0, 3]]]
_RUN_LENGTHS = [b"".join(bytes([1, value]) for value in row) + b"\0\0" for row in _BOTTOM_UP]
_RUN_LENGTHS[-1] += b"\0\1"
_GREY_16 = GREY.astype(np.uint16) * 257
_FLOAT = np.atleast_3d(GREY / 255.0)

JPEGS = {
    "jpeg": pillow("JPEG", quality=95),
    "jpeg-grey": pillow("JPEG", GREY, quality=95),
    "jpeg-cmyk": pillow("JPEG", mode="CMYK", quality=95),
    "jpeg-rgb": pillow("JPEG", keep_rgb=True, quality=95),
    "jpeg-444": pillow("JPEG", subsampling=0, quality=95),
    "jpeg-422": pillow("JPEG", subsampling=1, quality=95),
    "jpeg-411": opencv(".jpg", RGB, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x411111),
    "jpeg-440": opencv(".jpg", RGB, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x121111),
    "jpeg-sampled-4-2": _SAMPLED_4_2_JPEG,
    "jpeg-arithmetic": _ARITHMETIC_JPEG,
    "jpeg-progressive": pillow("JPEG", progressive=True, quality=95),
    "jpeg-progressive-cmyk": pillow("JPEG", mode="CMYK", progressive=True, quality=95),
    "jpeg-restart": opencv(".jpg", RGB, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
    "jpeg-optimised": pillow("JPEG", optimize=True, quality=95),
    "jpeg-several-pictures": pillow(
        "MPO", save_all=True, append_images=[PIL.Image.new("RGB", (9, 9))], quality=95
    ),
    "jpeg-fill-bytes": pillow("JPEG", quality=95).replace(b"\xff\xdb", b"\xff\xff\xff\xdb", 1),
}
PNGS = {
    "png": pillow("PNG"),
    "png-alpha": pillow("PNG", RGBA),
    "png-grey": pillow("PNG", GREY),
    "png-grey-alpha": pillow("PNG", GREY, "LA"),
    "png-palette": pillow("PNG", GREY, "P"),
    "png-grey-16": pillow("PNG", _GREY_16),
    "png-grey-alpha-16": png(16, 4, [np.dstack([r, r]).astype(">u2").tobytes() for r in _GREY_16]),
    "png-rgb-16": opencv(".png", RGB.astype(np.uint16) * 257),
    "png-rgba-16": opencv(".png", RGBA.astype(np.uint16) * 257),
    "png-interlaced": _interlaced_png(),
    "png-animated": pillow("PNG", save_all=True, append_images=[PIL.Image.new("RGB", (WIDTH, HEIGHT))]),
}
WEBPS = {
    "webp": pillow("WEBP", quality=95),
    "webp-lossless": pillow("WEBP", lossless=True),
    "webp-alpha": pillow("WEBP", RGBA, lossless=True),
    "webp-extended": pillow("WEBP", exif=exif(1), icc_profile=bytes(100), quality=95),
    "webp-odd-chunk": pillow("WEBP", icc_profile=bytes(99), quality=95),
    "webp-animated": pillow(
        "WEBP", lossless=True, save_all=True, append_images=[PIL.Image.new("RGB", (WIDTH, HEIGHT))]
    ),
}
BMPS = {
    "bmp": pillow("BMP"),
    "bmp-grey": pillow("BMP", GREY),
    "bmp-core-header": bmp(24, _BGR, header_size=12),
    "bmp-32": bmp(32, _BGRA),
    "bmp-v5": bmp(24, _BGR, header_size=124),
    "bmp-masks": bmp(32, _BGRA, compression=3, masks=(0xFF0000, 0xFF00, 0xFF)),
    "bmp-run-lengths": bmp(8, _RUN_LENGTHS, compression=1, palette=_GREY_PALETTE),
    "bmp-top-down": bmp(24, _BGR[::-1], top_down=True),
}
TIFFS = {
    "tiff": tiff(RGB, 2),
    "tiff-big-endian": tiff(RGB, 2, order=">"),
    "tiff-big": tiff(RGB, 2, big=True),
    "tiff-big-big-endian": tiff(RGB, 2, big=True, order=">"),
    "tiff-tiled": tiff(RGB, 2, tiled=True),
    "tiff-planar": tiff(RGB, 2, planar=True),
    "tiff-alpha": tiff(RGBA, 2, tag338=(2,)),
    "tiff-five-samples": tiff(np.dstack([RGBA, GREY]), 2, tag338=(2, 0)),
    "tiff-grey": tiff(GREY[..., None], 1),
    "tiff-grey-16": tiff(scaled(GREY, 16), 1, bits=16),
    "tiff-rgb-16": tiff(scaled(RGB, 16), 2, bits=16, order=">"),
    "tiff-float": tiff(_FLOAT, 1, bits=32, kind=3),
    "tiff-palette": tiff(GREY[..., None], 3, tag320=tuple(i * 257 for _ in range(3) for i in range(256))),
    "tiff-without-sizes": tiff(GREY[..., None], 1, without=(279,)),
    "tiff-lzw": pillow("TIFF", compression="tiff_lzw"),
    "tiff-deflate": pillow("TIFF", compression="tiff_adobe_deflate"),
    "tiff-packbits": pillow("TIFF", compression="packbits"),
    "tiff-zstandard": pillow("TIFF", compression="zstd"),
    "tiff-pages": pillow("TIFF", save_all=True, append_images=[PIL.Image.new("RGB", (9, 9))]),
    "tiff-strips": pillow("TIFF", strip_size=WIDTH * 3 * 5),
}
JPEG2000S = {
    "jpeg2000": pillow("JPEG2000"),
    "jpeg2000-codestream": pillow("JPEG2000", no_jp2=True),
    "jpeg2000-grey": pillow("JPEG2000", GREY),
    "jpeg2000-alpha": pillow("JPEG2000", RGBA),
    "jpeg2000-lossy": pillow("JPEG2000", irreversible=True),
    "jpeg2000-tiles": pillow("JPEG2000", tile_size=(16, 16)),
    "jpeg2000-rgb-16": opencv(".jp2", RGB.astype(np.uint16) * 257),
}
VARIANTS = {**JPEGS, **PNGS, **WEBPS, **BMPS, **TIFFS, **JPEG2000S, "ppm": pillow("PPM")}
REFUSED = {
    "bmp-swapped-masks": bmp(
        32, [row.tobytes() for row in RGBA[::-1]], compression=3, masks=(0xFF, 0xFF00, 0xFF0000)
    ),
    "webp-exif-behind-odd-chunk": pillow("WEBP", exif=exif(1), icc_profile=bytes(99), quality=95),
    "tiff-grey-alpha": tiff(np.dstack([GREY, np.full_like(GREY, 255)]), 1, tag338=(2,)),
    "tiff-32": tiff(scaled(GREY, 32), 1, bits=32),
    "tiff-signed": tiff(GREY[..., None] // 2, 1, kind=2),
    "tiff-without-bits": tiff(GREY[..., None], 1, without=(258,)),
    "jpeg2000-grey-alpha": pillow("JPEG2000", GREY, "LA"),
    "jpeg2000-offset": _moved(pillow("JPEG2000", no_jp2=True)),
    "jpeg2000-12-grey": pillow("JPEG2000", GREY)
    .replace(b"\0\1\7\7", b"\0\1\x0b\7")
    .replace(b"\0\1\7\1\1", b"\0\1\x0b\1\1"),
    "jpeg-12-grey": pillow("JPEG", GREY).replace(b"\xff\xc0\0\x0b\x08", b"\xff\xc1\0\x0b\x0c"),
    "jpeg2000-codestream-grey": pillow("JPEG2000", GREY, no_jp2=True),
}


def expected(name: str) -> np.ndarray:
    """Returns the pixels that DALI should decode, uint8 (HEIGHT, WIDTH, 3)."""
    grey = ("grey", "palette", "run-lengths", "without-sizes")
    return GREY_RGB if any(word in name for word in grey) or name == "tiff-float" else RGB
