"""Writes a data report: an HTML page or a PNG picture with all tables, figures and a sheet of images.

The page needs nothing else: no script, no style sheet, no file, no network. Names of classes and files come
from the data and may hold markup; Jinja2 escapes them.
"""

import base64
import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import PIL.Image

from common.annotations import Annotations
from common.datacheck.issues import KINDS, Issues
from common.errors import UserError
from common.evaluation.drawing import BACKGROUND
from common.files import write_bytes
from tools.report import figures, pictures, tables
from tools.report.anchor_report import AnchorReport
from tools.report.statistics import DataStatistics
from tools.report.tables import Table

SUFFIXES = (".html", ".png")
SIZES = 20  # image sizes that are listed
OPEN_OFFENDERS = 10  # a list of more is folded away


def write(
    path: str | os.PathLike,
    statistics: DataStatistics,
    anchors: AnchorReport,
    annotations: Annotations,
    images: Mapping[int, np.ndarray],
) -> None:
    """Writes one file, atomically, that needs no other: issues, tables, figures, a sheet of images.

    Args:
        path: ends in .html (all kept offenders are in it) or in .png.
        statistics: of the data set.
        anchors: what anchors match there.
        annotations: their issues are listed, and their boxes are drawn on the sheet.
        images: row of the annotations -> uint8 (H, W, 3) RGB, as `pictures.sample_images` gives them.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    suffix = check_suffix(path)
    parts = [figures.draw(statistics, anchors)]
    if images:
        parts.append(pictures.sheet(annotations, images, figures.WIDTH))
    if suffix == ".png":
        text = tables.format_text(statistics, anchors, annotations.issues)
        content = _png([pictures.written(text, figures.WIDTH), *parts])
    else:
        sizes = [(f"{h} x {w}", f"{count:,}") for h, w, count in statistics.frequent_sizes[:SIZES]]
        content = _page(
            found=[annotations.issues],
            overview=[tables.overview(statistics), tables.spreads(statistics)],
            pictures=[base64.b64encode(_png([part])).decode() for part in parts],
            anchor_lines=tables.anchor_heading(anchors),
            anchor_tables=[tables.level_table(anchors), tables.missed_table(anchors)],
            conclusion=tables.conclusion(anchors),
            missed={what: of for what, of in tables.missed_groups(anchors).items() if of.count},
            classes=tables.class_table(statistics),
            sizes=Table(("height x width", "images"), sizes),
            num_sizes=len(statistics.frequent_sizes),
        )
    _save(path, content)


def write_faults(path: str | os.PathLike, found: Sequence[Issues]) -> None:
    """Writes what was found in data that cannot be used, data set by data set; as `write` otherwise."""
    if check_suffix(path) == ".html":
        content = _page(found=found, overview=None)
    else:
        parts = [f"{tables.printable(of.origin)}\n{tables.issues_text(of)}" for of in found]
        content = _png([pictures.written("\n\n".join(parts), figures.WIDTH)])
    _save(path, content)


def check_suffix(path: str | os.PathLike) -> str:
    """The suffix of a report, in lower case; UserError for one that is not in SUFFIXES."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--report={os.fspath(path)}: its name must end in {' or '.join(SUFFIXES)}")
    return suffix


def _page(**content: Any) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("page.html")
    page = template.render(ordered=tables.ordered, kinds=KINDS, limit=OPEN_OFFENDERS, **content)
    # File names may hold bytes that are not UTF-8; Python keeps them as lone surrogates.
    return page.encode("utf-8", "backslashreplace")


def _png(parts: Sequence[np.ndarray]) -> bytes:
    """The parts one below the other."""
    stack = PIL.Image.new("RGB", (figures.WIDTH, sum(map(len, parts))), BACKGROUND)
    top = 0
    for part in parts:
        stack.paste(PIL.Image.fromarray(part), (0, top))
        top += len(part)
    stream = io.BytesIO()
    stack.save(stream, "PNG")
    return stream.getvalue()


def _save(path: str | os.PathLike, content: bytes) -> None:
    try:
        write_bytes(path, content)
    except OSError as error:
        raise UserError(f"cannot write the report {os.fspath(path)}: {error.strerror}") from error
