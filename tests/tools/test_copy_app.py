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

LIMIT = 5_000  # code lines of the minimal copy


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
    run(sys.executable, "-m", "pytest", "-q", "--setup-plan", cwd=project)
    # To run all would take minutes.
    quick = ["tests/common/test_boxes.py", "tests/common/test_hparams.py"]
    assert "passed" in run(sys.executable, "-m", "pytest", "-q", "-x", *quick, cwd=project)


@pytest.fixture(scope="module", params=copy_app.APPS)
def minimal(request, tmp_path_factory) -> tuple[str, pathlib.Path, list[str]]:
    """The app, its minimal copy, and the files of the product in it."""
    directory = tmp_path_factory.mktemp(request.param) / "project"
    return request.param, directory, copy_app.copy(request.param, directory, copy_app.PARTS)


def test_the_minimal_copy_is_small(minimal):
    _, directory, product = minimal
    assert sum(code_lines(str(directory / path)) for path in product) <= LIMIT
    assert len(list(directory.glob("tests/**/test_*.py"))) > 30


def check(app: str, project: pathlib.Path, product: list[str]) -> None:
    """No name is undefined, every call fits its function, and every module can be imported."""
    run(sys.executable, "-m", "ruff", "check", "--select=F,I", "--no-cache", ".", cwd=project)
    run(sys.executable, "-m", "mypy", f"--cache-dir={project}/../types", "common", app, "tools", cwd=project)
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in product]
    run(sys.executable, "-c", f"import {', '.join(modules)}", cwd=project)


def test_the_code_of_the_minimal_copy_fits_together(minimal):
    check(*minimal)


def test_help_has_no_lost_flag(minimal):
    app, directory, _ = minimal
    text = "".join(
        run(sys.executable, "-c", HELP.format(module=f"{app}.{command}"), cwd=directory)
        for command in ("train", "eval", "infer")
    ).split()
    assert "batch_size" in text and "dali_cpu" in text
    lost = {
        name for names in (*copy_app.PART_FLAGS.values(), *copy_app.PART_CHOICES.values()) for name in names
    }
    assert not lost & set(text)
    recipes = "".join(path.read_text() for path in (directory / app / "flags").glob("*.txt"))
    assert set(re.findall(r"^--(\w+)", recipes, re.MULTILINE)) <= set(text)


HELP = """
from absl import flags
import {module}
fv = flags.FlagValues()
{module}.define_flags(fv)
for name in fv:
    print(name, *(getattr(fv[name].parser, "enum_values", None) or ()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "part"), enumerate(copy_app.PARTS), ids=copy_app.PARTS)
def test_without_one_part_the_others_stay(tmp_path, number, part):
    product = copy_app.copy(copy_app.APPS[number % 2], tmp_path / "project", [part])
    assert set(product).isdisjoint(copy_app.left_out_files(copy_app.APPS[number % 2], [part]))
    text = (tmp_path / "project/common/args.py").read_text()
    assert ("train_file_pattern" in text) == (part not in ("tfrecord", "datacheck"))
    assert (" elastic: bool" in text) == (part not in ("elastic", "horovod"))
    check(copy_app.APPS[number % 2], tmp_path / "project", product)


@pytest.mark.parametrize("app", copy_app.APPS)
def test_a_copy_without_the_data_check_opens_data_plainly(tmp_path, app):
    product = copy_app.copy(app, tmp_path / "project", ["datacheck"])
    assert "common/datasets.py" in product and "common/datacheck/datasets.py" not in product
    assert "tools/conversion/coco_to_tfrecord.py" not in product
    for command in ("train.py", "eval.py", "infer.py"):
        text = (tmp_path / "project" / app / command).read_text()
        assert re.search(r"from common import .*\bdatasets\b", text) and "datacheck" not in text


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
