import re

import numpy as np
import pytest

from common.data.check.issues import KINDS, Issues
from tests.common.made_annotations import annotations, random_annotations
from tests.tools.report.made_reports import few, found, sections_of
from tools.report import page, tables


def text_of(*given):
    return page.format_text(sections_of(*given))


@pytest.mark.parametrize("num_classes", [1, 200])
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
    issues = Issues("made.json")
    for kind in KINDS:
        issues.add_many(kind, 1500, [f"image {i} ('{'long/' * 30}{i}.jpg') has it" for i in range(40)])
    text = " ".join(text_of(few(), issues).split())
    for kind in KINDS.values():
        assert f"{kind.what} (1500): image 0" in text, kind


def test_text_of_known_data():
    rows = [(0, 0, 10, 10, 40, 60), (0, 1, 5, 5, 30, 50), (1, 0, 10, 10, 4, 4), (1, 0, 10, 10, 4, 4)]
    truth = annotations([(200, 100), (200, 100), (50, 60)], rows)
    issues = found("image-without-boxes", 1, ["image 103 ('3.jpg')"])
    words = re.sub(" +", " ", text_of(truth, issues, {"JPEG": 2, "PNG": 1}))
    for expected in (
        "images 3\n",
        "boxes 4 to train on, 0 of them clipped; dropped without area 0, crowds 0",
        "classes 3 (1 without boxes)",
        "box areas small 2 (50.0 %), medium 2 (50.0 %), large 0 (0.0 %)",
        "200 x 100 2\n 50 x 60 1\n",
        "crowding 0: 1, 1: 0, 2: 2",
        "formats JPEG: 2, PNG: 1",
        " min 5 % 25 % median 75 % 95 % max\n image height 50 65 125 200 200 200 200\n",
        "image width / height 0.5 0.5 0.5 0.5 0.85 1.13 1.2\n boxes per image 0 0.2 1 2 2 2 2\n",
        "cat 10 3 75.0 % 2\n dog 20 1 25.0 % 1\n",
        "without boxes: cow",
        "3,069 anchors at 128x128: 3 scales per octave, aspect ratios 1, 2, 0.5, anchor scale 4",
        "2 of 2 images with boxes, 4 boxes",
        "with --anchor_scale mean best IoU boxes with an IoU above 0.5\n",
        "no anchor: another box has the best one 1 25.0 % 2.56\n",
        "Warning: image without boxes: image 103 ('3.jpg')",
    ):
        assert expected in words, expected


def test_text_without_boxes():
    text = text_of(annotations([(50, 60)], []))
    assert re.search(r"formats +not counted\n", text)
    assert text.endswith("Issues\n  none")


def test_what_stops_comes_first():
    issues = found("crowd", 1, ["annotation 1"])
    issues.add("box-outside", "annotation 2")
    issues.add("image-missing", "image 3")

    def first_words():
        return [item.split(":")[0] for item in tables.issue_items(issues) if isinstance(item, str)]

    assert first_words() == ["Error, or the image is skipped", "Fixed", "Warning"]
    issues["image-missing"].skipped = True
    assert first_words() == ["Fixed", "Skipped", "Warning"]


def test_long_and_unprintable_text():
    given = [("short", 5), ("longer one", 7), ("a\x1b\tb", 9), ("even", 2)]
    assert [tables.shorten(*each) for each in given] == ["short", "lon…one", "a??b", "e…"]


def test_numbers_have_three_or_four_digits():
    given = [0.5812, 15.04, 15, 99.96, 100.4, 1024]
    assert list(map(tables.number, given)) == ["0.581", "15", "15", "100", "100", "1,024"]
