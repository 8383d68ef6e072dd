"""Makes a data report as sections of lines, tables, lists and pictures."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.data.check.issues import KINDS, Issue, Severity
from tools.report.anchor_report import AnchorReport
from tools.report.statistics import DataStatistics

SHOWN = 12
QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


class Table(NamedTuple):
    """A table of text.

    Attributes:
        header: titles of the columns; empty for a table with two columns, a name and a text.
        rows: rows, all with the same number of cells.
    """

    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]


class Offenders(NamedTuple):
    """A list with one line for each place where an issue occurs. Only the HTML page shows the list."""

    title: str
    texts: Sequence[str]


Item = str | Table | Offenders | np.ndarray  # an array is a picture, uint8 (H, W, 3)


class Section(NamedTuple):
    title: str
    items: Sequence[Item]


def sections(
    statistics: DataStatistics,
    anchors: AnchorReport,
    issues: Iterable[Issue],
    pictures: Sequence[np.ndarray] = (),
) -> list[Section]:
    sizes = [(f"{h} x {w}", f"{count:,}") for h, w, count in statistics.frequent_sizes]
    names = ", ".join(shorten(of.name, 24) for of in statistics.classes if not of.boxes)
    return [
        Section(statistics.origin, [overview(statistics), spreads(statistics)]),
        Section("Image sizes", [Table(("height x width", "images"), sizes)]),
        Section("Classes", [class_table(statistics), f"without boxes: {shorten(names, 180) or 'none'}"]),
        Section("Figures", pictures),
        Section("Anchors", anchor_items(anchors)),
        Section("Issues", issue_items(issues)),
    ]


def overview(statistics: DataStatistics) -> Table:
    targets = statistics.targets
    empty = sum(not of.boxes for of in statistics.classes)
    crowding, formats = (
        ", ".join(f"{name}: {count:,}" for name, count in counts.items())
        for counts in (statistics.crowding, statistics.formats)
    )
    areas = [f"{name} {n:,} ({percent(n, statistics.boxes)})" for name, n in statistics.by_area.items()]
    rows = [
        ("images", f"{statistics.images:,}"),
        (
            "boxes",
            f"{statistics.boxes:,} to train on, {targets.num_clipped:,} of them clipped; "
            f"dropped without area {targets.num_dropped:,}, crowds {targets.num_crowds:,}",
        ),
        ("classes", f"{len(statistics.classes):,} ({empty:,} without boxes)"),
        ("box areas", f"{', '.join(areas)}  (COCO: 32² and 96²)"),
        ("crowding", f"{crowding}  (boxes: images)"),
        ("formats", formats or "not counted"),
    ]
    return Table((), rows)


def spreads(statistics: DataStatistics) -> Table:
    heights, widths = statistics.image_sizes.T
    values = {
        "image height": heights,
        "image width": widths,
        "image width / height": widths / heights,
        "boxes per image": statistics.boxes_per_image,
        "box side in pixels": statistics.box_sides_px,
        "box width / height": statistics.box_aspects,
    }
    header = ("", "min", "5 %", "25 %", "median", "75 %", "95 %", "max")
    return Table(header, [_row(name, *np.quantile(of, QUANTILES)) for name, of in values.items() if len(of)])


def class_table(statistics: DataStatistics) -> Table:
    rows = [
        _row(
            shorten(of.name, 50),
            str(of.category_id),
            of.boxes,
            percent(of.boxes, statistics.boxes),
            of.images,
        )
        for of in statistics.classes
    ]
    return Table(("class", "category id", "boxes", "share", "images"), rows)


def anchor_items(anchors: AnchorReport) -> list[Item]:
    given, total = anchors.anchors, anchors.boxes
    height, width = given.image_size
    ratios = ", ".join(f"{ratio:g}" for ratio in given.aspect_ratios)
    levels = [
        _row(
            *(of.level, 2**of.level, of.anchors, f"{of.smallest:.0f} to {of.largest:.0f}"),
            *(of.reached, percent(of.reached, total), of.best, of.positives),
        )
        for of in anchors.levels
    ]
    header = ("level", "stride", "anchors", "side in pixels", "IoU > 0.5", "of all", "best here", "assigned")
    groups = {
        "no anchor: another box has the best one": anchors.lost,
        "no anchor with an IoU above 0.5": anchors.unreached,
        "dropped: a side below min_box_size": anchors.too_small,
        f"dropped: beyond max_instances={anchors.max_instances}": anchors.over_limit,
    }
    missed = [
        _row(what, len(sides), percent(len(sides), total), float(np.median(sides)) if len(sides) else "")
        for what, sides in groups.items()
    ]
    fits = [
        _row(f"{scale:g}", f"{fit.mean_iou:.3f}", percent(fit.reached, 1.0))
        for scale, fit in anchors.fits.items()
    ]
    return [
        f"{given.num_anchors:,} anchors at {height}x{width}: {given.num_scales} scales per octave, "
        f"aspect ratios {ratios}, anchor scale {given.anchor_scale:g}",
        f"{anchors.images:,} of {anchors.images_with_boxes:,} images with boxes, {total:,} boxes",
        Table(header, levels),
        Table(("missed boxes", "", "of all", "median side in pixels"), missed),
        Table(("with --anchor_scale", "mean best IoU", "boxes with an IoU above 0.5"), fits),
    ]


def issue_items(issues: Iterable[Issue]) -> list[Item]:
    """Returns a line of text and an Offenders list for each kind of issue. Errors come first."""
    items: list[Item] = []
    for of in sorted(issues, key=lambda of: (not of.stops, of.severity is Severity.WARNING)):
        items.append(f"{of.severity.value}: {of.line(shown=3)}")
        listed = f"the first {len(of.offenders):,} of " if of.count > len(of.offenders) else ""
        items.append(Offenders(f"{KINDS[of.kind].what}: {listed}{of.count:,}", of.offenders))
    return items or ["none"]


def shorten(text: str, length: int) -> str:
    """Puts an ellipsis in the middle of a long text, because long names often differ at their end."""
    text, end = printable(text), (length - 1) // 2
    return text if len(text) <= length else text[: length - 1 - end] + "…" + text[len(text) - end :]


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def percent(part: float, whole: float) -> str:
    """Formats a share like "12.5 %"; as "-" if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def number(value: float) -> str:
    """Formats a number with three or four digits: 0.58, 15.2, 1,024."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _row(*cells: str | float) -> tuple[str, ...]:
    return tuple(cell if isinstance(cell, str) else number(cell) for cell in cells)
