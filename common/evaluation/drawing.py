"""Draws boxes on images, contact sheets of images, precision-recall curves and loss curves.

Images are uint8 (H, W, 3) RGB NumPy arrays. Drawing needs no display and works in threads.
"""

import colorsys
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont, ImageOps

from common.data.labels import LabelMap
from common.files import write_file

BACKGROUND = (255, 255, 255)
GAP = 6  # pixels between images
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
        names: the name of each class; a class without a name is shown as its number.
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
    draw.font = font(max(11, round(min(picture.size) / 32)))
    # A box side outside the image is moved to the edge of the image.
    clipped = np.clip(boxes_px, 0, picture.size * 2)
    for row in rows:
        left, top, right, bottom = clipped[row]
        corners = left, top, max(right - 1, left), max(bottom - 1, top)  # the last pixel inside the box
        draw.rectangle(corners, outline=class_colour(int(classes[row])), width=line)
    for row in rows:  # so that no box hides a label
        index = int(classes[row])
        name = names[index] if index < len(names) else str(index)
        text = name if scores is None else f"{name} {scores[row]:.2f}"
        _draw_label(draw, " ".join(text.split()), class_colour(index), *clipped[row, :2])
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


def read_image(file: str | os.PathLike | BinaryIO) -> np.ndarray:
    """Reads an image file as uint8 (H, W, 3)."""
    return np.asarray(as_rgb(Image.open(file)))


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
    for index, (name, precision) in enumerate(curves.items()):
        label = f"{name} {100 * np.mean(precision):.1f}" if len(curves) <= 20 else None
        colour = np.array(class_colour(index)) / 255
        axes.plot(recalls, precision, color=colour, label=label, linewidth=1.5 if label else 0.5)
    if len(curves) > 1:
        mean = np.mean(list(curves.values()), axis=0)
        axes.plot(recalls, mean, color="black", linewidth=3, label=f"all classes {100 * mean.mean():.1f}")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02), title="IoU 0.50 (AP50)")
    axes.legend(loc="lower left", fontsize="small")
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


def font(size: int) -> ImageFont.FreeTypeFont:
    """Returns Matplotlib's font; Pillow's own font has only Latin letters."""
    return ImageFont.truetype(pathlib.Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    # Matplotlib's version is left out of the file, so that equal curves give equal bytes.
    write_file(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))
