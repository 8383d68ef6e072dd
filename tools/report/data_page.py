"""A data report as one HTML page that needs nothing else: no script, no style sheet, no file, no network.

Names of classes and files come from the data and may hold markup: whatever is no constant here is escaped.
"""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence

from common.issues import KINDS, Finding, Findings, Severity
from tools.report.anchor_report import AnchorReport
from tools.report.data_statistics import DataStatistics
from tools.report.data_text import (
    anchor_lines,
    by_area,
    missed_groups,
    percent,
    spread_columns,
    spread_rows,
)

SIZES = 20  # image sizes that are listed
OPEN_OFFENDERS = 10  # a list of more is folded away

# Should anything slip through the escaping, browsers neither run nor fetch it.
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Data report</title><style>
body { font: 15px/1.45 sans-serif; color: #222; max-width: 1420px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; margin: 0.6em 0 }
th, td { padding: 0.15em 0.9em 0.15em 0; text-align: right; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid #999 }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
img { max-width: 100%; vertical-align: top } pre { overflow-x: auto }
.stops { border-left: 4px solid #cc3311; padding-left: 0.7em }
.mended { border-left: 4px solid #ee9900; padding-left: 0.7em }
.note { border-left: 4px solid #4477aa; padding-left: 0.7em }
li { overflow-wrap: anywhere }
</style></head><body>
"""
_TAIL = "</body></html>\n"
_CLASSES = {
    Severity.ERROR: "stops",
    Severity.IMAGE: "stops",
    Severity.FIXED: "mended",
    Severity.SKIPPED: "skipped",
    Severity.WARNING: "note",
}


def page(
    statistics: DataStatistics,
    anchors: AnchorReport | None,
    findings: Iterable[Finding],
    figures: Mapping[str, bytes],
    sheet: bytes | None,
) -> bytes:
    """The page, UTF-8.

    Args:
        statistics: of the data set.
        anchors: what its boxes find there, if anybody looked.
        findings: of the check; all kept offenders are listed.
        figures: title -> PNG.
        sheet: PNG of some images, if there are any.
    """
    parts = [f"<h1>{_escape(statistics.origin)}</h1>", *_findings(findings), "<h2>Numbers</h2>"]
    empty = sum(not of.boxes for of in statistics.classes)
    rows = [
        ("images", f"{statistics.images:,}", f"{statistics.images_without_boxes:,} without boxes"),
        ("boxes", f"{statistics.boxes:,}", f"{statistics.clipped:,} clipped to their image"),
    ]
    for name, count in by_area(statistics):
        rows.append((f"{name} boxes, by COCO's areas", f"{count:,}", percent(count, statistics.boxes)))
    rows += [
        ("boxes without area, dropped", f"{statistics.dropped:,}", ""),
        ("crowds, left out", f"{statistics.crowds:,}", ""),
        ("classes", f"{len(statistics.classes):,}", f"{empty:,} without boxes"),
    ]
    rows += [(f"{name} files", f"{count:,}", "") for name, count in (statistics.formats or {}).items()]
    parts.append(_table(("", "number", "of which"), rows))
    spreads = {name: spread_columns(spread) for name, spread in spread_rows(statistics).items()}
    titles = next(iter(spreads.values()))
    parts.append(_table(("", *titles), [(name, *columns.values()) for name, columns in spreads.items()]))
    parts.append("<h2>Figures</h2>")
    parts += [_image(content, title) for title, content in figures.items()]
    if sheet is not None:
        parts += ["<h2>Images with most boxes, and some others</h2>", _image(sheet, "images with boxes")]
    if anchors is not None:
        parts += _anchors(anchors)
    parts.append("<h2>Classes</h2>")
    parts.append(
        _table(
            ("class", "category id", "boxes", "share", "images"),
            [
                (
                    of.name,
                    of.category_id,
                    f"{of.boxes:,}",
                    percent(of.boxes, statistics.boxes),
                    f"{of.images:,}",
                )
                for of in sorted(statistics.classes, key=lambda of: (-of.boxes, of.category_id))
            ],
        )
    )
    shown = statistics.image_sizes[:SIZES]
    parts.append(f"<h2>Image sizes: {len(shown):,} of {statistics.num_image_sizes:,}</h2>")
    parts.append(
        _table(("height x width", "images"), [(f"{h} x {w}", f"{count:,}") for h, w, count in shown])
    )
    return _page(parts)


def fault_page(findings: Sequence[Findings]) -> bytes:
    """A page of the findings alone, data set by data set."""
    parts = []
    for of in findings:
        parts += [f"<h1>{_escape(of.origin)}</h1>", *_findings(of)]
    return _page(parts)


def _page(parts: Iterable[str]) -> bytes:
    # File names may hold bytes that are no UTF-8; Python keeps them as lone surrogates.
    return (_HEAD + "\n".join(parts) + _TAIL).encode("utf-8", "backslashreplace")


def _findings(findings: Iterable[Finding]) -> list[str]:
    parts = ["<h2>Findings</h2>"]
    for of in sorted(findings, key=lambda of: (not of.stops, of.severity is Severity.WARNING)):
        kind = KINDS[of.kind]
        remedy = "left out by --on_bad_image=skip" if of.skipped else kind.remedy
        more = f"; the first {len(of.offenders):,} are" if of.count > len(of.offenders) else ""
        parts.append(
            f'<div class="{_CLASSES[of.severity]}"><p><b>{_escape(kind.what)}</b> ({of.count:,}{more}) '
            f"{_escape(of.severity.value)}: {_escape(remedy)}.</p>{_offenders(of.offenders)}</div>"
        )
    return parts if len(parts) > 1 else [*parts, "<p>none</p>"]


def _anchors(anchors: AnchorReport) -> list[str]:
    parts = ["<h2>Anchors</h2>", f"<pre>{_escape(chr(10).join(anchor_lines(anchors)))}</pre>"]
    for what, group in missed_groups(anchors).items():
        if group.count:
            parts.append(f"<p>Boxes {_escape(what)}; {group.count:,} in {group.images:,} images</p>")
            parts.append(_offenders(group.offenders))
    return parts


def _offenders(offenders: Sequence[str]) -> str:
    items = "".join(f"<li>{_escape(text)}</li>" for text in offenders)
    if len(offenders) <= OPEN_OFFENDERS:
        return f"<ul>{items}</ul>"
    return f"<details><summary>{len(offenders):,} of them</summary><ul>{items}</ul></details>"


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{_escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _image(png: bytes, title: str) -> str:
    content = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{content}" alt="{_escape(title)}">'


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)
