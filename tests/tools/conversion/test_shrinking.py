import io

import cv2
import numpy as np
import PIL.Image
import PIL.PngImagePlugin
import pytest

from common.args import ImagePolicy
from common.data.check.images import inspect
from tests.common import image_variants
from tests.common.made_annotations import annotations
from tests.refusal import refusal
from tools.conversion.shrinking import shrink_annotations, shrink_image, shrunk_sizes, write_shrunk

RECTANGLES = {  # format, image size, box ltwh in pixels, longest side, expected size
    "JPEG that is decoded at a quarter": ("JPEG", (3001, 4001), (3100, 2300, 850, 650), 500, (375, 500)),
    "wide JPEG": ("JPEG", (301, 403), (50, 40, 200, 100), 150, (112, 150)),
    "almost unscaled JPEG": ("JPEG", (403, 301), (50, 40, 200, 100), 400, (400, 299)),
    "narrow JPEG": ("JPEG", (900, 40), (10, 100, 20, 400), 300, (300, 13)),
    "wide PNG": ("PNG", (301, 403), (50, 40, 200, 100), 150, (112, 150)),
}


def encoded(picture, image_format, **options):
    stream = io.BytesIO()
    picture.save(stream, image_format, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("image_format", "size", "box", "max_side", "expected"), RECTANGLES.values(), ids=RECTANGLES
)
def test_object_in_an_image_scaled_to_max_side_lies_at_its_scaled_box(
    image_format, size, box, max_side, expected
):
    picture = PIL.Image.new("RGB", size[::-1])
    picture.paste("white", (*box[:2], box[0] + box[2], box[1] + box[3]))
    image = PIL.Image.open(io.BytesIO(shrink_image(encoded(picture, image_format), "x", max_side)))
    assert (image.format, image.size) == (image_format, expected[::-1])
    result = shrink_annotations(annotations([size], [(0, 0, *box)]), max_side)
    assert result.image_sizes.tolist() == [list(expected)]
    left, top, width, height = result.boxes_ltwh_px[0]
    white = np.asarray(image.convert("L")) / 255.0
    rows, columns = (np.arange(side) + 0.5 for side in expected)
    assert white.sum() == pytest.approx(width * height, rel=0.02)
    assert white.sum(0) @ columns / white.sum() == pytest.approx(left + width / 2, abs=0.1)
    assert white.sum(1) @ rows / white.sum() == pytest.approx(top + height / 2, abs=0.1)
    assert result.areas[0] == pytest.approx(width * height)


VARIANTS = [name for name in image_variants.VARIANTS if name.startswith(("jpeg-", "png-"))]


@pytest.mark.parametrize("name", VARIANTS)
def test_colours_of_a_scaled_image_are_those_that_training_sees(name):
    """Decoders convert CMYK to RGB in different ways."""
    half = shrink_image(image_variants.VARIANTS[name], name, image_variants.WIDTH // 2)
    assert not inspect(half, ImagePolicy(decode=True)).fault
    pixels = np.asarray(PIL.Image.open(io.BytesIO(half)).convert("RGB")).astype(int)
    expected = cv2.resize(image_variants.expected(name), (26, 18), interpolation=cv2.INTER_AREA)
    assert np.abs(pixels - expected).mean() < (12 if "cmyk" in name else 3)


def test_scaled_png_has_the_colours_below_its_transparent_pixels():
    picture = PIL.Image.new("RGBA", (40, 20), (200, 100, 50, 0))
    half = PIL.Image.open(io.BytesIO(shrink_image(encoded(picture, "PNG"), "x", 20)))
    assert half.getpixel((10, 5)) == (200, 100, 50)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_scaled_image_has_the_orientation_and_colour_profile_of_the_original(image_format):
    exif = b"Exif\0\0" + image_variants.exif(6)
    original = encoded(PIL.Image.new("RGB", (40, 20)), image_format, exif=exif, icc_profile=b"p")
    half = shrink_image(original, "x", 20)
    facts = inspect(half)
    assert (facts.width, facts.height, facts.orientation) == (20, 10, 6)
    assert PIL.Image.open(io.BytesIO(half)).info["icc_profile"] == b"p"
    assert shrink_image(original, "x", 40) == original


def test_png_with_a_text_above_pillows_limit_is_scaled():
    texts = PIL.PngImagePlugin.PngInfo()
    texts.add_text("Comment", "x" * 2**21, zip=True)
    original = encoded(PIL.Image.new("RGB", (40, 20), "red"), "PNG", pnginfo=texts)
    half = PIL.Image.open(io.BytesIO(shrink_image(original, "x", 20)))
    assert (half.size, half.getpixel((3, 3))) == ((20, 10), (255, 0, 0))


def test_boxes_scale_by_the_rounded_image_sizes_and_images_within_max_side_stay_unchanged():
    boxes = [(0, 0, 1, 2, 3, 4), (1, 1, -10, 20, 300, 40), (1, 2, 5, 5, 0, 5), (3, 0, 1, 1, 1, 1)]
    sizes = [(30, 50), (101, 303), (400, 400), (1, 999)]
    original = annotations(sizes, boxes, crowds=[1], areas=[7, 99, 0, 1])
    result = shrink_annotations(original, 100)
    assert result.image_sizes.tolist() == [[30, 50], [33, 100], [100, 100], [1, 100]]
    x, y = 100 / 303, 33 / 101
    expected = [[1, 2, 3, 4], [-10 * x, 20 * y, 300 * x, 40 * y], [5 * x, 5 * y, 0, 5 * y]]
    np.testing.assert_allclose(result.boxes_ltwh_px, [*expected, [100 / 999, 1, 100 / 999, 1]], rtol=1e-12)
    np.testing.assert_allclose(result.areas, [7, 99 * x * y, 0, 100 / 999], rtol=1e-12)
    assert result.is_crowd.tolist() == [False, True, False, False]
    assert shrink_annotations(annotations([(400, 200)], []), 100).image_sizes.tolist() == [[100, 50]]
    largest = 2**31 - 1
    assert shrunk_sizes(np.array([[largest, 3]], np.int32), largest - 1).tolist() == [[largest - 1, 3]]


def test_bmp_is_refused_only_if_it_must_be_scaled():
    bmp = image_variants.pillow("BMP")
    assert shrink_image(bmp, "a.bmp", 52) == bmp
    assert refusal(shrink_image, bmp, "a.bmp", 51).startswith("a.bmp is BMP: convert it, --max_side reads")


def test_conversion_with_max_side_reports_a_damaged_image_and_writes_no_scaled_image(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    png = bytearray(image_variants.pillow("PNG", noise))
    png[3000] ^= 255
    (tmp_path / "1.jpg").write_bytes(png)
    arguments = annotations([(40, 60)], []), f"{tmp_path}", f"{tmp_path}/new", 20
    assert refusal(write_shrunk, *arguments).startswith(f"{tmp_path}/1.jpg cannot be decoded: ")
    assert not list((tmp_path / "new").iterdir())
