import subprocess
import sys

import pytest

from common.args import ImagePolicy
from common.data.check.issues import KINDS, DataError
from common.data.open import DataFlags
from tests.conftest import ROOT
from tests.refusal import refusal
from tests.tools.report.made_reports import ANCHORS
from tools import check_data


@pytest.fixture
def data(drawn):
    return DataFlags(str(drawn / "images"), str(drawn / "instances.json"))


def check(data, evaluation=None, **options):
    return check_data.check(data, evaluation or DataFlags(), ANCHORS, ImagePolicy(), **options)


def test_check_data_writes_one_report_page_each_for_training_and_evaluation_data(
    data, drawn_records, tmp_path, capsys
):
    evaluation = DataFlags(file_pattern=f"{drawn_records}-*.tfrecord")
    report = tmp_path / "a.html"
    text = check(data, evaluation, report=str(report), max_instances=3)
    assert capsys.readouterr().out == text + "\n"
    assert text.endswith(f"report: {tmp_path}/a_eval.html")
    assert f"report: {report}\n" in text
    assert text.count("beyond max_instances=3") == 2
    assert " ".join(text.split()).count("formats JPEG: 11, PNG: 1") == 2
    assert text.count("Anchors\n") == text.count("AP if a network found exactly") == 2
    for page in (report, tmp_path / "a_eval.html"):
        content = page.read_text("utf-8")
        assert content.count("<img ") == 2 and "toothbrush" in content


def test_data_check_without_a_report_prints_classes_and_issues_but_no_anchors(data, capsys):
    text = check(data)
    assert capsys.readouterr().out == text + "\n"
    assert "Anchors" not in text
    assert "Classes\n" in text and "Issues\n" in text


def test_check_data_report_of_two_invalid_json_files_lists_the_errors_of_both(tmp_path):
    (tmp_path / "a.json").write_text('{"images": [], "annotations": [], "categories": [}')
    (tmp_path / "b.json").write_text("")
    data = [DataFlags(str(tmp_path), str(tmp_path / f"{name}.json")) for name in "ab"]
    assert "2 kinds of faults" in refusal(check, *data, report=f"{tmp_path}/report.html", error=DataError)
    text = (tmp_path / "report.html").read_text()
    assert "<img " not in text
    for name, kind in (("a.json", "json-malformed"), ("b.json", "file-empty")):
        assert name in text and KINDS[kind].what in text and KINDS[kind].remedy[1:] in text


def test_check_data_refuses_a_report_file_not_named_html_before_it_reads_data():
    assert "--report=x.pdf must end in" in refusal(check, DataFlags(), report="x.pdf")


def test_check_data_refuses_an_anchor_flag_without_the_report_flag(data):
    command = [sys.executable, "tools/check_data.py", "--anchor_scale=2"]
    command += [f"--images={data.images}", f"--annotations={data.annotations}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--anchor_scale has no effect without --report=FILE.html: add it" in done.stderr
