"""A sheet of some images of a data set with their boxes, and text as a picture.

The sheet shows the images with most boxes first, then others by chance.
"""

import io
import pathlib
from collections.abc import Callable, Mapping

import matplotlib
import numpy as np
import PIL.Image
from PIL import ImageDraw, ImageFont

from common.annotations import Annotations
from common.evaluation.drawing import BACKGROUND, draw_boxes
from tools.report.tables import printable, shorten

MOST = 3  # images with most boxes
OTHERS = 6  # any others with boxes
NAMED_BOXES = 25  # of more boxes in one image the names would cover everything
NAME_LENGTH = 24  # characters of a class name
_LONGEST = 640  # pixels of the longer side of an image in memory
_HEIGHT = 300  # pixels of an image on the sheet: lines and letters are of one size everywhere
_GAP = 6
_CAPTION_HEIGHT = 24
_LETTER_HEIGHT = 18
_MARGIN = 20


def sample_images(
    annotations: Annotations, encoded: Callable[[int], bytes], seed: int = 0
) -> dict[int, np.ndarray]:
    """The images of a sheet: the MOST with most boxes, then OTHERS that have any.

    Args:
        annotations: of the data set.
        encoded: gives the image file of a row of the annotations.
        seed: chooses the others.

    Returns:
        Row -> uint8 (H, W, 3) RGB, shrunk. Images that cannot be read are left out.
    """
    counts = np.diff(annotations.target_boxes.row_splits)
    most = np.argsort(-counts, kind="stable")[:MOST]
    others = np.setdiff1d(np.flatnonzero(counts), most)
    chosen = np.random.default_rng(seed).choice(others, min(OTHERS, len(others)), replace=False)
    images = {}
    for row in [*most.tolist(), *np.sort(chosen).tolist()]:
        try:
            with PIL.Image.open(io.BytesIO(encoded(row))) as picture:
                picture.draft("RGB", (_LONGEST, _LONGEST))
                small = picture.convert("RGB")
        except (OSError, ValueError, PIL.Image.DecompressionBombError):
            continue  # the check names what is wrong with the file
        small.thumbnail((_LONGEST, _LONGEST))
        images[row] = np.asarray(small)
    return images


def sheet(annotations: Annotations, images: Mapping[int, np.ndarray], width: int) -> np.ndarray:
    """uint8 (H, width, 3): the images with their boxes, and above each its id and number of boxes.

    Args:
        annotations: of the data set.
        images: row of the annotations -> uint8 (H, W, 3) RGB, of any size; at least one.
        width: in pixels.
    """
    placed, left, top = [], 0, 0
    for row, image in images.items():
        picture = _with_boxes(annotations, row, image, width)
        if left and left + picture.width > width:
            left, top = 0, top + _CAPTION_HEIGHT + _HEIGHT + _GAP
        placed.append((picture, (left, top)))
        left += picture.width + _GAP
    whole = PIL.Image.new("RGB", (width, top + _CAPTION_HEIGHT + _HEIGHT + _GAP), BACKGROUND)
    for picture, place in placed:
        whole.paste(picture, place)
    return np.asarray(whole)


def written(text: str, width: int) -> np.ndarray:
    """uint8 (H, width, 3): the text in letters of one width, black on white."""
    step, lines = round(1.25 * _LETTER_HEIGHT), text.split("\n")
    picture = PIL.Image.new("RGB", (width, 2 * _MARGIN + step * len(lines)), BACKGROUND)
    font = _font("DejaVuSansMono", _LETTER_HEIGHT)
    for number, line in enumerate(lines):
        ImageDraw.Draw(picture).text((_MARGIN, _MARGIN + number * step), line, fill=(0, 0, 0), font=font)
    return np.asarray(picture)


def _with_boxes(annotations: Annotations, row: int, image: np.ndarray, width: int) -> PIL.Image.Image:
    targets = annotations.target_boxes
    own = slice(targets.row_splits[row], targets.row_splits[row + 1])
    scale = min(_HEIGHT / image.shape[0], width / image.shape[1])  # a panorama is as wide as the sheet
    size = max(round(image.shape[1] * scale), 1), max(round(image.shape[0] * scale), 1)
    shown = np.asarray(PIL.Image.fromarray(image).resize(size))
    boxes_px, classes = targets.boxes[own] * np.tile(size, 2), targets.classes[own]
    names = [shorten(name, NAME_LENGTH) for name in annotations.label_map.names]
    if len(classes) > NAMED_BOXES:
        names = [""] * len(names)
    caption = f"image {annotations.image_ids[row]}: {len(classes)} {'box' if len(classes) == 1 else 'boxes'}"
    if annotations.file_names[row]:
        caption += f", {printable(annotations.file_names[row])}"
    letters = _font("DejaVuSans", 14)
    while len(caption) > 1 and letters.getlength(caption) > size[0]:
        caption = caption[:-2] + "…"
    picture = PIL.Image.new("RGB", (size[0], size[1] + _CAPTION_HEIGHT), BACKGROUND)
    ImageDraw.Draw(picture).text((2, 3), caption, fill=(0, 0, 0), font=letters)
    picture.paste(PIL.Image.fromarray(draw_boxes(shown, boxes_px, classes, names)), (0, _CAPTION_HEIGHT))
    return picture


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of matplotlib, because Pillow's own knows Latin letters only."""
    return ImageFont.truetype(pathlib.Path(matplotlib.get_data_path()) / f"fonts/ttf/{name}.ttf", size)
