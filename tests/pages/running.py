"""Runs the Python commands and the Python code of documentation pages in a copy of the project."""

import pathlib
import re
import shlex

from tests.commands import run_forked
from tests.small_apps import TINY
from tests.test_readme import PAGES, python_commands

# Commands with these flags take only seconds.
SMALL = ["--image_size=64", "--epochs=1", "--batch_size=4", "--steps_per_epoch=2"]
BENCH = ["--image_size=64", "--batch_size=2", "--rounds=1", "--seconds=0.2", "--pipeline_types=dali_cpu"]
BENCH += ["--synthetic_images=8"]  # for the commands without data
DARKNET_FILE = "yolov4-tiny.weights"


def small_model(app: str) -> list[str]:
    return [f"--model_name={app}-nano", f"--hparams={TINY[app]}"]


def small_command(command: str) -> list[str]:
    """Returns the words after `python` of a command, with flags that make training and benchmarks short."""
    words = shlex.split(command)
    folder, _, program = words[1].partition("/")
    app = words[2] if folder == "tools" else folder
    if program == "large_coco.py":
        return [*words[1:], "--num_images=200", "--num_boxes=1500"]
    if program == "record_order.py":
        return [*words[1:], "--num_images=200"]
    small = {"train.py": SMALL, "bench.py": BENCH}.get(program, [])
    if small and not any(word.endswith((DARKNET_FILE, "demo.weights.h5", "=runs/mine")) for word in words):
        small = [*small, *small_model(app)]
    return [*words[1:], *small]


def write_code(pages: tuple[str, ...], project: pathlib.Path) -> list[str]:
    """Writes each block of Python code of the pages into a file, and returns the files' names."""
    blocks = [block for name in pages for block in re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL)]
    names = [f"block_{number}.py" for number in range(len(blocks))]
    for name, block in zip(names, blocks, strict=True):
        (project / name).write_text(block)
    return names


def assert_pages_run(pages: tuple[str, ...], project: pathlib.Path, *more_commands: str) -> None:
    """Also runs what follows a command that fails, so that one run shows all failures."""
    commands = map(small_command, [*python_commands(*pages), *more_commands])
    failures = []
    for words in [*commands, *([name] for name in write_code(pages, project))]:
        result = run_forked(*words, cwd=project, check=False)
        if result.returncode != 0:
            failures.append(f"{shlex.join(words)}\n{result.stdout[-3000:]}")
    assert not failures, "\n\n".join(failures)
