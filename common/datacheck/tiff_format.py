"""What a TIFF says of itself: size and turn, whether all strips or tiles are there, whether DALI decodes it.

DALI 2.4 hands TIFFs to libtiff or to OpenCV, and neither takes them all. Some come out as something else
without a word: grey with an alpha channel (every other pixel is the alpha), 16 bits where white is 0 (not
inverted), JPEG 2000 inside (black), floats from 0 to 255 (white, as DALI takes 1 for white; no header tells
which range was meant).

https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf; BigTIFF: http://bigtiff.org
"""

import struct
from collections.abc import Mapping, Sequence

from common.datacheck.encoded_image import Encoded, Header, damaged, truncated, unsupported

_TYPES = {3: "H", 4: "I", 16: "Q"}  # of the tags that are read
_TYPE_SIZES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)  # by number, 0 where there is none
_WIDTH, _HEIGHT, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _SAMPLES = 256, 257, 259, 262, 274, 277
_STRIP_ROWS, _PLANAR, _TILE_WIDTH, _TILE_HEIGHT = 278, 284, 322, 323
_SINGLE = {
    *(_WIDTH, _HEIGHT, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _SAMPLES),
    *(_STRIP_ROWS, _PLANAR, _TILE_WIDTH, _TILE_HEIGHT),
}
_BITS, _STRIP_OFFSETS, _STRIP_SIZES, _TILE_OFFSETS, _TILE_SIZES, _SAMPLE_FORMAT = 258, 273, 279, 324, 325, 339
_LISTS = {_BITS, _STRIP_OFFSETS, _STRIP_SIZES, _TILE_OFFSETS, _TILE_SIZES, _SAMPLE_FORMAT}
# None, CCITT (3), LZW, JPEG, Deflate (2), PackBits, Zstandard; not LZMA, WebP, LERC, JPEG 2000, JPEG XL, PNG.
_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32946, 32773, 50000)
_WHITE_IS_0, _BLACK_IS_0, _RGB, _PALETTE, _CMYK, _YCBCR, _LAB = 0, 1, 2, 3, 5, 6, 8
_UNSIGNED, _FLOAT = 1, 3  # sample formats
_UNCOMPRESSED, _JPEG = 1, 7

Tags = Mapping[int, Sequence[int]]


def read_tiff(encoded: Encoded, header: Header) -> None:
    """Fills in `header`.

    Raises:
        Fault: a strip, a tile or a table lies outside the file; or a variant that DALI does not decode.
    """
    tags = _read_tags(encoded)
    if not all(tags.get(tag, (0,))[0] for tag in (_WIDTH, _HEIGHT)):
        raise damaged("a TIFF without width or height")
    header.width, header.height = tags[_WIDTH][0], tags[_HEIGHT][0]
    if tags.get(_PLANAR, (1,))[0] not in (1, 2):
        raise damaged(f"a TIFF of planar configuration {tags[_PLANAR][0]}")
    orientation = tags.get(_ORIENTATION, (1,))[0]
    header.orientation = orientation if 1 <= orientation <= 8 else 1
    _refuse_unsupported(tags)
    header.is_16_bit = tags[_BITS][0] == 16
    end = _end(tags)
    if end > encoded.size:
        raise truncated(f"a TIFF of at least {end} bytes of which {encoded.size} are there")


def _read_tags(encoded: Encoded) -> Tags:
    """The tags of the first picture. DALI walks through the tables of all: they must be there, and whole."""
    order = "<" if encoded.head[0] == ord("I") else ">"
    is_big = encoded.head[2:4] in (b"+\0", b"\0+")
    offset = struct.Struct(f"{order}{'Q' if is_big else 'I'}")
    count = struct.Struct(f"{order}{'Q' if is_big else 'H'}")
    entry = struct.Struct(f"{order}HH{'Q8s' if is_big else 'I4s'}")
    (at,) = offset.unpack(encoded.at(8 if is_big else 4, offset.size))
    tags, seen = {}, set()
    while at:
        if at in seen:
            raise damaged(f"a TIFF whose tables lead back to byte {at}")
        (entries,) = count.unpack(encoded.at(at, count.size))
        table = encoded.at(at + count.size, entries * entry.size + offset.size)
        for tag, kind, length, value in entry.iter_unpack(table[: -offset.size]):
            size = length * (_TYPE_SIZES[kind] if kind < len(_TYPE_SIZES) else 0)
            if size > offset.size:
                value = encoded.at(*offset.unpack(value), size)
            if not seen and tag in _SINGLE | _LISTS:
                if kind not in _TYPES or length < 1 or (tag in _SINGLE and length > 1):
                    raise damaged(f"a TIFF whose tag {tag} has {length} values of type {kind}")
                tags[tag] = struct.unpack(f"{order}{length}{_TYPES[kind]}", value[:size])
        seen.add(at)
        (at,) = offset.unpack(table[-offset.size :])
    return tags


def _refuse_unsupported(tags: Tags) -> None:
    compression = tags.get(_COMPRESSION, (1,))[0]
    if compression not in _COMPRESSIONS:
        raise unsupported(f"TIFF with compression {compression}")
    samples = tags.get(_SAMPLES, (1,))[0]
    photometric = tags.get(_PHOTOMETRIC, (_RGB if samples > 2 else _BLACK_IS_0,))[0]
    one_sample = _PHOTOMETRIC in tags and photometric in (_WHITE_IS_0, _BLACK_IS_0, _PALETTE)
    if _BITS not in tags or not (_SAMPLES in tags or one_sample):
        raise unsupported("TIFF that does not say how many bits and samples a pixel has")
    bits, kind = set(tags[_BITS]), tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0]
    if kind == _FLOAT:
        raise unsupported("TIFF with float samples: DALI takes 1 for white, and most files mean 255")
    planar, tiled = tags.get(_PLANAR, (1,))[0] == 2 and samples > 1, _TILE_OFFSETS in tags
    ycbcr_parts = photometric == _YCBCR and (planar or tiled) and compression != _JPEG
    decoded = len(bits) == 1 and _is_decoded(photometric, samples, *bits, kind, planar=planar, tiled=tiled)
    if not decoded or ycbcr_parts:
        said = "/".join(map(str, sorted(bits)))
        raise unsupported(
            f"TIFF with photometric interpretation {photometric}, {samples} samples of {said} bits,"
            f" sample format {kind}{', planar' * planar}{', tiled' * tiled}"
        )


def _is_decoded(photometric: int, samples: int, bits: int, kind: int, *, planar: bool, tiled: bool) -> bool:
    """What DALI 2.4 decodes on a CPU into what the file means: found by trying all combinations."""
    if kind != _UNSIGNED:
        return False
    if photometric == _WHITE_IS_0:
        return samples == 1 and bits in (1, 8) and not tiled
    if photometric == _BLACK_IS_0:
        return samples == 1 and (bits in (8, 10, 12, 14, 16) or (bits == 1 and not tiled))
    if photometric == _RGB and planar:
        return samples == 3 and bits == 8
    if photometric == _RGB:  # perhaps with more
        in_16 = samples in (3, 4) and bits in (10, 12, 14)
        return in_16 or (samples >= 3 and (bits in (8, 16) or (bits == 1 and not tiled)))
    if photometric == _PALETTE:
        return samples == 1 and bits in (1, 2, 4, 8)
    if photometric == _LAB:
        return samples == 3 and bits in (8, 16) and not planar and not tiled
    return bits == 8 and samples == {_CMYK: 4, _YCBCR: 3}.get(photometric)


def _end(tags: Tags) -> int:
    """Where the last strip or tile ends."""
    width, height = tags[_WIDTH][0], tags[_HEIGHT][0]
    samples, planar = tags.get(_SAMPLES, (1,))[0], tags.get(_PLANAR, (1,))[0] == 2
    if _TILE_OFFSETS in tags:
        sides = tags.get(_TILE_WIDTH, (0,))[0], tags.get(_TILE_HEIGHT, (0,))[0]
        offsets, sizes = tags[_TILE_OFFSETS], tags.get(_TILE_SIZES, ())
    else:
        sides = width, min(tags.get(_STRIP_ROWS, (height,))[0], height)
        offsets, sizes = tags.get(_STRIP_OFFSETS, ()), tags.get(_STRIP_SIZES, ())
    if not all(sides):
        raise damaged(f"a TIFF of tiles or strips of {sides[0]} x {sides[1]} pixels")
    parts = -(-width // sides[0]) * -(-height // sides[1]) * (samples if planar else 1)
    part_size = (sides[0] * (1 if planar else samples) * tags[_BITS][0] + 7) // 8 * sides[1]
    uncompressed = tags.get(_COMPRESSION, (_UNCOMPRESSED,))[0] == _UNCOMPRESSED
    if not sizes and uncompressed and parts == 1:
        sizes = (part_size,)
    if len(offsets) < parts or len(sizes) < parts:
        raise damaged(f"a TIFF that names {min(len(offsets), len(sizes))} of {parts} strips or tiles")
    subsampled = tags.get(_PHOTOMETRIC, (_RGB,))[0] == _YCBCR  # perhaps
    if uncompressed and parts == 1 and sizes[0] < part_size and not subsampled:
        raise damaged(f"a TIFF of {part_size} bytes of pixels that names {sizes[0]}")
    return max(offset + size for offset, size in zip(offsets, sizes, strict=False))
