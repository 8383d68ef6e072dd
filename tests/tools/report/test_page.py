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
from common.datacheck.datasets import DataFlags
from common.datacheck.images import ImagePolicy
from common.datacheck.issues import KINDS, DataError, Issues
from common.errors import UserError
from common.evaluation import drawing
from tests.common.made_annotations import annotations, random_annotations
from tools.report import anchor_report, check_and_report, figures, page, pictures, statistics, tables

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
NOT_COUNTED: dict[str, int] = {}
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


def report_of(truth, formats=NOT_COUNTED):
    return statistics.describe(truth, formats), anchor_report.examine(truth, ANCHORS)


def sections_of(truth, issues=(), formats=NOT_COUNTED, shown=()):
    return tables.sections(*report_of(truth, formats), issues, shown)


def text_of(truth, issues=(), formats=NOT_COUNTED):
    return page.format_text(sections_of(truth, issues, formats))


def found(kind, count, offenders):
    issues = Issues("made.json")
    issues.add_many(kind, count, offenders)
    return issues


def parsed(path, sections):
    page.write(path, sections)
    return ParsedPage(path.read_text("utf-8"))


def few():
    return random_annotations(np.random.default_rng(0), 6, 8)


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
    text = text_of(truth, found("crowd", 1500, ["x" * 300] * 40), {f"format {i}": i for i in range(20)})
    lines = text.splitlines()
    assert len(lines) <= 92
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_text_has_every_kind_of_fault():
    text = " ".join(text_of(few(), every_kind()).split())
    for kind in KINDS.values():
        assert f"{kind.what} (1500): image 0" in text, kind


def test_text_of_known_data():
    truth = annotations(
        [(200, 100), (200, 100), (50, 60)],
        [(0, 0, 10, 10, 40, 60), (0, 1, 5, 5, 30, 50), (1, 0, 10, 10, 4, 4), (1, 0, 10, 10, 4, 4)],
    )
    issues = found("image-without-boxes", 1, ["image 103 ('3.jpg')"])
    text = text_of(truth, issues, {"JPEG": 2, "PNG": 1})
    words = re.sub(" +", " ", text)
    for expected in (
        "images 3\n",
        "boxes 4 to train on, 0 of them clipped",
        "classes 3 (1 without boxes)",
        "box areas small 2 (50.0 %), medium 2 (50.0 %), large 0 (0.0 %)",
        "200 x 100 2\n 50 x 60 1\n",
        "crowding 0: 1, 1: 0, 2: 2",
        "formats JPEG: 2, PNG: 1",
        "cat 10 3 75.0 % 2\n dog 20 1 25.0 % 1\n",
        "without boxes: cow",
        "2 of 2 images with boxes, 4 boxes",
        "without an anchor: others own their best 1 25.0 % 2.56\n",
        "AP ceiling, of perfect outputs: AP 0.832, AP50 0.832, APs 0.505, APm 1.000\n",
        "Warning: image without boxes: image 103 ('3.jpg')",
        "what is missing: 1 without an anchor",
    ):
        assert expected in words, expected


def test_text_says_how_well_other_scales_fit():
    rng = np.random.default_rng(0)
    rows = [(i // 4, 0, *rng.uniform(0, 300, 2), *rng.uniform(20, 40, 2)) for i in range(200)]
    lines = text_of(annotations([(400, 400)] * 50, rows)).splitlines()
    start = next(i for i, line in enumerate(lines) if "with --anchor_scale" in line)
    scales = {row[0]: row[1:] for row in map(str.split, lines[start + 1 : start + 10])}
    assert list(scales) == ["1", "1.5", "2", "2.5", "3", "4", "5", "6", "8"]
    assert float(scales["1.5"][0]) > float(scales["4"][0]) > 0


def test_text_without_boxes():
    text = text_of(annotations([(50, 60)], []))
    assert "AP ceiling, of perfect outputs: none, there is no box" in text
    assert text.endswith("Issues\n  none")


def test_what_stops_comes_first():
    issues = found("crowd", 1, ["annotation 1"])
    issues.add("box-outside", "annotation 2")
    issues.add("image-missing", "image 3")

    def first_words():
        return [item.split(":")[0] for item in tables.issue_items(issues) if isinstance(item, str)]

    assert first_words() == ["Error, or the image is skipped", "Fixed", "Warning"]
    issues.skip_images()
    assert first_words() == ["Fixed", "Skipped", "Warning"]


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [("short", 5, "short"), ("longer one", 7, "lon…one"), ("a\x1b\tb", 9, "a??b"), ("even", 2, "e…")],
)
def test_long_and_unprintable_text(text, length, expected):
    assert tables.shorten(text, length) == expected


# --- the page ---


def test_nothing_of_the_data_becomes_markup(tmp_path):
    rows = [(i % 3, i % 7, 5 + i, 5, 20, 30) for i in range(14)]
    truth = dataclasses.replace(annotations([(90, 80)] * 3, rows, NASTY), origin=f"/data/{NASTY[0]}.json")
    truth.file_names[0] = NASTY_FILE
    issues = Issues("made.json")
    issues.add_many("crowd", 2, [f"annotation 3 of {NASTY[1]}", f"image 1 ({NASTY_FILE!r})"])
    picture = np.zeros((9, 9, 3), np.uint8)
    shown = parsed(tmp_path / "report.html", sections_of(truth, issues, shown=[picture]))
    assert {tag for tag, _ in shown.tags} <= {
        "html", "head", "meta", "title", "style", "body", "h2", "table", "tr", "th", "td",
        "img", "p", "ul", "li", "details", "summary",
    }  # fmt: skip
    for _, attrs in shown.tags:
        assert set(attrs) <= {"lang", "charset", "http-equiv", "content", "class", "src", "alt"}
    text = "".join(shown.text)
    for name in NASTY:
        assert tables.printable(name) in text
    assert f"annotation 3 of {NASTY[1]}" in text
    assert f"/data/{NASTY[0]}.json" in text


def test_a_page_needs_nothing_else(tmp_path):
    pictures_of = [np.zeros((9, 9, 3), np.uint8)] * 2
    page.write(tmp_path / "report.html", sections_of(few(), shown=pictures_of))
    content = (tmp_path / "report.html").read_text("utf-8")
    shown = ParsedPage(content)
    assert len(shown.images) == 2
    for attrs in shown.images:
        kind, _, data = attrs["src"].partition(",")
        assert kind == "data:image/png;base64"
        PIL.Image.open(io.BytesIO(base64.b64decode(data, validate=True))).verify()
    assert not re.search(r"(?i)<script|javascript:|@import|url\(|https?://|<link|\son\w+=", content)
    assert "default-src 'none'" in content


def test_all_kept_offenders_and_all_classes_are_on_the_page(tmp_path):
    truth = random_annotations(np.random.default_rng(0), 5, 200, num_classes=90, smallest=0.004, largest=0.05)
    issues = found("crowd", 4321, [f"annotation {i} has it" for i in range(1000)])
    anchors = anchor_report.examine(truth, ANCHORS)
    text = parsed(tmp_path / "a.html", sections_of(truth, issues)).text
    for i in range(1000):
        assert f"annotation {i} has it" in text
    assert "crowd: the first 1,000 of 4,321" in text
    assert all(f"class {i}" in text for i in range(90))
    assert len(anchors.lost.offenders) > 5
    assert len(anchors.unreached.offenders) > 50
    assert set(anchors.lost.offenders + anchors.unreached.offenders) <= set(text)


def test_faults_alone_make_a_page_and_a_picture(tmp_path, coco128):
    """Of two data sets; and no figures of data that cannot be used."""
    (tmp_path / "a.json").write_text('{"images": [], "annotations": [], "categories": [}')
    (tmp_path / "b.json").write_text("")
    data = [DataFlags(str(tmp_path), str(tmp_path / f"{name}.json")) for name in "ab"]
    for suffix in ("html", "png"):
        report = tmp_path / f"report.{suffix}"
        with pytest.raises(DataError, match="2 kinds of faults"):
            check_and_report.check(*data, ANCHORS, ImagePolicy(), report=str(report))
    text = "".join(ParsedPage((tmp_path / "report.html").read_text()).text)
    for name, kind in (("a.json", "json-malformed"), ("b.json", "json-empty")):
        assert name in text and KINDS[kind].what in text and KINDS[kind].remedy[1:] in text
    assert PIL.Image.open(tmp_path / "report.png").size[0] == 1400


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
    assert image.shape == (1170, 1400, 3)
    for part in np.array_split(image, 3):  # rows of panels
        for panel in (part[:, :700], part[:, 700:]):
            assert (panel < 128).mean() > 0.001


def test_figures_are_the_same_every_time():
    first, again = (figures.draw(*report_of(few())) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_a_picture_holds_text_and_pictures(tmp_path):
    grey = np.full((300, 1400, 3), 77, np.uint8)
    page.write(tmp_path / "a.png", sections_of(few()))
    page.write(tmp_path / "b.PNG", sections_of(few(), shown=[grey, grey[:20, :9]]))
    without, image = (np.asarray(PIL.Image.open(tmp_path / name)) for name in ("a.png", "b.PNG"))
    np.testing.assert_array_equal(image[:-320], without)
    np.testing.assert_array_equal(image[-320:-20], grey)
    assert image.shape[1] == 1400 and (image[-20:, 9:] == 255).all()


# --- the sheet ---


def encoded(image, suffix):
    stream = io.BytesIO()
    PIL.Image.fromarray(image).save(stream, suffix)
    return stream.getvalue()


def test_images_with_most_boxes_come_first_and_images_without_last():
    counts = [2, 0, 9, 1, 30, 4, 5, 3, 12, 1, 0, 6]
    truth = annotations([(50, 60)] * 12, [(i, 0, 1, 1, 9, 9) for i, n in enumerate(counts) for _ in range(n)])
    rows = pictures.choose(truth)
    assert rows[:3] == [4, 8, 2]
    assert len(rows) == len(set(rows)) == 9
    assert all(counts[row] for row in rows)
    assert rows == pictures.choose(truth)
    assert any(rows != pictures.choose(truth, seed) for seed in range(1, 6))
    assert pictures.choose(annotations([(50, 60)] * 2, [])) == [0, 1]


def test_boxes_are_drawn_where_they_are(monkeypatch):
    monkeypatch.setattr(drawing, "_draw_label", lambda *args: None)
    truth = annotations([(600, 920)], [(0, 1, 230, 150, 460, 300)])
    black = encoded(np.zeros((600, 920, 3), np.uint8), "PNG")
    sheet = pictures.sheet(truth, lambda row: black)
    assert sheet.shape == (400, 3 * 466, 3)
    rows, columns = np.nonzero((sheet == np.array(drawing.class_colour(1))).all(axis=-1))
    # shown at half its size, below a caption of 24
    assert (columns.min(), columns.max() + 1, rows.min() - 24, rows.max() + 1 - 24) == (115, 345, 75, 225)


def test_images_of_all_shapes_have_a_place_and_those_that_cannot_be_read_have_none():
    truth = annotations([(50, 60)] * 5, [(i, 0, 1, 1, 9, 9) for i in range(5)])
    grey = np.full((900, 1200), 77, np.uint8)
    files = [encoded(image, "PNG") for image in (grey, grey[:30, :20], grey[:10], grey[:, :10], grey[:1])]
    assert pictures.sheet(truth, files.__getitem__).shape == (800, 3 * 466, 3)
    for file in files[:4]:
        assert pictures.sheet(truth, [file, b"no image", b"", file, file].__getitem__).shape[0] == 400

    def missing(row):
        raise FileNotFoundError(row)

    assert pictures.sheet(truth, missing) is None


# --- files ---


def test_another_suffix_or_place_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"report\.pdf: its name must end in \.html or \.png"):
        page.write(tmp_path / "report.pdf", [])
    with pytest.raises(UserError, match="cannot write the report"):
        page.write(tmp_path / "missing" / "report.html", [])
    with pytest.raises(UserError, match="must end in"):
        page.write(tmp_path / "report", [])
    assert list(tmp_path.iterdir()) == []


def test_reports_of_real_photographs(coco128, tmp_path):
    report = tmp_path / "a.html"
    data = DataFlags(str(coco128 / "images"), str(coco128 / "instances.json"))
    text = check_and_report.check(data, DataFlags(), ANCHORS, ImagePolicy(), report=str(report))
    assert text.endswith(f"report: {report}")
    shown = ParsedPage(report.read_text("utf-8"))
    assert len(shown.images) == 2
    assert "toothbrush" in shown.text
