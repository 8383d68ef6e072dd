import re

import pytest

from common.args import ImagePolicy
from common.data.check.issues import KEPT, KINDS, SHOWN, DataError, Issue, Issues, Severity
from common.errors import UserError


@pytest.fixture(params=["stop"])
def issues(request):
    """Issues of every severity, in another order than in KINDS."""
    issues = Issues("x.json", ImagePolicy(request.param))
    issues.add("crowd", "annotation 4 (image 1) is a crowd")
    issues.add("image-missing", "image 1 ('a.jpg')")
    issues.add("box-outside", "annotation 5 (image 1) has bbox [1, 2, 3, 4]")
    issues.add_many("box-negative", 12, (f"annotation {i}" for i in range(12)))
    return issues


def test_the_kinds_in_order(issues):
    severities = {issue.kind: issue.severity for issue in issues}
    assert list(severities) == [kind for kind in KINDS if kind in severities]
    assert severities == {
        "box-negative": Severity.ERROR,
        "box-outside": Severity.FIXED,
        "crowd": Severity.WARNING,
        "image-missing": Severity.IMAGE,
    }
    assert {issue.kind for issue in issues.stopping} == {"box-negative", "image-missing"}


def test_every_kind_can_be_said():
    for kind, row in KINDS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind)
        assert isinstance(row.severity, Severity)
        line = Issue(kind, 1, ["image 3 has value 7"]).line()
        assert line.startswith(f"{row.what}: image 3 has value 7. ")
        assert "\n" not in line and not line.endswith(".") and "  " not in line
        if row.severity is Severity.IMAGE:
            assert "--on_bad_image=skip" in line
    with pytest.raises(KeyError, match="box-negativ"):
        Issues("x").add_many("box-negativ", 0, [])


def test_a_line_names_some_and_counts_all(issues):
    shown = "; ".join(f"annotation {i}" for i in range(SHOWN))
    line = issues["box-negative"].line()
    assert line.startswith(f"box with a negative side (12): {shown}; and {12 - SHOWN} more. COCO's bbox is")
    assert issues["box-negative"].line(shown=2).count("annotation") == 2
    assert issues["box-outside"].line() == (
        "box that reaches outside its image: annotation 5 (image 1) has bbox [1, 2, 3, 4]."
        " It is clipped to the image"
    )
    exactly = Issues("x")
    exactly.add_many("crowd", SHOWN, [f"annotation {i}" for i in range(SHOWN)])
    assert "more" not in exactly["crowd"].line()


def test_counts_go_on_where_offenders_are_no_longer_kept():
    made = []
    issues = Issues("x")
    issues.add("crowd", "the first")
    issues.add_each("crowd", range(5 * KEPT), lambda i: made.append(i) or f"annotation {i}")
    issues.add("crowd", "the last")
    issue = issues["crowd"]
    assert issue.count == 5 * KEPT + 2
    assert len(issue.offenders) == KEPT and issue.offenders[:2] == ["the first", "annotation 0"]
    assert len(made) <= KEPT


def test_nothing_found_is_no_issue():
    issues = Issues("x")
    issues.add_many("crowd", 0, [])
    assert issues["crowd"].count == 0 and issues["crowd"].offenders == []
    assert list(issues) == [] and issues.stopping == []
    issues.raise_if_stopping()


def test_one_error_says_everything_that_stops(issues):
    with pytest.raises(DataError) as error:
        issues.raise_if_stopping()
    lines = str(error.value).split("\n")
    assert isinstance(error.value, UserError) and error.value.issues == (issues,)
    assert lines[0] == "2 kinds of faults in the data:"
    assert lines[1] == f"  x.json: {issues['box-negative'].line()}"
    assert lines[2] == f"  x.json: {issues['image-missing'].line()}" and len(lines) == 3


def test_one_fault_is_one_line_and_data_sets_are_listed_in_turn(issues):
    other = Issues("val.json")
    other.add("box-negative", "annotation 7 (image 3)")
    line = f"val.json: {other['box-negative'].line()}"
    assert str(DataError(other)) == line
    text = str(DataError(issues, other))
    assert text.startswith("3 kinds of faults") and text.endswith(f"\n  {line}")


def test_repeated_keys_name_the_first_rows():
    issues = Issues("x")
    issues.add_repeats("repeated-file", "file", [*"abbbbbaac", "", "", -1, -1], "row {}".format)
    assert issues["repeated-file"].offenders == [
        "file 'a' is given 3 times: row 0, row 6, row 7",
        "file 'b' is given 5 times: row 1, row 2, row 3, row 4, ...",
    ]


@pytest.mark.parametrize("issues", ["skip"], indirect=True)
def test_skipped_images_stop_nothing(issues):
    assert [issue.kind for issue in issues.stopping] == ["box-negative"]
    missing = issues["image-missing"]
    assert missing.severity is Severity.SKIPPED and not missing.stops
    assert missing.line().endswith("image 1 ('a.jpg'). Left out by --on_bad_image=skip")
    assert issues["crowd"].severity is Severity.WARNING


def test_a_fault_of_all_images_is_never_skipped():
    issues = Issues("x", ImagePolicy("skip"))
    for kind in KINDS:
        issues.add(kind, "image 1")
    errors = [kind for kind, row in KINDS.items() if row.severity is Severity.ERROR]
    assert [issue.kind for issue in issues.stopping] == errors


def test_extend(issues):
    other = Issues("elsewhere", ImagePolicy("skip"))
    other.add("box-negative", "annotation 99")
    other.add("image-empty", "image 5")
    issues.extend(other)
    assert issues["box-negative"].count == 13
    assert issues["box-negative"].offenders[-1] == "annotation 99"
    assert issues["image-empty"].skipped and not issues["image-missing"].skipped
