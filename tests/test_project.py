"""Promises about the repository itself: pins, recipes, and what must never be in it."""

import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml
from absl import flags

import efficientdet.config
import efficientdet.train
import yolov4.config
import yolov4.train
from efficientdet.optimization import make_schedule

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted(
    path
    for folder in ("common", "efficientdet", "yolov4", "examples", "tests", "docker")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".txt")
)


def test_every_package_of_the_design_is_declared_and_pinned():
    extras = PROJECT["optional-dependencies"]
    everything = [*PROJECT["dependencies"], *(r for requirements in extras.values() for r in requirements)]
    assert all(re.fullmatch(r"[\w-]+(\[[\w-]+\])?==[\w.]+", requirement) for requirement in everything)
    names = {re.split(r"[\[=]", requirement)[0] for requirement in everything}
    assert {"nvidia-dali-cuda120", "tensorflow", "horovod", "pycocotools", "absl-py"} <= names
    assert any(requirement.startswith("horovod==") for requirement in extras["horovod"])
    assert any(requirement.startswith("tensorflow[and-cuda]==") for requirement in extras["gpu"])


APPS = {"efficientdet": efficientdet, "yolov4": yolov4}
RECIPES = [path for name in APPS for path in sorted((ROOT / name / "flags").glob("*.txt"))]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_recipes_parse_and_name_their_source(recipe):
    text = recipe.read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    app = recipe.parts[-3]
    assert any(f"python {app}/train.py" in line for line in header)
    assert any("Hardware" in line for line in header)
    fv = flags.FlagValues()
    flags.DEFINE_multi_string("flagfile", [], "", flag_values=fv)
    APPS[app].train.define_flags(fv)
    fv(["train", *(line for line in text.splitlines() if line.startswith("--"))])
    APPS[app].config.get_config(fv.model_name)


def test_d0_recipe_is_the_published_schedule():
    schedule = make_schedule(
        efficientdet.config.get_config("efficientdet-d0"), effective_batch=64, steps_per_epoch=1000
    )
    expected = {0: 0.008, 500: 0.044, 1000: 0.08, 150_500: 0.04, 300_000: 0.0}
    for step, value in expected.items():
        assert float(schedule(step)) == pytest.approx(value, abs=1e-6)


def test_no_unsafe_loading():
    forbidden = re.compile(r"pickle\.|allow_pickle=True|unsafe_load|safe_mode=False|yaml\.load\((?!.*Loader)")
    for path in SOURCES:
        if path.suffix == ".py" and path != pathlib.Path(__file__):
            assert not forbidden.search(path.read_text()), path


def test_shell_scripts_parse():
    for script in [*(ROOT / "docker").glob("*.sh"), ROOT / ".ci/run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_licences_of_dependencies_are_listed():
    """docs/licences.md is written by docker/list_licences.py; a new pin must be in it."""
    rows = re.findall(
        r"^\| ([\w-]+) \| ([\w.+]+) \| (.+) \|$", (ROOT / "docs/licences.md").read_text(), re.MULTILINE
    )
    listed = {name: version for name, version, _ in rows}
    extras = PROJECT["optional-dependencies"]
    installed = ("dali-tf", "horovod", "faster-coco", "export", "dev")  # by `make test`
    for requirement in [*PROJECT["dependencies"], *(r for extra in installed for r in extras[extra])]:
        name, _, version = requirement.partition("==")
        assert listed.get(re.split(r"\[", name)[0]) == version, requirement
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:400]


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize(
    "extras", [("dev", "export", "faster-coco"), ("dev", "export", "faster-coco", "gpu")]
)
def test_the_default_set_up_is_locked_with_hashes(extras):
    """The lock that docker/setup_env.sh finds for `make setup` holds all pins, and nothing without a hash."""
    lock = (ROOT / "docker" / "locks" / f"{'+'.join(extras)}.txt").read_text()
    entries = re.split(r"\n(?=\S)", "".join(line for line in lock.splitlines(True) if line[0] != "#"))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert not re.search(r"https?://|--(extra-)?index", lock)
    locked = {entry.split(" ")[0].split(";")[0].strip() for entry in entries}
    for pin in [
        *PROJECT["dependencies"],
        *(p for extra in extras for p in PROJECT["optional-dependencies"][extra]),
    ]:
        assert re.sub(r"\[.*\]", "", pin) in locked, pin  # the lock lists what tensorflow[and-cuda] brings
    assert f"setup_env.sh $(VENV) {' '.join(extras[:3])}" in (ROOT / "Makefile").read_text()
