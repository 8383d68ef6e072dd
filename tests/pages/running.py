"""Runs the Python commands and the Python code of documentation pages in a copy of the project."""

import pathlib
import re
import shlex
from typing import NamedTuple

from tests.commands import run_forked
from tests.small_apps import TINY
from tests.test_readme import PAGES, python_commands_in

# Commands with these flags take only seconds.
SMALL = ["--image_size=64", "--epochs=1", "--batch_size=4", "--steps_per_epoch=2"]
BENCH = ["--image_size=64", "--batch_size=2", "--rounds=1", "--seconds=0.2", "--pipeline_types=dali_cpu"]
BENCH += ["--synthetic_images=8"]  # for the commands without data
DARKNET_FILE = "yolov4-tiny.weights"


class Code(NamedTuple):
    """A block of Python code of a page."""

    text: str


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


def steps(*names: str) -> list[str | Code]:
    """Returns the Python commands and the blocks of Python code of the pages in order, each once."""
    found: list[str | Code] = []
    text = "\n".join(PAGES[name] for name in names)
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        found += [Code(block)] if kind == "python" else python_commands_in(f"```bash\n{block}```")
    return [*dict.fromkeys(found)]


def assert_pages_run(pages: tuple[str, ...], project: pathlib.Path, *more_commands: str) -> None:
    """Also runs what follows a command that fails, so that one run shows all failures.

    The apps train eagerly. tests/gpu/test_traced_step.py traces their training steps, on a CPU, too.
    """
    failures = []
    for number, step in enumerate([*steps(*pages), *more_commands]):
        words = [f"block_{number}.py"] if isinstance(step, Code) else small_command(step)
        if isinstance(step, Code):
            (project / words[0]).write_text(step.text)
        result = run_forked(*words, cwd=project, check=False, eagerly=words[0].endswith("/train.py"))
        if result.returncode != 0:
            failures.append(f"{shlex.join(words)}\n{result.stdout[-3000:]}")
    assert not failures, "\n\n".join(failures)
