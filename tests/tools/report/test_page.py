import base64
import dataclasses
import html.parser
import io
import re

import numpy as np
import PIL.Image

from common.data.check.issues import KINDS, Issues
from common.data.labels import LabelMap
from tests.common.made_annotations import annotations, random_annotations
from tests.refusal import refusal
from tests.tools.report.made_reports import HOSTILE_NAMES, issues_of, sections_of
from tools.report import page

TAGS = "html head meta title style body h2 table tr th td img p ul li details summary"
HOSTILE_FILE = "<b onclick='alert(3)'>&amp;\udce9.jpg"
PICTURE = np.zeros((9, 9, 3), np.uint8)


class ParsedPage(html.parser.HTMLParser):
    """Tags must be closed in order."""

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


def written_page(path, sections):
    page.write(path, sections)
    return ParsedPage(path.read_text("utf-8"))


def test_data_report_page_loads_no_other_file_and_escapes_html_in_names(tmp_path):
    rows = [(i % 3, i % 7, 5 + i, 5, 20, 30) for i in range(14)]
    truth = dataclasses.replace(
        annotations([(90, 80)] * 3, rows, HOSTILE_NAMES), origin=f"/data/{HOSTILE_NAMES[0]}.json"
    )
    truth.file_names[0] = HOSTILE_FILE
    issues = issues_of("crowd", 2, [f"annotation 3 of {HOSTILE_NAMES[1]}", f"image 1 ({HOSTILE_FILE!r})"])
    parsed_page = written_page(tmp_path / "report.html", sections_of(truth, issues, pictures=[PICTURE] * 2))
    assert {tag for tag, _ in parsed_page.tags} <= set(TAGS.split())
    for _, attrs in parsed_page.tags:
        assert set(attrs) <= {"lang", "charset", "http-equiv", "content", "class", "src", "alt"}
    text = "".join(parsed_page.text)
    for expected in (
        *map(page.printable, HOSTILE_NAMES),
        f"annotation 3 of {HOSTILE_NAMES[1]}",
        truth.origin,
    ):
        assert expected in text
    pictures = [attrs["src"].partition(",") for tag, attrs in parsed_page.tags if tag == "img"]
    assert [kind for kind, _, _ in pictures] == ["data:image/png;base64"] * 2
    for _, _, data in pictures:
        PIL.Image.open(io.BytesIO(base64.b64decode(data, validate=True))).verify()
    content = (tmp_path / "report.html").read_text("utf-8")
    assert not re.search(r"(?i)@import|url\(|https?://", content)
    assert "default-src 'none'" in content


def test_data_report_page_lists_every_class_and_every_stored_faulty_entry_of_an_issue(tmp_path):
    truth = random_annotations(np.random.default_rng(0), 5, 200, num_classes=90, smallest=0.004, largest=0.05)
    offenders = [f"annotation {i} has it" for i in range(1000)]
    text = set(
        written_page(tmp_path / "a.html", sections_of(truth, issues_of("crowd", 4321, offenders))).text
    )
    assert {*offenders} <= text
    assert {"crowd: the first 1,000 of 4,321", *(f"class {i}" for i in range(90))} <= text


def test_data_report_page_and_text_show_the_issues_before_all_other_sections(tmp_path):
    path = tmp_path / "a.html"
    truth = annotations([(50, 60)], [])
    sections = sections_of(truth, issues_of("crowd", 1, ["annotation 1"]))
    page.write(path, sections)
    titles = re.findall("<h2>(.*)</h2>", path.read_text())
    assert titles == [f"Issues in {truth.origin}", truth.origin, "Classes", "Figures", "Anchors"]
    text = page.format_text(sections)
    assert text.startswith(f"Issues in {truth.origin}\n  Warning: crowd: annotation 1.")
    assert text.index("annotation 1") < text.index("\nClasses\n")


def test_data_report_page_in_a_missing_directory_is_refused(tmp_path):
    path = tmp_path / "missing" / "report.html"
    assert f"cannot write the report {path}: No such file" in refusal(page.write, path, [])
    assert list(tmp_path.iterdir()) == []


# --- text ---


def text_of(*arguments):
    return page.format_text(sections_of(*arguments))


def test_data_report_text_with_long_names_and_200_classes_fits_a_terminal():
    truth = random_annotations(np.random.default_rng(0), 12, 140, num_classes=200)
    names = [f"a name of a class that is longer than any column of the table {i}" for i in range(200)]
    truth = dataclasses.replace(truth, label_map=LabelMap(truth.label_map.category_ids, tuple(names)))
    text = text_of(truth, issues_of("crowd", 1500, ["x" * 300] * 40), {f"format {i}": i for i in range(20)})
    lines = text.splitlines()
    assert len(lines) <= 92 and any(line.strip() == "and 188 more" for line in lines)
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_data_report_text_names_every_kind_of_issue_with_its_count():
    issues = Issues("made.json")
    for kind in KINDS:
        issues.add_many(kind, 1500, [f"image {i} ('{'long/' * 30}{i}.jpg') has it" for i in range(40)])
    text = " ".join(text_of(annotations([(50, 60)], []), issues).split())
    for name, issue_kind in KINDS.items():
        assert f"{issue_kind.what} (1500): image 0" in text, name


def test_data_report_text_of_three_images_has_hand_computed_image_box_class_and_anchor_numbers():
    rows = [(0, 0, 10, 10, 40, 60), (0, 1, 5, 5, 30, 50), (1, 0, 10, 10, 4, 4), (1, 0, 10, 10, 4, 4)]
    truth = annotations([(200, 100), (200, 100), (50, 60)], rows)
    issues = issues_of("image-without-boxes", 1, ["image 103 ('3.jpg')"])
    words = re.sub(" +", " ", text_of(truth, issues, {"JPEG": 2, "PNG": 1}))
    for expected in (
        "images 3\n",
        "boxes 4 to train on, 0 of them clipped; dropped without area 0, crowds 0",
        "classes 3 (1 without boxes)",
        "box areas small 2 (50.0 %), medium 2 (50.0 %), large 0 (0.0 %)",
        "formats JPEG: 2, PNG: 1",
        " min 5 % 25 % median 75 % 95 % max\n image height 50 65 125 200 200 200 200\n",
        "image width / height 0.5 0.5 0.5 0.5 0.85 1.13 1.2\n boxes per image 0 0.2 1 2 2 2 2\n",
        "cat 10 3 75.0 % 2 2 1 0\n dog 20 1 25.0 % 1 0 1 0\n",
        "without boxes: cow",
        "3,069 anchors at 128x128: 3 scales per octave, aspect ratios 1, 2, 0.5, anchor scale 4",
        "2 of 2 images with boxes, 4 boxes",
        "with --anchor_scale mean best IoU boxes with an IoU above 0.5\n",
        "no anchor: another box has the best one 1 25.0 %\n",
        "AP if a network found exactly the boxes that have an anchor: all boxes 83.2, small 50.5, medium",
        "Warning: image without boxes: image 103 ('3.jpg')",
    ):
        assert expected in words, expected


def test_data_report_text_says_not_counted_without_image_formats_and_none_without_issues():
    text = text_of(annotations([(50, 60)], []))
    assert re.search(r"formats +not counted\n", text)
    assert text.startswith("Issues in made.json\n  none\n")


def test_data_report_lists_issues_that_stop_training_first_unless_their_images_are_skipped():
    issues = issues_of("crowd", 1, ["annotation 1"])
    issues.add("box-outside", "annotation 2")
    issues.add("image-missing", "image 3")

    def first_words():
        return [item.split(":")[0] for item in page.issue_items(issues) if isinstance(item, str)]

    assert first_words() == ["Error, or the image is skipped", "Fixed", "Warning"]
    issues["image-missing"].skipped = True
    assert first_words() == ["Fixed", "Skipped", "Warning"]


def test_long_text_is_shortened_in_the_middle_and_control_characters_replaced():
    cases = [("short", 5), ("longer one", 7), ("a\x1b\tb", 9), ("even", 2)]
    assert [page.shorten(*case) for case in cases] == ["short", "lon…one", "a??b", "e…"]


def test_data_report_rounds_numbers_to_three_digits_but_keeps_all_digits_of_integers():
    values = [0.5812, 15.04, 15, 99.96, 100.4, 1024]
    assert list(map(page.number, values)) == ["0.581", "15", "15", "100", "100", "1,024"]
