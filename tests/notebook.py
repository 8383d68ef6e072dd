"""Runs the code cells of a notebook without Jupyter.

    python tests/notebook.py docs/tutorial.ipynb

The command writes what the cells print, and the figures that they leave open, into the notebook as outputs.
"""

import base64
import contextlib
import io
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
from PIL import Image


def run_cells(notebook: dict[str, Any], names: dict[str, Any]) -> None:
    """`names` are the cells' global variables. Replaces the cells' outputs."""
    plt.switch_backend("Agg")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        text = {"name": "stdout", "output_type": "stream", "text": stdout.getvalue().splitlines(True)}
        outputs = [text] if text["text"] else []
        for png in _figures():
            outputs.append({"data": {"image/png": png}, "metadata": {}, "output_type": "display_data"})
        cell.update(execution_count=number, outputs=outputs)


def _figures() -> Iterator[str]:
    """Yields open figures as PNGs of at most 256 colours, in base64."""
    for number in plt.get_fignums():
        figure, png = io.BytesIO(), io.BytesIO()
        plt.figure(number).savefig(figure, dpi=100)
        Image.open(figure).convert("RGB").quantize(256).save(png, "PNG", optimize=True)
        yield base64.b64encode(png.getvalue()).decode()
    plt.close("all")


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    notebook = json.loads(path.read_text())
    run_cells(notebook, {})
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
