"""The tables of a data report, and the report as text for a terminal."""

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import rich.padding
import rich.table
from rich.console import Console
from rich.text import Text

from common.datacheck.issues import KINDS, Issue, Severity
from tools.report.anchor_report import AnchorReport
from tools.report.statistics import QUANTILES, DataStatistics
from yolov4.ap_ceiling import BoxGroup, ceiling_lines

COLUMNS = 100
CLASS_ROWS = 12  # classes in the text; the page has all
ISSUES = 10  # kinds of issues in the text
_ISSUE_LENGTH = 180  # characters, about two lines


class Table(NamedTuple):
    """A table of text: the first column is aligned to the left, the others to the right.

    Attributes:
        header: titles of the columns; empty for rows of a name and a text, both aligned to the left.
        rows: as many cells each.
    """

    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def format_text(statistics: DataStatistics, anchors: AnchorReport, issues: Iterable[Issue]) -> str:
    """The report: at most about 90 lines of COLUMNS letters."""
    counts = class_table(statistics)
    with_boxes = [row for row, of in zip(counts.rows, statistics.classes, strict=True) if of.boxes]
    parts: list[str | Table] = [
        printable(statistics.origin),
        overview(statistics),
        "",
        spreads(statistics),
        "",
    ]
    parts.append(counts._replace(rows=with_boxes[:CLASS_ROWS]) if with_boxes else "no class has a box")
    if rest := [of.boxes for of in statistics.classes if of.boxes][CLASS_ROWS:]:
        parts.append(f"and {len(rest):,} more classes with {rest[-1]:,} to {rest[0]:,} boxes")
    if empty := [of.name for of in statistics.classes if not of.boxes]:
        names = ", ".join(shorten(name, 24) for name in empty)
        parts.append(shorten(f"without boxes ({len(empty):,}): {names}", COLUMNS))
    parts += ["", *anchor_heading(anchors), level_table(anchors), "", missed_table(anchors), ""]
    return _render([*parts, *conclusion(anchors), "", issues_text(issues)])


def overview(statistics: DataStatistics) -> Table:
    """What there is, in words."""
    empty = sum(not of.boxes for of in statistics.classes)
    areas = [f"{name} {n:,} ({percent(n, statistics.boxes)})" for name, n in statistics.by_area.items()]
    sizes = [f"{height}x{width} {count:,}" for height, width, count in statistics.frequent_sizes[:5]]
    crowding = [
        f"{low if low == high else f'{low}-{high}'}: {images:,}" for low, high, images in statistics.crowding
    ]
    rows = [
        ("images", f"{statistics.images:,} ({statistics.images_without_boxes:,} without boxes)"),
        (
            "boxes",
            f"{statistics.boxes:,} to train on, {statistics.clipped:,} of them clipped; dropped without area "
            f"{statistics.dropped:,}, crowds {statistics.crowds:,}",
        ),
        ("classes", f"{len(statistics.classes):,} ({empty:,} without boxes)"),
        ("box areas", f"{', '.join(areas)}  (COCO: 32² and 96²)"),
        ("image sizes", f"{len(statistics.frequent_sizes):,}: {', '.join(sizes)}  (height x width)"),
        ("crowding", f"{', '.join(crowding)}  (boxes: images)"),
    ]
    if statistics.formats is not None:
        formats = ", ".join(f"{name} {count:,}" for name, count in statistics.formats.items())
        rows.append(("formats", formats))
    return Table((), rows)


def spreads(statistics: DataStatistics) -> Table:
    """Quantiles of sizes and shapes."""
    heights, widths = statistics.image_sizes.T
    values = {
        "image height": heights,
        "image width": widths,
        "image width / height": widths / heights,
        "boxes per image": statistics.boxes_per_image,
        "box side in pixels": statistics.box_sides_px,
        "box side, share of image": statistics.box_sides,
        "box width / height": statistics.box_aspects,
    }
    header = ("", "min", "5 %", "25 %", "median", "75 %", "95 %", "max")
    return Table(header, [_row(name, *np.quantile(of, QUANTILES)) for name, of in values.items() if len(of)])


def class_table(statistics: DataStatistics) -> Table:
    """All classes, the most frequent first."""
    total = statistics.boxes
    rows = [
        _row(shorten(of.name, 50), str(of.category_id), of.boxes, percent(of.boxes, total), of.images)
        for of in statistics.classes
    ]
    return Table(("class", "category id", "boxes", "share", "images"), rows)


def anchor_heading(anchors: AnchorReport) -> list[str]:
    """Which anchors, and which boxes are matched to them."""
    given = anchors.anchors
    height, width = given.image_size
    ratios = ", ".join(f"{ratio:g}" for ratio in given.aspect_ratios)
    sample = f"all {anchors.images:,}"
    if anchors.images < anchors.images_with_boxes:
        sample = f"a sample of {anchors.images:,} of the {anchors.images_with_boxes:,}"
    return [
        f"{given.num_anchors:,} anchors at {height}x{width}: {given.num_scales} scales per octave, "
        f"aspect ratios {ratios}, anchor scale {given.anchor_scale:g}",
        f"{sample} images with boxes, {anchors.boxes:,} boxes",
    ]


def level_table(anchors: AnchorReport) -> Table:
    """What the anchors of each level match."""
    header = (
        "level",
        "stride",
        "anchors",
        "side in pixels",
        "IoU > 0.5",
        "of all",
        "best here",
        "own a box",
    )
    rows = []
    for of in anchors.levels:
        sides, share = f"{of.smallest:.0f} to {of.largest:.0f}", percent(of.reached, anchors.boxes)
        rows.append(_row(of.level, 2**of.level, of.anchors, sides, of.reached, share, of.best, of.positives))
    return Table(header, rows)


def missed_groups(anchors: AnchorReport) -> dict[str, BoxGroup]:
    """The boxes that the anchors match badly or not at all."""
    return {
        "without an anchor: others own their best": anchors.lost,
        "reached by no anchor: IoU below 0.5": anchors.unreached,
        "dropped: a side below min_box_size": anchors.too_small,
        f"dropped: beyond max_instances={anchors.max_instances}": anchors.over_limit,
    }


def missed_table(anchors: AnchorReport) -> Table:
    """How many these are, and how large."""
    rows = []
    for what, group in missed_groups(anchors).items():
        median = float(np.median(group.sides)) if group.count else ""
        rows.append(_row(what, group.count, percent(group.count, anchors.boxes), median))
    return Table(("missed boxes", "", "of all", "median side in pixels"), rows)


def conclusion(anchors: AnchorReport) -> list[str]:
    """The AP ceiling, how well the anchors fit, and better ones where there are any."""
    if anchors.ceiling is None:
        return ["AP ceiling: none, there is no box"]
    lines = ceiling_lines(anchors.ceiling, anchors.reasons)
    suggestion = anchors.suggestion
    if suggestion is not None:
        return [
            *lines,
            f"on {suggestion.old.boxes:,} held-out boxes: {suggestion.old}",
            f"other anchors there: {suggestion.new}; {suggestion.lost} would own none",
            f"to take them, without pretrained weights: --hparams={suggestion.hparams}",
        ]
    if not anchors.fit.boxes:
        return lines
    return [*lines, f"the anchors fit: {anchors.fit}", "others, tried on held-out boxes, are not better"]


def ordered(issues: Iterable[Issue]) -> list[Issue]:
    """What stops first, notes last."""
    return sorted(issues, key=lambda of: (not of.stops, of.severity is Severity.WARNING))


def issues_text(issues: Iterable[Issue]) -> str:
    """Two lines for each kind, with the first offenders."""
    kinds = ordered(issues)
    if not kinds:
        return "issues: none"
    rows = []
    for of in kinds[:ISSUES]:
        count = f" ({of.count:,})" if of.count > 1 else ""
        more = "; …" if of.count > 3 else ""
        words = f"{KINDS[of.kind].what}{count}: {'; '.join(of.offenders[:3])}{more}"
        rows.append(("STOPS" if of.stops else of.severity.name.lower(), shorten(words, _ISSUE_LENGTH)))
    rest = [f"and {len(kinds) - ISSUES} more kinds"] if len(kinds) > ISSUES else []
    return _render(["issues", Table((), rows), *rest])


def shorten(text: str, length: int) -> str:
    """A longer text with an ellipsis in its middle: long names often differ at their end."""
    text, end = printable(text), (length - 1) // 2
    return text if len(text) <= length else text[: length - 1 - end] + "…" + text[len(text) - end :]


def printable(text: str) -> str:
    """A question mark for each character that cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def percent(part: float, whole: float) -> str:
    """12.5 %, or a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def number(value: float) -> str:
    """Three or four digits: 0.58, 15.0, 1,024."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _row(*cells: str | float) -> tuple[str, ...]:
    return tuple(cell if isinstance(cell, str) else number(cell) for cell in cells)


def _render(parts: Iterable[str | Table]) -> str:
    """Plain text of COLUMNS letters a line."""
    console = Console(file=io.StringIO(), width=COLUMNS, color_system=None)
    for part in parts:
        if isinstance(part, str):
            console.print(Text(part))
            continue
        table = rich.table.Table(box=None, show_header=bool(part.header), pad_edge=False, padding=(0, 2))
        for column, title in enumerate(part.header or ("", "")):
            table.add_column(title, justify="right" if part.header and column else "left", overflow="fold")
        for row in part.rows:
            table.add_row(*map(Text, row))
        console.print(rich.padding.Padding(table, (0, 0, 0, 2)))
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)
