"""Findings: what stops, how it is said, and what is stored."""

import pathlib
import re

import pytest

from common.datacheck.issues import KEPT, KINDS, SHOWN, DataError, Finding, Findings, Severity
from common.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def findings():
    """One of each severity, added in another order than KINDS has."""
    findings = Findings("x.json")
    findings.add("crowd", "annotation 4 (image 1) is a crowd")
    findings.add("image-missing", "image 1 ('a.jpg')")
    findings.add("box-outside", "annotation 5 (image 1) has bbox [1, 2, 3, 4]")
    findings.add_many("box-negative", 12, (f"annotation {i}" for i in range(12)))
    return findings


def test_the_kinds_in_order(findings):
    severities = {finding.kind: finding.severity for finding in findings}
    assert list(severities) == [kind for kind in KINDS if kind in severities]
    assert severities == {
        "box-negative": Severity.ERROR,
        "box-outside": Severity.FIXED,
        "crowd": Severity.WARNING,
        "image-missing": Severity.IMAGE,
    }
    assert {finding.kind for finding in findings.stopping} == {"box-negative", "image-missing"}


def test_every_kind_can_be_said():
    for kind, row in KINDS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind)
        assert isinstance(row.severity, Severity)
        line = Finding(kind, 1, ["image 3 has value 7"]).line()
        assert line.startswith(f"{row.what}: image 3 has value 7. ")
        assert "\n" not in line and not line.endswith(".") and "  " not in line
        if row.severity is Severity.IMAGE:
            assert "--on_bad_image=skip" in line


def test_every_kind_is_looked_for():
    """A kind that nobody adds is a promise that nobody keeps."""
    files = [*(ROOT / "common").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    sources = "\n".join(path.read_text() for path in files if path.name != "issues.py")
    assert [kind for kind in KINDS if f'"{kind}"' not in sources] == []


def test_a_misspelt_kind_is_our_bug():
    with pytest.raises(KeyError, match="box-negativ"):
        Findings("x").add("box-negativ", "annotation 1")
    with pytest.raises(KeyError):
        Findings("x").add_many("box-negativ", 0, [])


def test_a_line_names_some_and_counts_all(findings):
    shown = "; ".join(f"annotation {i}" for i in range(SHOWN))
    line = findings["box-negative"].line()
    assert line.startswith(f"box with a negative side (12): {shown}; and {12 - SHOWN} more. COCO's bbox is")
    assert findings["box-negative"].line(shown=2).count("annotation") == 2
    assert findings["box-outside"].line() == (
        "box that reaches outside its image: annotation 5 (image 1) has bbox [1, 2, 3, 4]."
        " It is clipped to the image"
    )
    exactly = Findings("x")
    exactly.add_many("crowd", SHOWN, [f"annotation {i}" for i in range(SHOWN)])
    assert "more" not in exactly["crowd"].line()


def test_counts_go_on_where_offenders_are_no_longer_kept():
    made = []

    def offenders():
        for i in range(5 * KEPT):
            made.append(i)
            yield f"annotation {i}"

    findings = Findings("x")
    findings.add("crowd", "the first")
    findings.add_many("crowd", 5 * KEPT, offenders())
    findings.add("crowd", "the last")
    finding = findings["crowd"]
    assert finding.count == 5 * KEPT + 2
    assert len(finding.offenders) == KEPT and finding.offenders[:2] == ["the first", "annotation 0"]
    assert len(made) <= KEPT  # words for the rest are never made


def test_nothing_found_is_no_finding():
    findings = Findings("x")
    findings.add_many("crowd", 0, [])
    assert list(findings) == [] and findings.stopping == []
    assert findings["crowd"].count == 0 and findings["crowd"].offenders == []
    assert list(findings) == []  # asking adds nothing
    findings.raise_if_stopping()


def test_one_error_says_everything_that_stops(findings):
    with pytest.raises(DataError) as error:
        findings.raise_if_stopping()
    lines = str(error.value).split("\n")
    assert isinstance(error.value, UserError) and error.value.findings == (findings,)
    assert lines[0] == "2 kinds of faults in the data:"
    assert lines[1] == f"  x.json: {findings['box-negative'].line()}"
    assert lines[2] == f"  x.json: {findings['image-missing'].line()}" and len(lines) == 3


def test_one_fault_is_one_line():
    findings = Findings("x.json")
    findings.add("box-negative", "annotation 7 (image 3)")
    assert str(DataError(findings)) == f"x.json: {findings['box-negative'].line()}"


def test_errors_of_two_data_sets(findings):
    other = Findings("val.json")
    other.add("box-negative", "annotation 7 (image 3)")
    text = str(DataError(findings, other))
    assert (
        text.startswith("3 kinds of faults")
        and "\n  val.json: box with a negative side: annotation 7" in text
    )


def test_skipped_images_stop_nothing(findings):
    findings.skip_images()
    assert [finding.kind for finding in findings.stopping] == ["box-negative"]
    missing = findings["image-missing"]
    assert missing.severity is Severity.SKIPPED and not missing.stops
    assert missing.line().endswith("image 1 ('a.jpg'). Left out by --on_bad_image=skip")
    assert findings["crowd"].severity is Severity.WARNING
    with pytest.raises(DataError) as error:
        findings.raise_if_stopping()
    assert "image 1" not in str(error.value)


def test_a_fault_of_all_images_is_never_skipped():
    findings = Findings("x")
    for kind, row in KINDS.items():
        if row.severity is not Severity.IMAGE:
            findings.add(kind, "image 1")
    stopping = [finding.kind for finding in findings.stopping]
    findings.skip_images()
    assert [finding.kind for finding in findings.stopping] == stopping


def test_extend(findings):
    other = Findings("elsewhere")
    other.add("box-negative", "annotation 99")
    other.add("image-empty", "image 5")
    other.skip_images()
    findings.extend(other)
    assert findings["box-negative"].count == 13
    assert findings["box-negative"].offenders[-1] == "annotation 99"
    assert findings["image-empty"].skipped and not findings["image-missing"].skipped
    assert findings.origin == "x.json"
