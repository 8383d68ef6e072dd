import re
import tomllib

import pytest
import yaml

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_SETUP = ("dev", "export", "faster-coco")
FOLDERS = ("common", "docker", "efficientdet", "examples", "tests", "tools", "yolov4")


def pins(extras):
    return [*PROJECT["dependencies"], *(pin for extra in extras for pin in EXTRAS[extra])]


def test_every_package_of_the_design_is_declared_and_pinned():
    everything = pins(EXTRAS)
    assert all(re.fullmatch(r"[\w-]+(\[[\w-]+\])?==[\w.]+", requirement) for requirement in everything)
    names = {re.split(r"[\[=]", requirement)[0] for requirement in everything}
    assert {"nvidia-dali-cuda120", "tensorflow", "horovod", "pycocotools", "absl-py"} <= names
    assert any(requirement.startswith("horovod==") for requirement in EXTRAS["horovod"])
    assert any(requirement.startswith("tensorflow[and-cuda]==") for requirement in EXTRAS["gpu"])


def test_no_unsafe_loading():
    forbidden = re.compile(r"pickle\.|allow_pickle=True|unsafe_load|safe_mode=False|yaml\.load\((?!.*Loader)")
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if path.name != "test_project.py":
            assert not forbidden.search(path.read_text()), path


def test_licences_of_dependencies_are_listed():
    page = (ROOT / "docs/dev/licences.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) +\| ([\w.+]+) +\| .+ \|$", page, re.MULTILINE)
    listed = {name.lower().replace("_", "-"): version for name, version in rows}
    for requirement in pins(("dali-tf", "horovod", "faster-coco", "export", "dev")):
        name, _, version = requirement.partition("==")
        assert listed.get(re.split(r"\[", name)[0]) == version, requirement
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:400]


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize("extras", [OF_SETUP, (*OF_SETUP, "gpu")])
def test_the_default_set_up_is_locked_with_hashes(extras):
    lock = (ROOT / "docker" / "locks" / f"{'+'.join(extras)}.txt").read_text()
    entries = re.split(r"\n(?=\S)", "".join(line for line in lock.splitlines(True) if line[0] != "#"))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert not re.search(r"https?://|--(extra-)?index", lock)
    locked = {entry.split(" ")[0].split(";")[0].strip() for entry in entries}
    for pin in pins(extras):
        assert re.sub(r"\[.*\]", "", pin) in locked, pin  # locks have no extras, only packages
    assert f"setup_env.sh $(VENV) {' '.join(OF_SETUP)}" in (ROOT / "Makefile").read_text()
