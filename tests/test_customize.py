"""Applies the diffs of docs/customize.md to copies of the project, and runs the checks that follow them."""

import csv
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.commands import run, run_forked
from tests.conftest import ROOT
from tests.small_apps import TINY

PAGE = (ROOT / "docs/customize.md").read_text()
SECTIONS = {re.match(r"Add an? (\w+)", text)[1]: text for text in PAGE.split("\n## ")[1:]}
FOLDERS = ("common", "efficientdet", "tools", "yolov4")
SMALL = ["--image_size=64", "--pipeline_type=dali_cpu", "--num_threads=1"]


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)


def copy_project(directory: pathlib.Path) -> pathlib.Path:
    names = run("git", "ls-files", "-z", *FOLDERS, "pyproject.toml").stdout
    for name in filter(None, names.split("\0")):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    return directory


def apply_diff(section: str, directory: pathlib.Path) -> None:
    (diff,) = blocks(section, "diff")
    # Inside a repository, git would skip files of other folders without an error.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent)}
    streams = {"input": diff, "capture_output": True, "text": True}
    result = subprocess.run(["git", "apply"], cwd=directory, env=env, **streams)
    assert result.returncode == 0, f"the diff of {section} no longer applies:\n{result.stderr}"


def lint(directory: pathlib.Path) -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", *FOLDERS, cwd=directory)
    run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", *FOLDERS, cwd=directory)


def write_csv(data: pathlib.Path) -> None:
    """Writes boxes.csv and classes.csv, which the page's reader reads."""
    content = json.loads((data / "instances.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    rows = []
    for image in content["images"]:
        objects = [o for o in content["annotations"] if o["image_id"] == image["id"]]
        for left, top, width, height, category_id in ((*o["bbox"], o["category_id"]) for o in objects):
            rows.append([image["file_name"], left, top, left + width, top + height, names[category_id]])
        if not objects:
            rows.append([image["file_name"], "", "", "", "", ""])
    for name, lines in (("boxes", rows), ("classes", [(name, i) for i, name in names.items()])):
        with (data / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)


def small_command(command: str) -> list[str]:
    """Returns the words after `python` of a command. Training gets a small network and small images."""
    words = shlex.split(command)[1:]
    if not words[0].endswith("train.py"):
        return words
    prefix = "--hparams="
    hparams = [word.removeprefix(prefix) for word in words if word.startswith(prefix)]
    return [*words, *SMALL, prefix + ",".join([*hparams, TINY["efficientdet"]])]


@pytest.mark.parametrize("section", SECTIONS)
def test_diff_of_each_section_of_the_customize_page_applies_and_passes_the_linter(section, tmp_path):
    apply_diff(section, copy_project(tmp_path))
    lint(tmp_path)


def test_all_diffs_of_the_customize_page_together_apply_and_pass_the_linter(tmp_path):
    assert list(SECTIONS) == ["augmentation", "loss", "schedule", "backbone", "reader"]
    copy_project(tmp_path)
    for section in SECTIONS:
        apply_diff(section, tmp_path)
    lint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_commands_and_code_of_each_customize_section_run_in_a_project_with_its_diff(section, tmp_path):
    apply_diff(section, copy_project(tmp_path))
    run_forked("tools/synthetic.py", "--output_dir=my", "--num_images=8", cwd=tmp_path)
    write_csv(tmp_path / "my")
    for code in blocks(section, "python"):
        (tmp_path / "block.py").write_text(code)
        run_forked("block.py", cwd=tmp_path)
    for block in blocks(section, "bash"):
        for command in block.replace("\\\n", " ").splitlines():
            run_forked(*small_command(command), cwd=tmp_path)
    assert list(tmp_path.glob("runs/*/first_batch.png"))
