import re

import pytest

from common.args import ImagePolicy
from common.data.check.issues import KEPT, KINDS, SHOWN, DataError, Issue, Issues, Severity
from common.errors import UserError


def make_issues(on_bad_image="stop"):
    """Returns issues of every severity, in another order than in KINDS."""
    issues = Issues("x.json", ImagePolicy(on_bad_image))
    issues.add("crowd", "annotation 4 (image 1) is a crowd")
    issues.add("image-missing", "image 1 ('a.jpg')")
    issues.add("box-outside", "annotation 5 (image 1) has bbox [1, 2, 3, 4]")
    issues.add_many("box-negative", 12, (f"annotation {i}" for i in range(12)))
    return issues


@pytest.fixture
def issues():
    return make_issues()


def test_data_issues_are_sorted_by_kind_and_errors_and_bad_images_stop_training(issues):
    severities = {issue.kind: issue.severity for issue in issues}
    assert list(severities) == [kind for kind in KINDS if kind in severities]
    assert severities == {
        "box-negative": Severity.ERROR,
        "box-outside": Severity.FIXED,
        "crowd": Severity.WARNING,
        "image-missing": Severity.IMAGE,
    }
    assert {issue.kind for issue in issues.stopping} == {"box-negative", "image-missing"}


@pytest.mark.parametrize("kind", KINDS)
def test_message_of_each_kind_of_data_issue_is_one_line_that_names_the_faulty_entry(kind):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind)
    assert isinstance(KINDS[kind].severity, Severity)
    line = Issue(kind, 1, ["image 3 has value 7"]).line()
    assert line.startswith(f"{KINDS[kind].what}: image 3 has value 7. ")
    assert "\n" not in line and not line.endswith(".") and "  " not in line
    assert KINDS[kind].severity is not Severity.IMAGE or "--on_bad_image=skip" in line


def test_data_issue_of_unknown_kind_raises_key_error():
    with pytest.raises(KeyError, match="box-negativ"):
        Issues("x").add_many("box-negativ", 0, [])


def test_data_issue_message_of_many_faulty_entries_names_the_first_and_counts_all(issues):
    shown = "; ".join(f"annotation {i}" for i in range(SHOWN))
    line = issues["box-negative"].line()
    assert line.startswith(f"box with a negative side (12): {shown}; and {12 - SHOWN} more. COCO's bbox is")
    assert issues["box-negative"].line(shown=2).count("annotation") == 2


def test_data_issue_message_names_all_faulty_entries_if_there_are_few(issues):
    assert issues["box-outside"].line() == (
        "box that reaches outside its image: annotation 5 (image 1) has bbox [1, 2, 3, 4]."
        " It is clipped to the image"
    )
    issues.add_many("image-empty", SHOWN, [f"image {i}" for i in range(SHOWN)])
    assert "more" not in issues["image-empty"].line()


def test_data_issue_counts_faulty_entries_beyond_the_limit_without_describing_them():
    described = []
    issues = Issues("x")
    issues.add("crowd", "the first")
    issues.add_each("crowd", range(5 * KEPT), lambda i: described.append(i) or f"annotation {i}")
    issues.add("crowd", "the last")
    issue = issues["crowd"]
    assert issue.count == 5 * KEPT + 2
    assert len(issue.offenders) == KEPT and issue.offenders[:2] == ["the first", "annotation 0"]
    assert len(described) <= KEPT


def test_data_issue_with_zero_faulty_entries_is_not_listed():
    issues = Issues("x")
    issues.add_many("crowd", 0, [])
    assert issues["crowd"].count == 0 and issues["crowd"].offenders == []
    assert list(issues) == [] and issues.stopping == []
    issues.raise_if_stopping()


def test_data_error_lists_each_issue_that_stops_training_on_its_own_line(issues):
    with pytest.raises(DataError) as error:
        issues.raise_if_stopping()
    assert isinstance(error.value, UserError) and error.value.issues == (issues,)
    assert str(error.value).split("\n") == [
        "2 kinds of faults in the data:",
        f"  x.json: {issues['box-negative'].line()}",
        f"  x.json: {issues['image-missing'].line()}",
    ]


def test_data_error_message_is_one_line_for_one_issue_and_lists_the_issues_of_two_data_sets(issues):
    other = Issues("val.json")
    other.add("box-negative", "annotation 7 (image 3)")
    line = f"val.json: {other['box-negative'].line()}"
    assert str(DataError(other)) == line
    message = str(DataError(issues, other))
    assert message.startswith("3 kinds of faults") and message.endswith(f"\n  {line}")


def test_data_issue_of_a_repeated_file_name_has_its_count_and_the_first_rows_that_have_it():
    issues = Issues("x")
    issues.add_repeats("repeated-file", "file", [*"abbbbbaac", "", "", -1, -1], "row {}".format)
    assert issues["repeated-file"].offenders == [
        "file 'a' is given 3 times: row 0, row 6, row 7",
        "file 'b' is given 5 times: row 1, row 2, row 3, row 4, ...",
    ]


def test_bad_images_under_policy_skip_are_reported_but_do_not_stop_training():
    issues = make_issues("skip")
    assert [issue.kind for issue in issues.stopping] == ["box-negative"]
    missing = issues["image-missing"]
    assert missing.severity is Severity.SKIPPED and not missing.stops
    assert missing.line().endswith("image 1 ('a.jpg'). Left out by --on_bad_image=skip")
    assert issues["crowd"].severity is Severity.WARNING


def test_policy_skip_leaves_out_images_with_any_image_fault_but_other_errors_still_stop_training():
    issues = Issues("x", ImagePolicy("skip"))
    for kind in KINDS:
        issues.add(kind, "image 1")
    errors = [kind for kind, row in KINDS.items() if row.severity is Severity.ERROR]
    assert [issue.kind for issue in issues.stopping] == errors


def test_merging_two_lists_of_data_issues_adds_counts_and_keeps_which_kinds_are_skipped(issues):
    other = Issues("elsewhere", ImagePolicy("skip"))
    other.add("box-negative", "annotation 99")
    other.add("image-empty", "image 5")
    issues.extend(other)
    assert issues["box-negative"].count == 13
    assert issues["box-negative"].offenders[-1] == "annotation 99"
    assert issues["image-empty"].skipped and not issues["image-missing"].skipped


def test_data_issue_line_of_a_very_long_value_is_cut():
    issues = Issues("a.json")
    issues.add("label-line", "a.xml object 1 " + "9" * 5000)
    assert len(issues["label-line"].line()) < 600
