"""What is said about a data set: tables as text, and one page or one picture with everything.

print(data_report.format_text(statistics, anchors, annotations.findings))
images = sample_sheet.read(sample_sheet.choose(annotations), encoded)
data_report.write("report.html", statistics, anchors, annotations.findings, annotations, sample_images=images)
"""

import io
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import PIL.Image
from PIL import ImageDraw

from common.annotations import Annotations
from common.errors import UserError
from common.evaluation import drawing
from common.files import write_bytes
from common.issues import Finding, Findings
from tools.report import data_figures, data_page, sample_sheet
from tools.report.anchor_report import AnchorReport
from tools.report.data_statistics import DataStatistics
from tools.report.data_text import COLUMNS, finding_lines, format_text, shorten

__all__ = ["SUFFIXES", "format_text", "write", "write_faults"]

SUFFIXES = (".html", ".png")

_WIDTH = round(100 * data_figures.WIDTH)  # pixels of the picture and of the sheet
_LETTER_HEIGHT = 18
_MARGIN = 20


def write(
    path: str | os.PathLike,
    statistics: DataStatistics,
    anchors: AnchorReport | None,
    findings: Iterable[Finding],
    annotations: Annotations,
    *,
    sample_images: Mapping[int, np.ndarray] | None = None,
) -> None:
    """Writes one file, atomically, that needs no other: tables, figures, a sheet of images.

    Args:
        path: ends in .html (all kept offenders are in it) or in .png.
        statistics: of the data set.
        anchors: what its boxes find there, if anybody looked.
        findings: of the check.
        annotations: whose boxes are drawn on the sheet.
        sample_images: row of the annotations -> uint8 (H, W, 3) RGB, as `sample_sheet.read` gives them.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    suffix, findings = _suffix(path), list(findings)
    figures = data_figures.figures(statistics, anchors)
    sheet = sample_sheet.sheet(annotations, sample_images, _WIDTH) if sample_images else None
    if suffix == ".html":
        content = data_page.page(
            statistics, anchors, findings, figures, None if sheet is None else _png(sheet)
        )
    else:
        classes, *others = (
            np.asarray(PIL.Image.open(io.BytesIO(of)).convert("RGB")) for of in figures.values()
        )
        parts = [_written(format_text(statistics, anchors, findings)), classes]
        parts += [np.concatenate(others[start : start + 2], axis=1) for start in range(0, len(others), 2)]
        content = _png(_stack(parts if sheet is None else [*parts, sheet]))
    _save(path, content)


def write_faults(path: str | os.PathLike, findings: Sequence[Findings]) -> None:
    """Writes what was found in data that cannot be used, data set by data set; as `write` otherwise."""
    if _suffix(path) == ".html":
        content = data_page.fault_page(findings)
    else:
        lines = [line for of in findings for line in (of.origin, *finding_lines(of), "")]
        content = _png(_stack([_written("\n".join(shorten(line, COLUMNS) for line in lines))]))
    _save(path, content)


def _suffix(path: str | os.PathLike) -> str:
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"report {os.fspath(path)}: its name must end in {' or '.join(SUFFIXES)}")
    return suffix


def _save(path: str | os.PathLike, content: bytes) -> None:
    try:
        write_bytes(path, content)
    except OSError as error:
        raise UserError(f"cannot write the report {os.fspath(path)}: {error.strerror}") from error


def _written(text: str) -> np.ndarray:
    """The text as a picture, black on white."""
    lines = text.split("\n")
    font = sample_sheet.font("DejaVuSansMono", _LETTER_HEIGHT)
    step = round(1.25 * _LETTER_HEIGHT)
    picture = PIL.Image.new("RGB", (_WIDTH, 2 * _MARGIN + step * len(lines)), drawing.BACKGROUND)
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * step), line, fill=(0, 0, 0), font=font)
    return np.asarray(picture)


def _stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One below the other, at the left."""
    sheet = np.full((sum(len(part) for part in parts), _WIDTH, 3), drawing.BACKGROUND, np.uint8)
    top = 0
    for part in parts:
        sheet[top : top + len(part), : part.shape[1]] = part[:, :_WIDTH]
        top += len(part)
    return sheet


def _png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()
