"""Copies one app into a new directory, with its tests, its set-up and all files that it imports.

    python tools/copy_app.py efficientdet my_project
    python tools/copy_app.py yolov4 my_project --without=tfrecord,tf_pipeline
    python tools/copy_app.py efficientdet my_project --minimal    # leaves out every optional part

The copy is a complete project: `make setup`, `make demo` and `make test` work in it. It has no files, flags,
code or tests of the parts that are left out, and no functions that only other apps and tools call.
"""

import ast
import collections
import dataclasses
import fnmatch
import functools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from common import args, errors
from tools.imports import PRODUCT as FOLDERS
from tools.imports import ROOT, closure, python_files, read
from tools.pruning import Lost, prune
from tools.unused import unused

APPS = ("efficientdet", "yolov4")
# Part that can be left out -> its files. {app} is the name of the app.
PARTS = {
    "datacheck": ("common/data/check/*.py",),
    "tfrecord": ("common/*tfrecord*.py", "tools/conversion/coco_to_tfrecord.py"),
    "tf_pipeline": ("{app}/tf_*.py", "common/data/tf_readers.py"),
    "synthetic_loader": (),
    "retinanet": (*("{app}/retinanet*.py", "{app}/mobilenet.py"), "{app}/import_weights/torch_files.py"),
    "horovod": (),
    "tf_distribute": ("common/distributed/tf_*.py",),
    "elastic": ("common/distributed/elastic.py",),
    "fine_tuning": ("common/weights/fine_tuning.py", "{app}/init_from.py"),
    "import_weights": ("{app}/import_weights/*.py", "{app}/automl_weights.py", "{app}/darknet_weights.py"),
    "fit_model": ("{app}/fit_model.py",),
    "fresh_mosaic": ("{app}/fresh_mosaic.py",),
    "augmentations": ("{app}/augmentations.py",),
    "fit_anchors": ("{app}/fit_anchors.py", "{app}/anchor_fit.py"),
    "export": (
        *("{app}/export*.py", "common/export/*.py", "common/evaluation/exported.py"),
        "tests/common/weights/test_model_metadata_exported.py",
    ),
    "bench": ("{app}/bench.py", "tools/benchmark/*.py"),
    "dry_run": ("tools/dry_run*.py", "tools/replay_step.py"),
    "watchdog": ("tests/common/training/test_watchdog.py",),
    "video": ("common/evaluation/video.py",),
    "curves": (),
    "faster_coco": (),
    "error_analysis": ("common/evaluation/error_analysis.py",),
}
# Part -> its flags. The flags of "horovod tf_distribute" are left out only with both parts.
PART_FLAGS = {
    "tfrecord": ("input_type", "label_map", "train_file_pattern", "eval_file_pattern"),
    "horovod": ("compression",),
    "horovod tf_distribute": ("strategy",),
    "elastic": ("elastic",),
    "fine_tuning": ("init_from", "freeze", "freeze_batch_norm"),
    "dry_run": ("dry_run",),
    "error_analysis": ("errors", "errors_min_score"),
    "augmentations": ("augmentation_preset",),
    "watchdog": ("step_timeout",),
    "datacheck": ("on_bad_image", "max_megapixels"),
    "faster_coco": ("coco_backend",),
}
AUGMENTING = ("rotation", "auto_augment", "cutout_prob", "rand_augment_ops", "rand_augment_magnitude")
# Part -> what to remove from files that stay: classes, functions and fields.
PART_NAMES = {
    "datacheck": ("common/args.py:ImagePolicy",),
    "tfrecord": (
        "common/data/datasets.py:Opener.open_tfrecords",
        "common/data/check/datasets.py:open_tfrecords",
        "common/data/check/datasets.py:CheckedOpener.open_tfrecords",
        "tools/conversion/coco_writer.py:write_images",
        "tools/conversion/coco_writer.py:file_names",
    ),
    "tfrecord import_weights": ("common/data/labels.py:LabelMap.load",),
    "elastic dry_run": ("common/distributed/ranks.py:Hooks",),
    "dry_run": ("common/training/run.py:Run._save_skipped",),
    "curves": ("common/evaluation/drawing.py:loss_curves", "common/evaluation/drawing.py:pr_curves"),
    "faster_coco": ("common/evaluation/coco_metrics.py:check_backend",),
    "export": ("common/weights/model_metadata.py:is_exported",),
    "watchdog": ("common/training/watchdog.py:Watchdog",),
    "error_analysis": ("common/evaluation/commands.py:ReportErrors",),
    "augmentations": tuple(
        f"{app}/config.py:{name}"
        for app, config in (("efficientdet", "EfficientDetConfig"), ("yolov4", "YOLOv4Config"))
        for name in ("PRESETS", "_NONE", *(f"{config}.{field}" for field in AUGMENTING))
    ),
}
# Part -> values of flags and config fields that need the part, such as --strategy=horovod.
PART_CHOICES = {
    "tfrecord": ("tfrecord",),
    "tf_pipeline": ("tensorflow",),
    "synthetic_loader": ("synthetic",),
    "retinanet": ("retinanet", "mobilenet"),
    "horovod": ("horovod",),
    "tf_distribute": ("mirrored", "multi_worker"),
    "fresh_mosaic": ("fresh",),
    "curves": ("loss_curves", "pr_curves"),
    "faster_coco": ("faster",),
}
NAMES_PACKAGES = "common/training/run_directory.py"  # here "tensorflow" is a package, not a --pipeline_type
# Part -> the parts that need it, so they are left out too.
LEFT_OUT_ALONG = {
    "datacheck": ["tfrecord"],
    "tf_pipeline": ["video", "export", "bench"],
    "synthetic_loader": ["bench"],
    "horovod": ["elastic", "dry_run"],
    "fine_tuning": ["import_weights"],
}
# If the data check is left out, imports of common.data.check.datasets become imports of common.data.datasets.
CHECKED = "common/data/check/datasets.py"
CHECKED_IMPORT = re.compile(r"from common\.data\.check(?= import datasets$|\.datasets import)", re.MULTILINE)
OWN_FLAG = re.compile(r"^    (\w+): .* = (?:\w+\.)?flag\(", re.MULTILINE)
# Part -> the recipes (files of flags) that need it.
RECIPES = {
    "retinanet": ["retinanet*.txt"],
    "fine_tuning": ["finetune*.txt"],
    "horovod": ["*_8x*.txt", "*_coco_*gpu.txt", "retinanet_coco.txt"],
}
# Programs to copy, though no app imports them.
TOOLS = (
    *("tools/synthetic.py", "tools/dry_run_process.py", "tools/replay_step.py"),
    "tools/conversion/coco_to_tfrecord.py",
)
# Copied without changes.
SETUP = ("docker/setup_env.sh", "docker/build_horovod.sh", "docker/locks", "LICENSE", ".gitignore")


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_list("without", [], f"Parts to leave out, from: {', '.join(PARTS)}.", flag_values=fv)
    flags.DEFINE_bool("minimal", False, "Leave out all parts that --without accepts.", flag_values=fv)


def copy(app: str, directory: pathlib.Path, without: Iterable[str] = ()) -> list[str]:
    """Copies an app into a directory.

    Args:
        directory: directory to create; if it exists, it must be empty.
        without: parts to leave out, names in PARTS.

    Returns:
        The copied files except tests and set-up, as paths relative to `directory`.

    Raises:
        UserError: the app or a part does not exist, or the directory has files.
    """
    if app not in APPS:
        raise errors.unknown("app", app, APPS)
    for part in without:
        if part not in PARTS:
            raise errors.unknown("part", part, PARTS)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise errors.UserError(f"{directory} exists and is not an empty directory: choose a new one")
    without = dict.fromkeys(name for part in without for name in (part, *LEFT_OUT_ALONG.get(part, ())))
    lost = _lost(without)
    left_out = left_out_files(app, without)
    product = _product(app, left_out, lost)
    tests = _tests(app, product, lost, without)
    for path, text in {**product, **tests}.items():
        _write(directory / path, text)
    for folder in {pathlib.Path(path).parent for path in tests}:
        for beside in (ROOT / folder).glob("*.txt"):
            _write(directory / folder / beside.name, beside.read_text())
    needing = _left_out_of(RECIPES, without)
    flag_names, choices = (_left_out_of(parts, without) for parts in (PART_FLAGS, PART_CHOICES))
    lost_line = re.compile(rf"(?m)^--(({'|'.join(flag_names)})(=.*)?|.*=({'|'.join(choices)}))\n")
    for recipe in sorted((ROOT / app / "flags").glob("*.txt")):
        if not any(recipe.match(pattern) for pattern in needing):
            _write(directory / app / "flags" / recipe.name, lost_line.sub("", recipe.read_text()))
    for path in SETUP:
        source, target = ROOT / path, directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
    name = directory.resolve().name
    pins = re.sub(r'(?m)^name = ".*"', f'name = "{name}"', read("pyproject.toml"))
    _write(directory / "pyproject.toml", pins)
    of_app = [part for part in without if not PARTS[part] or left_out_files(app, [part])]
    parts = f"\nLeft out: {', '.join(of_app)}.\n" if of_app else ""
    words = {"{app}": app, "{name}": name, "{model}": f"{app}-nano", "{left_out}": parts}
    for template in ("Makefile", "README.md"):
        text = read(f"tools/copied/{template}")
        if "horovod" in without:
            text = re.sub(r"(?m)^.*horovod.*\n", "", text)
        _write(directory / template, functools.reduce(lambda t, word: t.replace(*word), words.items(), text))
    return sorted(product)


def _lost(without: Iterable[str]) -> dict[str, Lost]:
    """Returns path -> the lost names of this file (tools/pruning.py)."""
    lost_flags = _left_out_of(PART_FLAGS, without)
    words = [name for name in lost_flags if name != "label_map"]  # the metadata keep this key
    choices = [*words, *_left_out_of(PART_CHOICES, without)]
    fields = [f for kind in (args.Args, args.EvalArgs, args.InferArgs) for f in dataclasses.fields(kind)]
    defaults = {field.name: field.default for field in fields if field.name in lost_flags}
    lost: dict[str, Lost] = collections.defaultdict(lambda: Lost({}, defaults, choices))
    lost[NAMES_PACKAGES] = Lost({}, defaults, words)
    for place in _left_out_of(PART_NAMES, without):
        path, _, name = place.partition(":")
        scope, _, name = name.rpartition(".")
        lost[path].names.setdefault(scope, set()).add(f"self.{name}" if scope else name)
    return lost


def _left_out_of(table: Mapping[str, Sequence[str]], without: Iterable[str]) -> list[str]:
    return [name for parts, names in table.items() if {*parts.split()} <= {*without} for name in names]


def left_out_files(app: str, without: Iterable[str]) -> frozenset[str]:
    patterns = [pattern.format(app=app) for part in without for pattern in PARTS[part]]
    folders = ("common", app, "tools", "tests")
    every = [path for path in python_files(*folders) if not path.endswith("__init__.py")]
    return frozenset(path for path in every if any(fnmatch.fnmatch(path, pattern) for pattern in patterns))


def _product(app: str, left_out: frozenset[str], lost: dict[str, Lost]) -> dict[str, str]:
    """Returns path -> text of the copied files except tests. Adds removed names to `lost`."""

    def read_with_opener(path: str) -> str:
        if path in left_out:
            return ""
        return CHECKED_IMPORT.sub("from common", read(path)) if CHECKED in left_out else read(path)

    commands = [path for path in python_files(app) if path.count("/") == 1]
    entries = {*commands, *TOOLS} - left_out
    texts = {path: read_with_opener(path) for path in closure(entries, read_with_opener) - left_out}
    for path, text in texts.items():  # a command keeps its own flags
        own = set(OWN_FLAG.findall(text)) if path != "common/args.py" else set()
        lost[path] = lost[path]._replace(flags={k: v for k, v in lost[path].flags.items() if k not in own})
    project = {path: read(path) for path in python_files(*FOLDERS)}
    before = None
    while before != texts:
        before = texts
        for path, scope, name in unused(texts, project):
            if path in TOOLS and not name.startswith("_"):  # users may import this name
                continue
            lost[path].names.setdefault(scope, set()).add(f"self.{name}" if scope else name)
        prune(texts := dict(texts), lost, lambda path: path not in left_out)
        texts = tidied(texts)
        texts = {path: texts[path] for path in closure(entries, texts.__getitem__)}
    return texts


def _tests(
    app: str, product: Mapping[str, str], lost: dict[str, Lost], without: Iterable[str]
) -> dict[str, str]:
    left_out, wanted = left_out_files(app, without), {"tests/__init__.py", "tests/conftest.py"}
    for module in product:
        folder, _, name = module.rpartition("/")
        for home in (folder, "apps") if folder == app else (folder,):
            for test in (ROOT / "tests" / home).glob(f"test_{name.removesuffix('.py')}*.py"):
                if test.stem.endswith(tuple(f"_{other}" for other in APPS if other != app)):
                    continue
                files = {test, *test.parent.glob("conftest.py")}
                wanted |= {file.relative_to(ROOT).as_posix() for file in files}
    texts = {path: read(path) for path in closure(wanted - left_out) if path.startswith("tests/")}
    others = [name for name in (*APPS, *python_files(*FOLDERS)) if name != app and name not in product]
    methods = set(_lost_methods(product, lost))
    for path in texts:
        words = [*lost[path].words, *others, *without]
        lost[path] = lost[path]._replace(names={"": {*methods}}, words=words, is_test=True)
    for _ in range(2):
        prune(texts, lost, lambda path: path in product or path.startswith("tests/"))
        for conftest in [path for path in texts if path.endswith("conftest.py")]:
            for path in [path for path in texts if path.startswith(conftest.removesuffix("conftest.py"))]:
                lost[path].names[""] |= lost[conftest].names[""]
    texts = {path: text for path, text in tidied({**product, **texts}).items() if path in texts}
    wanted = {path for path in wanted & texts.keys() if "test_" not in path or "def test_" in texts[path]}
    found = closure(wanted, lambda path: texts.get(path, ""))
    return {path: texts[path] for path in sorted(found & texts.keys())}


def _lost_methods(product: Mapping[str, str], lost: Mapping[str, Lost]) -> Iterator[str]:
    """Yields the removed methods and fields of classes, for example "LabelMap.load"."""
    called = {
        node.attr
        for text in product.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
    }
    for scope, names in [item for found in lost.values() for item in found.names.items()]:
        for name in [name.removeprefix("self.") for name in names if name.startswith("self.")]:
            yield f"{scope}.{name}"
            if name not in called:
                yield f".{name}"


def tidied(texts: Mapping[str, str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        for path, text in {"pyproject.toml": read("pyproject.toml"), **texts}.items():
            _write(pathlib.Path(directory, path), text)
        fixes = ["check", "--fix", "--unsafe-fixes", "--exit-zero", "--select=F401,F841,I,TC005"]
        for command in (fixes, ["format"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache"]
            subprocess.run(ruff, cwd=directory, check=True)
        return {path: pathlib.Path(directory, path).read_text() for path in texts}


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(*arguments: str) -> None:
    if len(arguments) != 2:
        raise errors.UserError("give an app and a directory: tools/copy_app.py efficientdet my_project")
    app, directory = arguments
    without = list(PARTS) if flags.FLAGS.minimal else flags.FLAGS.without
    product = copy(app, pathlib.Path(directory), without)
    print(f"{directory}: {len(product)} files of {app}, common and tools")
    print(f"next: cd {directory} && make demo")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    errors.run(main, positional=True)
