"""The report as text, page and picture: everything is in it, nothing of the data is taken for markup."""

import base64
import dataclasses
import html.parser
import io
import re

import numpy as np
import PIL.Image
import pytest

from common.anchors import Anchors
from common.datacheck.coco import load_coco
from common.datacheck.issues import KINDS, Issues
from common.errors import UserError
from common.evaluation import drawing
from tests.common.made_annotations import annotations, random_annotations
from tools.report import anchor_report, figures, page, pictures, statistics, tables

ANCHORS = Anchors(3, 7, 3, (1.0, 2.0, 0.5), 4.0, (128, 128))
NASTY = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "a$^_{$b",  # no formula
    "日本語",
    "new\nline",
    "\x1b[31mred",
    "half a letter \udce9",
)
NASTY_FILE = "<b onclick='alert(3)'>&amp;\udce9.jpg"


class ParsedPage(html.parser.HTMLParser):
    """Tags with their attributes, the text outside of style, and whether all tags are closed in order."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(content)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def images(self):
        return [attrs for tag, attrs in self.tags if tag == "img"]


def report_of(truth, formats=None):
    return statistics.describe(truth, formats), anchor_report.examine(truth, ANCHORS)


def text_of(truth, issues=None, formats=None):
    return tables.format_text(*report_of(truth, formats), issues or Issues(truth.origin))


def found(kind, count, offenders):
    issues = Issues("made.json")
    issues.add_many(kind, count, offenders)
    return issues


def noise(truth, rows):
    rng = np.random.default_rng(0)
    return {row: rng.integers(0, 256, (*truth.image_sizes[row], 3), dtype=np.uint8) for row in rows}


def write(path, truth, issues=None, rows=(0,)):
    truth = dataclasses.replace(truth, issues=issues or Issues(truth.origin))
    page.write(path, *report_of(truth), truth, noise(truth, rows))
    return path


def parsed(path, truth, issues=None, rows=(0,)):
    return ParsedPage(write(path, truth, issues, rows).read_text("utf-8"))


def few():
    return random_annotations(np.random.default_rng(0), 6, 8)


@pytest.fixture(scope="module")
def figures_of_few():
    return figures.draw(*report_of(few()))


@pytest.fixture
def drawn_once(monkeypatch, figures_of_few):
    """Every report has these figures: drawing them is what takes time."""
    monkeypatch.setattr(figures, "draw", lambda statistics, anchors: figures_of_few)


# --- text ---


def every_kind():
    issues = Issues("made.json")
    for kind in KINDS:
        issues.add_many(kind, 1500, [f"image {i} ('{'long/' * 30}{i}.jpg') has something" for i in range(40)])
    return issues


@pytest.mark.parametrize("num_classes", [1, 12, 80, 1203])
def test_text_fits_a_terminal_whatever_the_data(num_classes):
    truth = random_annotations(np.random.default_rng(0), 12, 140, num_classes)
    names = [f"a name of a class that is longer than any column of the table {i}" for i in range(num_classes)]
    rows = zip(truth.box_image, truth.category_ids // 10 - 1, *truth.boxes_ltwh_px.T, strict=True)
    truth = annotations(truth.image_sizes, list(rows), names)
    text = text_of(truth, every_kind(), {f"format {i}": i for i in range(20)})
    lines = text.splitlines()
    assert len(lines) <= 92
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    assert re.search(r"STOPS +annotations file cannot be read \(1,500\): image 0", text)
    assert f"and {len(KINDS) - 10} more kinds" in text


def test_text_of_known_data():
    truth = annotations(
        [(200, 100), (200, 100), (50, 60)],
        [(0, 0, 10, 10, 40, 60), (0, 1, 5, 5, 30, 50), (1, 0, 10, 10, 4, 4), (1, 0, 10, 10, 4, 4)],
    )
    issues = found("image-without-boxes", 1, ["image 103 ('3.jpg')"])
    text = text_of(truth, issues, {"JPEG": 2, "PNG": 1})
    words = re.sub(" +", " ", text)
    for expected in (
        "images 3 (1 without boxes)",
        "boxes 4 to train on, 0 of them clipped",
        "classes 3 (1 without boxes)",
        "box areas small 2 (50.0 %), medium 2 (50.0 %), large 0 (0.0 %)",
        "image sizes 2: 200x100 2, 50x60 1",
        "crowding 0: 1, 1: 0, 2: 2",
        "formats JPEG 2, PNG 1",
        "cat 10 3 75.0 % 2\n dog 20 1 25.0 % 1\n",
        "without boxes (1): cow",
        "all 2 images with boxes, 4 boxes",
        "without an anchor: others own their best 1 25.0 % 2.56\n",
        "AP ceiling, of perfect outputs: AP 0.832, AP50 0.832, APs 0.505, APm 1.000\n",
        "warning image without boxes: image 103 ('3.jpg')",
        "what is missing: 1 without an anchor",
    ):
        assert expected in words, expected


def test_text_says_that_anchors_fit_or_which_do():
    assert "the anchors fit: mean best IoU" in text_of(few())
    rng = np.random.default_rng(0)
    rows = [(i // 4, 0, *rng.uniform(0, 300, 2), *rng.uniform(20, 40, 2)) for i in range(200)]
    text = text_of(annotations([(400, 400)] * 50, rows))
    assert re.search(r"--hparams=anchor_scale=[\d.]+,aspect_ratios=[\d.]+,[\d.]+,[\d.]+\n", text)
    assert "the anchors fit" not in text


def test_text_without_boxes():
    text = text_of(annotations([(50, 60)], []))
    assert "no class has a box" in text
    assert "AP ceiling: none" in text
    assert "issues: none" in text


def test_what_stops_comes_first():
    issues = found("crowd", 1, ["annotation 1"])
    issues.add("box-outside", "annotation 2")
    issues.add("image-missing", "image 3")
    lines = tables.issues_text(issues).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["STOPS", "fixed", "warning"]
    issues.skip_images()
    assert re.match("  fixed +box that reaches outside", tables.issues_text(issues).splitlines()[1])


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [("short", 5, "short"), ("longer one", 7, "lon…one"), ("a\x1b\tb", 9, "a??b"), ("even", 2, "e…")],
)
def test_long_and_unprintable_text(text, length, expected):
    assert tables.shorten(text, length) == expected


# --- the page ---


def test_nothing_of_the_data_becomes_markup(tmp_path, drawn_once):
    rows = [(i % 3, i % 7, 5 + i, 5, 20, 30) for i in range(14)]
    truth = annotations([(90, 80)] * 3, rows, NASTY)
    truth.file_names[0] = NASTY_FILE
    issues = Issues(f"/data/{NASTY[0]}.json")
    issues.add_many("crowd", 2, [f"annotation 3 of {NASTY[1]}", f"image 1 ({NASTY_FILE!r})"])
    shown = parsed(tmp_path / "report.html", truth, issues, rows=(0, 1))
    assert {tag for tag, _ in shown.tags} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "table", "tr", "th", "td",
        "img", "pre", "p", "b", "ul", "li", "div", "details", "summary",
    }  # fmt: skip
    for _, attrs in shown.tags:
        assert set(attrs) <= {"lang", "charset", "http-equiv", "content", "class", "src", "alt"}
    text = "".join(shown.text)
    for name in NASTY:
        assert tables.printable(name) in text
    assert f"annotation 3 of {NASTY[1]}" in text
    assert f"/data/{NASTY[0]}.json" in text


def test_a_page_needs_nothing_else(tmp_path, drawn_once, figures_of_few):
    content = write(tmp_path / "report.html", few()).read_text("utf-8")
    shown = ParsedPage(content)
    assert len(shown.images) == 2
    for attrs in shown.images:
        kind, _, data = attrs["src"].partition(",")
        assert kind == "data:image/png;base64"
        PIL.Image.open(io.BytesIO(base64.b64decode(data, validate=True))).verify()
    assert not re.search(r"(?i)<script|javascript:|@import|url\(|https?://|<link|\son\w+=", content)
    assert "default-src 'none'" in content


def test_all_kept_offenders_and_all_classes_are_on_the_page(tmp_path, drawn_once):
    truth = random_annotations(np.random.default_rng(0), 5, 200, num_classes=90, smallest=0.004, largest=0.05)
    issues = found("crowd", 4321, [f"annotation {i} has it" for i in range(1000)])
    anchors = anchor_report.examine(truth, ANCHORS)
    text = parsed(tmp_path / "a.html", truth, issues, rows=()).text
    for i in range(1000):
        assert f"annotation {i} has it" in text
    assert any("(4,321; the first 1,000 are)" in part for part in text)
    assert all(f"class {i}" in text for i in range(90))
    assert len(anchors.lost.offenders) > 5
    assert len(anchors.unreached.offenders) > 50
    assert set(anchors.lost.offenders + anchors.unreached.offenders) <= set(text)


def test_faults_alone_make_a_page_and_a_picture(tmp_path):
    first = found("box-negative", 2, ["annotation 7 (image 3) has <b>", "annotation 8"])
    second = Issues("<i>eval</i>.json")
    second.add("no-images", "it has none")
    page.write_faults(tmp_path / "a.html", [first, second])
    text = "".join(ParsedPage((tmp_path / "a.html").read_text()).text)
    assert "annotation 7 (image 3) has <b>" in text
    assert "<i>eval</i>.json" in text
    assert KINDS["no-images"].remedy in text
    page.write_faults(tmp_path / "a.png", [first, second])
    assert PIL.Image.open(tmp_path / "a.png").size[0] == 1400


# --- the picture ---


CASES = {
    "one image, one class": annotations([(90, 80)], [(0, 0, 5, 5, 20, 30)], ["cat"]),
    "no boxes": annotations([(90, 80)] * 2, []),
    "crowds alone": annotations([(90, 80)], [(0, 0, 5, 5, 20, 30)], crowds=[0]),
    "80 classes": random_annotations(np.random.default_rng(1), 9, 40, 80),
    "1203 classes": random_annotations(np.random.default_rng(1), 9, 40, 1203),
    "strange names": annotations([(90, 80)], [(0, i, 5, 5, 20, 30) for i in range(7)], NASTY),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CASES)
def test_figures_of_extreme_data(case):
    image = figures.draw(*report_of(CASES[case]))
    assert image.shape[1:] == (1400, 3)
    assert image.shape[0] < 2000
    for part in np.array_split(image[-1170:], 3):  # rows of panels
        assert (part[:, :700] < 128).mean() > 0.001


def test_figures_are_the_same_every_time(figures_of_few):
    np.testing.assert_array_equal(figures.draw(*report_of(few())), figures_of_few)


def test_of_too_many_classes_the_rarest_are_shown_too():
    classes = [statistics.ClassCount(i, f"c{i}", 500 - i, 1) for i in range(500)]
    shown, title = figures.shown_classes(classes)
    assert [of.category_id for of in shown] == [*range(54), *range(473, 500)]
    assert title == "500 classes: the 54 most frequent and the 27 rarest"
    assert figures.shown_classes(classes[:81]) == (classes[:81], "81 classes")


def test_a_picture_holds_text_figures_and_sheet(tmp_path, drawn_once):
    truth = few()
    without = PIL.Image.open(write(tmp_path / "a.png", truth, rows=()))
    image = PIL.Image.open(write(tmp_path / "b.PNG", truth, rows=(0, 1, 2)))
    assert image.size[0] == without.size[0] == 1400
    assert image.size[1] > without.size[1] + 300
    np.testing.assert_array_equal(np.asarray(image)[: without.size[1]], np.asarray(without))


# --- the sheet ---


def encoded(image, suffix):
    stream = io.BytesIO()
    PIL.Image.fromarray(image).save(stream, suffix)
    return stream.getvalue()


def chosen(truth, seed=0):
    tiny = encoded(np.zeros((5, 5, 3), np.uint8), "PNG")
    return list(pictures.sample_images(truth, lambda row: tiny, seed))


def test_images_with_most_boxes_come_first_and_images_without_last():
    counts = [2, 0, 9, 1, 30, 4, 5, 3, 12, 1, 0, 6]
    truth = annotations([(50, 60)] * 12, [(i, 0, 1, 1, 9, 9) for i, n in enumerate(counts) for _ in range(n)])
    rows = chosen(truth)
    assert rows[:3] == [4, 8, 2]
    assert len(rows) == len(set(rows)) == 9
    assert all(counts[row] for row in rows)
    assert rows == chosen(truth)
    assert any(rows != chosen(truth, seed) for seed in range(1, 6))
    assert chosen(annotations([(50, 60)] * 2, [])) == [0, 1]


def test_boxes_are_drawn_where_they_are(monkeypatch):
    monkeypatch.setattr(drawing, "_draw_label", lambda *args: None)
    truth = annotations([(600, 800)], [(0, 1, 200, 150, 400, 300)])
    sheet = pictures.sheet(truth, {0: np.zeros((600, 800, 3), np.uint8)}, 1400)
    assert sheet.shape[1] == 1400
    rows, columns = np.nonzero((sheet == np.array(drawing.class_colour(1))).all(axis=-1))
    # shown at half its size, below a caption of 24
    assert (columns.min(), columns.max() + 1, rows.min() - 24, rows.max() + 1 - 24) == (100, 300, 75, 225)


def test_images_flow_into_rows_and_none_is_wider_than_the_sheet():
    truth = annotations([(100, 100)] * 4 + [(10, 3000), (3000, 10)], [])
    sheet = pictures.sheet(truth, noise(truth, range(6)), 700)
    assert sheet.shape == (4 * 330, 700, 3)  # two, two, the long one, the tall one
    filled = (sheet != 255).any(axis=(0, 2))
    assert filled[:606].mean() > 0.95


def test_reading_shrinks_and_leaves_out_what_cannot_be_read():
    truth = annotations([(50, 60)] * 4, [])
    grey = np.full((900, 1200), 77, np.uint8)
    files = {0: encoded(grey, "JPEG"), 1: b"no image", 2: encoded(grey[:30, :20], "PNG"), 3: b""}
    images = pictures.sample_images(truth, files.__getitem__)
    assert {row: image.shape for row, image in images.items()} == {0: (480, 640, 3), 2: (30, 20, 3)}
    assert np.abs(images[0].astype(int) - 77).max() < 3

    def missing(row):
        raise FileNotFoundError(row)

    assert pictures.sample_images(truth, missing) == {}


# --- files ---


def test_another_suffix_or_place_is_one_line(tmp_path, drawn_once):
    with pytest.raises(UserError, match=r"report\.pdf: its name must end in \.html or \.png"):
        write(tmp_path / "report.pdf", few())
    with pytest.raises(UserError, match="cannot write the report"):
        write(tmp_path / "missing" / "report.html", few())
    with pytest.raises(UserError, match="must end in"):
        page.write_faults(tmp_path / "report", [])
    assert list(tmp_path.iterdir()) == []


def test_reports_of_real_photographs(coco128, tmp_path):
    truth = load_coco(coco128 / "instances.json", None)
    images = pictures.sample_images(
        truth, lambda row: (coco128 / "images" / truth.file_names[row]).read_bytes()
    )
    assert len(images) == 9
    page.write(tmp_path / "a.html", *report_of(truth), truth, images)
    shown = ParsedPage((tmp_path / "a.html").read_text("utf-8"))
    assert len(shown.images) == 2
    assert "toothbrush" in shown.text
