"""Tests docs/copy_this.md: an app and common/, copied into an empty directory, are a working project."""

import pathlib
import re
import shlex
import sys

import pytest

from tests.commands import run
from tests.conftest import ROOT
from tests.small_apps import TINY

APPS = ("efficientdet", "yolov4")
PACKAGES = (*APPS, "common", "tools", "tests")
PAGE = (ROOT / "docs/copy_this.md").read_text()
# The copy gets this code: at its end, each command lists the files of the packages that it imported.
LIST_FILES = f"""
import atexit, sys
atexit.register(lambda: [
    print("imported", module.__file__) for name, module in list(sys.modules.items())
    if name.partition(".")[0] in {PACKAGES} and getattr(module, "__file__", None)
])
"""
IMPORT_ALL = """
import importlib, pathlib
for path in sorted(pathlib.Path().rglob("*.py")):
    importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
"""


def copy(app: str, project: pathlib.Path, number: int) -> pathlib.Path:
    """Runs the command with this number of the page."""
    project.mkdir(exist_ok=True)
    command = re.findall(r"`(cp -r .*?)`", PAGE)[number].replace("efficientdet", app)
    command = command.replace("my_project", shlex.quote(str(project)))
    run("bash", "-c", command)
    return project


@pytest.fixture
def project(request, tmp_path) -> pathlib.Path:
    directory = copy(request.param, tmp_path / "my_project", 0)
    with (directory / "common/__init__.py").open("a") as file:
        file.write(LIST_FILES)
    return directory


def run_there(project: pathlib.Path, *words: str) -> list[str]:
    """Runs Python in the copy. Returns the imported files, relative to the copy."""
    done = run(sys.executable, *words, cwd=project)
    files = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert files
    return [str(pathlib.Path(file).relative_to(project)) for file in files]


@pytest.mark.parametrize(("app", "project"), [(app, app) for app in APPS], indirect=["project"])
def test_all_modules_of_a_copy_are_imported_from_it(app, project):
    files = run_there(project, "-c", IMPORT_ALL)
    assert {f"{app}/train.py", f"{app}/export.py", "common/training/run.py"} <= set(files)
    assert sorted(files) == sorted(str(path.relative_to(project)) for path in project.rglob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize(("app", "project"), [(app, app) for app in APPS], indirect=["project"])
def test_copy_trains_resumes_evaluates_infers_and_exports(app, project, drawn):
    data = [f"--eval_images={drawn}/images", f"--eval_annotations={drawn}/instances.json"]
    train = [
        *(f"{app}/train.py", f"--model_name={app}-nano", f"--hparams={TINY[app]}", "--image_size=64"),
        *("--batch_size=4", "--steps_per_epoch=2", "--pipeline_type=dali_cpu", "--output_dir=run", *data),
        *(f"--train_images={drawn}/images", f"--train_annotations={drawn}/instances.json"),
    ]
    assert f"{app}/pipeline.py" in run_there(project, *train, "--epochs=1")
    run_there(project, *train, "--epochs=2")
    assert len((project / "run/results.csv").read_text().splitlines()) == 3
    run_there(project, f"{app}/eval.py", "--weights=run", "--errors", *data)
    assert {"metrics.json", "detections.json", "errors.json"} <= {file.name for file in project.glob("run/*")}
    images = f"--images={drawn}/images"
    run_there(project, f"{app}/infer.py", "--weights=run", images, "--output_dir=found")
    assert (project / "found/detections.json").exists()
    weights = "--weights=run/best.weights.h5"
    run_there(project, f"{app}/export.py", weights, "--format=onnx", "--output=model.onnx")
    assert (project / "model.onnx").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("app", "project"), [(app, app) for app in APPS], indirect=["project"])
def test_copied_tests_pass_in_a_copy(app, project):
    copy(app, project, 1)
    tests = "tests" if app == APPS[0] else f"tests/{app}"  # tests/common takes minutes: once is enough
    done = run(sys.executable, "-m", "pytest", "-q", "-m", "not slow", tests, cwd=project)
    assert re.search(r"\d{3,} passed", done.stdout)
