import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import efficientdet.train
import yolov4.train
from common.anchors import Anchors
from common.args import ImagePolicy
from common.data.check.issues import KINDS, DataError
from common.data.open import DataFlags
from tests.common.made_annotations import random_annotations
from tests.conftest import ROOT
from tests.refusal import refusal
from tools import check_data

D0 = check_data.model_config("efficientdet-d0", image_size="128", max_instances=3)


@pytest.fixture
def data(drawn):
    return DataFlags(str(drawn / "images"), str(drawn / "instances.json"))


def check(data, evaluation=None, config=D0, **options):
    return check_data.check(data, evaluation or DataFlags(), config, ImagePolicy(), **options)


def run(data, *arguments):
    command = [sys.executable, "tools/check_data.py", *arguments]
    command += [f"--images={data.images}", f"--annotations={data.annotations}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_check_data_writes_one_report_page_each_for_training_and_evaluation_data(
    data, drawn_records, tmp_path, capsys
):
    evaluation = DataFlags(file_pattern=f"{drawn_records}-*.tfrecord")
    report = tmp_path / "a.html"
    text = check(data, evaluation, report=str(report))
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
    text = check(data, config=None)
    assert capsys.readouterr().out == text + "\n"
    assert "Anchors" not in text
    assert "Classes\n" in text and text.startswith(f"Issues in {data.annotations}\n")


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


def test_check_data_refuses_an_anchor_flag_without_the_report_or_model_name_flag(data):
    done = run(data, "--anchor_scale=2")
    assert done.returncode == 1
    assert "--anchor_scale has no effect without --report=FILE.html or --model_name: add one" in done.stderr


def test_check_data_checks_no_image_file_on_request_and_refuses_a_check_without_effect(
    data, drawn_records, tmp_path
):
    done = run(data._replace(images=str(tmp_path)), "--check=none")
    assert done.returncode == 0 and "image file that was not checked (12): image 10 ('00.jpg')" in done.stdout
    done = run(data, "--check=none", "--decode")
    assert done.returncode == 1 and "--decode has no effect with --check=none: omit one" in done.stderr
    command = [sys.executable, "tools/check_data.py", "--check=sample", f"--file_pattern={drawn_records}-*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "--check=sample has no effect without a COCO json" in done.stderr


# --- the model whose anchors are judged ---


def test_anchors_of_a_recipe_of_yolov4_are_judged_without_its_training_flags(data, tmp_path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("# a recipe\n--model_name=yolov4-tiny\n--noxla\n--epochs=3\n--image_size=96x160\n")
    done = run(data, f"--flagfile={recipe}", "--hparams=iou_thresh=0.2")
    assert "6 anchors of yolov4-tiny at 96x160, images stretched" in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.fixture
def recipe(data, tmp_path):
    """A recipe with the drawn data for training, and a copy of the json for evaluation."""
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_bytes(pathlib.Path(data.annotations).read_bytes())
    lines = [f"--train_images={data.images}", f"--train_annotations={data.annotations}", "--epochs=2"]
    lines += [f"--eval_images={data.images}", f"--eval_annotations={evaluation}"]
    (tmp_path / "recipe.txt").write_text("\n".join(lines))
    return tmp_path / "recipe.txt"


def run_recipe(recipe, *arguments):
    command = [sys.executable, "tools/check_data.py", f"--flagfile={recipe}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_training_and_evaluation_data_of_a_recipe_are_checked(data, recipe):
    done = run_recipe(recipe)
    titles = [line for line in done.stdout.splitlines() if line.startswith("Issues in ")]
    assert titles == [f"Issues in {data.annotations}", f"Issues in {recipe.parent}/evaluation.json"]
    assert done.returncode == 0


def test_training_data_of_a_recipe_beside_data_of_the_command_are_logged_as_not_checked(data, recipe):
    other = recipe.parent / "other.json"
    other.write_bytes(pathlib.Path(data.annotations).read_bytes())
    done = run_recipe(recipe, f"--images={data.images}", f"--annotations={other}")
    assert f"Issues in {other}\n" in done.stdout and f"Issues in {data.annotations}\n" not in done.stdout
    text = f"--train_annotations={data.annotations} is not checked, because --images={data.images} is given"
    assert text in done.stderr
    assert done.returncode == 0


def test_check_data_refuses_an_unknown_flag_of_a_recipe(data, tmp_path):
    (tmp_path / "recipe.txt").write_text("--model_name=yolov4-tiny\n--epoch=3\n")
    done = run(data, f"--flagfile={tmp_path}/recipe.txt")
    assert done.returncode == 1
    assert "unknown flag --epoch" in done.stderr


def test_check_data_refuses_a_training_flag_of_the_command_line(data):
    done = run(data, "--epochs=3", "--flagfile=yolov4/flags/finetune.txt")
    assert done.returncode == 1
    assert "unknown flag --epochs" in done.stderr


def test_check_data_refuses_a_missing_flagfile_in_one_line(data):
    done = run(data, "--flagfile=missing.txt")
    assert done.returncode == 1
    assert "missing.txt" in done.stderr and "Traceback" not in done.stderr


def test_training_flags_ignored_in_recipes_are_those_of_both_apps():
    commands = (efficientdet.train.Args, yolov4.train.Args)
    names = {field.name for args in commands for field in dataclasses.fields(args)}
    assert names == check_data.TRAINING_FLAGS


def test_efficientdet_nano_gets_a_sentence_because_its_assignment_ignores_the_iou(data, tmp_path):
    config = check_data.model_config("efficientdet-nano")
    text = " ".join(check(data, config=config, report=f"{tmp_path}/a.html").split())
    assert "Anchors efficientdet-nano assigns each box to the anchors that predict it best" in text
    assert "mean best IoU" not in text
    config = check_data.model_config("efficientdet-nano", hparams="assignment=max_iou")
    truth = random_annotations(np.random.default_rng(0), 2, 3)
    assert check_data.examine_anchors(truth, config).anchors == config.anchors


def test_model_of_anchors_takes_flags_over_hparams_over_the_models_values():
    config = check_data.model_config(
        "efficientdet-d1", hparams="anchor_scale=2,num_scales=2", anchor_scale=3.0, aspect_ratios=None
    )
    assert config.anchors == Anchors(3, 7, 2, (1.0, 2.0, 0.5), 3.0, (640, 640))


def test_model_of_anchors_refuses_unknown_names_and_flags_of_the_other_app():
    message = refusal(check_data.model_config, "yolo4")
    assert "unknown model 'yolo4': did you mean 'yolov4'?" in message
    message = refusal(check_data.model_config, "yolov4", anchor_scale=2.0)
    assert message == "--anchor_scale has no effect on the anchors of yolov4: remove it"
