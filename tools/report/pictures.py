"""Draws the pictures of a data report: figures, and a sheet of the images with the most boxes and of others.

The pictures are uint8 arrays. pyplot is not used, so drawing works without a display and in threads.
"""

import io
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from common.data.annotations import Annotations
from common.data.check.image_headers import PILLOW_ERRORS, png_without_metadata
from common.evaluation.curves import set_literal_text
from common.evaluation.drawing import Panel, as_rgb, make_panel, warn_if_undrawable
from common.evaluation.sheets import WIDTH, contact_sheet
from tools.report.anchor_shapes import AnchorShape, ShapeReport
from tools.report.anchors import AnchorReport, Level
from tools.report.page import number, printable, shorten
from tools.report.statistics import LARGE, SMALL, ClassCount, DataStatistics

HEIGHT = 720  # of the figures, pixels
_DPI = 100
_COLOUR = "#4477aa"
_ACCENT = "#cc6677"

NAMED_CLASSES = 24  # more names would overlap
LABEL_LENGTH = 22
BINS_PER_DOUBLING = 4

MOST = 3
OTHERS = 6
NAMED_BOXES = 25  # with more boxes, class names would cover the image
NAME_LENGTH = 24


def draw(
    statistics: DataStatistics,
    anchors: AnchorReport | ShapeReport | str | None,
    annotations: Annotations,
    encoded: Callable[[int], bytes],
) -> list[np.ndarray]:
    """Returns the pictures of a report: see `draw_figures` and `draw_sheet`. One that fails is left out."""
    pictures: list[np.ndarray | None] = []
    with warn_if_undrawable("the report's figures"):
        pictures.append(draw_figures(statistics, anchors))
    with warn_if_undrawable("the report's images"):
        pictures.append(draw_sheet(annotations, encoded))
    return [picture for picture in pictures if picture is not None]


# --- figures ---


def draw_figures(statistics: DataStatistics, anchors: AnchorReport | ShapeReport | str | None) -> np.ndarray:
    """Draws figures, uint8 (HEIGHT, WIDTH, 3): classes, sizes and shapes of boxes, anchors if judged."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, layout=layout)
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).ravel()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    plot_classes(panels[0], statistics.classes)
    plot_sizes(panels[1], statistics.box_sides_px)
    plot_aspects(panels[2], statistics.box_aspects)
    if isinstance(anchors, AnchorReport):
        plot_levels(panels[3], anchors.levels)
    elif isinstance(anchors, ShapeReport):
        plot_shapes(panels[3], anchors.anchors)
    else:
        panels[3].set_axis_off()
    set_literal_text(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # set_literal_text has named the missing letters
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def plot_classes(axes: Axes, classes: Sequence[ClassCount]) -> None:
    """Draws a bar for each class, with a logarithmic scale if some classes are rare."""
    boxes = [row.boxes for row in classes]
    axes.bar(range(len(boxes)), boxes, color=_COLOUR)
    if boxes[0] > 100 * max(boxes[-1], 1):
        axes.set_yscale("symlog", linthresh=1)
    axes.set(title="boxes of each class", ylabel="boxes")
    if len(boxes) > NAMED_CLASSES:
        axes.set_xlabel("classes, the most frequent first")
        return
    names = [shorten(row.name, LABEL_LENGTH) for row in classes]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")


def plot_sizes(axes: Axes, box_sides_px: np.ndarray) -> None:
    axes.set(title="box sizes", xlabel="square root of the area, pixels of the image; lines: COCO's limits")
    _plot_histogram(axes, box_sides_px, lines=(SMALL**0.5, LARGE**0.5))


def plot_aspects(axes: Axes, box_aspects: np.ndarray) -> None:
    axes.set(title="aspect ratios of the boxes", xlabel="width / height")
    _plot_histogram(axes, box_aspects, lines=(1,))


def plot_levels(axes: Axes, levels: Sequence[Level]) -> None:
    axes.set(title="boxes that each anchor level matches")
    names = [f"level {level.level}\n{level.smallest:.0f} to {level.largest:.0f} px" for level in levels]
    reached, best = [level.reached for level in levels], [level.best for level in levels]
    _plot_pairs(axes, names, {"IoU above 0.5": reached, "best anchor": best})


def plot_shapes(axes: Axes, anchors: Sequence[AnchorShape]) -> None:
    axes.set(title="boxes that each anchor fits")
    names = [f"{anchor.width:g}\nx {anchor.height:g}" for anchor in anchors]
    assigned, best = [anchor.assigned for anchor in anchors], [anchor.best for anchor in anchors]
    _plot_pairs(axes, names, {"assigned": assigned, "best anchor": best})


def _plot_pairs(axes: Axes, names: Sequence[str], counts: dict[str, list[int]]) -> None:
    """Draws two bars for each name, with the labels and numbers of boxes in `counts`."""
    places = np.arange(len(names))
    for offset, colour, (label, heights) in zip((-0.2, 0.2), (_COLOUR, "0.7"), counts.items(), strict=True):
        axes.bar(places + offset, heights, 0.4, color=colour, label=label)
    axes.set_xticks(places, names, fontsize="small")
    axes.set_ylabel("boxes")
    axes.legend(fontsize="small", frameon=False)


def _plot_histogram(axes: Axes, values: np.ndarray, lines: tuple[float, ...]) -> None:
    axes.set_ylabel("boxes")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    for line in lines:
        axes.axvline(line, color=_ACCENT, linestyle="--", linewidth=1)
    if len(values):
        # The outer edges are powers of two, so that rounding moves no value out of the bins.
        low, high = np.floor(np.log2(values.min())), np.floor(np.log2(values.max())) + 1
        edges = 2.0 ** np.linspace(low, high, int(high - low) * BINS_PER_DOUBLING + 1)
        axes.hist(values, edges.tolist(), color=_COLOUR, edgecolor="white")


# --- images with their boxes ---


def draw_sheet(annotations: Annotations, encoded: Callable[[int], bytes]) -> np.ndarray | None:
    """Draws images with their boxes, and above each image its number of boxes, id and file name.

    `encoded` maps the index of an image to the content of its file. The sheet is uint8 (H, W, 3).
    Returns None if no image can be read.
    """
    tiles = []
    for row in choose(annotations):
        try:
            with PIL.Image.open(io.BytesIO(png_without_metadata(encoded(row)))) as picture:
                picture.draft("RGB", (WIDTH, WIDTH))
                tiles.append([_panel(annotations, row, as_rgb(picture))])
        except (*PILLOW_ERRORS, PIL.Image.DecompressionBombError):
            continue  # the data check reports the file
    return contact_sheet(tiles) if tiles else None


def choose(annotations: Annotations, seed: int = 0) -> list[int]:
    """Returns indices of images: the `MOST` images with the most boxes, then `OTHERS` random images."""
    counts = np.diff(annotations.target_boxes.row_splits)
    most = np.argsort(-counts, kind="stable")[:MOST]
    others = np.setdiff1d(np.flatnonzero(counts), most)
    chosen = np.random.default_rng(seed).choice(others, min(OTHERS, len(others)), replace=False)
    return [*most.tolist(), *np.sort(chosen).tolist()]


def _panel(annotations: Annotations, row: int, image: PIL.Image.Image) -> Panel:
    """Makes the panel of an image, which is shrunk to the width of the sheet."""
    targets = annotations.target_boxes
    rows = slice(targets.row_splits[row], targets.row_splits[row + 1])
    image.thumbnail((WIDTH, WIDTH))
    boxes_px, classes = targets.boxes[rows] * np.tile(image.size, 2), targets.classes[rows]
    length = NAME_LENGTH if len(classes) <= NAMED_BOXES else 0
    names = [shorten(name, NAME_LENGTH)[:length] for name in annotations.label_map.names]
    boxes = "1 box" if len(classes) == 1 else f"{len(classes)} boxes"
    title = printable(f"{boxes} in {annotations.image_name(row)}")
    return make_panel(np.asarray(image), boxes_px, classes, names, title=title)
