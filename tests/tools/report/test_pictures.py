import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from common.evaluation import drawing
from tests.common.image_variants import pillow
from tests.common.made_annotations import annotations, random_annotations
from tests.tools.report.made_reports import HOSTILE_NAMES, report_of
from tools.report import anchor_shapes, pictures
from tools.report.statistics import describe
from yolov4.config import get_config

CASES = {
    "one image, one class": annotations([(90, 80)], [(0, 0, 5, 5, 20, 30)], ["cat"]),
    "no boxes": annotations([(90, 80)] * 2, [(0, 0, 5, 5, 20, 30)], crowds=[0]),
    "90 classes": random_annotations(np.random.default_rng(1), 9, 40, 90),
    "strange names": annotations([(90, 80)], [(0, i, 5, 5, 20, 30) for i in range(7)], HOSTILE_NAMES),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_data_report_figures_have_four_drawn_panels_for_no_boxes_one_class_or_90_classes(case):
    image = pictures.draw_figures(*report_of(CASES[case]))
    assert image.shape == (720, 1280, 3)
    for part in np.array_split(image, 2):
        for panel in (part[:, :640], part[:, 640:]):
            assert (panel < 128).mean() > 0.001


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def test_data_report_bar_charts_show_the_box_counts_of_classes_and_anchor_levels():
    statistics, anchors = report_of(CASES["90 classes"])
    axes = Figure().subplots()
    pictures.plot_classes(axes, statistics.classes)
    assert heights(axes) == [row.boxes for row in statistics.classes]
    assert axes.get_xlabel() and axes.get_yscale() == "linear"

    axes = Figure().subplots()
    pictures.plot_levels(axes, anchors.levels)
    assert heights(axes) == [level.reached for level in anchors.levels] + [row.best for row in anchors.levels]


def test_data_report_bar_chart_of_yolov4_shows_the_boxes_of_each_anchor():
    truth = CASES["90 classes"]
    report = anchor_shapes.examine(truth, get_config("yolov4-tiny"))
    axes = Figure().subplots()
    pictures.plot_shapes(axes, report.anchors)
    assert heights(axes) == [row.assigned for row in report.anchors] + [row.best for row in report.anchors]
    assert pictures.draw_figures(describe(truth, {}), report).shape == (720, 1280, 3)


def test_data_report_has_three_figures_if_anchors_cannot_be_rated():
    image = pictures.draw_figures(describe(CASES["90 classes"], {}), "not judged")
    assert (image[360:, 640:] == 255).all()
    assert (image[360:, :640] < 128).any()


HISTOGRAMS = {
    "sizes": (pictures.plot_sizes, "box_sides_px", [32, 96]),
    "aspect ratios": (pictures.plot_aspects, "box_aspects", [1]),
}


@pytest.mark.parametrize(("plot", "field", "lines"), HISTOGRAMS.values(), ids=HISTOGRAMS)
def test_data_report_histograms_count_every_box_in_bins_of_a_quarter_octave(plot, field, lines):
    statistics, _ = report_of(CASES["90 classes"])
    axes = Figure().subplots()
    plot(axes, getattr(statistics, field))
    edges = [bar.get_x() for bar in axes.patches if isinstance(bar, Rectangle)]
    edges.append(edges[-1] * 2**0.25)
    np.testing.assert_allclose(np.diff(np.log2(edges)), 0.25, rtol=1e-6)
    assert heights(axes) == np.histogram(getattr(statistics, field), edges)[0].tolist()
    assert sum(heights(axes)) == statistics.boxes
    assert [line.get_xdata()[0] for line in axes.lines] == lines


def test_data_report_class_plot_shortens_long_names_and_has_a_log_scale_for_rare_classes():
    rows = [(0, 0, 1, 1, 9, 9)] * 101 + [(0, 1, 1, 1, 9, 9)]
    axes = Figure().subplots()
    pictures.plot_classes(axes, describe(annotations([(90, 80)], rows, ["x" * 40, "dog"])).classes)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x" * 11 + "…" + "x" * 10, "dog"]
    assert axes.get_yscale() == "symlog"


# --- images with their boxes ---


def test_contact_sheet_chooses_the_images_with_most_boxes_then_random_images_with_boxes():
    counts = [2, 0, 9, 1, 30, 4, 5, 3, 12, 1, 0, 6]
    truth = annotations([(50, 60)] * 12, [(i, 0, 1, 1, 9, 9) for i, n in enumerate(counts) for _ in range(n)])
    rows = pictures.choose(truth)
    assert rows[:3] == [4, 8, 2]
    assert len(rows) == len(set(rows)) == 9
    assert rows[3:] == sorted(rows[3:]) and all(counts[row] for row in rows)
    assert rows == pictures.choose(truth)
    assert any(rows != pictures.choose(truth, seed) for seed in range(1, 6))
    assert pictures.choose(annotations([(50, 60)] * 2, [])) == [0, 1]


def test_contact_sheet_draws_a_box_at_its_place_in_the_scaled_image():
    truth = annotations([(600, 920)], [(0, 1, 230, 150, 460, 300)], ["", ""])
    black = pillow("PNG", np.zeros((600, 920, 3), np.uint8))
    sheet = pictures.draw_sheet(truth, lambda row: black)
    scale = 1280 / 920
    height = round(600 * scale)
    rows, columns = np.nonzero((sheet == np.array(drawing.class_colour(1))).all(axis=-1))
    rows -= len(sheet) - height  # the title is above the image
    extent = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    np.testing.assert_allclose(extent, scale * np.array([230, 150, 690, 450]), atol=1)


def test_contact_sheet_names_the_classes_only_in_images_with_at_most_25_boxes(monkeypatch):
    drawn_names = []

    def make_panel(image, boxes, classes, names, title):
        drawn_names.append(names)
        return drawing.make_panel(image, boxes, classes, names, title=title)

    monkeypatch.setattr(pictures, "make_panel", make_panel)
    black = pillow("PNG", np.zeros((60, 90, 3), np.uint8))
    for count in (25, 26):
        truth = annotations([(60, 90)], [(0, 1, 5, 5, 9, 9)] * count, ["cat", "x" * 40])
        pictures.draw_sheet(truth, lambda row: black)
    assert drawn_names == [["cat", "x" * 12 + "…" + "x" * 11], ["", ""]]


def test_contact_sheet_has_images_of_all_shapes_and_omits_unreadable_images():
    truth = annotations([(50, 60)] * 5, [(i, 0, 1, 1, 9, 9) for i in range(5)])
    grey = np.full((900, 1200), 77, np.uint8)
    files = [pillow("PNG", image) for image in (grey, grey[:30, :20], grey[:10], grey[:, :10], grey[:1])]
    assert pictures.draw_sheet(truth, files.__getitem__).shape[1:] == (1280, 3)
    broken = files[0].replace(b"IDAT", b"\x01DAT")
    for file in files[:4]:
        sheet = pictures.draw_sheet(truth, [file, broken, b"", file, file].__getitem__)
        readable = annotations([(50, 60)] * 3, [(i, 0, 1, 1, 9, 9) for i in range(3)])
        assert sheet.shape == pictures.draw_sheet(readable, lambda row, file=file: file).shape

    def missing(row):
        raise FileNotFoundError(row)

    assert pictures.draw_sheet(truth, missing) is None


def test_report_has_the_other_picture_if_one_cannot_be_drawn(monkeypatch, capfd):
    def undrawable(*args):
        raise ValueError("no picture")

    monkeypatch.setattr(pictures, "draw_figures", undrawable)
    truth = CASES["one image, one class"]
    black = pillow("PNG", np.zeros((90, 80, 3), np.uint8))
    (sheet,) = pictures.draw(*report_of(truth), annotations=truth, encoded=lambda row: black)
    assert sheet.shape[2] == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: the report's figures cannot be drawn (ValueError: no picture)")
