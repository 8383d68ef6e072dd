"""Writes a data report: as text for a terminal, or as an HTML page.

The page needs no other file and no network. Jinja2 escapes the names of classes and files.
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
from common.files import user_errors, write_bytes
from tools.report.tables import SHOWN, Section, Table, printable

COLUMNS = 100


def format_text(sections: Sequence[Section]) -> str:
    """Returns the report as text. It omits pictures and the rows of a table after the first SHOWN."""
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
