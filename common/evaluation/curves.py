"""Draws precision-recall curves and loss curves with Matplotlib.

Drawing needs no display and works in threads. Names of classes are drawn literally: `$` and `_` have no
meaning in them.
"""

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator

from common.evaluation.drawing import NAME_LENGTH, class_colour, font_file
from common.files import write_file

_new_figure = functools.partial(Figure, figsize=(8.0, 5.0), dpi=120, layout="tight")


def pr_curves(curves: Mapping[str, Sequence[float]], path: str | os.PathLike) -> None:
    """Draws the precision-recall curve of each class and, for several classes, the mean curve.

    Args:
        curves: class name -> 101 precisions at the recalls 0, 0.01 .. 1.
    """
    figure = _new_figure()
    axes = figure.add_subplot()
    recalls = np.linspace(0, 1, 101)
    is_named = len(curves) <= 20
    labels, lines = [], []
    for index, (name, precision) in enumerate(curves.items()):
        colour = np.array(class_colour(index)) / 255
        curve = axes.plot(recalls, precision, color=colour, linewidth=1.5 if is_named else 0.5)
        if is_named:
            lines += curve
            labels.append(f"{name[:NAME_LENGTH]} {np.mean(precision):.3f}")
    if len(curves) > 1:
        mean = np.mean(list(curves.values()), axis=0)
        lines += axes.plot(recalls, mean, color="black", linewidth=3)
        labels.append(f"all classes {mean.mean():.3f}")
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title("precision and recall at IoU 0.50")
    axes.grid(alpha=0.3)
    # Without these lists, Matplotlib leaves out labels that begin with "_".
    style: dict[str, Any] = {"title": "AP50", "fontsize": "small", "frameon": False, "borderaxespad": 0}
    axes.legend(lines, labels, loc="upper left", bbox_to_anchor=(1.01, 1), **style)  # beside the axes
    save_figure(figure, path)


def loss_curves(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Draws the loss, its parts, and AP if there were evaluations, over the epochs, beside each other.

    The scale of losses is logarithmic if the largest is more than ten times the smallest.

    Args:
        rows: rows of a results.csv, with the key "epoch". AP, AP50 and columns that end in `loss` are drawn.
    """
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value != ""))
    parts = [name for name in names if name.endswith("loss") and name != "loss"]
    scores: list[str] = [name for name in ("AP", "AP50") if name in names]
    choices: dict[str, list[str]] = {
        "loss": ["loss"] if "loss" in names else [],
        "parts of the loss": parts,
        "AP": scores,
    }
    panels = {title: columns for title, columns in choices.items() if columns}
    last = max((float(row["epoch"]) for row in rows), default=1.0)
    figure = _new_figure(figsize=(max(4.5 * len(panels), 8), 4))
    for position, (title, columns) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), position)
        positive = []
        for name in columns:
            epochs, values = np.array([(row["epoch"], row[name]) for row in rows if row.get(name)], float).T
            label = f"{name}, best {values.max():.3f}" if name in scores else name
            axes.plot(epochs, values, label=label, marker="." if len(values) < 50 else None)
            positive += values[values > 0].tolist()
        if columns == scores:
            axes.set_ylim(bottom=0)
        elif positive and max(positive) > 10 * min(positive):
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        axes.set(xlabel="epoch", title=title, xlim=(0, 1.02 * last))
        axes.locator_params("x", integer=last > 2)
        axes.grid(alpha=0.3)
        if columns != [title]:
            axes.legend(fontsize="small")
    save_figure(figure, path)


def save_figure(figure: Figure, path: str | os.PathLike) -> None:
    set_literal_text(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # `font_file` has named the missing letters
        # Matplotlib's version is left out of the file, so that equal curves give equal bytes.
        write_file(
            path,
            lambda temporary: figure.savefig(
                temporary, format="png", bbox_inches="tight", metadata={"Software": None}
            ),
        )


def set_literal_text(figure: Figure) -> None:
    """Makes a figure's texts literal, not formulas, and gives each a font that has its letters.

    Call it before the figure is drawn. Ticks without fixed labels keep their format.
    """
    for text in figure.findobj(Text):
        if letters := text.get_text():
            text.set_parse_math(False)
            text.set_usetex(False)
            properties = text.get_fontproperties().copy()
            properties.set_file(font_file(letters))
            text.set_fontproperties(properties)
