import subprocess
import sys

from common.args import ImagePolicy
from common.data.check.issues import KINDS, DataError
from common.data.open import DataFlags
from tests.conftest import ROOT
from tests.refusal import refusal
from tests.tools.report.made_reports import ANCHORS
from tools import check_data


def test_two_valid_data_sets_give_two_reports(drawn, drawn_records, tmp_path, capsys):
    data = DataFlags(str(drawn / "images"), str(drawn / "instances.json"))
    evaluation = DataFlags(file_pattern=f"{drawn_records}-*.tfrecord")
    report = tmp_path / "a.html"
    options = {"report": str(report), "max_instances": 3}
    text = check_data.check(data, evaluation, ANCHORS, ImagePolicy(), **options)
    assert capsys.readouterr().out == text + "\n"
    assert text.endswith(f"report: {tmp_path}/a_eval.html")
    assert f"report: {report}\n" in text
    assert text.count("beyond max_instances=3") == 2
    assert " ".join(text.split()).count("formats JPEG: 11, PNG: 1") == 2
    assert text.count("Anchors\n") == text.count("AP if a network found exactly") == 2
    for page in (report, tmp_path / "a_eval.html"):
        content = page.read_text("utf-8")
        assert content.count("<img ") == 2 and "toothbrush" in content


def test_without_report_the_text_has_no_anchors(drawn, capsys):
    data = DataFlags(str(drawn / "images"), str(drawn / "instances.json"))
    text = check_data.check(data, DataFlags(), ANCHORS, ImagePolicy())
    assert capsys.readouterr().out == text + "\n"
    assert "Anchors" not in text
    assert "Classes\n" in text and "Issues\n" in text


def test_page_lists_the_errors_of_invalid_data(tmp_path):
    (tmp_path / "a.json").write_text('{"images": [], "annotations": [], "categories": [}')
    (tmp_path / "b.json").write_text("")
    data = [DataFlags(str(tmp_path), str(tmp_path / f"{name}.json")) for name in "ab"]
    arguments = [check_data.check, *data, ANCHORS, ImagePolicy()]
    assert "2 kinds of faults" in refusal(*arguments, report=f"{tmp_path}/report.html", error=DataError)
    text = (tmp_path / "report.html").read_text()
    assert "<img " not in text
    for name, kind in (("a.json", "json-malformed"), ("b.json", "file-empty")):
        assert name in text and KINDS[kind].what in text and KINDS[kind].remedy[1:] in text


def test_report_with_another_suffix_is_refused_before_data_are_read():
    arguments = [check_data.check, DataFlags(), DataFlags(), ANCHORS, ImagePolicy()]
    assert "--report=x.pdf must end in" in refusal(*arguments, report="x.pdf")


def test_anchor_flag_without_report_is_refused(drawn):
    words = [f"--images={drawn}/images", f"--annotations={drawn}/instances.json", "--anchor_scale=2"]
    done = subprocess.run(
        [sys.executable, "tools/check_data.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "--anchor_scale has no effect without --report=FILE.html: add it" in done.stderr
