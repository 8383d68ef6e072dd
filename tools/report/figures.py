"""The figures of a data report: how classes, boxes and images are distributed, and what anchors match.

All are one uint8 picture, WIDTH pixels wide. Nothing here touches pyplot, so it works without a display and
in threads.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools.report.anchor_report import AnchorReport
from tools.report.statistics import LARGE, SMALL, ClassCount, DataStatistics
from tools.report.tables import number, shorten

WIDTH = 1400  # pixels
_DPI = 100
_HEIGHT = 3.9  # inches of a panel
_BAR_HEIGHT = 0.22  # inches of a class
_COLOUR = "#4477aa"
_ACCENT = "#cc6677"

CLASS_ROWS = 27  # bars in a column
CLASS_COLUMNS = 3
NAME_LENGTH = 22  # characters of a class name
BINS_PER_DOUBLING = 4


def draw(statistics: DataStatistics, anchors: AnchorReport) -> np.ndarray:
    """uint8 (H, WIDTH, 3): the classes, and below them two panels a row."""
    panels = [_box_sizes, _aspects, _crowding, _image_sizes, _levels]
    if anchors.unreached.count or anchors.lost.count:
        panels.append(_missed)
    shown, title = shown_classes(statistics.classes)
    class_rows = -(-len(shown) // -(-len(shown) // CLASS_ROWS))
    heights = [1.1 + _BAR_HEIGHT * class_rows, 3 * _HEIGHT]
    figure = Figure(figsize=(WIDTH / _DPI, sum(heights)), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # inches
    canvas = FigureCanvasAgg(figure)
    top, bottom = figure.subfigures(2, 1, height_ratios=heights)
    _classes(top, shown, title)
    grid = bottom.subplots(3, 2).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        panel(axes, statistics, anchors)
    if len(panels) < len(grid):
        grid[-1].set_axis_off()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a script that the font does not have
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def shown_classes(classes: Sequence[ClassCount]) -> tuple[Sequence[ClassCount], str]:
    """The classes that there is room for, in their order, and a title that names the choice.

    Of too many those in the middle are left out: the rarest are the ones to worry about.
    """
    room = CLASS_ROWS * CLASS_COLUMNS
    if len(classes) <= room:
        return classes, f"{len(classes)} classes" if len(classes) > 1 else "1 class"
    most = room - CLASS_ROWS
    title = f"{len(classes)} classes: the {most} most frequent and the {CLASS_ROWS} rarest"
    return [*classes[:most], *classes[-CLASS_ROWS:]], title


def _classes(figure: Figure, shown: Sequence[ClassCount], title: str) -> None:
    columns = -(-len(shown) // CLASS_ROWS)
    rows = -(-len(shown) // columns)
    largest, smallest = shown[0].boxes, shown[-1].boxes
    is_wide = largest > 100 * max(smallest, 1)
    figure.suptitle(title + (" (logarithmic)" if is_wide else ""))
    for column, axes in enumerate(figure.subplots(1, columns, squeeze=False)[0]):
        part = shown[column * rows : (column + 1) * rows]
        bars = axes.barh(range(len(part)), [of.boxes for of in part], color=_COLOUR, height=0.75)
        labels = axes.bar_label(bars, [f"{of.boxes:,}" for of in part], padding=4, fontsize="small")
        for label, of in zip(labels, part, strict=True):
            label.set_color("black" if of.boxes else _ACCENT)
        names = [shorten(of.name, NAME_LENGTH) for of in part]
        axes.set_yticks(range(len(part)), names, fontsize="small")
        for label in axes.get_yticklabels():
            label.set_parse_math(False)  # a dollar sign is a letter in a name
        axes.set_ylim(max(rows, 3) - 0.4, -0.6)  # the first on top, bars of one width in all columns
        if is_wide:
            axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, largest * 4 if is_wide else max(largest, 1) * 1.15)
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)


def _box_sizes(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    shares = [f"{100 * n / max(statistics.boxes, 1):.0f} % {name}" for name, n in statistics.by_area.items()]
    axes.set_title(f"box sizes: {', '.join(shares)}")
    if _histogram(axes, statistics.box_sides_px):
        axes.set_xlabel("square root of the area, pixels of the image; lines: COCO's limits")
        for side in (SMALL**0.5, LARGE**0.5):
            axes.axvline(side, color=_ACCENT, linestyle="--", linewidth=1)


def _aspects(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    axes.set_title("aspect ratios of the boxes")
    if _histogram(axes, statistics.box_aspects):
        axes.set_xlabel("width / height")
        axes.axvline(1, color=_ACCENT, linestyle="--", linewidth=1)


def _crowding(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    names = [f"{low}" if low == high else f"{low}-{high}" for low, high, _ in statistics.crowding]
    axes.bar(range(len(names)), [images for *_, images in statistics.crowding], color=_COLOUR)
    axes.set_xticks(range(len(names)), names, rotation=45 if len(names) > 8 else 0, fontsize="small")
    axes.set_xlim(-0.6, max(len(names), 4) - 0.4)
    axes.set(title="boxes per image", xlabel="boxes", ylabel="images")
    _whole_numbers(axes)


def _image_sizes(axes: Axes, statistics: DataStatistics, _: AnchorReport) -> None:
    heights, widths, counts = np.array(statistics.frequent_sizes).T
    areas = 15 + 600 * counts / statistics.images
    axes.scatter(widths, heights, s=areas, color=_COLOUR, alpha=0.4, linewidths=0, clip_on=False)
    limit = 1.1 * max(heights.max(), widths.max())
    axes.plot([0, limit], [0, limit], color="0.8", linewidth=1, zorder=0)
    axes.set(xlim=(0, limit), ylim=(0, limit), xlabel="width in pixels", ylabel="height in pixels")
    axes.set_title(
        f"image sizes, most often {widths[0]} x {heights[0]} ({counts[0]:,} of {statistics.images:,})"
    )


def _levels(axes: Axes, _: DataStatistics, anchors: AnchorReport) -> None:
    names = [f"level {of.level}\n{of.smallest:.0f} to {of.largest:.0f} px" for of in anchors.levels]
    places = np.arange(len(names))
    axes.bar(places - 0.2, [of.reached for of in anchors.levels], 0.4, color=_COLOUR, label="IoU above 0.5")
    axes.bar(places + 0.2, [of.best for of in anchors.levels], 0.4, color="0.7", label="best anchor")
    axes.set_xticks(places, names, fontsize="small")
    axes.set(title="boxes that each anchor level matches", ylabel="boxes")
    axes.legend(fontsize="small", frameon=False)
    axes.set_ylim(0, 1.15 * max(1, *(max(of.reached, of.best) for of in anchors.levels)))
    _whole_numbers(axes)


def _missed(axes: Axes, _: DataStatistics, anchors: AnchorReport) -> None:
    """How large the boxes are that no anchor reaches, and those without any anchor."""
    groups = {"that no anchor\noverlaps by 0.5": anchors.unreached, "that own\nno anchor": anchors.lost}
    groups = {f"{of.count:,} {what}": of.sides for what, of in groups.items() if of.count}
    axes.boxplot(
        list(groups.values()),
        orientation="horizontal",
        tick_labels=list(groups),
        widths=0.3,
        whis=(0, 100),
        medianprops={"color": _ACCENT},
    )
    axes.set_xscale("log", base=2)
    sides = np.concatenate(list(groups.values()))
    low, high = np.floor(np.log2(sides.min())), np.floor(np.log2(sides.max()))
    axes.set_xlim(2**low, 2 ** (high + 1))  # at least two ticks
    axes.set(title="boxes that anchors miss", xlabel="square root of the area, pixels of the network")
    axes.xaxis.set_major_formatter(lambda value, _: number(value))


def _histogram(axes: Axes, values: np.ndarray) -> bool:
    """Bars over a logarithmic axis, BINS_PER_DOUBLING from x to 2 x; False where there are no values."""
    if not len(values):
        axes.text(0.5, 0.5, "no boxes", ha="center", va="center", color="0.5", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return False
    # The powers of two around the values, so that a value never lies outside by rounding.
    low, high = np.floor(np.log2(values.min())), np.floor(np.log2(values.max())) + 1
    edges = 2.0 ** np.linspace(low, high, int(high - low) * BINS_PER_DOUBLING + 1)
    axes.hist(values, edges, color=_COLOUR, edgecolor="white")
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[0] / 1.1, edges[-1] * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_ylabel("boxes")
    _whole_numbers(axes)
    return True


def _whole_numbers(axes: Axes) -> None:
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
