"""Tests pictures of boxes by their pixels, and the fonts of all pictures."""

import io

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from common.evaluation import curves, drawing
from tests.common.evaluation.names import HOSTILE_NAMES

NAMES = ("disk", "ring", "a rather long name of a class")
NAMELESS = ("", "", "")


def blank(height=120, width=200, value=0):
    return np.full((height, width, 3), value, np.uint8)


def pixels_of(image, colour):
    return np.nonzero((image == np.array(colour, np.uint8)).all(axis=-1))


def draw_box(box, index=0, names=NAMES, scores=None):
    return drawing.draw_boxes(blank(), np.array([box]), np.array([index]), names, scores)


def extent(picture, colour):
    rows, columns = pixels_of(picture, colour)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_box_is_drawn_as_a_rectangle_along_its_edges_and_changes_no_other_pixel():
    image = blank()
    picture = drawing.draw_boxes(image, np.array([[30, 40, 150, 100]]), np.array([1]), NAMELESS)
    assert extent(picture, drawing.class_colour(1)) == (30, 40, 150, 100)
    assert (picture[50:90, 40:140] == 0).all()
    assert (picture[:, :30] == 0).all()
    assert (image == 0).all()


def test_box_that_reaches_beyond_the_image_is_drawn_with_those_sides_on_the_image_edge():
    picture = draw_box([-50.0, -1e9, 250.0, 60.0], names=NAMELESS)
    assert extent(picture, drawing.class_colour(0)) == (0, 0, 200, 60)


def test_drawn_lines_and_labels_scale_with_the_picture():
    sizes = []
    for scale in (6, 24):
        box = np.array([[32, 36, 144, 96]]) * scale
        picture = drawing.draw_boxes(blank(120 * scale, 160 * scale), box, np.array([0]), ["cat"])
        line = len(pixels_of(picture[: 50 * scale, 130 * scale :][:, :1], drawing.class_colour(0))[0])
        label = 36 * scale - extent(picture, drawing.class_colour(0))[1]
        sizes.append((line / scale, label / scale))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.4)


BOXES_WITHOUT_AREA = {
    "line": [50, 60, 50, 100],
    "point": [50, 60, 50, 60],
    "negative sides": [50, 60, 40, 30],
    "point at the corner": [200, 120, 200, 120],
    "outside": [-9, -9, -3, -3],
}


@pytest.mark.parametrize("box", BOXES_WITHOUT_AREA.values(), ids=BOXES_WITHOUT_AREA)
def test_box_without_area_or_outside_the_image_is_drawn_visibly(box):
    assert len(pixels_of(draw_box(box), drawing.class_colour(0))[0]) > 0


def test_padding_boxes_are_not_drawn():
    boxes = np.array([[-1, -1, -1, -1], [np.nan] * 4])
    assert (drawing.draw_boxes(blank(), boxes, np.array([-1, -1]), NAMES) == 0).all()
    assert (drawing.draw_boxes(blank(), np.zeros((0, 4)), np.zeros(0, int), NAMES) == 0).all()


@pytest.mark.parametrize("box", [[0, 0, 40, 40], [190, 110, 200, 120], [60, 3, 199, 60]], ids=str)
def test_drawn_class_label_lies_inside_the_image_for_boxes_at_any_edge(box):
    def white_pixels(box):
        return (draw_box(box, 2) > 200).all(axis=-1).sum()

    assert white_pixels(box) == white_pixels([5, 60, 20, 80]) > 50


def test_class_label_is_drawn_above_its_box():
    picture = draw_box([30, 50, 90, 90])
    assert (picture[55:85, 35:85] == 0).all()
    assert (picture[35:49, 30:50] > 0).any()


@pytest.mark.parametrize(
    ("index", "names", "shown"),
    [(0, ["traffic\nlight\n"], ["traffic light"]), (7, NAMES, [*NAMES, *"3456", "7"])],
    ids=["line feeds", "missing name"],
)
def test_drawn_class_label_shows_line_feeds_as_blanks_and_a_missing_name_as_a_number(index, names, shown):
    box = [30, 50, 90, 90]
    np.testing.assert_array_equal(draw_box(box, index, names), draw_box(box, index, shown))


def test_box_of_a_class_with_an_empty_name_is_drawn_without_a_caption(monkeypatch):
    box = [30, 50, 90, 90]
    picture = draw_box(box, 0, [""])
    monkeypatch.setattr(drawing, "caption", lambda *_: Image.new("RGB", (0, 0)))
    np.testing.assert_array_equal(picture, draw_box(box, 0, NAMES))


def test_box_with_the_best_score_is_drawn_on_top():
    boxes = np.array([[30, 40, 150, 100], [30, 40, 150, 100]])
    for scores, top in (([0.9, 0.2], 0), ([0.2, 0.9], 1)):
        picture = drawing.draw_boxes(blank(), boxes, np.array([0, 1]), NAMES, np.array(scores))
        assert tuple(picture[99, 60]) == drawing.class_colour(top)


def test_drawn_class_label_is_wider_with_a_score_than_without_one():
    def label_width(scores):
        picture = draw_box([30, 50, 40, 90], scores=scores)
        return pixels_of(picture[:49], drawing.class_colour(0))[1].max()

    assert label_width(np.array([0.5])) > label_width(None) + 10


@pytest.mark.parametrize("size", [0.06, 0.3])
def test_labels_of_forty_boxes_hide_no_other_label(monkeypatch, size):
    """Each label has a colour of its own, so that its pixels in the picture can be counted."""
    labels, draw_caption = [], drawing.caption

    def caption(text, *args):
        number = len(labels) + 1
        labels.append(Image.new("RGB", draw_caption(text, *args).size, (number, 0, 255)))
        return labels[-1]

    monkeypatch.setattr(drawing, "caption", caption)
    random = np.random.default_rng(0)
    centres, sides = random.uniform(0, 1, (40, 2)) * [640, 480], random.uniform(0.5, 2, (40, 2)) * size * 480
    boxes = np.hstack([centres - sides / 2, centres + sides / 2])
    picture = drawing.draw_boxes(blank(480, 640), boxes, np.arange(40) % 3, NAMES[:2] + ("horse",))
    pixels = [len(pixels_of(picture, (number, 0, 255))[0]) for number in range(1, 41)]
    assert pixels == [label.width * label.height for label in labels]


def test_colours_of_twenty_classes_differ_and_those_of_consecutive_classes_differ_strongly():
    colours = np.array([drawing.class_colour(i) for i in range(20)], int)
    distances = np.abs(colours[:, None] - colours[None]).sum(axis=-1) + 1000 * np.eye(20, dtype=int)
    assert distances.min() > 20
    assert min(np.abs(colours[i] - colours[i + 1]).sum() for i in range(19)) > 150


def test_saved_png_has_the_pixels_of_the_image_and_no_temporary_file_stays(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (31, 47, 3), np.uint8)
    drawing.save_png(image, tmp_path / "x.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "x.png")), image)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_png_with_a_text_above_pillows_limit_is_read():
    texts, stream = PngInfo(), io.BytesIO()
    texts.add_text("Comment", "x" * 2**21, zip=True)
    Image.new("RGB", (3, 2), "red").save(stream, "PNG", pnginfo=texts)
    np.testing.assert_array_equal(drawing.read_image(stream.getvalue()), [[(255, 0, 0)] * 3] * 2)


def test_image_of_16_bits_is_scaled_to_8_bits(tmp_path):
    Image.fromarray(np.uint16([[0, 257 * 128, 65535]])).save(tmp_path / "x.png")
    assert drawing.read_image((tmp_path / "x.png").read_bytes())[0, :, 0].tolist() == [0, 128, 255]


# --- names ---


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_box_with_a_hostile_name_is_drawn(name):
    assert len(pixels_of(draw_box([30, 50, 90, 90], 0, [name]), drawing.class_colour(0))[0]) > 0


@pytest.fixture
def cat_font(tmp_path, monkeypatch):
    """Installs a font in which 猫 and digits are filled squares, and a damaged font, but no other font."""
    builder = FontBuilder(1000, isTTF=True)
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 1000), (1000, 1000), (1000, 0)):
        pen.lineTo(point)
    pen.closePath()
    builder.setupGlyphOrder([".notdef", "cat"])
    builder.setupCharacterMap({ord(letter): "cat" for letter in "猫0123456789."})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "cat": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "cat": (1000, 0)})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Cat", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "Cat-Regular.ttf")
    damaged = tmp_path / "NotoSansDamaged-Regular.ttf"
    damaged.write_bytes(b"\0\1\0\0")
    monkeypatch.setattr(
        font_manager, "findSystemFonts", lambda: [str(tmp_path / "Cat-Regular.ttf"), str(damaged)]
    )
    drawing._font_with.cache_clear()
    yield str(tmp_path / "Cat-Regular.ttf")
    drawing._font_with.cache_clear()


def test_font_with_the_letters_of_a_name_is_used_in_all_pictures(cat_font, figures, tmp_path, capfd):
    assert drawing.font_file("猫") == cat_font
    assert drawing.font_file("cat ☃") == drawing._SANS
    white = (draw_box([30, 50, 90, 90], 0, ["猫"]) == 255).all(axis=-1)
    rows, columns = np.nonzero(white)
    assert white.sum() == (np.ptp(rows) + 1) * (np.ptp(columns) + 1) == 10 * 10
    curves.pr_curves({"猫": [0.5] * 101}, tmp_path / "curves.png")
    (text,) = figures[0].axes[0].get_legend().get_texts()
    assert text.get_fontproperties().get_file() == cat_font
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("犬 いぬ", "fonts-noto-cjk"),
        ("개", "fonts-noto-cjk"),
        ("กา", "fonts-noto-core"),
        ("🐈", "fonts-symbola"),
    ],
)
def test_letter_that_no_font_has_is_named_once_with_a_package(
    cat_font, tmp_path, monkeypatch, capfd, name, package
):
    monkeypatch.setattr(drawing, "_named_packages", set())
    for _ in range(2):
        draw_box([30, 50, 90, 90], 0, [name])
        curves.pr_curves({name: [0.5] * 101, f"{name} {name[0]}": [0.5] * 101}, tmp_path / "curves.png")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: no installed font has the letter '") and package in line


def test_picture_that_cannot_be_drawn_gives_one_line_and_no_error(capfd):
    with drawing.warn_if_undrawable("runs/mine/pr_curves.png"):
        raise ValueError("\n$5_$10\n^\nParseSyntaxException")
    assert capfd.readouterr().err == (
        "warning: runs/mine/pr_curves.png cannot be drawn (ValueError: $5_$10 ^ ParseSyntaxException); "
        "all else goes on\n"
    )


def test_full_disk_is_not_an_undrawable_picture():
    with pytest.raises(OSError, match="No space"), drawing.warn_if_undrawable("a.png"):
        raise OSError(28, "No space left on device")
