"""Draws boxes on images, contact sheets of images, precision-recall curves and loss curves.

Images are uint8 (H, W, 3) RGB NumPy arrays. Drawing needs no display and works in threads. Names of classes
and files are drawn literally: `$` and `_` have no meaning in them.
"""

import colorsys
import contextlib
import functools
import io
import os
import pathlib
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from PIL import Image, ImageDraw, ImageFont, ImageOps

from common.data.check.image_headers import png_without_metadata
from common.data.labels import LabelMap
from common.files import write_file
from common.progress import log

BACKGROUND = (255, 255, 255)
GAP = 6  # pixels between images
NAME_LENGTH = 40  # characters of a class name in a legend
_SANS = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
_named_packages: set[str] = set()  # each is named once
Image.MAX_IMAGE_PIXELS = None  # the data check limits the size (--max_megapixels)
_new_figure = functools.partial(Figure, figsize=(8.0, 5.0), dpi=120, layout="tight")


def class_colour(index: int) -> tuple[int, int, int]:
    """Returns the RGB colour of a class."""
    hue = (0.58 + index * 0.618034) % 1  # steps of the golden ratio never repeat a hue
    light = 0.85 - 0.25 * (index // 7 % 2)  # seven lighter colours, then seven darker ones
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.9, light)
    return int(255 * red), int(255 * green), int(255 * blue)


def draw_boxes(
    image: np.ndarray,
    boxes_px: np.ndarray,
    classes: np.ndarray,
    names: Sequence[str],
    scores: np.ndarray | None = None,
) -> np.ndarray:
    """Draws boxes with the names of their classes and, if given, their scores.

    Args:
        image: uint8 (H, W, 3); it is not changed.
        boxes_px: (N, 4) ltrb in pixels; boxes may reach outside the image.
        classes: (N,) int, 0-based. Boxes of class -1 are padding and are not drawn.
        names: the name of each class; a class without a name is shown as its number. An empty name gives
            no label.
        scores: (N,) float, or None. The box with the best score is drawn on top.

    Returns:
        uint8 (H, W, 3).
    """
    order = range(len(classes)) if scores is None else np.argsort(scores, kind="stable")
    rows = [int(row) for row in order if classes[row] >= 0]
    boxes_px = np.asarray(boxes_px, np.float64).reshape(-1, 4)
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    line = max(2, round(min(picture.size) / 200))
    font_size = max(11, round(min(picture.size) / 32))
    # A box side outside the image is moved to the edge of the image.
    clipped = np.clip(boxes_px, 0, picture.size * 2)
    for row in rows:
        left, top, right, bottom = clipped[row]
        corners = left, top, max(right - 1, left), max(bottom - 1, top)  # the last pixel inside the box
        draw.rectangle(corners, outline=class_colour(int(classes[row])), width=line)
    for row in rows:  # so that no box hides a label
        index = int(classes[row])
        name = names[index] if index < len(names) else str(index)
        text = " ".join((name if scores is None else f"{name} {scores[row]:.2f}").split())
        if text:
            draw.font = font(font_size, text)
            _draw_label(draw, text, class_colour(index), *clipped[row, :2])
    return np.asarray(picture)


def draw_results(image: np.ndarray, results: Sequence[Mapping[str, Any]], label_map: LabelMap) -> np.ndarray:
    """Draws COCO results or COCO annotations on their image."""
    boxes_ltwh_px = np.array([result["bbox"] for result in results], np.float32).reshape(-1, 4)
    classes = label_map.classes_of([result["category_id"] for result in results])
    scores = np.array([result["score"] for result in results if "score" in result])
    left_top, sides = np.split(boxes_ltwh_px, 2, axis=1)
    boxes_px = np.hstack([left_top, left_top + sides])
    return draw_boxes(image, boxes_px, classes, label_map.names, scores if len(scores) else None)


def save_batch(
    images: np.ndarray, boxes: np.ndarray, classes: np.ndarray, names: Sequence[str], path: str | os.PathLike
) -> None:
    """Writes a contact sheet of the first 16 images of a batch with their boxes.

    Args:
        images: uint8 (B, H, W, 3).
        boxes: float (B, N, 4), ltrb normalised.
        classes: int (B, N), 0-based; -1 in the padding.
    """
    height, width = images.shape[1:3]
    boxes_px = boxes * np.array([width, height, width, height], np.float32)
    batch = zip(images[:16], boxes_px, classes, strict=False)
    save_png(contact_sheet([draw_boxes(*image, names) for image in batch], columns=4), path)


def contact_sheet(images: Sequence[np.ndarray], columns: int = 4, width: int = 1280) -> np.ndarray:
    """Puts images of any size on a sheet of equal tiles.

    Args:
        images: at least one, uint8 (H, W, 3) each. Tiles have the mean aspect ratio of the images.
        columns: number of images in a row; the last row may have fewer.
        width: width of the sheet in pixels.

    Returns:
        uint8 (H, `width`, 3).
    """
    columns = min(columns, len(images))
    aspect = np.mean([image.shape[0] / image.shape[1] for image in images])
    tile_width = (width - GAP * (columns - 1)) // columns
    tile_height = max(round(tile_width * aspect), 1)
    height = -(-len(images) // columns) * (tile_height + GAP) - GAP
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        shown = ImageOps.contain(Image.fromarray(image), (tile_width, tile_height), Image.Resampling.LANCZOS)
        sheet.paste(shown, (column * (tile_width + GAP), row * (tile_height + GAP)))
    return np.asarray(sheet)


def read_image(encoded: bytes) -> np.ndarray:
    """Decodes an image as uint8 (H, W, 3)."""
    return np.asarray(as_rgb(Image.open(io.BytesIO(png_without_metadata(encoded)))))


def as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits; convert("RGB") would clip them at 255
        picture = Image.fromarray(np.rint(np.asarray(picture) / 257).astype(np.uint8))
    return picture.convert("RGB")


def save_png(image: np.ndarray, path: str | os.PathLike) -> None:
    """Writes uint8 (H, W, 3) as a PNG file, atomically."""
    write_file(path, lambda temporary: Image.fromarray(image).save(temporary, "PNG"))


def pr_curves(curves: Mapping[str, Sequence[float]], path: str | os.PathLike) -> None:
    """Draws the precision-recall curve of each class and, for several classes, the mean curve.

    Args:
        curves: class name -> 101 precisions at the recalls 0, 0.01 .. 1.
    """
    figure = _new_figure()
    axes = figure.add_subplot()
    recalls = np.linspace(0, 1, 101)
    is_named = len(curves) <= 20
    labels, lines = [], []
    for index, (name, precision) in enumerate(curves.items()):
        colour = np.array(class_colour(index)) / 255
        curve = axes.plot(recalls, precision, color=colour, linewidth=1.5 if is_named else 0.5)
        if is_named:
            lines += curve
            labels.append(f"{name[:NAME_LENGTH]} {100 * np.mean(precision):.1f}")
    if len(curves) > 1:
        mean = np.mean(list(curves.values()), axis=0)
        lines += axes.plot(recalls, mean, color="black", linewidth=3)
        labels.append(f"all classes {100 * mean.mean():.1f}")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02), title="IoU 0.50 (AP50)")
    # Without these lists, Matplotlib leaves out labels that begin with "_".
    axes.legend(lines, labels, loc="lower left", fontsize="small")
    save_figure(figure, path)


def loss_curves(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Draws the losses in the rows of a results.csv over the epochs, and AP if there were evaluations.

    Args:
        rows: rows with the key "epoch". AP, AP50 and columns that end in `loss` are drawn.
    """
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value != ""))
    losses, scores = [n for n in names if n.endswith("loss")], [n for n in names if n in ("AP", "AP50")]
    panels = [panel for panel in (("loss", losses), ("AP", scores)) if panel[1]]
    figure = _new_figure()
    for position, (title, names) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        for name in names:
            points = [(float(row["epoch"]), float(row[name])) for row in rows if row.get(name)]
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 50 else None)
        axes.set(xlabel="epoch", title=title)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    save_figure(figure, path)


def _draw_label(draw: ImageDraw.ImageDraw, text: str, colour: tuple, left: float, top: float) -> None:
    """Draws a label above the box if there is room, else inside the box."""
    *_, width, height = (side + 4 for side in draw.textbbox((0, 0), text, anchor="lt"))
    x = max(min(left, draw.im.size[0] - width), 0)
    y = top - height if top >= height else min(top, draw.im.size[1] - height)
    draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)
    brightness = np.dot(colour, (0.299, 0.587, 0.114))  # ITU-R BT.601 luma
    draw.text((x + 2, y + 2), text, fill="black" if brightness > 140 else "white", anchor="lt")


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    set_literal_text(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # `font_file` has named the missing letters
        # Matplotlib's version is left out of the file, so that equal curves give equal bytes.
        write_file(
            path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None})
        )


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


def set_literal_text(figure: Figure) -> None:
    """Makes a figure's texts literal, not formulas, and gives each a font that has its letters.

    Call it before the figure is drawn. Ticks without fixed labels keep their format.
    """
    for text in figure.findobj(Text):
        if letters := text.get_text():
            text.set_parse_math(False)
            text.set_usetex(False)
            properties = text.get_fontproperties().copy()
            properties.set_file(font_file(letters))
            text.set_fontproperties(properties)


def font(size: int, text: str) -> ImageFont.FreeTypeFont:
    """Returns a font with the letters of `text`; Pillow's own font has only Latin letters."""
    return ImageFont.truetype(font_file(text), size)


def font_file(text: str) -> str:
    """Returns the font for a text: Matplotlib's, or else the installed font that lacks the fewest letters.

    If no font has all letters, a warning names a package of fonts, once.
    """
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
    files = map(pathlib.Path, font_manager.findSystemFonts())
    order = sorted(files, key=lambda f: (not f.stem.startswith("NotoSans"), "Regular" not in f.stem, f))
    return list(map(str, order))


@functools.cache
def _letters_of(file: str) -> frozenset[int]:
    """Returns the code points that a font can draw; none of a damaged font or one of bitmaps."""
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
