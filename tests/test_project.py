"""Tests the project's files: version, pins, locks, licences, linters and GitHub's files."""

import fnmatch
import itertools
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
import yaml

import common
from common.evaluation import exported
from tests import try_newest
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
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_workflows_of_the_site_run_make_docs_and_publish_only_by_hand():
    for name, triggers in (("docs", {"push", "pull_request"}), ("publish_docs", {"workflow_dispatch"})):
        workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
        commands = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
        assert commands == ["make docs"]
        starts = workflow[True]  # YAML 1.1 reads the key "on" as true
        assert set([starts] if isinstance(starts, str) else starts) == triggers


def test_job_that_may_publish_the_site_runs_no_command():
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish_docs.yml").read_text())
    jobs = {"workflow": workflow, **workflow["jobs"]}
    writers = [name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()]
    assert writers == ["deploy"]
    assert not any("run" in step for step in jobs["deploy"]["steps"])


def test_every_action_of_a_workflow_is_pinned_by_the_hash_of_a_commit():
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for line in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), (path, line)


def test_every_job_of_a_workflow_has_a_time_limit_and_only_the_release_writes():
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"]["contents"] == "read", path
        for name, job in workflow["jobs"].items():
            assert job["timeout-minutes"], path
            assert (job.get("permissions", {}).get("contents") == "write") == (name == "release"), path


def test_version_of_pyproject_stands_in_every_file_that_has_a_version():
    version = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    sections = re.findall(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert common.__version__ == version
    assert citation["version"] == version
    assert sections[0] == f"{version}, {citation['date-released']}"


def test_release_notes_are_the_section_of_the_version_without_line_breaks_in_a_paragraph():
    script = runpy.run_path(str(ROOT / ".ci/release_notes.py"))
    changelog = "# Changelog\n\n## 1.10, 2030-01-02\n\nNew\n[a](b.md).\n\n* One\n  line.\n* Two.\n\n"
    changelog += "## 1.1, 2029-01-02\n\nOld.\n"
    assert script["notes"]("1.10", changelog) == "New a.\n\n* One line.\n* Two."
    assert script["notes"]("1.1", changelog) == "Old."
    for missing in ("1.2", "1", "1x10"):
        with pytest.raises(SystemExit, match="has no section"):
            script["notes"](missing, changelog)


def test_release_notes_refuse_a_tag_that_is_not_the_version():
    command = [sys.executable, ROOT / ".ci/release_notes.py"]
    result = subprocess.run([*command, "9.9"], capture_output=True, text=True)
    assert result.returncode == 1 and PROJECT["version"] in result.stderr
    result = subprocess.run([*command, PROJECT["version"]], capture_output=True, text=True)
    assert "**Models**" in result.stdout


def test_pre_commit_runs_the_linters_of_make_lint():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].replace(".venv/bin/", "") for hook in repo["hooks"]]
    commands = [line.strip().removeprefix("$(VENV)/bin/") for line in lint[1].splitlines()]
    assert len(entries) == len(commands)
    assert all(line.startswith(entry) for line, entry in zip(commands, entries, strict=True)), commands


def test_newer_version_replaces_every_pin_of_a_package_and_no_other_pin():
    text = (ROOT / "pyproject.toml").read_text()
    pinned = try_newest.pinned_versions(text)
    assert set(pinned) == set(sum(try_newest.GROUPS, ()))
    changed = tomllib.loads(try_newest.with_versions(text, {"tensorflow": "9.8.7"}))["project"]
    before = {*PROJECT["dependencies"], *pins(EXTRAS)}
    after = {*changed["dependencies"], *itertools.chain(*changed["optional-dependencies"].values())}
    assert after - before == {"tensorflow==9.8.7", "tensorflow[and-cuda]==9.8.7"}
    assert len(after) == len(before)
    assert all((ROOT / path).exists() for path in try_newest.TESTS)


def test_report_of_newer_versions_has_a_line_for_each_package_and_the_failing_tests():
    pinned = {name: "1.0" for group in try_newest.GROUPS for name in group}
    newest = pinned | {"keras": "2.0", "tensorflow": "1.1"}
    report = try_newest.report(pinned, newest, {("keras",): ["FAILED a::b"], ("tensorflow",): []})
    assert report.splitlines()[:3] == [
        "tensorflow: 1.0 -> 1.1: works",
        "keras: 1.0 -> 2.0: breaks",
        "    FAILED a::b",
    ]
    assert report.count("not newer") == 2


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
