"""Image headers: what passes is decoded by DALI to its pixels, and what DALI would misread is refused."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia.dali import fn, pipeline_def, types

from common.data.check.image_headers import Encoded, ImageFacts, png_without_metadata
from common.data.check.images import ImagePolicy, inspect
from common.data.check.issues import KINDS, Fault, Severity
from tests.common.image_variants import HEIGHT, REFUSED, RGB, WIDTH, bmp, chunk, exif, expected, pillow, tiff
from tests.common.image_variants import VARIANTS as DECODED

# DALI decodes these formats, but the check refuses them: hardly any data set uses them.
RARE = (
    *("bmp-run-lengths", "ppm", "jpeg2000-rgb-16", "tiff-big-big-endian", "tiff-planar", "tiff-float"),
    *("tiff-without-sizes", "tiff-zstandard", "tiff-pages", "tiff-five-samples"),
)
VARIANTS = {name: encoded for name, encoded in DECODED.items() if name not in RARE}
SOUND_JPEG = VARIANTS["jpeg"]
EVERY_PIXEL = ImagePolicy(decode=True)


def decode_by_dali(*encoded: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Decodes each image with DALI's decoder, and as a window of the image's size."""

    @pipeline_def(batch_size=len(encoded), num_threads=2, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        batch = [np.frombuffer(image, np.uint8) for image in encoded]
        files = fn.external_source(source=lambda: batch, batch=True)
        size = fn.cast(fn.peek_image_shape(files, adjust_orientation=False)[:2], dtype=types.INT32)
        options = {"output_type": types.RGB, "adjust_orientation": False}
        windows = fn.decoders.image_slice(files, start=[0, 0], shape=size, axes=[0, 1], **options)
        return fn.decoders.image(files, **options), windows

    pictures, windows = pipeline().run()
    return [(np.array(pictures[i]), np.array(windows[i])) for i in range(len(encoded))]


def test_images_of_each_accepted_format_variant_are_decoded_by_dali_to_the_right_pixels():
    decoded = decode_by_dali(*VARIANTS.values())
    for (name, encoded), (picture, window) in zip(VARIANTS.items(), decoded, strict=True):
        facts = inspect(encoded)
        assert facts == ImageFacts(name.split("-")[0].upper(), HEIGHT, WIDTH), name
        assert picture.shape == (facts.height, facts.width, 3), name
        np.testing.assert_array_equal(picture, window, err_msg=name)
        difference = np.abs(picture.astype(int) - expected(name)).mean()
        assert difference < 4, (name, difference)


GARBAGE = {"nothing": b"", "zeros": bytes(33), "a jpeg": b"\xff\xd8\xff\xe0 more", "text": b"text\n"}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_valid_image_of_each_format_variant_followed_by_other_bytes_is_not_reported(garbage):
    for name in VARIANTS:
        encoded = VARIANTS[name] + garbage
        facts = inspect(encoded, EVERY_PIXEL)
        assert not facts.fault and inspect(encoded) == facts, name
        assert inspect(memoryview(b"before" + encoded)[6:], EVERY_PIXEL) == facts, name


@pytest.mark.parametrize("name", REFUSED)
def test_image_that_dali_refuses_or_decodes_wrongly_is_reported(name):
    facts = inspect(REFUSED[name])
    assert facts.fault in ("unsupported-format", "image-damaged") and facts.detail
    try:
        ((picture, _),) = decode_by_dali(REFUSED[name])
    except RuntimeError:
        return
    assert facts.fault == "unsupported-format"
    assert np.abs(picture.astype(int) - expected(name)).mean() > 25


@pytest.mark.parametrize("name", RARE)
def test_rare_image_format_variant_that_dali_decodes_is_reported_as_unsupported(name):
    facts = inspect(DECODED[name])
    assert facts.fault == "unsupported-format" and facts.detail
    assert inspect(DECODED[name], EVERY_PIXEL) == facts


LAYOUTS = [(0, 1), (1, 1), (2, 3), (2, 4), (2, 5), (3, 1), (5, 4), (5, 5), (6, 3), (8, 3)]


@pytest.mark.parametrize(("photometric", "samples"), LAYOUTS)
def test_tiff_pixel_layouts_that_the_check_accepts_are_decoded_by_dali(photometric, samples):
    passing = []
    for bits in (1, 2, 4, 8, 10, 12, 14, 16) if photometric != 3 else (1, 2, 4, 8):
        values = np.arange(HEIGHT * WIDTH * samples).reshape(HEIGHT, WIDTH, samples) % 2**bits
        palette = {"tag320": tuple(range(3 * 2**bits))} if photometric == 3 else {}
        for planar, tiled in ((False, False), (samples > 1, False), (False, True)):
            encoded = tiff(values, photometric, bits=bits, planar=planar, tiled=tiled, **palette)
            if inspect(encoded).fault != "unsupported-format":
                passing.append(encoded)
    assert bool(passing) == ((photometric, samples) in ((1, 1), (2, 3), (2, 4), (3, 1)))
    assert not passing or all(picture.shape == RGB.shape for picture, _ in decode_by_dali(*passing))


# --- truncated files and bytes after the end ---


@pytest.mark.parametrize("name", VARIANTS)
def test_truncated_image_is_reported_without_decoding(name):
    encoded = VARIANTS[name]
    end = len(encoded)
    if name == "jpeg-several-pictures":
        end = encoded.index(b"\xff\xd9") + 2  # DALI reads only the first picture of this file
    for cut in sorted({*range(1, min(end, 700), 3), *range(1, end, 7), *range(end - 100, end)}):
        facts = inspect(encoded[:cut])
        assert facts.fault, cut
        if (name in ("png", "webp") and cut > 20) or (name in ("jpeg", "bmp") and cut > 700):
            assert facts.fault == "image-truncated", (cut, facts)


def test_image_header_that_points_beyond_the_end_of_the_file_is_reported_and_nothing_is_read_there():
    counts = []

    class Stream(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            counts.append(count)
            return super().read(count)

    encoded = Encoded(Stream(bytes(20_000)))
    assert len(encoded.at(15_000, 4)) == 4 and len(encoded.whole()) == 20_000
    for offset, count in ((19_999, 2), (0, 2**40), (2**40, 1)):
        with pytest.raises(Fault, match=f"after 20000 bytes, and byte {offset + count - 1} is needed"):
            encoded.at(offset, count)
    assert max(counts) == 20_000 and len(counts) == 3


@pytest.mark.parametrize("width", range(1, 9))
def test_bmp_of_any_width_is_valid_and_without_its_last_byte_truncated(width):
    for pixels in (RGB[:, :width], RGB[:, :width, 0]):
        encoded = pillow("BMP", pixels)
        assert not inspect(encoded).fault
        assert inspect(encoded[:-1]).fault == "image-truncated"


def with_exif(jpeg: bytes, block: bytes) -> bytes:
    block = b"Exif\0\0" + block
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


def test_end_of_a_jpeg_thumbnail_is_not_taken_for_the_end_of_the_image():
    encoded = with_exif(SOUND_JPEG, exif(1) + VARIANTS["jpeg-grey"])
    assert encoded.count(b"\xff\xd9") == 2
    assert inspect(encoded, EVERY_PIXEL) == ImageFacts("JPEG", HEIGHT, WIDTH)
    scan, first_end = encoded.rindex(b"\xff\xda") + 30, encoded.index(b"\xff\xd9") + 2
    for truncated in (encoded[:-1], encoded[:-1] + bytes(50), encoded[:scan], encoded[:first_end]):
        assert inspect(truncated).fault == "image-truncated"


# --- contents of headers ---


PIXELS = chunk(b"IDAT", zlib.compress(bytes(HEIGHT * (1 + 3 * WIDTH))))


def png_with(*chunks: bytes, color=2) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join((header, *chunks, chunk(b"IEND", b"")))


@pytest.mark.parametrize("order", ["<", ">"], ids=["little-endian", "big-endian"])
def test_exif_orientation_is_read_from_every_format_and_is_1_if_unknown(order):
    for orientation in range(10):
        block = exif(orientation, order)
        encoded = {
            "JPEG": with_exif(SOUND_JPEG, block),
            "PNG": png_with(chunk(b"eXIf", block), PIXELS),
            "WEBP": pillow("WEBP", exif=block),
            "TIFF": tiff(RGB, 2, order=order, tag274=(orientation,)),
        }
        known = orientation if 1 <= orientation <= 8 else 1
        for image_format, image in encoded.items():
            assert inspect(image) == ImageFacts(image_format, HEIGHT, WIDTH, known)
        assert PIL.Image.open(io.BytesIO(encoded["JPEG"])).getexif()[0x0112] == orientation


DAMAGED_EXIF = {
    "empty": b"",
    "2 bytes": b"II",
    "4 bytes": b"II*\0",
    "15 bytes": exif(6)[:15],
    "bad byte order": b"XX*\0" + exif(6)[4:],
    "bad offset": exif(6)[:4] + b"\xff" * 4,
}


@pytest.mark.parametrize("block", DAMAGED_EXIF.values(), ids=DAMAGED_EXIF)
def test_damaged_exif_block_is_ignored(block):
    assert inspect(with_exif(SOUND_JPEG, block)) == ImageFacts("JPEG", HEIGHT, WIDTH)


OTHER_FORMATS = {
    "gif": (pillow("GIF", RGB, "P"), "GIF"),
    "avif of pillow": (pillow("AVIF"), "AVIF"),
    "avif sequence": (b"\0\0\0\x18ftypavis\0\0\0\0avismif1" + bytes(50), "AVIF"),
    "avif behind mif1": (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf" + bytes(50), "AVIF"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(50), "HEIF"),
    "mif1": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(50), "HEIF"),
    "jpeg xl": (b"\xff\x0a" + bytes(50), "JPEG XL"),
    "pam": (b"P7\nWIDTH 3\n", "PNM"),
}


@pytest.mark.parametrize(("encoded", "image_format"), OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_format_that_dali_does_not_decode_is_reported_by_its_name(encoded, image_format):
    facts = inspect(encoded)
    assert facts == ImageFacts(image_format, fault="unsupported-format", detail=image_format)


VIDEOS = {
    "mp4": b"\0\0\0\x18ftypisom\0\0\0\0isommp42",
    "3gp": b"\0\0\0\x1cftyp3gp4\0\0\2\0",
    "avi": b"RIFF\x26\x1e\0\0AVI LIST",
    "mkv": b"\x1aE\xdf\xa3\xa3B\x86\x81",
    "flv": b"FLV\1\5\0\0\0\x09",
}


@pytest.mark.parametrize("start", VIDEOS.values(), ids=VIDEOS)
def test_video_is_reported_as_a_video(start):
    facts = inspect(start + bytes(50))
    assert (facts.image_format, facts.fault) == ("video", "video")


OTHER_FILES = {
    "html": b"<!DOCTYPE html>\n<html>",
    "zeros": b"\0" * 100,
    "wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(50),
    "1 byte": b"x",
    "almost ppm": b"P6x",
    "ico": pillow("ICO"),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


@pytest.mark.parametrize("encoded", OTHER_FILES.values(), ids=OTHER_FILES)
def test_file_that_is_no_image_is_reported_with_its_first_bytes(encoded):
    expected = ImageFacts(fault="not-an-image", detail=f"it begins with {encoded[:16]!r}")
    assert inspect(encoded) == expected


def overwritten(name: str, position: int, value: bytes) -> bytes:
    encoded = VARIANTS[name]
    return encoded[:position] + value + encoded[position + len(value) :]


FRAME, TABLES = SOUND_JPEG.index(b"\xff\xc0"), SOUND_JPEG.index(b"\xff\xdb")
CODESTREAM = VARIANTS["jpeg2000"].index(b"\xff\x4f\xff\x51")


def jpeg_frame(position: int, value: bytes) -> bytes:
    """Writes `value` at a byte of the frame header.

    Byte 2 has the bits per sample. The height begins at byte 3, the width at byte 5. Byte 7 has the number of
    components.
    """
    return overwritten("jpeg", FRAME + 2 + position, value)


BAD_HEADERS = {
    "jpeg of 12 bits": (jpeg_frame(2, b"\x0c"), "unsupported-format"),
    # The frame header says lossless, and the quantization tables are left out.
    "lossless jpeg": (SOUND_JPEG[:TABLES] + jpeg_frame(-1, b"\xc3")[FRAME:], "unsupported-format"),
    "jpeg frame of unknown type": (jpeg_frame(-1, b"\xf7"), "image-damaged"),
    "jpeg height 0": (jpeg_frame(3, b"\0\0"), "image-damaged"),
    "jpeg width 0": (jpeg_frame(5, b"\0\0"), "image-damaged"),
    "bytes inside a jpeg header": (SOUND_JPEG[:20] + b"abc" + SOUND_JPEG[20:], "image-damaged"),
    "jpeg of markers only": (b"\xff\xd8\xff\xd9" + bytes(9), "image-truncated"),
    "png width 0": (overwritten("png", 16, bytes(4)), "image-damaged"),
    "png of 3 bits": (overwritten("png", 24, b"\3"), "image-damaged"),
    "png header checksum": (overwritten("png", 29, b"abcd"), "image-damaged"),
    "png without pixels": (VARIANTS["png"][:33] + chunk(b"IEND", b""), "image-damaged"),
    "webp of unknown codec": (overwritten("webp", 12, b"VP9 "), "image-damaged"),
    "bmp header of 16 bytes": (overwritten("bmp", 14, b"\x10"), "unsupported-format"),
    "bmp width 0": (overwritten("bmp", 18, bytes(4)), "image-damaged"),
    "bmp of negative width": (overwritten("bmp", 18, b"\0\0\0\x80"), "image-damaged"),
    "bmp with alpha masks": (bmp(32, [bytes(4 * WIDTH)] * HEIGHT, compression=6), "unsupported-format"),
    "tiff without width": (tiff(RGB, 2, without=(256,)), "unsupported-format"),
    "tiff of mixed bits": (tiff(RGB, 2, tag258=(8, 8, 16)), "unsupported-format"),
    "tiff with jpeg 2000 inside": (tiff(RGB, 2, tag259=(34712,)), "unsupported-format"),
    "tiff with offsets as text": (
        tiff(RGB, 2).replace(b"\x11\x01\x04\0", b"\x11\x01\x02\0"),
        "unsupported-format",
    ),
    "jpeg2000 without size marker": (overwritten("jpeg2000", CODESTREAM + 3, b"\x52"), "image-damaged"),
    "jpeg2000 without image header": (VARIANTS["jpeg2000"].replace(b"ihdr", b"xxxx"), "image-damaged"),
    # nvImageCodec would divide by 0 and crash the process.
    "jpeg2000 tile width 0": (overwritten("jpeg2000", CODESTREAM + 24, bytes(4)), "image-damaged"),
    "jpeg2000 tile height 0": (overwritten("jpeg2000", CODESTREAM + 28, bytes(4)), "image-damaged"),
}


@pytest.mark.parametrize(("encoded", "kind"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_each_bad_image_header_is_reported_as_its_kind_of_issue_and_stderr_stays_empty(encoded, kind, capfd):
    facts = inspect(encoded)
    assert facts.fault == kind and facts.detail, facts
    assert inspect(encoded, EVERY_PIXEL) == facts
    assert not capfd.readouterr().err


def test_jpeg_with_a_side_above_65500_is_reported_as_unsupported_and_dali_refuses_it():
    for position in (3, 5):
        facts = inspect(jpeg_frame(position, struct.pack(">H", 65501)))
        assert facts.fault == "unsupported-format" and "65501" in facts.detail
        assert not inspect(jpeg_frame(position, struct.pack(">H", 65500))).fault
    with pytest.raises(RuntimeError):
        decode_by_dali(jpeg_frame(5, struct.pack(">H", 65501)))


def test_rare_jpeg_and_png_headers_that_dali_decodes_are_not_reported():
    jpeg, scan = SOUND_JPEG, SOUND_JPEG.index(b"\xff\xc4")
    values = np.frombuffer(jpeg[TABLES + 5 : TABLES + 69], np.uint8).astype(">u2").tobytes()
    of_16_bits = b"\xff\xdb\0\x83\x10" + values
    indices = chunk(b"IDAT", zlib.compress(bytes(HEIGHT * (1 + WIDTH))))
    encoded = {
        "tables behind the frame": jpeg[:TABLES] + jpeg[FRAME:scan] + jpeg[TABLES:FRAME] + jpeg[scan:],
        "a table of 16 bits": jpeg[:FRAME] + of_16_bits + jpeg[FRAME:],
        "a palette": png_with(chunk(b"PLTE", bytes(768)), indices, color=3),
        "an unknown chunk": png_with(chunk(b"abCD", b""), PIXELS),
        "a part without data": png_with(chunk(b"IDAT", b""), PIXELS),
    }
    assert not [name for name, image in encoded.items() if inspect(image).fault]
    assert all(picture.shape == RGB.shape for picture, _ in decode_by_dali(*encoded.values()))


TEXT = b"\1" + bytes(2**21 - 1)  # two megabytes, above Pillow's limit of one
LARGE_METADATA = {
    "compressed text": [chunk(b"zTXt", b"Comment\0\0" + zlib.compress(TEXT))],
    "compressed international text": [
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(TEXT)),
    ],
    "color profile": [chunk(b"iCCP", b"ICC Profile\0\0" + zlib.compress(TEXT))],
    "70 texts of a megabyte": [chunk(b"zTXt", b"Comment\0\0" + zlib.compress(TEXT[: 2**20]))] * 70,
    "text of nine megabytes": [chunk(b"tEXt", b"Comment\0" + b"x" * 9_000_000)],
}


@pytest.mark.parametrize("place", ["before the pixels", "after the pixels"])
@pytest.mark.parametrize("chunks", LARGE_METADATA.values(), ids=LARGE_METADATA)
def test_png_with_large_metadata_has_no_fault_and_the_pixels_that_dali_decodes(chunks, place):
    parts = [*chunks, PIXELS] if place == "before the pixels" else [PIXELS, *chunks]
    encoded = png_with(*parts)
    assert inspect(encoded) == inspect(encoded, EVERY_PIXEL) == ImageFacts("PNG", HEIGHT, WIDTH)
    ((picture, _),) = decode_by_dali(encoded)
    assert png_without_metadata(encoded) == png_with(PIXELS)
    np.testing.assert_array_equal(picture, np.asarray(PIL.Image.open(io.BytesIO(png_with(PIXELS)))))


def test_check_of_images_leaves_pillows_limits_of_metadata_as_they_are():
    encoded = png_with(*LARGE_METADATA["compressed text"], PIXELS)
    assert not inspect(encoded, EVERY_PIXEL).fault
    with pytest.raises(ValueError, match="too large"):
        PIL.Image.open(io.BytesIO(encoded))


def test_image_without_metadata_keeps_its_bytes():
    for name in ("png", "png-palette", "jpeg", "webp"):
        assert png_without_metadata(VARIANTS[name]) == VARIANTS[name]
    assert png_without_metadata(VARIANTS["png"][:-30]) == VARIANTS["png"][:-30]


def test_png_chunk_before_the_pixels_that_dali_refuses_is_unsupported():
    for count, is_accepted in ((7_999_988, True), (7_999_989, False)):
        encoded = png_with(chunk(b"zTXt", b"Comment\0\0" + bytes(count - 9)), PIXELS)
        facts = inspect(encoded)
        assert (facts.fault, "with 7999989 bytes of metadata (zTXt)" in facts.detail) == (
            ("", False) if is_accepted else ("unsupported-format", True)
        )
        if is_accepted:
            decode_by_dali(encoded)
        else:
            with pytest.raises(RuntimeError):
                decode_by_dali(encoded)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_random_bytes_in_an_image_give_a_result_or_a_reported_fault_but_no_exception(data):
    encoded = bytearray(VARIANTS[data.draw(st.sampled_from(sorted(VARIANTS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        # At least half of the changes are in the first 150 bytes, because most headers are short.
        position = data.draw(st.integers(0, min(len(encoded) - 1, data.draw(st.sampled_from([150, 5000])))))
        encoded[position] = data.draw(st.integers(0, 255))
    facts = inspect(bytes(encoded), ImagePolicy(decode=True, max_megapixels=1))
    assert not facts.fault or KINDS[facts.fault].severity is Severity.IMAGE
    assert 0 <= facts.height < 2**31 and 0 <= facts.width < 2**31 and 1 <= facts.orientation <= 8
