"""The figures of a data report: how classes, boxes and images are distributed, and what anchors match.

Every figure is a PNG as bytes. Nothing here touches pyplot, so it works without a display and in threads.
"""

import io
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools.report.anchor_report import AnchorReport
from tools.report.data_statistics import LARGE, SMALL, ClassCount, DataStatistics, Histogram
from tools.report.data_text import number, shorten_name

WIDTH = 14.0  # inches of the widest figure; the others are half as wide
_DPI = 100
_HEIGHT = 3.9
_COLOUR = "#4477aa"
_ACCENT = "#cc6677"

CLASS_ROWS = 27  # bars in a column
CLASS_COLUMNS = 3
NAME_LENGTH = 22  # characters of a class name that are written


def figures(statistics: DataStatistics, anchors: AnchorReport | None) -> dict[str, bytes]:
    """Title -> PNG. The first, the classes, is twice as wide as the others."""
    panels: dict[str, Callable[[Axes], None]] = {
        "box sizes, shares by COCO's areas": lambda axes: _box_sizes(axes, statistics),
        "aspect ratios of the boxes": lambda axes: _aspects(axes, statistics.aspects_histogram),
        "boxes per image": lambda axes: _crowding(axes, statistics),
        "image sizes": lambda axes: _image_sizes(axes, statistics),
    }
    if anchors is not None:
        panels["boxes that each anchor level matches"] = lambda axes: _levels(axes, anchors)
        if anchors.unreached.count or anchors.lost.count:
            panels["boxes that anchors miss"] = lambda axes: _missed(axes, anchors)
    drawn = {"classes": _classes(statistics.classes)}
    for title, draw in panels.items():
        figure = _figure(WIDTH / 2, _HEIGHT)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title)
        draw(axes)
        drawn[title] = _png(figure)
    return drawn


def shown_classes(classes: Sequence[ClassCount]) -> tuple[list[ClassCount], str]:
    """The classes that there is room for, the most frequent first, and a title that says which these are.

    Of too many those in the middle are left out: the rarest are the ones to worry about.
    """
    ordered = sorted(classes, key=lambda of: (-of.boxes, of.category_id))
    room = CLASS_ROWS * CLASS_COLUMNS
    if len(ordered) <= room:
        return ordered, f"{len(ordered)} classes" if len(ordered) > 1 else "1 class"
    most = room - CLASS_ROWS
    title = f"{len(ordered)} classes: the {most} most frequent and the {CLASS_ROWS} rarest"
    return ordered[:most] + ordered[-CLASS_ROWS:], title


def _classes(classes: Sequence[ClassCount]) -> bytes:
    shown, title = shown_classes(classes)
    columns = -(-len(shown) // CLASS_ROWS)
    rows = -(-len(shown) // columns)
    largest = max(of.boxes for of in shown)
    is_wide = largest > 100 * max(min(of.boxes for of in shown), 1)
    figure = _figure(WIDTH, 1.1 + 0.22 * rows)
    figure.suptitle(title + (" (logarithmic)" if is_wide else ""))
    for column in range(columns):
        part = shown[column * rows : (column + 1) * rows]
        axes = figure.add_subplot(1, columns, column + 1)
        places = np.arange(len(part))
        axes.barh(places, [of.boxes for of in part], color=_COLOUR, height=0.75)
        for place, of in zip(places, part, strict=True):
            axes.annotate(
                f"{of.boxes:,}",
                (of.boxes, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                color=_ACCENT if not of.boxes else "black",
            )
        axes.set_yticks(places, [shorten_name(of.name, NAME_LENGTH) for of in part], fontsize="small")
        for label in axes.get_yticklabels():
            label.set_parse_math(False)  # a dollar sign is a letter in a name
        axes.set_ylim(max(rows, 3) - 0.4, -0.6)  # the first on top, bars of one width in all columns
        if is_wide:
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xlim(0, largest * 4)
        else:
            axes.set_xlim(0, max(largest, 1) * 1.15)
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return _png(figure)


def _box_sizes(axes: Axes, statistics: DataStatistics) -> None:
    _draw_histogram(axes, statistics.sides_histogram)
    if not statistics.boxes:
        return
    axes.set_xlabel("square root of the area, pixels of the image")
    share = [f"{100 * n / statistics.boxes:.0f} %" for n in _by_size(statistics)]
    for side in (SMALL**0.5, LARGE**0.5):
        axes.axvline(side, color=_ACCENT, linestyle="--", linewidth=1)
    low, high = axes.get_xlim()
    low, high = min(low, SMALL**0.5 / 2), max(high, LARGE**0.5 * 2)
    axes.set_xlim(low, high)
    edges = np.array([low, SMALL**0.5, LARGE**0.5, high])
    for name, text, place in zip(
        ("small", "medium", "large"), share, np.sqrt(edges[:-1] * edges[1:]), strict=True
    ):
        axes.text(
            place, 1.0, f"{name}\n{text}", transform=axes.get_xaxis_transform(), ha="center", va="top",
            color=_ACCENT, fontsize="small",
        )  # fmt: skip
    axes.set_ylim(top=axes.get_ylim()[1] * 1.2)  # room for the words


def _by_size(statistics: DataStatistics) -> tuple[int, int, int]:
    return statistics.small, statistics.medium, statistics.large


def _aspects(axes: Axes, histogram: Histogram) -> None:
    _draw_histogram(axes, histogram)
    if histogram.counts:
        axes.set_xlabel("width / height")
        axes.axvline(1, color=_ACCENT, linestyle="--", linewidth=1)


def _crowding(axes: Axes, statistics: DataStatistics) -> None:
    names = [f"{low}" if low == high else f"{low}-{high}" for low, high, _ in statistics.crowding]
    counts = [images for *_, images in statistics.crowding]
    axes.bar(np.arange(len(names)), counts, color=_COLOUR, width=0.8)
    axes.set_xticks(np.arange(len(names)), names, rotation=45 if len(names) > 8 else 0, fontsize="small")
    axes.set_xlim(-0.6, max(len(names), 4) - 0.4)
    axes.set_xlabel("boxes")
    axes.set_ylabel("images")
    _whole_numbers(axes)


def _image_sizes(axes: Axes, statistics: DataStatistics) -> None:
    if not statistics.image_sizes:
        _say_nothing(axes, "no images")
        return
    heights, widths, counts = np.array(statistics.image_sizes).T
    areas = 15 + 600 * counts / statistics.images
    axes.scatter(widths, heights, s=areas, color=_COLOUR, alpha=0.4, linewidths=0, clip_on=False)
    limit = 1.1 * max(heights.max(), widths.max())
    axes.plot([0, limit], [0, limit], color="0.8", linewidth=1, zorder=0)
    axes.set(xlim=(0, limit), ylim=(0, limit), xlabel="width in pixels", ylabel="height in pixels")
    axes.set_title(
        f"image sizes, most often {widths[0]} x {heights[0]} ({counts[0]:,} of {statistics.images:,})"
    )


def _levels(axes: Axes, anchors: AnchorReport) -> None:
    names = [f"level {of.level}\n{of.smallest:.0f} to {of.largest:.0f} px" for of in anchors.levels]
    places = np.arange(len(names))
    axes.bar(places - 0.2, [of.reached for of in anchors.levels], 0.4, color=_COLOUR, label="IoU above 0.5")
    axes.bar(places + 0.2, [of.best for of in anchors.levels], 0.4, color="0.7", label="best anchor")
    axes.set_xticks(places, names, fontsize="small")
    axes.set_ylabel("boxes")
    axes.legend(fontsize="small", frameon=False)
    axes.set_ylim(0, 1.15 * max(1, *(max(of.reached, of.best) for of in anchors.levels)))
    _whole_numbers(axes)


def _missed(axes: Axes, anchors: AnchorReport) -> None:
    """How large the boxes are that no anchor reaches, and those without any anchor."""
    groups = {"that no anchor\noverlaps by 0.5": anchors.unreached, "that own\nno anchor": anchors.lost}
    spreads = [
        {
            "label": f"{group.count:,} {what}",
            "med": group.sides.median,
            "q1": group.sides.p25,
            "q3": group.sides.p75,
            "whislo": group.sides.minimum,
            "whishi": group.sides.maximum,
            "fliers": [],
        }
        for what, group in groups.items()
        if group.count
    ]
    axes.bxp(spreads, orientation="horizontal", widths=0.3, medianprops={"color": _ACCENT})
    axes.set_xscale("log", base=2)
    low, high = min(of["whislo"] for of in spreads), max(of["whishi"] for of in spreads)
    axes.set_xlim(2 ** np.floor(np.log2(low)), 2 ** (np.floor(np.log2(high)) + 1))  # at least two ticks
    axes.set_xlabel("square root of the area, pixels of the network")
    axes.xaxis.set_major_formatter(lambda value, _: number(value))


def _draw_histogram(axes: Axes, histogram: Histogram) -> None:
    """Bars over a logarithmic axis, whose ticks are plain numbers."""
    if not histogram.counts:
        _say_nothing(axes, "no boxes")
        return
    edges = np.array(histogram.edges)
    axes.bar(edges[:-1], histogram.counts, np.diff(edges), align="edge", color=_COLOUR, edgecolor="white")
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[0] / 1.1, edges[-1] * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_ylabel("boxes")
    _whole_numbers(axes)


def _whole_numbers(axes: Axes) -> None:
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _say_nothing(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, ha="center", va="center", color="0.5", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="tight")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a script that the font does not have
        figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
