"""Writes a data report: as text for a terminal, as an HTML page or as a PNG picture.

The page needs nothing else: no script, no style sheet, no file, no network. Names of classes and files come
from the data and may hold markup; Jinja2 escapes them.
"""

import base64
import io
import os
import pathlib
from collections.abc import Sequence

import jinja2
import numpy as np
import PIL.Image
import rich.padding
import rich.table
from rich.console import Console
from rich.text import Text

from common.errors import UserError
from common.evaluation.drawing import BACKGROUND
from common.files import user_errors, write_bytes
from tools.report import figures, pictures
from tools.report.tables import SHOWN, Section, Table, printable

SUFFIXES = (".html", ".png")
COLUMNS = 100  # letters in a line of the text


def format_text(sections: Sequence[Section]) -> str:
    """Everything but pictures and lists of offenders, and SHOWN rows of a table."""
    text = io.StringIO()
    console = Console(file=text, width=COLUMNS, color_system=None)
    for title, items in sections:
        shown = [item for item in items if isinstance(item, str | Table)]
        if shown:
            console.print(Text(printable(title)))
        for item in shown:
            content = Text(printable(item)) if isinstance(item, str) else _rich_table(item)
            console.print(rich.padding.Padding(content, (0, 0, 0, 2)))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _rich_table(table: Table) -> rich.table.Table:
    shown = rich.table.Table(box=None, show_header=bool(table.header), pad_edge=False, padding=(0, 2))
    for column, title in enumerate(table.header or ("", "")):
        shown.add_column(title, justify="right" if table.header and column else "left", overflow="fold")
    for row in table.rows[:SHOWN]:
        shown.add_row(*map(Text, row))
    if len(table.rows) > SHOWN:
        shown.add_row(f"and {len(table.rows) - SHOWN:,} more")
    return shown


def write(path: str | os.PathLike, sections: Sequence[Section]) -> None:
    """Writes a report, atomically, as one file that needs no other.

    Args:
        path: ends in .html (everything is in it) or in .png (without the lists of offenders).
        sections: what it holds.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    content = _page(sections) if check_suffix(path) == ".html" else _picture(sections)
    with user_errors(f"cannot write the report {os.fspath(path)}"):
        write_bytes(path, content)


def check_suffix(path: str | os.PathLike) -> str:
    """The suffix of a report, in lower case; UserError for one that is not in SUFFIXES."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--report={os.fspath(path)}: its name must end in {' or '.join(SUFFIXES)}")
    return suffix


def _page(sections: Sequence[Section]) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["png"] = lambda image: base64.b64encode(_png([image])).decode()
    page = environment.get_template("page.html").render(sections=sections)
    # File names may hold bytes that are not UTF-8; Python keeps them as lone surrogates.
    return page.encode("utf-8", "backslashreplace")


def _picture(sections: Sequence[Section]) -> bytes:
    images = [item for section in sections for item in section.items if isinstance(item, np.ndarray)]
    return _png([pictures.written(format_text(sections), figures.WIDTH), *images])


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
