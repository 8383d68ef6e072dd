"""Tests the project's files: pins, locks, licences and the CI workflow."""

import fnmatch
import re
import tomllib

import pytest
import yaml

from common.evaluation import exported
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_SETUP = ("dev", "export", "faster-coco")
FOLDERS = ("common", "docker", "efficientdet", "examples", "tests", "tools", "yolov4")


def pins(extras):
    return [*PROJECT["dependencies"], *(pin for extra in extras for pin in EXTRAS[extra])]


def test_every_dependency_is_pinned_to_one_version():
    for requirement in pins(EXTRAS):
        assert re.fullmatch(r"[\w-]+(\[[\w-]+\])?==[\w.]+", requirement)


def test_no_file_uses_pickle_or_unsafe_yaml():
    forbidden = re.compile(r"pickle\.|allow_pickle=True|unsafe_load|safe_mode=False|yaml\.load\((?!.*Loader)")
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if path.name != "test_project.py":
            assert not forbidden.search(path.read_text()), path


def test_licence_of_every_dependency_is_listed():
    page = (ROOT / "docs/dev/licences.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) +\| ([\w.+]+) +\| .+ \|$", page, re.MULTILINE)
    listed = {name.lower().replace("_", "-"): version for name, version in rows}
    for requirement in pins(("dali-tf", "horovod", "faster-coco", "export", "dev")):
        name, _, version = requirement.partition("==")
        assert listed.get(re.split(r"\[", name)[0]) == version, requirement
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:400]


def test_github_workflow_runs_only_the_ci_script():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_workflows_of_the_site_run_make_docs_and_publish_only_by_hand():
    for name, triggers in (("docs", {"push", "pull_request"}), ("publish_docs", {"workflow_dispatch"})):
        workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
        (job,) = workflow["jobs"].values()
        assert [step["run"] for step in job["steps"] if "run" in step] == ["make docs"]
        starts = workflow[True]  # YAML 1.1 reads the key "on" as true
        assert set([starts] if isinstance(starts, str) else starts) == triggers


def test_extra_gpu_export_has_the_versions_that_messages_of_the_export_name():
    for requirement, pin in zip(
        (exported.ONNX_RUNTIME, exported.TENSORRT), pins(["gpu-export"])[-2:], strict=True
    ):
        assert fnmatch.fnmatch(pin, requirement.strip("'"))


@pytest.mark.parametrize("extras", [OF_SETUP, (*OF_SETUP, "gpu")], ids="+".join)
def test_lock_file_of_make_setup_has_every_pinned_package_with_a_sha256_hash(extras):
    lock = (ROOT / "docker" / "locks" / f"{'+'.join(extras)}.txt").read_text()
    entries = re.split(r"\n(?=\S)", "".join(line for line in lock.splitlines(True) if line[0] != "#"))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert not re.search(r"https?://|--(extra-)?index", lock)
    locked = {entry.split(" ")[0].split(";")[0].strip() for entry in entries}
    for pin in pins(extras):
        assert re.sub(r"\[.*\]", "", pin) in locked, pin  # locks have no extras, only packages
    assert f"setup_env.sh $(VENV) {' '.join(OF_SETUP)}" in (ROOT / "Makefile").read_text()
