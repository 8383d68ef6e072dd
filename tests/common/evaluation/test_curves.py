"""Tests precision-recall curves and loss curves by their lines and legends."""

import numpy as np
import pytest
from matplotlib import _pylab_helpers

from common.evaluation import curves
from tests.common.evaluation.names import HOSTILE_NAMES


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("num_classes", [1, 20, 21])
def test_precision_recall_curves_have_a_legend_for_at_most_twenty_classes(figures, tmp_path, num_classes):
    precision = [0.4, *[0.7] * 99, 1.0]
    names = [f"class {k}" for k in range(num_classes)]
    for file in ("a.png", "b.png"):
        curves.pr_curves(dict.fromkeys(names, precision), tmp_path / file)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    (axes,) = figures[0].axes
    shown = names if num_classes <= 20 else []
    assert legend_of(axes) == [f"{name} 0.700" for name in [*shown, *["all classes"] * (num_classes > 1)]]
    assert len(axes.lines) == num_classes + (num_classes > 1)
    for line in axes.lines:
        np.testing.assert_allclose(line.get_xydata().T, [np.linspace(0, 1, 101), precision])
    assert _pylab_helpers.Gcf.get_all_fig_managers() == []


def test_loss_curves_skip_empty_values_and_ap_is_drawn_only_if_there_were_evaluations(figures, tmp_path):
    first = {"epoch": 1, "step": 10, "loss": "3", "box_loss": "1", "learning_rate": "0.1"}
    second = {"epoch": "2", "step": "20", "loss": "2", "box_loss": "", "AP": "0.2", "AP50": "0.4"}
    for rows in ([first, second], [first], []):
        curves.loss_curves(rows, tmp_path / "curves.png")
    panels = [
        [(axes.get_title(), [line.get_label() for line in axes.lines]) for axes in f.axes] for f in figures
    ]
    losses = [("loss", ["loss"]), ("parts of the loss", ["box_loss"])]
    assert panels == [[*losses, ("AP", ["AP, best 0.200", "AP50, best 0.400"])], losses, []]
    points = [line.get_xydata().tolist() for axes in figures[0].axes for line in axes.lines]
    assert points == [[[1, 3], [2, 2]], [[1, 1]], [[2, 0.2]], [[2, 0.4]]]
    assert {axes.get_xlim() for axes in figures[0].axes} == {(0, 2.04)}
    assert figures[0].axes[2].get_ylim()[0] == 0


@pytest.mark.parametrize(("smallest", "scale"), [("3", "linear"), ("0.03", "log"), ("0", "linear")])
def test_loss_curves_of_very_different_sizes_have_a_logarithmic_axis_with_plain_numbers(
    figures, tmp_path, smallest, scale
):
    rows = [{"epoch": n, "class_loss": "20", "l2_loss": smallest} for n in (1, 2, 3)]
    curves.loss_curves(rows, tmp_path / "curves.png")
    (axes,) = figures[0].axes
    assert axes.get_yscale() == scale
    numbers = [float(label.get_text().replace("\N{MINUS SIGN}", "-")) for label in axes.get_yticklabels()]
    assert len(numbers) >= 4


def test_names_with_dollars_and_underscores_are_in_the_legend_literally(figures, tmp_path):
    curves.pr_curves({name: [0.5] * 101 for name in HOSTILE_NAMES}, tmp_path / "curves.png")
    assert legend_of(figures[0].axes[0]) == [f"{name} 0.500" for name in [*HOSTILE_NAMES, "all classes"]]
    assert all(text.get_parse_math() is False for text in figures[0].axes[0].get_legend().get_texts())


def test_long_name_is_cut_off_in_the_legend(figures, tmp_path):
    curves.pr_curves({"x" * 300: [0.5] * 101}, tmp_path / "curves.png")
    assert legend_of(figures[0].axes[0]) == ["x" * 40 + " 0.500"]
