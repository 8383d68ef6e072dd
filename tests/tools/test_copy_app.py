"""Copies of both apps, full and minimal, train, evaluate and pass their own tests in an empty directory."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from common.errors import UserError
from tools import copy_app
from tools.imports import ROOT, code_lines

LIMIT = 5_900  # code lines of the minimal copy; the aim is 5,000


def run(*command: str, cwd: pathlib.Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("app", copy_app.APPS)
@pytest.mark.parametrize("minimal", [False, True], ids=["full", "minimal"])
def test_a_copy_is_a_project(tmp_path, app, minimal):
    project = tmp_path / "project"
    copy_app.copy(app, project, copy_app.PARTS if minimal else ())
    ready = tmp_path / "venv"
    ready.mkdir()
    (ready / ".ready").touch()  # the environment of this test serves
    small = "--epochs=1 --image_size=64 --batch_size=4 --steps_per_epoch=2"
    run(
        "make",
        "demo",
        f"VENV={ready}",
        f"RUN={sys.executable}",
        "DEMO_IMAGES=8",
        f"DEMO_FLAGS={small}",
        cwd=project,
    )
    assert (project / "runs/demo/metrics.json").exists()
    run(sys.executable, "-m", "pytest", "-q", "--collect-only", cwd=project)
    # To run all would take minutes.
    quick = ["tests/common/test_boxes.py", "tests/common/test_letterbox.py"]
    assert "passed" in run(sys.executable, "-m", "pytest", "-q", "-x", *quick, cwd=project)


@pytest.mark.parametrize("app", copy_app.APPS)
def test_the_minimal_copy_is_small(tmp_path, app):
    product = copy_app.copy(app, tmp_path / "project", copy_app.PARTS)
    left_out = copy_app.left_out_files(app, copy_app.PARTS)
    assert sum(code_lines(path) for path in product if path not in left_out) <= LIMIT


@pytest.mark.parametrize("app", copy_app.APPS)
def test_a_copy_without_the_data_check_opens_data_plainly(tmp_path, app):
    product = copy_app.copy(app, tmp_path / "project", ["datacheck"])
    assert "common/datasets.py" in product and "common/datacheck/datasets.py" not in product
    assert "tools/conversion/coco_to_tfrecord.py" not in product
    for command in ("train.py", "eval.py", "infer.py"):
        text = (tmp_path / "project" / app / command).read_text()
        assert "from common import datasets\n" in text and "datacheck" not in text


def test_a_left_out_part_is_one_clear_error(tmp_path):
    copy_app.copy("yolov4", tmp_path / "project", ["tf_pipeline"])
    script = "from yolov4.tf_pipeline import YOLOv4TFPipeline as T; T()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "project", capture_output=True, text=True
    )
    assert "UserError: this copy was made without yolov4/tf_pipeline.py" in done.stderr


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(UserError, match="unknown app 'yolo': did you mean 'yolov4'"):
        copy_app.copy("yolo", tmp_path / "new")
    with pytest.raises(UserError, match="unknown part 'tfrecords': did you mean 'tfrecord'"):
        copy_app.copy("yolov4", tmp_path / "new", ["tfrecords"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not an empty directory"):
        copy_app.copy("yolov4", tmp_path)


def test_the_page_lists_every_part():
    page = (ROOT / "docs/copy_this.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(copy_app.PARTS)
    commands = re.search(r"```bash needs: a checkout[^\n]*\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert commands[0] == "python $REPO/tools/copy_app.py efficientdet my_project"
