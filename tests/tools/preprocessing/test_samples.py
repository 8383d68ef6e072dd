import numpy as np
import pytest

from tests.refusal import refusal
from tools.preprocessing.samples import FileNames, Sample


@pytest.mark.parametrize("shape", [(20, 31, 3), (20, 31, 1), (20, 31), (1, 1, 3)])
@pytest.mark.parametrize("is_bgr", [False, True])
def test_a_picture_is_contiguous_rgb_or_gray(shape, is_bgr):
    image = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    picture = Sample(0, "a.jpg", -1, image).picture(is_bgr=is_bgr)
    expected = image.squeeze(-1) if shape[-1] == 1 else image
    np.testing.assert_array_equal(picture, expected[..., ::-1] if is_bgr and shape[-1] == 3 else expected)
    assert picture.flags.c_contiguous


NO_PICTURES = [
    ((20, 31, 3), np.float32, "HWC", "float32 20 x 31 x 3 (HWC)"),
    ((3, 20, 31), np.float16, "CHW", "float16 3 x 20 x 31 (CHW)"),
    ((20, 31, 3), np.uint8, "CHW", "uint8 20 x 31 x 3 (CHW)"),
    ((20, 31, 4), np.uint8, "HWC", "uint8 20 x 31 x 4"),
    ((0, 31, 3), np.uint8, "HWC", "uint8 0 x 31 x 3"),
]


@pytest.mark.parametrize(("shape", "dtype", "layout", "told"), NO_PICTURES)
def test_what_is_no_picture_is_told_with_the_remedy(shape, dtype, layout, told):
    said = refusal(Sample(7, "a.jpg", -1, np.ones(shape, dtype), layout).picture)
    assert f"image 7 ('a.jpg') is {told}" in said
    assert "remove crop_mirror_normalize, cast and layout from --ops" in said


def test_files_are_named_after_their_sources():
    names = {
        "cats/a.jpg": "cats/a.png",
        "cats/a.webp": "cats/a-2.png",
        "cats/a-2.jpg": "cats/a-2-2.png",
        "日本/übung.tiff": "日本/übung.png",
        "n01440764_10026": "n01440764_10026.png",
        "video.0001": "video.0001.png",
        "/etc/passwd": "etc/passwd.png",
        "../../b.jpg": "b.png",
        "x/../y.jpg": "x/y.png",
        ".hidden.jpg": "hidden.png",
        "a\\b\n\0.jpg": "a_b__.png",
        "": "image.png",
        "/": "image-2.png",
        "ü" * 300 + ".jpg": "ü" * 115 + ".png",  # names are cut after 230 bytes
        "ü" * 299 + "a.jpg": "ü" * 115 + "-2.png",
        "x" * 300: "x" * 230 + ".png",
        "\udcff.jpg": "_.png",
    }
    given_names = FileNames(".png")
    assert {name: given_names.of(name) for name in names} == names
