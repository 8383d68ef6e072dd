"""Tests the newest TensorFlow, Keras and DALI that pip finds, in environments outside .venv.

python -m tests.try_newest runs/newest

Each newer version is tried alone, with all other pins of pyproject.toml. docker/setup_env.sh makes each
environment, without the lock file: packages that pyproject.toml does not name also get their newest version.
DALI and its TensorFlow plugin always have the same version. If pip finds nothing newer, the pins are tried.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
GROUPS = (("tensorflow",), ("keras",), ("nvidia-dali-cuda120", "nvidia-dali-tf-plugin-cuda120"))
EXTRAS = ("dev", "export", "faster-coco")
# 3.5 minutes on two cores: DALI graphs, both networks, steps, checkpoints, exported files, old files.
TESTS = (
    "tests/test_files_of_0_1_0.py",
    "tests/common/test_dali_ops.py",
    "tests/common/test_box_encoder.py",
    "tests/common/training/test_checkpoints.py",
    "tests/common/training/test_optimizers.py",
    "tests/common/training/test_step_guard.py",
    "tests/efficientdet/test_model.py",
    "tests/efficientdet/test_pipeline.py",
    "tests/yolov4/test_model.py",
    "tests/yolov4/test_pipeline.py",
    "tests/apps/test_train.py",
    "tests/apps/test_export.py",
)


def pinned_versions(pyproject: str) -> dict[str, str]:
    """Returns {package of GROUPS: its version in the text of pyproject.toml}."""
    project = tomllib.loads(pyproject)["project"]
    pins = [*project["dependencies"], *project["optional-dependencies"]["dali-tf"]]
    versions = dict(pin.split("==") for pin in pins)
    return {name: versions[name] for group in GROUPS for name in group}


def with_versions(pyproject: str, versions: dict[str, str]) -> str:
    """Returns the text of pyproject.toml with other versions of some packages."""
    for name, version in versions.items():
        pyproject = re.sub(rf'"{name}(\[[\w-]+\])?==[^"]+"', rf'"{name}\g<1>=={version}"', pyproject)
    return pyproject


def newest_version(name: str) -> str:
    """Returns the newest release for this Python that pip finds in its index."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return output.partition("(")[2].partition(")")[0]  # "keras (3.15.1)"


def faults_of(pyproject: str, directory: pathlib.Path) -> list[str]:
    """Makes an environment in `directory` and runs TESTS in it.

    Returns:
        A line for each test that fails, or one line if the environment cannot be made.
    """
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT / "docker", directory / "docker", ignore=shutil.ignore_patterns("locks"))
    (directory / "pyproject.toml").write_text(pyproject)
    setup = [directory / "docker" / "setup_env.sh", directory / "env", *EXTRAS]
    if subprocess.run(setup, env={**os.environ, "PYTHON": sys.executable}).returncode:
        return ["the environment cannot be made: see the messages above"]
    options = ["-m", "not slow", "--numprocesses=2", "--dist=loadfile", "-p", "no:cacheprovider"]
    pytest = [directory / "env/bin/python", "-m", "pytest", *options, *TESTS]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with (directory / "pytest.log").open("w+") as log:
        result = subprocess.run(pytest, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        lines = log.read().splitlines()
    faults = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]  # of pytest's summary
    return faults or (lines[-1:] if result.returncode else [])


def report(pinned: dict[str, str], newest: dict[str, str], faults: dict[Sequence[str], list[str]]) -> str:
    """Returns a line for each package, and below the last package of a group its failing tests.

    Args:
        faults: for each group that was tried its faults; for () those of the pins, if nothing is newer.
    """
    lines = []
    for group in GROUPS:
        result = "not newer"
        if group in faults:
            result = "breaks" if faults[group] else "works"
        lines += [f"{name}: {pinned[name]} -> {newest[name]}: {result}" for name in group]
        lines += [f"    {fault}" for fault in faults.get(group, [])]
    if () in faults:
        lines.append(
            f"the pins, with the newest of all other packages: {'breaks' if faults[()] else 'works'}"
        )
        lines += [f"    {fault}" for fault in faults[()]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path, help="directory of the environments, 4 GB each")
    directory = parser.parse_args().directory.absolute()
    pyproject = (ROOT / "pyproject.toml").read_text()
    pinned = pinned_versions(pyproject)
    newest = {name: newest_version(name) for name in pinned}
    newer = [group for group in GROUPS if any(newest[name] != pinned[name] for name in group)]
    faults: dict[Sequence[str], list[str]] = {}
    for group in newer or [()]:
        changed = with_versions(pyproject, {name: newest[name] for name in group})
        faults[group] = faults_of(changed, directory / (group[0] if group else "pins"))
    print(report(pinned, newest, faults))
    sys.exit(any(faults.values()))


if __name__ == "__main__":
    main()
