"""Draws the figures of a data report into one uint8 image, a panel for each figure.

pyplot is not used, so drawing works without a display and in threads.
"""

import warnings

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from tools.report.anchor_report import AnchorReport
from tools.report.statistics import LARGE, SMALL, DataStatistics
from tools.report.tables import number, shorten

WIDTH = 1400  # pixels
_DPI = 100
_HEIGHT = 3.9  # inches
_COLOUR = "#4477aa"
_ACCENT = "#cc6677"

NAMED_CLASSES = 24  # more names would overlap
NAME_LENGTH = 22
BINS_PER_DOUBLING = 4


def draw(statistics: DataStatistics, anchors: AnchorReport) -> np.ndarray:
    """Draws PANELS, two in a row, as uint8 (H, WIDTH, 3)."""
    rows = -(-len(PANELS) // 2)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=(WIDTH / _DPI, rows * _HEIGHT), dpi=_DPI, layout=layout)
    canvas = FigureCanvasAgg(figure)
    for axes, (title, panel) in zip(figure.subplots(rows, 2).ravel(), PANELS.items(), strict=True):
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        panel(axes, statistics, anchors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks characters of some scripts
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _classes(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    boxes = [of.boxes for of in statistics.classes]
    axes.bar(range(len(boxes)), boxes, color=_COLOUR)
    if boxes[0] > 100 * max(boxes[-1], 1):
        axes.set_yscale("symlog", linthresh=1)
    axes.set_ylabel("boxes")
    if len(boxes) > NAMED_CLASSES:
        axes.set_xlabel("classes, the most frequent first")
        return
    names = [shorten(of.name, NAME_LENGTH) for of in statistics.classes]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")
    for label in axes.get_xticklabels():
        label.set_parse_math(False)  # in a name, $ does not begin a formula


def _box_sizes(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    label = "square root of the area, pixels of the image; lines: COCO's limits"
    _histogram(axes, statistics.box_sides_px, label, lines=(SMALL**0.5, LARGE**0.5))


def _aspects(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    _histogram(axes, statistics.box_aspects, "width / height", lines=(1,))


def _crowding(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    crowding = statistics.crowding
    axes.bar(range(len(crowding)), list(crowding.values()), color=_COLOUR)
    axes.set_xticks(range(len(crowding)), list(crowding), rotation=45, fontsize="small")
    axes.set(xlabel="boxes", ylabel="images")


def _image_sizes(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    heights, widths, counts = np.array(statistics.frequent_sizes).T
    areas = 15 + 600 * counts / statistics.images
    axes.scatter(widths, heights, s=areas, color=_COLOUR, alpha=0.4, linewidths=0, clip_on=False)
    limit = 1.1 * max(heights.max(), widths.max())
    axes.plot([0, limit], [0, limit], color="0.8", linewidth=1, zorder=0)
    axes.set(xlim=(0, limit), ylim=(0, limit), xlabel="width in pixels", ylabel="height in pixels")


def _levels(axes: Axes, _: DataStatistics, anchors: AnchorReport) -> None:
    names = [f"level {of.level}\n{of.smallest:.0f} to {of.largest:.0f} px" for of in anchors.levels]
    places = np.arange(len(names))
    axes.bar(places - 0.2, [of.reached for of in anchors.levels], 0.4, color=_COLOUR, label="IoU above 0.5")
    axes.bar(places + 0.2, [of.best for of in anchors.levels], 0.4, color="0.7", label="best anchor")
    axes.set_xticks(places, names, fontsize="small")
    axes.set_ylabel("boxes")
    axes.legend(fontsize="small", frameon=False)


def _histogram(axes: Axes, values: np.ndarray, label: str, lines: tuple[float, ...]) -> None:
    axes.set(xlabel=label, ylabel="boxes")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    for line in lines:
        axes.axvline(line, color=_ACCENT, linestyle="--", linewidth=1)
    if len(values):
        # The outer edges are powers of two, so that rounding moves no value out of the bins.
        low, high = np.floor(np.log2(values.min())), np.floor(np.log2(values.max())) + 1
        edges = 2.0 ** np.linspace(low, high, int(high - low) * BINS_PER_DOUBLING + 1)
        axes.hist(values, edges.tolist(), color=_COLOUR, edgecolor="white")


PANELS = {
    "boxes of each class": _classes,
    "box sizes": _box_sizes,
    "aspect ratios of the boxes": _aspects,
    "boxes per image": _crowding,
    "image sizes": _image_sizes,
    "boxes that each anchor level matches": _levels,
}
