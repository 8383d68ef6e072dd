"""Runs the Python commands and the Python code of documentation pages in a copy of the project."""

import pathlib
import re
import shlex
from typing import NamedTuple

from tests.commands import run_forked
from tests.small_apps import TINY
from tests.test_readme import PAGES, python_commands, python_commands_in

# Programs with these flags take only seconds.
SMALL = ["--image_size=64", "--epochs=1", "--batch_size=4", "--steps_per_epoch=2"]
BENCH = ["--image_size=64", "--batch_size=2", "--rounds=1", "--seconds=0.2", "--pipeline_types=dali_cpu"]
BENCH += ["--synthetic_images=8"]  # for the commands without data
ONE_FILE = ["--epochs=1", "--batch_size=8"]  # tests/test_examples.py takes a second epoch
FLAGS = {
    "train.py": SMALL,
    "bench.py": BENCH,
    "train_efficientdet.py": ONE_FILE,
    "train_yolov4.py": ONE_FILE,
    "large_coco.py": ["--num_images=200", "--num_boxes=1500"],
    "record_order.py": ["--num_images=200"],
    "synthetic.py": ["--num_images=16"],
}
EAGER = ("/train.py", "/eval.py", "/infer.py", "/keras_fit.py", "/train_efficientdet.py", "/train_yolov4.py")
DARKNET_FILE = "yolov4-tiny.weights"


class Code(NamedTuple):
    """A block of Python code of a page."""

    text: str


def sections(name: str) -> dict[str, str]:
    """Returns {heading: text} of a page. The text above the first heading has the heading ""."""
    parts = [part.partition("\n") for part in f"\n{PAGES[name]}".split("\n## ")]
    return {"": parts[0][2]} | {heading: text for heading, _, text in parts[1:]}


def small_model(app: str) -> list[str]:
    return [f"--model_name={app}-nano", f"--hparams={TINY[app]}"]


def small_command(command: str, keep_model: bool = False) -> list[str]:
    """Returns the words after `python` of a command, with flags that make training and benchmarks short.

    The model is small, too, unless `keep_model` is set, or weights are given that do not fit a small YOLOv4.
    """
    words = shlex.split(command)
    if "--style=aerial" in words:
        return [*words[1:], "--num_images=1"]  # it has 12 megapixels
    folder, _, program = words[1].partition("/")
    app = words[2] if folder == "tools" else folder
    small = FLAGS.get(program, [])
    keep_model |= any(word.endswith((DARKNET_FILE, "yolov4/demo.weights.h5")) for word in words)
    if program in ("train.py", "bench.py") and not keep_model:
        small = [*small, *small_model(app)]
    return [*words[1:], *small]


def training_of_readme() -> str:
    """Returns the command that trains runs/mine."""
    return next(command for command in python_commands("README") if "/train.py" in command)


def steps(text: str) -> list[str | Code]:
    """Returns the Python commands and the blocks of Python code of a text in order, each once."""
    found: list[str | Code] = []
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        found += [Code(block)] if kind == "python" else python_commands_in(f"```bash\n{block}```")
    return [*dict.fromkeys(found)]


def assert_steps_pass(steps: list[str | Code], project: pathlib.Path, keep_model: bool) -> None:
    """Also runs what follows a command that fails, so that one run shows all failures.

    Code, training, eval.py and infer.py run eagerly. Other tests trace detectors (tests/apps/), the steps of
    the apps (tests/gpu/test_traced_step.py, on a CPU, too) and those of the examples (tests/examples/).
    """
    failures = []
    for number, step in enumerate(steps):
        words = [f"block_{number}.py"] if isinstance(step, Code) else small_command(step, keep_model)
        if isinstance(step, Code):
            (project / words[0]).write_text(step.text)
        eagerly = isinstance(step, Code) or words[0].endswith(EAGER)
        result = run_forked(*words, cwd=project, check=False, eagerly=eagerly)
        if result.returncode != 0:
            failures.append(f"{shlex.join(words)}\n{result.stdout[-3000:]}")
    assert not failures, "\n\n".join(failures)
