"""Copies one app into a directory of its own, with what it imports, its tests, pins and set-up.

    python tools/copy_app.py efficientdet my_project
    python tools/copy_app.py yolov4 my_project --without=tfrecord,tf_pipeline
    python tools/copy_app.py efficientdet my_project --minimal    # without all parts that can be left out

The copy is a project: `make setup`, `make demo` and `make test` work in it. Where code that stays
imports a part that was left out, the copy holds a short module whose functions raise one clear error.
"""

import ast
import fnmatch
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import errors
from tools.imports import ROOT, closure, parse, python_files

APPS = ("efficientdet", "yolov4")
# What can be left out, and its files. {app} is the name of the app.
PARTS = {
    "datacheck": ("common/datacheck/*.py",),
    "tfrecord": ("common/*tfrecord*.py", "tools/conversion/coco_to_tfrecord.py"),
    "tf_pipeline": ("{app}/tf_*.py", "common/tf_readers.py"),
    "retinanet": ("{app}/retinanet*.py", "{app}/resnet.py", "{app}/mobilenet.py"),
    "tf_distribute": ("common/distributed/tf_*.py",),
    "elastic": ("common/distributed/elastic.py",),
    "fine_tuning": ("common/training/fine_tuning.py", "{app}/init_from.py"),
    "import_weights": ("{app}/import_weights/*.py", "{app}/automl_weights.py", "{app}/darknet_weights.py"),
    "fit_model": ("{app}/fit_model.py",),
    "fresh_mosaic": ("{app}/fresh_mosaic.py",),
    "fit_anchors": ("{app}/fit_anchors.py", "{app}/anchor_*.py", "{app}/ap_ceiling.py"),
    "export": ("{app}/export*.py", "tools/exporting/*.py", "common/evaluation/exported.py"),
    "bench": ("{app}/bench.py", "tools/benchmark/*.py"),
    "dry_run": ("tools/dry_run*.py", "tools/replay_step.py"),
    "video": ("common/evaluation/video.py",),
    "submission": ("common/evaluation/submission.py",),
}
# Without the data check, its opener is replaced by the plain one, which has functions of the same names.
CHECKED, PLAIN = "common/datacheck/datasets.py", "common/datasets.py"
CHECKED_IMPORT = re.compile(r"from common\.datacheck(?= import datasets$|\.datasets import)", re.MULTILINE)
# Recipes that need a part.
RECIPES = {"retinanet": "retinanet*.txt", "fine_tuning": "finetune*.txt"}
# Programs that no import leads to: started as processes, or by the user.
TOOLS = (
    *("tools/synthetic.py", "tools/dry_run_process.py", "tools/replay_step.py"),
    "tools/conversion/coco_to_tfrecord.py",
)
# Copied as they are: the set-up with its pins and hashes, and the licence.
SETUP = ("docker/setup_env.sh", "docker/build_horovod.sh", "docker/locks", "LICENSE", ".gitignore")


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_list(
        "without", [], f"Parts to leave out: {', '.join(PARTS)}. Default: none.", flag_values=fv
    )
    flags.DEFINE_bool("minimal", False, "Leave out every part that can be left out.", flag_values=fv)


def copy(app: str, directory: pathlib.Path, without: Iterable[str] = ()) -> list[str]:
    """Writes the copy.

    Args:
        app: "efficientdet" or "yolov4".
        directory: is made; must not exist or be empty.
        without: names in PARTS.

    Returns:
        The product's files of the copy, as paths below it.

    Raises:
        UserError: no such app or part, or the directory has files.
    """
    if app not in APPS:
        raise errors.unknown("app", app, APPS)
    for part in without:
        if part not in PARTS:
            raise errors.unknown("part", part, PARTS)
    if "datacheck" in without:  # TFRecords need the check's scan
        without = dict.fromkeys([*without, "tfrecord"])
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise errors.UserError(f"{directory} exists and is not an empty directory: name a new one")
    left_out = left_out_files(app, without)
    commands = [path for path in python_files(app) if path.count("/") == 1]
    entries = {*commands, *TOOLS} - left_out
    found = closure(sorted(entries), without=left_out)
    if CHECKED in left_out:
        found = (found | closure([PLAIN], without=left_out)) - {CHECKED}
        if not any(path in left_out for path in found if path.startswith("common/datacheck/")):
            found -= {"common/datacheck/__init__.py"}
    kept = found - left_out
    product = sorted(found)
    for path in product:
        text = _stub(path) if path in left_out else (ROOT / path).read_text()
        _write(directory / path, CHECKED_IMPORT.sub("from common", text) if CHECKED in left_out else text)
    if found & left_out:
        _write(directory / "common/left_out.py", LEFT_OUT)
    for path in sorted(_tests(app, kept)):
        _write(directory / path, (ROOT / path).read_text())
        for beside in (ROOT / path).parent.glob("*.txt"):  # numbers that tests compare with
            _write(directory / beside.relative_to(ROOT), beside.read_text())
    needing = [RECIPES[part] for part in without if part in RECIPES]
    for recipe in sorted((ROOT / app / "flags").glob("*.txt")):
        if any(recipe.match(pattern) for pattern in needing):
            continue
        _write(directory / app / "flags" / recipe.name, recipe.read_text())
    for path in SETUP:
        source, target = ROOT / path, directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
    pins = (ROOT / "pyproject.toml").read_text()
    _write(
        directory / "pyproject.toml",
        re.sub(r'(?m)^name = ".*"', f'name = "{directory.resolve().name}"', pins),
    )
    _write(directory / "Makefile", MAKEFILE.format(app=app))
    _write(directory / "README.md", _readme(app, directory.name, without))
    return product


def left_out_files(app: str, without: Iterable[str]) -> frozenset[str]:
    patterns = [pattern.format(app=app) for part in without for pattern in PARTS[part]]
    every = [path for path in python_files("common", app, "tools") if not path.endswith("__init__.py")]
    return frozenset(path for path in every if any(fnmatch.fnmatch(path, pattern) for pattern in patterns))


def _stub(path: str) -> str:
    """A module of the same names: calling a function or class raises a UserError, and tables are empty."""
    text = STUB.format(path=path)
    for node in parse(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            is_table = isinstance(node, ast.AnnAssign) or isinstance(node.value, ast.Dict | ast.Tuple)
            if is_table and re.fullmatch("[A-Z][A-Z_]*", name):
                text += f"{name} = {{}}\n"
    return text


def _tests(app: str, kept: set[str]) -> set[str]:
    """The tests of the kept modules that import nothing else of the product, with their own helpers."""
    wanted = {"tests/__init__.py", "tests/conftest.py"}
    for path in kept:
        folder, _, name = path.rpartition("/")
        test = f"tests/{folder}/test_{name}"
        if (ROOT / test).exists() and closure([test]) <= kept | set(python_files("tests")):
            conftest = f"tests/{folder}/conftest.py"
            wanted |= closure([test, *([conftest] if (ROOT / conftest).exists() else [])])
    return {path for path in wanted if path.startswith("tests/")}


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


STUB = """\
# Left out of this copy: {path}.
from common.left_out import left_out

__getattr__ = left_out("{path}")
"""
LEFT_OUT = '''\
"""What the modules that were left out of this copy hold."""

from common.errors import UserError


def left_out(path):
    """A module's __getattr__: gives a class, in place of any function or class, that cannot be called."""

    def stand_in(name):
        if name.startswith("__"):  # Python and TensorFlow ask modules for such names
            raise AttributeError(name)

        class LeftOut:
            def __init__(self, *arguments, **options):
                raise UserError(f"this copy was made without {path}: copy the app again with that part")

        return LeftOut

    return stand_in
'''
MAKEFILE = """\
# make setup: the environment; make demo: draws images, trains, evaluates; make test: the tests.
VENV := .venv
RUN := $(VENV)/bin/python
DEMO := runs/demo
DEMO_IMAGES := 600
DEMO_FLAGS :=

.PHONY: setup demo test

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
\tdocker/setup_env.sh $(VENV) dev export faster-coco
\t@touch $@

demo: setup
\t$(RUN) tools/synthetic.py --output_dir=$(DEMO)-data/train --num_images=$(DEMO_IMAGES) --seed=1
\t$(RUN) tools/synthetic.py --output_dir=$(DEMO)-data/eval --num_images=100 --seed=2
\t$(RUN) {app}/train.py --flagfile={app}/flags/demo.txt --output_dir=$(DEMO) \\
\t  --train_images=$(DEMO)-data/train/images --train_annotations=$(DEMO)-data/train/instances.json \\
\t  --eval_images=$(DEMO)-data/eval/images --eval_annotations=$(DEMO)-data/eval/instances.json $(DEMO_FLAGS)
\t$(RUN) {app}/eval.py --weights=$(DEMO) --eval_images=$(DEMO)-data/eval/images \\
\t  --eval_annotations=$(DEMO)-data/eval/instances.json

test: setup
\t$(RUN) -m pytest
"""


def _readme(app: str, name: str, without: Iterable[str]) -> str:
    parts = f"\nLeft out: {', '.join(without)}.\n" if without else ""
    return f"""# {name}

The {app} app of dali-detection, copied by `tools/copy_app.py`.
{parts}
    make demo     sets up, draws a small data set, trains on it and evaluates
    make test     runs the tests of the copied modules

Train on your own data:

    .venv/bin/python {app}/train.py --train_images=my/images --train_annotations=my/instances.json \\
        --eval_images=my/eval/images --eval_annotations=my/eval/instances.json --output_dir=runs/first

`{app}/train.py` holds the loop, `{app}/pipeline.py` the DALI graph, `{app}/losses.py` the loss,
`{app}/config.py` every hyper-parameter.
"""


def main(*arguments: str) -> None:
    if len(arguments) != 2:
        raise errors.UserError("name an app and a directory: tools/copy_app.py efficientdet my_project")
    app, directory = arguments
    without = list(PARTS) if flags.FLAGS.minimal else flags.FLAGS.without
    product = copy(app, pathlib.Path(directory), without)
    print(f"{directory}: {len(product)} files of {app}, common and tools")
    print(f"next: cd {directory} && make demo")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    errors.run(main, positional=True)
