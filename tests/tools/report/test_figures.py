import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.common.made_annotations import annotations, random_annotations
from tests.tools.report.made_reports import NASTY, report_of
from tools.report import figures

CASES = {
    "one image, one class": annotations([(90, 80)], [(0, 0, 5, 5, 20, 30)], ["cat"]),
    "no boxes": annotations([(90, 80)] * 2, [(0, 0, 5, 5, 20, 30)], crowds=[0]),
    "90 classes": random_annotations(np.random.default_rng(1), 9, 40, 90),
    "strange names": annotations([(90, 80)], [(0, i, 5, 5, 20, 30) for i in range(7)], NASTY),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_figures_of_extreme_data(case):
    image = figures.draw(*report_of(CASES[case]))
    assert image.shape == (1170, 1400, 3)
    for part in np.array_split(image, 3):
        for panel in (part[:, :700], part[:, 700:]):
            assert (panel < 128).mean() > 0.001


def drawn(title, report):
    axes = Figure().subplots()
    figures.PANELS[title](axes, *report)
    return axes


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def test_bars_are_the_numbers_of_the_report():
    numbers, anchors = report = report_of(CASES["90 classes"])
    axes = drawn("boxes of each class", report)
    assert heights(axes) == [of.boxes for of in numbers.classes]
    assert axes.get_xlabel() and axes.get_yscale() == "linear"
    assert heights(drawn("boxes per image", report)) == list(numbers.crowding.values())
    expected = [of.reached for of in anchors.levels] + [of.best for of in anchors.levels]
    assert heights(drawn("boxes that each anchor level matches", report)) == expected
    for title, lines in (("box sizes", [32, 96]), ("aspect ratios of the boxes", [1])):
        axes = drawn(title, report)
        assert sum(heights(axes)) == numbers.boxes
        assert [line.get_xdata()[0] for line in axes.lines] == lines
        left, right = (bar.get_x() for bar in axes.patches[:2])
        assert right / left == pytest.approx(2**0.25)


def test_classes_are_named_where_there_is_room_and_rare_ones_are_seen():
    rows = [(0, 0, 1, 1, 9, 9)] * 101 + [(0, 1, 1, 1, 9, 9)]
    axes = drawn("boxes of each class", report_of(annotations([(90, 80)], rows, ["x" * 40, "dog"])))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x" * 11 + "…" + "x" * 10, "dog"]
    assert axes.get_yscale() == "symlog"


def test_image_sizes_are_points_whose_area_is_their_number():
    axes = drawn("image sizes", report_of(annotations([(50, 200)] * 3 + [(90, 80)], [])))
    (points,) = axes.collections
    assert points.get_offsets().tolist() == [[200, 50], [80, 90]]
    assert points.get_sizes().tolist() == [15 + 600 * 3 / 4, 15 + 600 / 4]
    assert axes.get_xlim() == axes.get_ylim() == pytest.approx((0, 220))
