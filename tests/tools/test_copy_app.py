import contextlib
import importlib
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator

import keras
import pytest
from absl import flags

from tests.commands import run
from tests.refusal import refusal
from tests.source_sizes import code_lines
from tools import copy_app
from tools.imports import PRODUCT, ROOT

LIMIT = 5_000
NUM_COPIES = 6  # copy number i leaves out every sixth part of copy_app.PARTS, from part i on
COPIES = [(copy_app.APPS[i % 2], list(copy_app.PARTS)[i::NUM_COPIES]) for i in range(NUM_COPIES)]
COPIES += [(app, []) for app in copy_app.APPS]
QUICK = COPIES.pop(1)  # what `make test` checks: YOLOv4 without TFRecords, elastic training and export
LONG = [pytest.param(*copy, marks=pytest.mark.slow) for copy in COPIES]


@contextlib.contextmanager
def importable(project: pathlib.Path) -> Iterator[None]:
    """Imports of product packages come from a copy of the project."""

    def own() -> set[str]:
        return {name for name in sys.modules if name.partition(".")[0] in PRODUCT}

    modules, paths = {name: sys.modules.pop(name) for name in own()}, sys.path.copy()
    layers = dict(keras.saving.get_custom_objects())
    sys.path[:] = [str(project), *(path for path in paths if pathlib.Path(path).resolve() != ROOT)]
    try:
        yield
    finally:
        sys.path[:] = paths
        for name in own():
            del sys.modules[name]
        sys.modules.update(modules)
        keras.saving.get_custom_objects().update(layers)


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """check(app, project, product): names, imports and calls are valid."""
    # All copies share this cache. It starts as a copy of the project's cache.
    cache = tmp_path_factory.mktemp("types")
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", cache, dirs_exist_ok=True)

    def run_checks(app: str, project: pathlib.Path, product: list[str]) -> None:
        run(sys.executable, "-m", "ruff", "check", "--select=F,I", "--no-cache", ".", cwd=project)
        with importable(project):
            for path in product:
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                assert importlib.import_module(module).__file__ == str(project / path)
        run(sys.executable, "-m", "mypy", f"--cache-dir={cache}", "common", app, "tools", cwd=project)

    return run_checks


@pytest.fixture(scope="module", params=[pytest.param(app, marks=pytest.mark.slow) for app in copy_app.APPS])
def minimal(request, tmp_path_factory) -> tuple[str, pathlib.Path, list[str]]:
    """Returns (app, its minimal copy, product files)."""
    directory = tmp_path_factory.mktemp(request.param) / "project"
    return request.param, directory, copy_app.copy(request.param, directory, copy_app.PARTS)


def test_the_minimal_copy_is_small(minimal):
    _, directory, product = minimal
    assert sum(code_lines(str(directory / path)) for path in product) <= LIMIT
    assert len(list(directory.glob("tests/**/test_*.py"))) > 30


def test_the_code_of_the_minimal_copy_fits_together(minimal, check):
    check(*minimal)
    for path in minimal[1].glob("tests/**/*.py"):
        compile(path.read_text(), path, "exec")


def test_help_of_the_minimal_copy_has_no_lost_flag(minimal):
    app, directory, _ = minimal
    words = set()
    with importable(directory):
        for command in ("train", "eval", "infer"):
            fv = flags.FlagValues()
            importlib.import_module(f"{app}.{command}").define_flags(fv)
            for name in fv:
                words |= {name, *(getattr(fv[name].parser, "enum_values", None) or ())}
    assert {"batch_size", "dali_cpu"} <= words
    lost = [*copy_app.PART_FLAGS.values(), *copy_app.PART_CHOICES.values()]
    assert words.isdisjoint(name for names in lost for name in names)
    recipes = "".join(path.read_text() for path in (directory / app / "flags").glob("*.txt"))
    assert set(re.findall(r"^--(\w+)", recipes, re.MULTILINE)) <= words and "=fresh\n" not in recipes


def test_a_copy_without_the_data_check_opens_data_plainly(minimal):
    app, directory, product = minimal
    assert "common/data/datasets.py" in product and "common/data/check/datasets.py" not in product
    assert "tools/conversion/coco_to_tfrecord.py" not in product
    for command in ("train.py", "eval.py", "infer.py"):
        text = (directory / app / command).read_text()
        assert re.search(r"from common import .*\bdatasets\b", text) and "datacheck" not in text


def test_the_minimal_copy_is_a_project(minimal, tmp_path):
    app, project, _ = minimal
    (tmp_path / ".ready").touch()
    small = "DEMO_FLAGS=--epochs=1 --image_size=64 --batch_size=4 --steps_per_epoch=2"
    run("make", "demo", f"VENV={tmp_path}", f"RUN={sys.executable}", "DEMO_IMAGES=8", small, cwd=project)
    assert (project / "runs/demo/metrics.json").exists()
    run(sys.executable, "-m", "pytest", "-q", "--setup-plan", cwd=project)
    # All tests would take minutes.
    quick = [f"tests/{app}", "tests/common/training/test_run.py"]
    assert "passed" in run(sys.executable, "-m", "pytest", "-q", "-x", *quick, cwd=project).stdout


@pytest.mark.parametrize(("app", "parts"), [QUICK, *LONG])
def test_without_some_parts_or_none_the_others_stay_and_fit_together(tmp_path, check, app, parts):
    project = tmp_path / "project"
    product = copy_app.copy(app, project, parts)
    assert set(product).isdisjoint(copy_app.left_out_files(app, parts))
    text = (project / "common/args.py").read_text()
    assert ("train_file_pattern" in text) == {"tfrecord", "datacheck"}.isdisjoint(parts)
    assert (" elastic: bool" in text) == {"elastic", "horovod"}.isdisjoint(parts)
    check(app, project, product)


def test_bad_arguments_are_refused(tmp_path):
    new, file = tmp_path / "new", tmp_path / "file"
    file.touch()
    assert "unknown app 'yolo': did you mean 'yolov4'" in refusal(copy_app.copy, "yolo", new)
    said = refusal(copy_app.copy, "yolov4", new, ["tfrecords"])
    assert "unknown part 'tfrecords': did you mean 'tfrecord'" in said
    for taken in (tmp_path, file):
        assert "is not an empty directory" in refusal(copy_app.copy, "yolov4", taken)


def test_the_page_lists_every_part():
    page = (ROOT / "docs/copy_this.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(copy_app.PARTS)
    commands = re.search(r"```bash needs: a checkout[^\n]*\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert commands[0] == "python $REPO/tools/copy_app.py efficientdet my_project"
