"""Makes the report of check_data as sections of lines, tables and pictures, as text or an HTML page.

The page needs no other file and no network. Jinja2 escapes the names of classes and files.
"""

import base64
import io
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jinja2
import numpy as np
import PIL.Image
import rich.padding
import rich.table
from rich.console import Console
from rich.text import Text

from common.data.check.issues import KINDS, Issue, Severity
from common.errors import UserError
from common.files import user_errors, write_bytes
from tools.report.anchor_shapes import ShapeReport
from tools.report.statistics import DataStatistics

if TYPE_CHECKING:
    from tools.report.anchors import AnchorReport  # imports TensorFlow and DALI

SHOWN = 12  # rows of a table in the text
COLUMNS = 100  # width of the text
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
    issues: Iterable[Issue],
    anchors: Sequence[Item] = (),
    pictures: Sequence[np.ndarray] = (),
) -> list[Section]:
    """Returns the sections of a report, the issues first. Without `anchors`, no section is about them."""
    unused = ", ".join(shorten(row.name, 24) for row in statistics.classes if not row.boxes)
    parts = [
        Section(f"Issues in {statistics.origin}", issue_items(issues)),
        Section(statistics.origin, [overview(statistics), spreads(statistics)]),
        Section("Classes", [class_table(statistics), f"without boxes: {shorten(unused, 180) or 'none'}"]),
        Section("Figures", pictures),
    ]
    if anchors:
        parts.append(Section("Anchors", anchors))
    return parts


def overview(statistics: DataStatistics) -> Table:
    targets = statistics.targets
    empty = sum(not row.boxes for row in statistics.classes)
    formats = ", ".join(f"{name}: {count:,}" for name, count in statistics.formats.items())
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
        ("formats", formats or "not counted"),
    ]
    return Table((), rows)


def spreads(statistics: DataStatistics) -> Table:
    heights, widths = statistics.image_sizes.T
    columns = {
        "image height": heights,
        "image width": widths,
        "image width / height": widths / heights,
        "boxes per image": statistics.boxes_per_image,
        "box side in pixels": statistics.box_sides_px,
        "box width / height": statistics.box_aspects,
    }
    header = ("", "min", "5 %", "25 %", "median", "75 %", "95 %", "max")
    rows = [_row(name, *np.quantile(values, QUANTILES)) for name, values in columns.items() if len(values)]
    return Table(header, rows)


def class_table(statistics: DataStatistics) -> Table:
    rows = [
        _row(
            *(shorten(row.name, 34), str(row.category_id), row.boxes, percent(row.boxes, statistics.boxes)),
            *(row.images, row.small, row.medium, row.large),
        )
        for row in statistics.classes
    ]
    return Table(("class", "category id", "boxes", "share", "images", "small", "medium", "large"), rows)


def anchor_items(report: "AnchorReport | ShapeReport | str") -> list[Item]:
    """Returns the items of the section about anchors. `report` is a text if there are no numbers."""
    if isinstance(report, str):
        return [report]
    return _shape_items(report) if isinstance(report, ShapeReport) else _level_items(report)


def _shape_items(report: ShapeReport) -> list[Item]:
    config, total = report.config, report.boxes
    height, width = config.image_size
    anchors = [
        _row(
            *(f"{anchor.width:g}x{anchor.height:g}", ", ".join(map(str, anchor.strides)) or "none"),
            *(anchor.best, percent(anchor.best, total), anchor.assigned),
        )
        for anchor in report.anchors
    ]
    missed = {
        "no anchor: no head uses the best one": report.unassigned,
        "dropped: a side below min_box_size": report.too_small,
        f"dropped: beyond max_instances={config.max_instances}": report.over_limit,
    }
    return [
        f"{config.num_anchors} anchors of {config.model_name} at {height}x{width}, "
        f"images {'letterboxed' if config.letterbox else 'stretched'}",
        f"{total:,} boxes: {report.fit}",
        Table(("width x height", "stride", "best here", "of all", "assigned"), anchors),
        _missed_table(missed, total),
        f"python yolov4/fit_anchors.py --model_name={config.model_name} fits anchors to the boxes",
    ]


def _missed_table(missed: dict[str, int], total: int) -> Table:
    rows = [_row(reason, count, percent(count, total)) for reason, count in missed.items()]
    return Table(("missed boxes", "", "of all"), rows)


def _level_items(report: "AnchorReport") -> list[Item]:
    anchors, total = report.anchors, report.boxes
    height, width = anchors.image_size
    ratios = ", ".join(f"{ratio:g}" for ratio in anchors.aspect_ratios)
    levels = [
        _row(
            *(level.level, 2**level.level, level.anchors, f"{level.smallest:.0f} to {level.largest:.0f}"),
            *(level.reached, percent(level.reached, total), level.best, level.positives),
        )
        for level in report.levels
    ]
    header = ("level", "stride", "anchors", "side in pixels", "IoU > 0.5", "of all", "best here", "assigned")
    missed = {
        "no anchor: another box has the best one": report.lost,
        "no anchor with an IoU above 0.5": report.unreached,
        "dropped: a side below min_box_size": report.too_small,
        f"dropped: beyond max_instances={report.max_instances}": report.over_limit,
    }
    fits = [
        _row(f"{scale:g}", f"{fit.mean_iou:.3f}", percent(fit.reached, 1.0))
        for scale, fit in report.fits.items()
    ]
    names = {"AP": "all boxes", "APs": "small", "APm": "medium", "APl": "large"}
    ceiling = {names[key]: value for key, value in report.ceiling.items() if key in names and value >= 0}
    return [
        f"{anchors.num_anchors:,} anchors at {height}x{width}: {anchors.num_scales} scales per octave, "
        f"aspect ratios {ratios}, anchor scale {anchors.anchor_scale:g}",
        f"{report.images:,} of {report.images_with_boxes:,} images with boxes, {total:,} boxes",
        Table(header, levels),
        _missed_table(missed, total),
        "AP if a network found exactly the boxes that have an anchor: "
        + (", ".join(f"{name} {100 * value:.1f}" for name, value in ceiling.items()) or "-"),
        Table(("with --anchor_scale", "mean best IoU", "boxes with an IoU above 0.5"), fits),
    ]


def issue_items(issues: Iterable[Issue]) -> list[Item]:
    """Returns a line of text and an Offenders list for each kind of issue. Errors come first."""
    items: list[Item] = []
    for issue in sorted(issues, key=lambda issue: (not issue.stops, issue.severity is Severity.WARNING)):
        items.append(f"{issue.severity.value}: {issue.line(shown=3)}")
        listed = f"the first {len(issue.offenders):,} of " if issue.count > len(issue.offenders) else ""
        items.append(Offenders(f"{KINDS[issue.kind].what}: {listed}{issue.count:,}", issue.offenders))
    return items or ["none"]


def shorten(text: str, length: int) -> str:
    """Puts an ellipsis in the middle of a long text, because long names often differ at their end."""
    text, end = printable(text), (length - 1) // 2
    return text if len(text) <= length else text[: length - 1 - end] + "…" + text[len(text) - end :]


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def percent(part: float, total: float) -> str:
    """Formats a share like "12.5 %"; as "-" if `total` is 0."""
    return f"{100 * part / total:.1f} %" if total else "-"


def number(value: float) -> str:
    """Formats a number with three or four digits: 0.58, 15.2, 1,024."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _row(*cells: str | float) -> tuple[str, ...]:
    return tuple(cell if isinstance(cell, str) else number(cell) for cell in cells)


# --- output ---


def format_text(sections: Sequence[Section]) -> str:
    """Returns the report as text. It omits pictures and the rows of a table after the first SHOWN."""
    text = io.StringIO()
    console = Console(file=text, width=COLUMNS, color_system=None)
    for title, items in sections:
        lines = [item for item in items if isinstance(item, str | Table)]
        if lines:
            console.print(Text(printable(title)))
        for item in lines:
            content = Text(printable(item)) if isinstance(item, str) else _rich_table(item)
            console.print(rich.padding.Padding(content, (0, 0, 0, 2)))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _rich_table(table: Table) -> rich.table.Table:
    result = rich.table.Table(box=None, show_header=bool(table.header), pad_edge=False, padding=(0, 2))
    for column, title in enumerate(table.header or ("", "")):
        result.add_column(title, justify="right" if table.header and column else "left", overflow="fold")
    for row in table.rows[:SHOWN]:
        result.add_row(*map(Text, row))
    if len(table.rows) > SHOWN:
        result.add_row(f"and {len(table.rows) - SHOWN:,} more")
    return result


def write(path: str | os.PathLike, sections: Sequence[Section]) -> None:
    """Writes a report as one HTML page. Raises UserError."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["png"] = _png
    page = environment.get_template("page.html").render(sections=sections)
    with user_errors(f"cannot write the report {os.fspath(path)}"):
        # Some file names are not UTF-8, so they cannot be encoded without "backslashreplace".
        write_bytes(path, page.encode("utf-8", "backslashreplace"))


def check_suffix(path: str | os.PathLike) -> None:
    if pathlib.Path(path).suffix.lower() != ".html":
        raise UserError(f"--report={os.fspath(path)} must end in .html")


def _png(image: np.ndarray) -> str:
    stream = io.BytesIO()
    PIL.Image.fromarray(image).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
