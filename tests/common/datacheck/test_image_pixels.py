"""What only decoding shows: damage in the data, and values that fill a part of their range."""

import struct
import zlib

import cv2
import numpy as np
import PIL.Image
import pytest
import simplejpeg

from common.datacheck import images
from common.datacheck.images import inspect
from tests.common.image_variants import (
    GREY,
    HEIGHT,
    JPEGS,
    PNGS,
    RGB,
    VARIANTS,
    WIDTH,
    chunk,
    opencv,
    pillow,
    png,
    scaled,
    tiff,
)

NOISE = np.random.default_rng(5).integers(0, 256, (96, 128, 3), np.uint8)  # a photograph has as many codes
NOISY_JPEGS = {
    "baseline": pillow("JPEG", NOISE, quality=90),
    "progressive": pillow("JPEG", NOISE, progressive=True),
    "grey": pillow("JPEG", NOISE, "L"),
    "cmyk": pillow("JPEG", NOISE, "CMYK"),
    "ycck": simplejpeg.encode_jpeg(np.dstack([NOISE, NOISE[..., :1]]), colorspace="CMYK"),
    "restart": opencv(".jpg", NOISE, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
}


def _scan(jpeg: bytes) -> int:
    return jpeg.index(b"\xff\xda") + 14


def _early_end(jpeg: bytes) -> bytes:
    at = (_scan(jpeg) + len(jpeg)) // 2
    return jpeg[:at] + b"\xff\xd9" + bytes(58) + jpeg[at + 60 :]


def _zeros(jpeg: bytes) -> bytes:
    at = (_scan(jpeg) + len(jpeg)) // 2
    return jpeg[:at] + bytes(len(jpeg) // 4) + jpeg[at + len(jpeg) // 4 :]


def _piece_lost(jpeg: bytes) -> bytes:
    at = (_scan(jpeg) + len(jpeg)) // 2
    return jpeg[:at] + jpeg[at + len(jpeg) // 4 :]


def _foreign_piece(jpeg: bytes) -> bytes:
    """A block of another file in the place of one of this: as after a broken copy."""
    at, size = (_scan(jpeg) + len(jpeg)) // 2, len(jpeg) // 4
    return jpeg[:at] + np.random.default_rng(1).bytes(size).replace(b"\xff", b"\xfe") + jpeg[at + size :]


@pytest.mark.parametrize("damage", [_early_end, _zeros, _piece_lost, _foreign_piece])
@pytest.mark.parametrize("name", NOISY_JPEGS)
def test_damage_in_the_scan_of_a_jpeg(name, damage):
    sound = NOISY_JPEGS[name]
    assert not inspect(sound, decode=True).fault
    damaged = damage(sound)
    facts = inspect(damaged, decode=True)
    assert facts.fault == "image-damaged" and facts.detail
    assert (facts.height, facts.width) == NOISE.shape[:2]
    assert not inspect(damaged).fault or name == "progressive"  # whose tables may have been hit


@pytest.mark.parametrize("name", ["jpeg-sampled-4-2", "jpeg-arithmetic"])
def test_damage_in_the_scan_header_of_rare_jpegs(name):
    component = JPEGS[name].index(b"\xff\xda") + 5
    damaged = JPEGS[name][:component] + b"\x0f" + JPEGS[name][component + 1 :]
    assert not inspect(damaged).fault
    assert inspect(damaged, decode=True).fault == "image-damaged"


def test_equal_bytes_between_a_picture_and_its_end_are_no_damage():
    for name in ("jpeg", "jpeg-cmyk", "jpeg-progressive"):
        body, end = JPEGS[name][:-2], JPEGS[name][-2:]
        for padding in (bytes(500), b"\x55" * 3):
            assert not inspect(body + padding + end, decode=True).fault, name
            assert not inspect(body + padding + end + b"behind it", decode=True).fault, name
        assert inspect(body + b"other bytes" + end, decode=True).fault == "image-damaged"


def test_what_does_not_touch_the_pixels_is_no_damage():
    jfif = JPEGS["jpeg"].index(b"JFIF\0") + 5
    assert not inspect(JPEGS["jpeg"][:jfif] + b"\x09" + JPEGS["jpeg"][jfif + 1 :], decode=True).fault
    adobe = JPEGS["jpeg-rgb"].replace(b"JFIF", b"ABCD")
    assert not inspect(adobe, decode=True).fault


# --- PNG ---


def test_a_flipped_bit_anywhere_in_a_png():
    for name in ("png", "png-interlaced", "png-palette"):
        for position in range(8, len(PNGS[name]), 1 if name == "png" else 37):
            damaged = bytearray(PNGS[name])
            damaged[position] ^= 4
            assert inspect(bytes(damaged), decode=True).fault, (name, position)


def test_the_message_names_the_chunk():
    data = PNGS["png"].index(b"IDAT") + 12
    damaged = PNGS["png"][:data] + b"\0" + PNGS["png"][data + 1 :]
    assert not inspect(damaged).fault
    facts = inspect(damaged, decode=True)
    assert facts.fault == "image-damaged" and "IDAT" in facts.detail


def _png_of(data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_data_with_right_checksums_that_are_too_short_or_no_data():
    rows = bytes(HEIGHT * (1 + 3 * WIDTH))
    assert not inspect(_png_of(zlib.compress(rows)), decode=True).fault
    short = inspect(_png_of(zlib.compress(rows[:-1])), decode=True)
    assert short.fault == "image-damaged" and "truncated" in short.detail
    for data in (b"no deflate", zlib.compress(rows)[:-4] + bytes(4)):
        assert inspect(_png_of(data), decode=True).fault == "image-damaged"


# --- the others ---


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate"])
def test_damage_in_a_tiff(compression):
    encoded = bytearray(pillow("TIFF", NOISE, compression=compression))
    third = len(encoded) // 3
    encoded[third : 2 * third] = np.random.default_rng(2).bytes(third)
    assert not inspect(bytes(encoded)).fault
    facts = inspect(bytes(encoded), decode=True)
    assert facts.fault == "image-damaged" and facts.detail


@pytest.mark.parametrize("lossless", [False, True])
def test_a_webp_with_a_piece_lost_and_right_lengths(lossless):
    encoded = pillow("WEBP", NOISE, lossless=lossless)
    data = encoded[20:][: len(encoded) // 2 // 2 * 2]
    damaged = (
        b"RIFF" + struct.pack("<I", 12 + len(data)) + encoded[8:16] + struct.pack("<I", len(data)) + data
    )
    assert not inspect(damaged).fault
    assert inspect(damaged, decode=True).fault == "image-damaged"


def test_damage_that_openjpeg_reports():
    encoded = VARIANTS["jpeg2000"]
    styles = encoded.index(b"\xff\x52") + 4
    damaged = encoded[:styles] + b"\xff" * 8 + encoded[styles + 8 :]
    assert not inspect(damaged).fault
    assert inspect(damaged, decode=True).fault == "image-damaged"


def test_the_limit_of_pillow_does_not_count(monkeypatch, recwarn):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 10)
    for name in ("webp", "tiff-lzw", "jpeg2000", "png-grey-16", "jpeg-sampled-4-2"):
        assert not inspect(VARIANTS[name], decode=True).fault
    assert not [warning for warning in recwarn if "bomb" in str(warning.message)]
    assert PIL.Image.MAX_IMAGE_PIXELS == 10


def test_another_size_in_the_data_than_in_the_header_is_not_decoded(monkeypatch):
    """Pillow believes the box, the codestream is what was checked against the limit."""
    real = PIL.Image.Image.height
    monkeypatch.setattr(PIL.Image.Image, "height", property(lambda image: 10_000 * real.fget(image)))
    facts = inspect(VARIANTS["jpeg2000"], decode=True)
    assert facts.fault == "image-damaged" and f"has {WIDTH} x {HEIGHT}" in facts.detail


def test_nothing_above_the_limit_is_decoded(monkeypatch):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr(images, "check_pixels", never)
    for encoded in (
        VARIANTS["png"],
        VARIANTS["png-grey-16"],
        pillow("PNG", np.zeros((2000, 3000), np.uint8)),
    ):
        facts = inspect(encoded, decode=True, max_megapixels=0.001)
        assert facts.fault == "image-too-large"
        assert f"{facts.width} x {facts.height}" in facts.detail and "0.001" in facts.detail
    assert "6 megapixels" in facts.detail


# --- 12 bits in 16 ---


def _deep(largest: int) -> dict[str, bytes]:
    """16-bit images whose largest value is `largest`."""
    grey = (scaled(GREY, 16)[..., 0] * largest // scaled(GREY, 16).max()).astype(np.uint16)
    assert grey.max() == largest
    rgb = np.dstack([grey, grey // 2, grey // 3])
    alpha = np.full_like(grey, 65535)
    alpha_rows = [row.astype(">u2").tobytes() for row in np.dstack([grey, alpha])]
    return {
        "png-grey": pillow("PNG", grey),
        "png-grey-alpha": png(16, 4, alpha_rows),
        "png-rgb": opencv(".png", rgb),
        "png-rgba": opencv(".png", np.dstack([rgb, alpha])),
        "tiff-grey": tiff(grey[..., None], 1, bits=16),
        "tiff-grey-big-endian": tiff(grey[..., None], 1, bits=16, order=">"),
        "tiff-rgb": tiff(rgb, 2, bits=16),
    }


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("name", _deep(4095))
def test_12_bit_data_in_16_bits(name, decode):
    for largest in (255, 4095):
        facts = inspect(_deep(largest)[name], decode=decode)
        assert facts.fault == "image-12-bit", largest
        in_color = "rgb" in name or name == "png-grey-alpha"
        assert (f"is {largest} of" in facts.detail) != in_color and ("about" in facts.detail) == in_color
        assert (facts.height, facts.width) == RGB.shape[:2]
    assert not inspect(_deep(4096)[name], decode=decode).fault


def test_an_image_without_light():
    assert not inspect(pillow("PNG", np.zeros((9, 9), np.uint16))).fault
    assert not inspect(tiff(np.zeros((HEIGHT, WIDTH, 1), np.int64), 1, bits=16)).fault
    # Pillow keeps the upper bits of colours: black may be 8-bit data.
    assert inspect(opencv(".png", np.zeros((9, 9, 3), np.uint16))).fault == "image-12-bit"


def test_16_bit_images_are_decoded_without_being_asked():
    data = VARIANTS["png-rgb-16"].index(b"IDAT") + 10
    damaged = VARIANTS["png-rgb-16"][:data] + bytes(200) + VARIANTS["png-rgb-16"][data + 200 :]
    assert inspect(damaged).fault == "image-damaged"
