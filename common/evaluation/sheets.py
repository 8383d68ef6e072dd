"""Puts images with their boxes on sheets without gaps, and chooses which images a sheet shows."""

import collections
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from common.data.labels import LabelMap
from common.data.sources import Source
from common.evaluation import drawing
from common.evaluation.drawing import Panel

WIDTH = 1280  # of a sheet, pixels
ROW_HEIGHT, MAX_ROW_HEIGHT = 320, 960  # pixels; rows are near the first
BACKGROUND = (255, 255, 255)
GAP, TILE_GAP = 4, 12  # pixels between the panels of a tile, and between tiles
BATCH_IMAGES = 16
SHOWN_IMAGES = 6
MIN_SCORE = 0.3  # of the detections of an evaluation; the default of infer.py


def contact_sheet(tiles: Sequence[Sequence[Panel]]) -> np.ndarray:
    """Draws tiles in rows that fill the sheet.

    Args:
        tiles: at least one; the panels of a tile stand side by side.

    Returns:
        uint8 (H, W, 3); W is WIDTH, or less if a single row would be too high.
    """
    aspects = [sum(map(aspect, tile)) for tile in tiles]
    splits = itertools.accumulate(row_lengths(aspects), initial=0)
    return stack(draw_row(tiles[a:b], WIDTH, MAX_ROW_HEIGHT) for a, b in itertools.pairwise(splits))


def stack(pictures: Iterable[np.ndarray]) -> np.ndarray:
    """Puts pictures, uint8 (h, w, 3) each, below each other on a white sheet."""
    rows = list(pictures)
    width = max(row.shape[1] for row in rows)
    height = sum(row.shape[0] + TILE_GAP for row in rows) - TILE_GAP
    sheet = np.full((height, width, 3), BACKGROUND, np.uint8)
    top = 0
    for row in rows:
        sheet[top : top + row.shape[0], : row.shape[1]] = row
        top += row.shape[0] + TILE_GAP
    return sheet


def legend(colours: Mapping[str, tuple[int, ...]], font_size: int = 16) -> np.ndarray:
    """Draws texts on their colours side by side, uint8 (h, w, 3)."""
    captions = [
        np.asarray(drawing.caption(text, font_size, colour, WIDTH)) for text, colour in colours.items()
    ]
    gap = np.full((len(captions[0]), TILE_GAP, 3), BACKGROUND, np.uint8)
    return np.hstack([part for picture in captions for part in (picture, gap)][:-1])


def row_lengths(aspects: Sequence[float]) -> list[int]:
    """Divides tiles of the aspect ratios width / height into rows whose heights are near ROW_HEIGHT.

    Returns:
        The number of tiles in each row.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # of the first 0, 1, 2 .. tiles: cost, row lengths
    for end in range(1, len(aspects) + 1):
        heights = [WIDTH / sum(aspects[start:end]) for start in range(end)]
        costs = [
            cost + math.log(height / ROW_HEIGHT) ** 2 for (cost, _), height in zip(best, heights, strict=True)
        ]
        start = int(np.argmin(costs))
        best.append((costs[start], [*best[start][1], end - start]))
    return best[-1][1]


def draw_row(tiles: Sequence[Sequence[Panel]], width: int, max_height: float = math.inf) -> np.ndarray:
    """Draws the panels of tiles side by side, equally high, each below its title.

    Returns:
        uint8 (h, w, 3); w is `width`, or less if the images would be higher than `max_height`.
    """
    panels = list(itertools.chain.from_iterable(tiles))
    gaps = [gap for tile in tiles for gap in [GAP] * (len(tile) - 1) + [TILE_GAP]][:-1]
    height = min((width - sum(gaps)) / sum(map(aspect, panels)), max_height)
    lefts = np.cumsum([0.0, *(height * aspect(panel) for panel in panels)])
    font_size = max(14, width // 90)
    title_height = 3 * font_size // 2 if any(panel.title for panel in panels) else 0
    size = max(round(lefts[-1]), 1) + sum(gaps), title_height + max(round(height), 1)
    row, offset = Image.new("RGB", size, BACKGROUND), 0
    for panel, gap, start, end in zip(panels, [*gaps, 0], lefts, lefts[1:], strict=False):
        left, panel_width = round(start) + offset, max(round(end) - round(start), 1)
        if panel.title:
            row.paste(drawing.caption(panel.title, font_size, BACKGROUND, panel_width), (left, 0))
        picture = drawing.draw(panel, (panel_width, size[1] - title_height))
        row.paste(Image.fromarray(picture), (left, title_height))
        offset += gap
    return np.asarray(row)


def aspect(panel: Panel) -> float:
    """Returns width / height of the panel's image."""
    return panel.image.shape[1] / panel.image.shape[0]


def batch_sheet(
    images: np.ndarray, boxes: np.ndarray, classes: np.ndarray, names: Sequence[str]
) -> np.ndarray:
    """Draws the first images of a batch with their boxes, uint8 (H, W, 3).

    Args:
        images: uint8 (B, H, W, 3).
        boxes: float (B, N, 4), ltrb normalised.
        classes: int (B, N), 0-based; -1 in the padding.
    """
    boxes_px = boxes * np.tile(images.shape[2:0:-1], 2)
    batch = zip(images[:BATCH_IMAGES], boxes_px, classes, strict=False)
    return contact_sheet([[drawing.make_panel(*image, names)] for image in batch])


def results_panel(
    image: np.ndarray, results: Sequence[Mapping[str, Any]], label_map: LabelMap, title: str = ""
) -> Panel:
    """Makes a panel of COCO results or COCO annotations."""
    boxes_ltwh_px = np.array([result["bbox"] for result in results], np.float64).reshape(-1, 4)
    classes = label_map.classes_of([result["category_id"] for result in results])
    scores = np.array([result["score"] for result in results if "score" in result])
    left_top, sides = np.split(boxes_ltwh_px, 2, axis=1)
    boxes_px = np.hstack([left_top, left_top + sides])
    return drawing.make_panel(
        image, boxes_px, classes, label_map.names, scores if len(scores) else None, title
    )


def varied(classes: Sequence[Sequence[int]], count: int = SHOWN_IMAGES) -> list[int]:
    """Chooses images: first those with most classes that no image before shows, then with most classes.

    Of these, images with more objects come first.

    Args:
        classes: for each image, the class of each object.

    Returns:
        The indices of at most `count` images.
    """
    different = [set(of_image) for of_image in classes]
    left, shown, chosen = set(range(len(classes))), set[int](), list[int]()
    while left and len(chosen) < count:
        best = max(left, key=lambda i: (len(different[i] - shown), len(different[i]), len(classes[i]), -i))
        left.remove(best)
        shown |= different[best]
        chosen.append(best)
    return chosen


def detection_sheet(source: Source, results: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Draws images of an evaluation: the ground truth on the left, detections on the right.

    The images depend only on the ground truth, so that the sheets of a run show the same ones.

    Args:
        results: COCO results; those with scores below MIN_SCORE are not drawn.

    Returns:
        uint8 (H, W, 3).
    """
    annotations, label_map = source.annotations, source.label_map
    categories = np.split(annotations.category_ids, annotations.row_splits[1:-1])
    rows = varied([of_image.tolist() for of_image in categories])
    is_shown = np.isin(np.arange(source.size), rows)
    truth = by_image(annotations.select(is_shown).ground_truth()["annotations"])
    detections = by_image(
        result
        for result in results
        if result["score"] >= MIN_SCORE and result["category_id"] in label_map.category_ids
    )
    tiles = []
    for row in rows:
        image, image_id = read(source, row), int(annotations.image_ids[row])
        panels = {
            f"ground truth of {short_name(source, row)}": truth,
            f"detections (score ≥ {MIN_SCORE:g})": detections,
        }
        tiles.append(
            [results_panel(image, boxes[image_id], label_map, title) for title, boxes in panels.items()]
        )
    return contact_sheet(tiles)


def by_image(rows: Iterable[Mapping[str, Any]]) -> Mapping[int, list[Mapping[str, Any]]]:
    """Groups COCO results or annotations by their image id. Other ids have empty lists."""
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row["image_id"]].append(row)
    return grouped


def short_name(source: Source, row: int) -> str:
    """Returns the file name of an image without directories, or its id if it has no file."""
    annotations = source.annotations
    return os.path.basename(annotations.file_names[row]) or f"image {annotations.image_ids[row]}"


def read(source: Source, row: int) -> np.ndarray:
    """Decodes an image of a data set as uint8 (H, W, 3).

    Raises:
        ValueError: the file cannot be read, which must not be taken for an error of writing.
    """
    try:
        return drawing.read_image(source.encoded(row))
    except OSError as error:
        raise ValueError(f"{source.image_name(row)}: {error}") from error
