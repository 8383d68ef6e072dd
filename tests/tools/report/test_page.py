import base64
import dataclasses
import html.parser
import io
import re

import numpy as np
import PIL.Image

from tests.common.made_annotations import annotations, random_annotations
from tests.refusal import refusal
from tests.tools.report.made_reports import NASTY, found, sections_of
from tools.report import page, tables

TAGS = "html head meta title style body h2 table tr th td img p ul li details summary"
NASTY_FILE = "<b onclick='alert(3)'>&amp;\udce9.jpg"
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


def parsed(path, sections):
    page.write(path, sections)
    return ParsedPage(path.read_text("utf-8"))


def test_a_page_needs_nothing_else_and_nothing_of_the_data_becomes_markup(tmp_path):
    rows = [(i % 3, i % 7, 5 + i, 5, 20, 30) for i in range(14)]
    truth = dataclasses.replace(annotations([(90, 80)] * 3, rows, NASTY), origin=f"/data/{NASTY[0]}.json")
    truth.file_names[0] = NASTY_FILE
    issues = found("crowd", 2, [f"annotation 3 of {NASTY[1]}", f"image 1 ({NASTY_FILE!r})"])
    shown = parsed(tmp_path / "report.html", sections_of(truth, issues, shown=[PICTURE] * 2))
    assert {tag for tag, _ in shown.tags} <= set(TAGS.split())
    for _, attrs in shown.tags:
        assert set(attrs) <= {"lang", "charset", "http-equiv", "content", "class", "src", "alt"}
    text = "".join(shown.text)
    for expected in (*map(tables.printable, NASTY), f"annotation 3 of {NASTY[1]}", truth.origin):
        assert expected in text
    pictures = [attrs["src"].partition(",") for tag, attrs in shown.tags if tag == "img"]
    assert [kind for kind, _, _ in pictures] == ["data:image/png;base64"] * 2
    for _, _, data in pictures:
        PIL.Image.open(io.BytesIO(base64.b64decode(data, validate=True))).verify()
    content = (tmp_path / "report.html").read_text("utf-8")
    assert not re.search(r"(?i)@import|url\(|https?://", content)
    assert "default-src 'none'" in content


def test_all_kept_offenders_and_all_classes_are_on_the_page(tmp_path):
    truth = random_annotations(np.random.default_rng(0), 5, 200, num_classes=90, smallest=0.004, largest=0.05)
    offenders = [f"annotation {i} has it" for i in range(1000)]
    text = set(parsed(tmp_path / "a.html", sections_of(truth, found("crowd", 4321, offenders))).text)
    assert {*offenders} <= text
    assert {"crowd: the first 1,000 of 4,321", *(f"class {i}" for i in range(90))} <= text


def test_another_suffix_or_place_is_one_line(tmp_path):
    assert "report.pdf must end in .html" in refusal(page.check_suffix, "report.pdf")
    place = tmp_path / "missing" / "report.html"
    assert f"cannot write the report {place}: No such file" in refusal(page.write, place, [])
    assert list(tmp_path.iterdir()) == []
