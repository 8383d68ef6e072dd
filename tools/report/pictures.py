"""Draws a sheet of some images of a data set with their boxes."""

import io
from collections.abc import Callable

import numpy as np
import PIL.Image
from PIL import ImageDraw, ImageOps

from common.data.annotations import Annotations
from common.data.check.image_headers import PILLOW_ERRORS
from common.evaluation.drawing import BACKGROUND, as_rgb, draw_boxes, font
from tools.report.tables import printable, shorten

MOST = 3
OTHERS = 6
NAMED_BOXES = 25  # with more boxes, class names would cover the image
NAME_LENGTH = 24
_COLUMNS = 3
_TILE = (466, 400)  # width and height in pixels, with the caption
_GAP = 6
_CAPTION_HEIGHT = 24


def sheet(annotations: Annotations, encoded: Callable[[int], bytes]) -> np.ndarray | None:
    """Draws images with their boxes, and above each image its id, file name and number of boxes.

    `encoded` maps the index of an image to the content of its file. The sheet is uint8 (H, W, 3), three
    images wide. Returns None if no image can be read.
    """
    tiles = []
    for row in choose(annotations):
        try:
            with PIL.Image.open(io.BytesIO(encoded(row))) as picture:
                picture.draft("RGB", (2 * _TILE[0], 2 * _TILE[1]))
                tiles.append(_tile(annotations, row, as_rgb(picture)))
        except (*PILLOW_ERRORS, PIL.Image.DecompressionBombError):
            continue  # the data check reports the file
    if not tiles:
        return None
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % _COLUMNS)
    rows = [np.concatenate(tiles[i : i + _COLUMNS], axis=1) for i in range(0, len(tiles), _COLUMNS)]
    return np.concatenate(rows)


def choose(annotations: Annotations, seed: int = 0) -> list[int]:
    """Returns indices of images: the `MOST` images with the most boxes, then `OTHERS` random images."""
    counts = np.diff(annotations.target_boxes.row_splits)
    most = np.argsort(-counts, kind="stable")[:MOST]
    others = np.setdiff1d(np.flatnonzero(counts), most)
    chosen = np.random.default_rng(seed).choice(others, min(OTHERS, len(others)), replace=False)
    return [*most.tolist(), *np.sort(chosen).tolist()]


def _tile(annotations: Annotations, row: int, image: PIL.Image.Image) -> np.ndarray:
    """Draws the image with a caption above it, uint8 (400, 466, 3)."""
    targets = annotations.target_boxes
    own = slice(targets.row_splits[row], targets.row_splits[row + 1])
    image = ImageOps.contain(image, (_TILE[0] - _GAP, _TILE[1] - _GAP - _CAPTION_HEIGHT))
    boxes_px, classes = targets.boxes[own] * np.tile(image.size, 2), targets.classes[own]
    length = NAME_LENGTH if len(classes) <= NAMED_BOXES else 0
    names = [shorten(name, NAME_LENGTH)[:length] for name in annotations.label_map.names]
    shown = draw_boxes(np.asarray(image), boxes_px, classes, names)
    tile = PIL.Image.new("RGB", _TILE, BACKGROUND)
    tile.paste(PIL.Image.fromarray(shown), (0, _CAPTION_HEIGHT))
    caption = printable(f"{annotations.image_name(row)}: {len(classes)} boxes")
    ImageDraw.Draw(tile).text((2, 3), caption, fill=(0, 0, 0), font=font(14))
    return np.asarray(tile)
