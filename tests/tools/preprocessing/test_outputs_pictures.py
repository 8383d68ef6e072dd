"""Pictures and contact sheets, read back by Pillow; file names made of any names."""

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from tests.tools.preprocessing.samples import images, left, output, samples
from tools.preprocessing.samples import FileNames


def read(path):
    return np.asarray(PIL.Image.open(path))


@pytest.mark.parametrize("shape", [(20, 31, 3), (20, 31, 1), (20, 31), (1, 1, 3)])
def test_png_pictures_are_the_pixels(tmp_path, shape):
    of = images(3, shape)
    output(tmp_path / "out").write(samples(of), 3)
    for i, image in enumerate(of):
        expected = image[..., 0] if shape == (20, 31, 1) else image
        np.testing.assert_array_equal(read(tmp_path / f"out/{i}.png"), expected)


def test_pictures_are_named_after_their_sources(tmp_path):
    names = {
        "cats/a.jpg": "cats/a.png",
        "dogs/a.JPEG": "dogs/a.png",
        "cats/a.webp": "cats/a-2.png",  # one stem
        "cats/a-2.jpg": "cats/a-2-2.png",  # whose name is taken
        "two words.jp2": "two words.png",
        "日本/übung.tiff": "日本/übung.png",
        "n01440764_10026": "n01440764_10026.png",  # a record's key
        "video.0001": "video.0001.png",
        "video.0002": "video.0002.png",
        "/etc/passwd": "etc/passwd.png",
        "../../b.jpg": "b.png",
        "x/../y.jpg": "x/y.png",
        ".hidden.jpg": "hidden.png",
        "a\\b\n\0.jpg": "a_b__.png",
        "": "image.png",
        "/": "image-2.png",
        "..": "image-3.png",
    }
    out = output(tmp_path / "out")
    out.write(samples(images(len(names)), list(names)), len(names))
    found = [path for path in left(tmp_path / "out") if (tmp_path / "out" / path).is_file()]
    assert found == sorted(names.values())
    for image, file in zip(images(len(names)), names.values(), strict=True):
        np.testing.assert_array_equal(read(tmp_path / "out" / file), image)


@given(st.lists(st.text() | st.from_regex(r"[./a\\-]{1,8}"), max_size=20))
def test_any_names_give_distinct_files_inside_the_directory(names):
    given_names = FileNames(".png")
    files = [given_names.of(name) for name in names]
    assert len(set(files)) == len(files)
    for file in files:
        assert file.endswith(".png")
        parts = file.split("/")
        assert all(part and not part.startswith(".") and "\0" not in part for part in parts)
        assert all(len(part.encode()) <= 255 for part in parts)


def test_long_names_are_cut_between_characters(tmp_path):
    names = ["ü" * 300 + ".jpg", "ü" * 299 + "a.jpg", "\udcff.jpg"]
    output(tmp_path / "out").write(samples(images(3), names), 3)
    assert len(left(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("of", "layout", "told"),
    [
        (images(2, dtype=np.float32), "HWC", "float32 20 x 31 x 3 (HWC)"),
        (images(2, (3, 20, 31), np.float16), "CHW", "float16 3 x 20 x 31 (CHW)"),
        (images(2, (3, 20, 31)), "CHW", "uint8 3 x 20 x 31 (CHW)"),
        (images(2, (20, 31, 4)), "HWC", "uint8 20 x 31 x 4"),
        (images(2, (0, 31, 3)), "HWC", "uint8 0 x 31 x 3"),
    ],
)
def test_what_is_no_picture_is_told_with_the_remedy(tmp_path, of, layout, told):
    with pytest.raises(UserError) as raised:
        output(tmp_path / "out").write(samples(of, ["a.jpg", "b.jpg"], layout=layout), 2)
    assert told in str(raised.value) and "'a.jpg'" in str(raised.value) and "--ops" in str(raised.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_directory_keeps_its_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "0.png").write_text("old")
    output(tmp_path, overwrite=True).write(samples(images(2)), 2)
    assert left(tmp_path) == ["0.png", "1.png", "mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "mine"
    np.testing.assert_array_equal(read(tmp_path / "0.png"), images(1)[0])


def test_a_directory_in_a_files_place_is_one_line(tmp_path):
    (tmp_path / "0.png").mkdir()
    with pytest.raises(UserError, match=r"0\.png"):
        output(tmp_path, overwrite=True).write(samples(images(1)), 1)
    assert left(tmp_path) == ["0.png"]


# --- contact sheets ---


def test_a_sheet_shows_every_image_in_order(tmp_path):
    """Nine images of one colour each stand in three rows of three."""
    colours = [(25 * i, 255 - 20 * i, 30) for i in range(9)]
    of = [np.full((40, 40, 3), colour, np.uint8) for colour in colours]
    assert "9 of 9" in output(tmp_path / "x.png").write(samples(of), 9)
    sheet = read(tmp_path / "x.png")
    height, width = sheet.shape[:2]
    for i, colour in enumerate(colours):
        centre = sheet[height * (2 * (i // 3) + 1) // 6, width * (2 * (i % 3) + 1) // 6]
        np.testing.assert_allclose(centre, colour, atol=1)


def test_a_sheet_reads_no_more_than_it_shows(tmp_path):
    read_names = []

    def told():
        for sample in samples(images(100, (8, 9, 3))):
            read_names.append(sample.name)
            yield sample

    line = output(tmp_path / "x.jpg").write(told(), 100)
    assert "64 of 100" in line and len(read_names) == 64
    assert PIL.Image.open(tmp_path / "x.jpg").format == "JPEG"


def test_a_sheet_takes_grey_images_and_any_sizes(tmp_path):
    of = [images(1, (20, 31, 1))[0], images(1, (3000, 20, 3))[0], images(1, (31, 20))[0]]
    output(tmp_path / "x.png").write(samples(of), 3)
    assert read(tmp_path / "x.png").shape[1:] == (1280, 3)


@pytest.mark.parametrize("shape", [(20, 31, 3), (20, 31)])
def test_a_single_image_is_written_as_it_is(tmp_path, shape):
    (image,) = images(1, shape)
    output(tmp_path / "x.png").write(samples([image]), 1)
    np.testing.assert_array_equal(read(tmp_path / "x.png"), image)
