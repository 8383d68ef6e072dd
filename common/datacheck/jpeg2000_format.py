"""What a JPEG 2000 file says of itself: its size, whether its end is there, and whether DALI decodes it.

DALI 2.4 (OpenCV) decodes pictures of 1, 3 or 4 components, all of 8 or all of 16 bits, without subsampling
and without an offset. Other depths it does not scale, so that 12 bits come out almost black.

ISO/IEC 15444-1, annexes A (the codestream) and I (the boxes around it).
"""

import struct

from common.datacheck.encoded_image import Encoded, Header, damaged, truncated, unsupported

_BOX = struct.Struct(">I4s")  # length, itself included; type
_IMAGE_HEADER = struct.Struct(">IIHB")  # height, width, components, bits - 1
_SIZE = struct.Struct(">4x4x4I16xH")  # SOC and SIZ; right, bottom, left, top; components
_CODESTREAM = b"\xff\x4f\xff\x51"
_START_OF_DATA, _END = b"\xff\x93", b"\xff\xd9"
_COMPONENTS = {None: (3, 4), 16: (3, 4), 17: (1,), 18: (3,)}  # that DALI decodes in a colour space


def read_jpeg2000(encoded: Encoded, header: Header) -> None:
    """Fills in `header`.

    Raises:
        Fault: the end of the codestream is missing; or a variant that DALI does not decode.
    """
    at, end, boxed, space = 0, encoded.size, None, None
    if not encoded.head.startswith(_CODESTREAM):
        at, end, boxed, space = _read_boxes(encoded)
    if encoded.at(at, 4) != _CODESTREAM:
        raise damaged("a JPEG 2000 file whose codestream has no header")
    right, bottom, left, top, components = _SIZE.unpack(encoded.at(at, _SIZE.size))
    header.width, header.height = max(right - left, 0), max(bottom - top, 0)
    if not header.width or not header.height or not components:
        raise damaged(f"a JPEG 2000 file of {header.width} x {header.height} pixels")
    parts = encoded.at(at + _SIZE.size, 3 * components)  # of each: bits - 1, distances across and down
    said = (header.height, header.width, components)
    if boxed and boxed not in (said + (parts[0],), said + (255,)):  # 255: they differ
        raise damaged(f"a JPEG 2000 file whose codestream has {said}, and whose box has {boxed}")
    if components not in _COMPONENTS.get(space, ()):
        raise unsupported(f"JPEG 2000 with {components} components in color space {space}")
    if left or top or any(distance != 1 for i, distance in enumerate(parts) if i % 3):
        raise unsupported("JPEG 2000 with an offset or with subsampled components")
    bits = set(parts[::3])
    if bits not in ({7}, {15}):
        depths = ", ".join(f"{(b & 0x7F) + 1}{' signed' * (b >> 7)}" for b in sorted(bits))
        raise unsupported(f"JPEG 2000 with {depths} bits per sample")
    header.is_16_bit = bits == {15}
    if end > encoded.size:
        raise truncated(f"a JPEG 2000 file of at least {end} bytes of which {encoded.size} are there")
    if encoded.at(end - 2, 2) != _END:  # something follows it, or it is missing
        codestream = encoded.at(at, end - at)
        if _END not in codestream[codestream.find(_START_OF_DATA) :]:
            raise truncated(f"a JPEG 2000 file without its end-of-codestream marker, {encoded.size} bytes")


def _read_boxes(encoded: Encoded) -> tuple[int, int, tuple[int, ...], int | None]:
    """Where the codestream begins and ends (the file may end before), what the image header says, and the
    number of the colour space, None where it has none."""
    at, inner_end, boxed, space = 0, 0, None, None
    while True:
        length, name = _BOX.unpack(encoded.at(at, _BOX.size))
        if name == b"jp2c" and length != 1:
            if boxed is None:
                raise damaged("a JPEG 2000 file without an image header")
            return at + _BOX.size, at + length if length else encoded.size, boxed, space
        if length < _BOX.size or (at < inner_end < at + length):
            raise damaged(f"a JPEG 2000 file whose box {name!r} at byte {at} has {length} bytes")
        if name == b"ihdr":
            boxed = _IMAGE_HEADER.unpack(encoded.at(at + _BOX.size, _IMAGE_HEADER.size))
        elif name == b"colr" and space is None and encoded.at(at + 8, 1) == b"\1":
            (space,) = struct.unpack(">I", encoded.at(at + 11, 4))
        if name == b"jp2h":  # a box of boxes
            inner_end = at + length
            at += _BOX.size
        else:
            at += length
