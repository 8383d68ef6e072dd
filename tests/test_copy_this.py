"""Tests docs/copy_this.md: an app and common/, copied into an empty directory, are a working project."""

import pathlib
import re
import shlex
import sys

import pytest

from tests.commands import run, run_forked
from tests.conftest import ROOT
from tests.small_apps import TINY

APPS = ("efficientdet", "yolov4")
PACKAGES = (*APPS, "common", "tools", "tests")
PAGE = (ROOT / "docs/copy_this.md").read_text()
# The copy gets this code: before it ends, each command lists the files of the packages that it imported.
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
# A plugin of pytest.
KEEP_FIRST_TESTS = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    assert len(items) > 100
    items.sort(key=lambda item: item.location[1], reverse=True)  # the line
    items[:] = {item.path: item for item in items}.values()
"""


def run_copy_command(app: str, project: pathlib.Path, number: int) -> None:
    """Runs the command with this number of the page."""
    command = re.findall(r"`((?:mkdir my_project && )?cp -r .*?)`", PAGE)[number].replace("efficientdet", app)
    run("bash", "-c", command.replace("my_project", shlex.quote(str(project))))


@pytest.fixture(params=APPS)
def app(request) -> str:
    return request.param


@pytest.fixture
def project(app, tmp_path) -> pathlib.Path:
    """A copy of the app and common/, whose commands list the files that they imported."""
    directory = tmp_path / "my_project"
    run_copy_command(app, directory, 0)
    with (directory / "common/__init__.py").open("a") as file:
        file.write(LIST_FILES)
    return directory


def imported_files(output: str, project: pathlib.Path) -> list[str]:
    """Returns the files that a command of the copy lists in its output, relative to the copy."""
    files = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith("imported ")]
    assert files
    return [str(pathlib.Path(file).relative_to(project)) for file in files]


def test_all_modules_of_a_copied_app_are_imported_from_the_copy(app, project):
    files = imported_files(run(sys.executable, "-c", IMPORT_ALL, cwd=project).stdout, project)
    assert {f"{app}/train.py", f"{app}/export.py", "common/training/run.py"} <= set(files)
    assert sorted(files) == sorted(str(path.relative_to(project)) for path in project.rglob("*.py"))


@pytest.mark.slow
def test_copied_app_trains_evaluates_infers_and_exports_with_only_its_own_files(app, project, drawn):
    data = [f"--eval_images={drawn}/images", f"--eval_annotations={drawn}/instances.json"]
    train = [
        *(f"{app}/train.py", f"--model_name={app}-nano", f"--hparams={TINY[app]}", "--image_size=64"),
        *("--batch_size=4", "--steps_per_epoch=2", "--pipeline_type=dali_cpu", "--output_dir=run", *data),
        *(f"--train_images={drawn}/images", f"--train_annotations={drawn}/instances.json"),
    ]
    files = imported_files(run_forked(*train, "--epochs=1", cwd=project, eagerly=True).stdout, project)
    assert f"{app}/pipeline.py" in files
    for words in (
        (f"{app}/eval.py", "--weights=run", "--errors", *data),
        (f"{app}/infer.py", "--weights=run", f"--images={drawn}/images", "--output_dir=pictures"),
        (f"{app}/export.py", "--weights=run/best.weights.h5", "--format=onnx", "--output=model.onnx"),
    ):
        imported_files(run_forked(*words, cwd=project).stdout, project)
    assert {"metrics.json", "detections.json", "errors.json"} <= {file.name for file in project.glob("run/*")}
    assert (project / "pictures/detections.json").exists()
    assert (project / "model.onnx").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tests_of_a_copied_app_are_collected_and_the_first_of_each_file_passes(app, project):
    """The first test of a file shows that its fixtures, helpers and data are in the copy."""
    run_copy_command(app, project, 1)
    (project / "firsts.py").write_text(KEEP_FIRST_TESTS)
    tests = "tests" if app == APPS[0] else f"tests/{app}"  # tests/common takes minutes: once is enough
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "firsts", "-m", "not slow and not gpu"]
    output = run(*pytest_command, tests, cwd=project).stdout
    assert int(re.search(r"(\d+) passed", output)[1]) >= 15  # tests of real data may be skipped
