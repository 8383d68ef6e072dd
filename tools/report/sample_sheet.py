"""A sheet of some images of a data set with their boxes: those with most boxes first, then drawn ones."""

import io
import pathlib
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
import PIL.Image
from PIL import ImageDraw, ImageFont

from common.annotations import Annotations
from common.evaluation import drawing
from tools.report.data_text import shorten, shorten_name

MOST = 3  # images with most boxes
OTHERS = 6  # any others with boxes
NAMED_BOXES = 25  # of more boxes in one image the names would cover everything
NAME_LENGTH = 24  # letters of the name of a class
_LONGEST = 640  # pixels of the longer side of an image in memory
_HEIGHT = 300  # pixels of an image on the sheet: lines and letters are of one size everywhere
_GAP = 6
_CAPTION_HEIGHT = 24


def choose(annotations: Annotations, seed: int = 0) -> list[int]:
    """The rows of the images to show: the MOST with most boxes, then OTHERS that have any."""
    counts = np.diff(annotations.target_boxes.row_splits)
    most = np.argsort(-counts, kind="stable")[:MOST]
    others = np.setdiff1d(np.flatnonzero(counts), most)
    random = np.random.default_rng(seed)
    drawn = np.sort(random.choice(others, min(OTHERS, len(others)), replace=False))
    return [*most.tolist(), *drawn.tolist()]


def read(rows: Sequence[int], encoded: Callable[[int], bytes]) -> dict[int, np.ndarray]:
    """Decodes images for `sheet`, shrunk; what cannot be read is left out.

    Args:
        rows: of the annotations.
        encoded: gives the image file of a row.
    """
    images = {}
    for row in rows:
        try:
            with PIL.Image.open(io.BytesIO(encoded(row))) as picture:
                picture.draft("RGB", (_LONGEST, _LONGEST))
                shown = picture.convert("RGB")
        except (OSError, ValueError, PIL.Image.DecompressionBombError):
            continue  # what is wrong with the file is the check's business
        shown.thumbnail((_LONGEST, _LONGEST))
        images[row] = np.asarray(shown)
    return images


def sheet(annotations: Annotations, images: Mapping[int, np.ndarray], width: int) -> np.ndarray:
    """uint8 (H, width, 3): the images with their boxes, and above each its id and number of boxes.

    Args:
        annotations: of the data set.
        images: row of the annotations -> uint8 (H, W, 3) RGB, of any size; at least one.
        width: in pixels.
    """
    rows: list[list[np.ndarray]] = [[]]
    for row, image in images.items():
        picture = _picture(annotations, row, image, width)
        if rows[-1] and sum(of.shape[1] + _GAP for of in rows[-1]) + picture.shape[1] > width:
            rows.append([])
        rows[-1].append(picture)
    step = _CAPTION_HEIGHT + _HEIGHT + _GAP
    whole = np.full((step * len(rows), width, 3), drawing.BACKGROUND, np.uint8)
    for number, pictures in enumerate(rows):
        left = 0
        for picture in pictures:
            height, shown = picture.shape[:2]
            whole[number * step : number * step + height, left : left + shown] = picture
            left += shown + _GAP
    return whole


def _picture(annotations: Annotations, row: int, image: np.ndarray, width: int) -> np.ndarray:
    targets = annotations.target_boxes
    mine = slice(targets.row_splits[row], targets.row_splits[row + 1])
    scale = min(_HEIGHT / image.shape[0], width / image.shape[1])  # a panorama is as wide as the sheet
    size = max(round(image.shape[1] * scale), 1), max(round(image.shape[0] * scale), 1)
    shown = np.asarray(PIL.Image.fromarray(image).resize(size))
    boxes_px, classes = targets.boxes[mine] * np.tile(size, 2), targets.classes[mine]
    names = [shorten_name(name, NAME_LENGTH) for name in annotations.label_map.names]
    if len(classes) > NAMED_BOXES:
        names = [""] * len(names)
    drawn = drawing.draw_boxes(shown, boxes_px, classes, names)
    caption = f"image {annotations.image_ids[row]}: {len(classes)} {'box' if len(classes) == 1 else 'boxes'}"
    if annotations.file_names[row]:
        caption += f", {annotations.file_names[row]}"
    return _with_caption(drawn, caption)


def _with_caption(image: np.ndarray, caption: str) -> np.ndarray:
    height, width = image.shape[:2]
    letters = font("DejaVuSans", 14)
    length = len(caption)
    while length > 1 and letters.getlength(shorten(caption, length)) > width:
        length -= 1
    picture = PIL.Image.new("RGB", (width, height + _CAPTION_HEIGHT), drawing.BACKGROUND)
    ImageDraw.Draw(picture).text((2, 3), shorten(caption, length), fill=(0, 0, 0), font=letters)
    picture.paste(PIL.Image.fromarray(image), (0, _CAPTION_HEIGHT))
    return np.asarray(picture)


def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """One of those that come with matplotlib, because Pillow's own knows Latin letters only."""
    return ImageFont.truetype(pathlib.Path(matplotlib.get_data_path()) / f"fonts/ttf/{name}.ttf", size)
