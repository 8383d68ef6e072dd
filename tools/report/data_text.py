"""A data report as text for a terminal."""

import textwrap
from collections.abc import Iterable, Sequence

from common.issues import KINDS, Finding, Severity
from tools.report.anchor_report import AnchorReport
from tools.report.data_statistics import ClassCount, DataStatistics, Spread
from tools.report.shown_boxes import Group

COLUMNS = 100
_CLASS_LINES, _CLASS_COLUMNS = 8, 3
_FINDINGS = 10
_NAMES = {
    Severity.ERROR: "STOPS",
    Severity.IMAGE: "STOPS",
    Severity.FIXED: "mended",
    Severity.SKIPPED: "skipped",
    Severity.WARNING: "note",
}


def format_text(statistics: DataStatistics, anchors: AnchorReport | None, findings: Iterable[Finding]) -> str:
    """Tables: at most about 70 lines of COLUMNS letters."""
    parts = [_overview(statistics), _spreads(statistics), _classes(statistics.classes)]
    if anchors is not None:
        parts.append(anchor_lines(anchors))
    parts.append(finding_lines(findings))
    return "\n\n".join("\n".join(shorten(line.rstrip(), COLUMNS) for line in part) for part in parts)


def shorten(text: str, length: int) -> str:
    """What is longer ends in an ellipsis; what cannot be printed is a question mark."""
    text = _printable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def shorten_name(name: str, length: int) -> str:
    """The same for a name, which keeps its end: long names often differ there."""
    name, end = _printable(name), (length - 1) // 2
    return name if len(name) <= length else name[: length - 1 - end] + "…" + name[len(name) - end :]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def percent(part: float, whole: float) -> str:
    """12.5 %, or a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def number(value: float) -> str:
    """Three or four digits: 0.58, 15.0, 1,024."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """One line for each kind, what stops first."""
    ordered = sorted(findings, key=lambda of: (not of.stops, of.severity is Severity.WARNING))
    if not ordered:
        return ["findings: none"]
    lines = []
    for of in ordered[:_FINDINGS]:
        count = f" ({of.count:,})" if of.count > 1 else ""
        more = "; …" if of.count > 3 else ""
        words = f"{KINDS[of.kind].what}{count}: {'; '.join(of.offenders[:3])}{more}"
        name = f"  {_NAMES[of.severity]:8}"
        indents = {"initial_indent": name, "subsequent_indent": " " * len(name)}
        lines += textwrap.wrap(words, COLUMNS, max_lines=2, placeholder=" …", **indents)
    if len(ordered) > _FINDINGS:
        lines.append(f"  and {len(ordered) - _FINDINGS} more kinds")
    return ["findings", *lines]


def anchor_lines(anchors: AnchorReport) -> list[str]:
    """What the anchors match, what they miss, the AP ceiling, and other anchors."""
    settings = anchors.anchors
    height, width = settings["image_size"]
    ratios = ", ".join(f"{ratio:g}" for ratio in settings["aspect_ratios"])
    lines = [
        f"{anchors.num_anchors:,} anchors at {height}x{width}: {settings['num_scales']} scales per octave, "
        f"aspect ratios {ratios}, anchor scale {settings['anchor_scale']:g}",
        f"  {_sample(anchors)}",
        "  level  stride   anchors     side in pixels   boxes reached at 0.5   best here   own a box",
    ]
    for level in anchors.levels:
        lines.append(
            f"  {level.level:5}  {2**level.level:6}  {level.anchors:8,}  {level.smallest:8.0f} to "
            f"{level.largest:6.0f}   {level.reached:10,} {percent(level.reached, anchors.boxes):>9}  "
            f"{level.best:10,}  {level.positives:10,}"
        )
    lines.append("  missed boxes                                          of all   median side in pixels")
    for what, group in missed_groups(anchors).items():
        side = number(group.sides.median) if group.count else ""
        lines.append(f"  {what:42} {group.count:8,} {percent(group.count, anchors.boxes):>8} {side:>12}")
    lines += [f"  {line}" for line in [*ceiling_lines(anchors), *suggestion_lines(anchors)]]
    return lines


def missed_groups(anchors: AnchorReport) -> dict[str, Group]:
    """The boxes that the anchors do badly by, in words."""
    return {
        "without an anchor: others own their best": anchors.lost,
        "reached by no anchor: IoU below 0.5": anchors.unreached,
        "dropped: a side below min_box_size": anchors.too_small,
        f"dropped: beyond max_instances={anchors.max_instances}": anchors.truncated,
    }


def ceiling_lines(anchors: AnchorReport) -> list[str]:
    """What a network with perfect outputs would reach, and why not more."""
    if anchors.ceiling is None:
        return ["AP ceiling: none, there is no box"]
    values = ", ".join(f"{name} {value:.3f}" for name, value in anchors.ceiling.items() if value >= 0)
    lines = [f"AP ceiling, of perfect outputs: {values}"]
    if anchors.reasons:
        lines += textwrap.wrap(
            "what is missing: " + "; ".join(anchors.reasons), COLUMNS - 4, subsequent_indent="  "
        )
    return lines


def suggestion_lines(anchors: AnchorReport) -> list[str]:
    """How well the anchors fit, and better ones where there are any."""
    suggestion = anchors.suggestion
    if not anchors.fit.boxes:
        return []
    if suggestion is None:
        return [f"the anchors fit: {anchors.fit.words()}", "others, tried on held-out boxes, are not better"]
    return [
        f"on {suggestion.own.boxes:,} held-out boxes: {suggestion.own.words()}",
        f"other anchors there: {suggestion.new.words()}; {suggestion.lost} would own none",
        f"to take them, without pretrained weights: --hparams={suggestion.hparams}",
    ]


def _sample(anchors: AnchorReport) -> str:
    if anchors.images == anchors.images_with_boxes:
        return f"all {anchors.images:,} images with boxes, {anchors.boxes:,} boxes"
    return (
        f"a sample of {anchors.images:,} of the {anchors.images_with_boxes:,} images with boxes, "
        f"{anchors.boxes:,} boxes"
    )


def _overview(statistics: DataStatistics) -> list[str]:
    empty = sum(not of.boxes for of in statistics.classes)
    sizes = ", ".join(f"{height}x{width} {count:,}" for height, width, count in statistics.image_sizes[:5])
    crowding = ", ".join(
        f"{low if low == high else f'{low}-{high}'}: {images:,}" for low, high, images in statistics.crowding
    )
    rows = {
        "images": f"{statistics.images:,} ({statistics.images_without_boxes:,} without boxes)",
        "boxes": f"{statistics.boxes:,} to train on, {statistics.clipped:,} of them clipped; dropped without "
        f"area {statistics.dropped:,}, crowds {statistics.crowds:,}",
        "classes": f"{len(statistics.classes):,} ({empty:,} without boxes)",
        "box areas": ", ".join(
            f"{name} {count:,} ({percent(count, statistics.boxes)})" for name, count in by_area(statistics)
        )
        + "  (COCO: 32² and 96²)",
        "image sizes": f"{statistics.num_image_sizes:,}: {sizes}  (height x width)",
        "crowding": f"{crowding}  (boxes: images)",
    }
    if statistics.formats is not None:
        rows["formats"] = ", ".join(f"{name} {count:,}" for name, count in statistics.formats.items())
    lines = [statistics.origin]
    for name, text in rows.items():
        lines += textwrap.wrap(text, COLUMNS, initial_indent=f"  {name:14}", subsequent_indent=" " * 16)
    return lines


def by_area(statistics: DataStatistics) -> list[tuple[str, int]]:
    """COCO's names of box areas with their counts."""
    return [
        ("small", statistics.small),
        ("medium", statistics.medium),
        ("large", statistics.large),
    ]


def spread_rows(statistics: DataStatistics) -> dict[str, Spread]:
    """The rows of the table of sizes: title -> quantiles."""
    rows = {
        "image height": statistics.heights,
        "image width": statistics.widths,
        "image width / height": statistics.image_aspects,
        "boxes per image": statistics.boxes_per_image,
    }
    if not statistics.boxes:
        return rows
    return rows | {
        "box side in pixels": statistics.box_sides_px,
        "box side, share of image": statistics.box_sides,
        "box width / height": statistics.box_aspects,
    }


def spread_columns(spread: Spread) -> dict[str, str]:
    """One row of it: title of the column -> value."""
    values = {
        "min": spread.minimum,
        "5 %": spread.p5,
        "25 %": spread.p25,
        "median": spread.median,
        "75 %": spread.p75,
        "95 %": spread.p95,
        "max": spread.maximum,
    }
    return {name: number(value) for name, value in values.items()}


def _spreads(statistics: DataStatistics) -> list[str]:
    lines = []
    for name, spread in spread_rows(statistics).items():
        columns = spread_columns(spread)
        if not lines:
            lines.append(" " * 26 + "".join(f"{title:>10}" for title in columns))
        lines.append(f"  {name:24}" + "".join(f"{value:>10}" for value in columns.values()))
    return lines


def _classes(classes: Sequence[ClassCount]) -> list[str]:
    with_boxes = sorted((of for of in classes if of.boxes), key=lambda of: (-of.boxes, of.category_id))
    shown = with_boxes[: _CLASS_LINES * _CLASS_COLUMNS]
    rows = -(-len(shown) // _CLASS_COLUMNS) if len(shown) > _CLASS_LINES else len(shown)
    width = 15 if len(shown) > rows else 60
    cells = [f"{shorten_name(of.name, width):{width}} {of.boxes:>7,}{of.images:>8,}" for of in shown]
    columns = [cells[start : start + rows] for start in range(0, len(cells), rows or 1)]
    head = f"{'class':{width}} {'boxes':>7}{'images':>8}"
    lines = ["  " + "  ".join(head for _ in columns)] if columns else ["  no class has a box"]
    lines += ["  " + "  ".join(column[row] for column in columns if row < len(column)) for row in range(rows)]
    if rest := with_boxes[len(shown) :]:
        lines.append(f"  and {len(rest):,} more classes with {rest[-1].boxes:,} to {rest[0].boxes:,} boxes")
    if empty := [of.name for of in classes if not of.boxes]:
        lines.append(
            f"  without boxes ({len(empty):,}): {', '.join(shorten_name(name, 24) for name in empty)}"
        )
    return lines
