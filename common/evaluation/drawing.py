"""Draws boxes on images. sheets.py puts images on sheets, curves.py draws curves.

Images are uint8 (H, W, 3) RGB NumPy arrays. Drawing needs no display and works in threads. Names of classes
and files are drawn literally.
"""

import colorsys
import contextlib
import functools
import importlib.util
import io
import math
import os
import pathlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask

from common.data.check.image_headers import png_without_metadata
from common.files import write_file
from common.progress import log

# Costs of a label's place: a hidden label costs as much as ten hidden boxes; the first places cost least.
LABEL_WEIGHT = 10.0
PLACE_COSTS = 0.03 * np.arange(16)
NAME_LENGTH = 40  # characters of a class name in a legend
_MATPLOTLIB = os.path.dirname(getattr(importlib.util.find_spec("matplotlib"), "origin", ""))  # no import
_SANS = os.path.join(_MATPLOTLIB, "mpl-data", "fonts", "ttf", "DejaVuSans.ttf")
_named_packages: set[str] = set()  # each is named once
Image.MAX_IMAGE_PIXELS = None  # the data check limits the size (--max_megapixels)


def class_colour(index: int) -> tuple[int, int, int]:
    """Returns the RGB colour of a class."""
    hue = (0.58 + index * 0.618034) % 1  # steps of the golden ratio never repeat a hue
    light = 0.85 - 0.25 * (index // 7 % 2)  # seven lighter colours, then seven darker ones
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.9, light)
    return int(255 * red), int(255 * green), int(255 * blue)


class Panel(NamedTuple):
    """An image with N boxes that have labels.

    Attributes:
        image: uint8 (H, W, 3).
        boxes_px: float (N, 4) ltrb in pixels of the image; the last box is drawn on top.
        labels: N texts; "" gives no label.
        colours: N RGB colours.
        title: a text above the image; "" for none.
    """

    image: np.ndarray
    boxes_px: np.ndarray
    labels: Sequence[str]
    colours: Sequence[tuple[int, ...]]
    title: str = ""


def make_panel(
    image: np.ndarray,
    boxes_px: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str],
    scores: np.ndarray | None = None,
    title: str = "",
) -> Panel:
    """Makes a panel whose labels are the names of the classes and, if given, the scores.

    Args:
        image: uint8 (H, W, 3).
        boxes_px: (N, 4) ltrb in pixels; boxes may reach outside the image.
        classes: (N,) int, 0-based. Boxes of class -1 are padding and are left out.
        names: the name of each class; a class without a name is shown as its number. An empty name gives
            no label.
        scores: (N,) float, or None. The box with the best score is drawn on top.
        title: a text above the image.
    """
    order = range(len(classes)) if scores is None else np.argsort(scores, kind="stable")
    rows = [int(row) for row in order if classes[row] >= 0]
    indices = [int(classes[row]) for row in rows]
    labels = [names[index] if index < len(names) else str(index) for index in indices]
    if scores is not None:
        labels = [f"{label} {scores[row]:.2f}" for label, row in zip(labels, rows, strict=True)]
    boxes_px = np.asarray(boxes_px, np.float64).reshape(-1, 4)[rows]
    return Panel(image, boxes_px, labels, [class_colour(index) for index in indices], title)


def draw_boxes(
    image: np.ndarray,
    boxes_px: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str],
    scores: np.ndarray | None = None,
) -> np.ndarray:
    """Draws boxes with labels on a copy of an image; see `make_panel`. Returns uint8 (H, W, 3)."""
    return draw(make_panel(image, boxes_px, classes, names, scores))


def draw(panel: Panel, size: tuple[int, int] | None = None) -> np.ndarray:
    """Draws the boxes and labels of a panel on its image, without the title.

    Lines and labels scale with the picture, and many labels are smaller.

    Args:
        size: (width, height) of the picture in pixels; by default that of the image.

    Returns:
        uint8 (height, width, 3).
    """
    picture, boxes_px = Image.fromarray(panel.image), panel.boxes_px
    if size and size != picture.size:
        boxes_px = boxes_px * np.tile(np.divide(size, picture.size), 2)
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    boxes_px = np.clip(boxes_px, 0, picture.size * 2)  # a side outside the image is moved to its edge
    drawing, side = ImageDraw.Draw(picture), math.sqrt(math.prod(picture.size))
    for (left, top, right, bottom), colour in zip(boxes_px, panel.colours, strict=True):
        sides = left, top, max(right - 1, left), max(bottom - 1, top)  # the last pixel inside the box
        drawing.rectangle(sides, outline=colour, width=1 + round(side / 300))
    font_size = max(10, round(side / max(36, 8 * math.sqrt(len(boxes_px)))))
    rows = [row for row, label in enumerate(panel.labels) if label.split()]
    labels = [caption(panel.labels[row], font_size, panel.colours[row], picture.size[0]) for row in rows]
    corners = _places(boxes_px, rows, [label.size for label in labels], picture.size)
    for label, corner in zip(labels, corners, strict=True):  # after the boxes: no box hides a label
        picture.paste(label, corner)
    return np.asarray(picture)


def caption(text: str, font_size: int, colour: tuple[int, ...], max_width: int) -> Image.Image:
    """Draws a line of text on a background of one colour. Text beyond `max_width` pixels is cut off."""
    text = " ".join(text.split())
    letters, margin = font(font_size, text), max(font_size // 6, 2)
    ascent, descent = letters.getmetrics()
    width = min(math.ceil(letters.getlength(text)) + 2 * margin, max_width)
    picture = Image.new("RGB", (max(width, 1), ascent + descent), colour)
    brightness = np.dot(colour, (0.299, 0.587, 0.114))  # ITU-R BT.601 luma
    ImageDraw.Draw(picture).text(
        (margin, 0), text, fill="black" if brightness > 140 else "white", font=letters
    )
    return picture


def _places(
    boxes_px: np.ndarray,
    rows: Sequence[int],
    label_sizes: Sequence[tuple[int, int]],
    picture_size: tuple[int, int],
) -> list[tuple[int, int]]:
    """Chooses where each label hides least of other labels and of boxes. The last label chooses first.

    Args:
        boxes_px: float (N, 4) ltrb.
        rows: for each label, the row of its box.

    Returns:
        (left, top) of each label. A label touches its box, and lies in the picture if it fits into it.
    """
    corners: list[tuple[int, int]] = []
    obstacles_ltwh = np.hstack([boxes_px[:, :2], np.maximum(boxes_px[:, 2:] - boxes_px[:, :2], 1)])
    weights = np.ones(len(boxes_px))
    for row, (width, height) in reversed(list(zip(rows, label_sizes, strict=True))):
        left, top, right, bottom = boxes_px[row]
        lefts, tops = (left, right - width, right, left - width), (top - height, bottom, top, bottom - height)
        places = np.array([(x, y, width, height) for x in lefts for y in tops])
        limits = np.maximum(np.subtract(picture_size, (width, height)), 0)
        places[:, :2] = np.clip(np.rint(places[:, :2]), 0, limits)
        hidden = mask.iou(obstacles_ltwh, places, np.ones(len(places)))  # "crowds": shares of each obstacle
        best = places[(weights @ hidden + PLACE_COSTS).argmin()]
        corners.append((int(best[0]), int(best[1])))
        obstacles_ltwh, weights = np.vstack([obstacles_ltwh, best]), np.append(weights, LABEL_WEIGHT)
    return corners[::-1]


def read_image(encoded: bytes) -> np.ndarray:
    """Decodes an image as uint8 (H, W, 3)."""
    return np.asarray(as_rgb(Image.open(io.BytesIO(png_without_metadata(encoded)))))


def as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits; convert("RGB") would clip them at 255
        picture = Image.fromarray(np.rint(np.asarray(picture) / 257).astype(np.uint8))
    return picture.convert("RGB")


def save_png(image: np.ndarray, path: str | os.PathLike) -> None:
    """Writes uint8 (H, W, 3) as a PNG file, atomically."""
    picture = Image.fromarray(image)
    # Pillow's default level is 6. It takes two to three times as long, for files that are 1 to 5 % smaller.
    write_file(path, lambda temporary: picture.save(temporary, "PNG", compress_level=3))


@contextlib.contextmanager
def warn_if_undrawable(path: str | os.PathLike) -> Iterator[None]:
    """Turns an error in the `with` block into a warning, because results do not depend on a picture.

    An OSError, such as that of a full disk, passes: the caller handles it as for other files.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # Matplotlib, FreeType and Pillow raise many classes
        reason = " ".join(str(error).split())[:200]
        log(
            f"warning: {os.fspath(path)} cannot be drawn ({type(error).__name__}: {reason}); all else goes on"
        )


# --- text ---


def font(size: int, text: str) -> ImageFont.FreeTypeFont:
    """Returns a font with the letters of `text`; Pillow's own font has only Latin letters."""
    return ImageFont.truetype(font_file(text), size)


def font_file(text: str) -> str:
    """Returns the font for a text: Matplotlib's, or else the installed font that lacks the fewest letters.

    If no font has all letters, a warning names a package of fonts, once.
    """
    if text.isascii():
        return _SANS  # the search imports Matplotlib, which takes a third of a second
    return _font_with(frozenset(map(ord, filter(str.isprintable, text))) - {ord(" ")})


@functools.cache
def _font_with(letters: frozenset[int]) -> str:
    best, lacking = _SANS, letters - _letters_of(_SANS)
    for file in _installed_fonts() if lacking else ():
        lacking_here = letters - _letters_of(file)
        if len(lacking_here) < len(lacking):
            best, lacking = file, lacking_here
    if lacking:
        letter = chr(min(lacking))
        _name_package(_package_of(letter), letter)
    return best


def _installed_fonts() -> list[str]:
    """Returns the fonts of this machine, Noto Sans and regular weights first."""
    # Matplotlib's own list of fonts is a cache, which lacks new fonts.
    from matplotlib import font_manager

    files = map(pathlib.Path, font_manager.findSystemFonts())
    order = sorted(files, key=lambda f: (not f.stem.startswith("NotoSans"), "Regular" not in f.stem, f))
    return list(map(str, order))


@functools.cache
def _letters_of(file: str) -> frozenset[int]:
    """Returns the code points that a font can draw; none of a damaged font or one of bitmaps."""
    from matplotlib.ft2font import FT2Font

    try:
        face = FT2Font(file)
        return frozenset(face.get_charmap() if face.scalable else ())
    except (OSError, RuntimeError):
        return frozenset()


def _package_of(letter: str) -> str:
    """Returns the package of Debian and Ubuntu that has a font with this letter."""
    scripts = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH")
    if unicodedata.name(letter, "").startswith(scripts):
        return "fonts-noto-cjk"
    return "fonts-symbola" if unicodedata.category(letter).startswith("S") else "fonts-noto-core"


def _name_package(package: str, letter: str) -> None:
    if package not in _named_packages:
        _named_packages.add(package)
        log(
            f"warning: no installed font has the letter {letter!r}, so pictures show a square: install one, "
            f"for example with `apt-get install {package}`"
        )
