"""Tests limits on sizes and imports, and tools/imports.py."""

import ast
import re

import pytest

from tests.source_sizes import code_lines, depth, parse
from tools.imports import PRODUCT, ROOT, closure, imports, python_files

APPS = ("efficientdet", "yolov4")
FILES = python_files(*PRODUCT)
COMMON = python_files("common")

ROOMS = ("common", "common/distributed", "common/data/check", "common/evaluation", "common/training")
# {package: other packages that its files may import}. "common" means only files directly in common/.
LAYERS = {
    "common": {"common"},
    "common/distributed": {"common"},
    "common/data/check": {"common"},
    "common/evaluation": {"common", "common/distributed"},
    "common/training": {"common", "common/distributed", "common/evaluation"},
    **{app: set(ROOMS) for app in APPS},
}
# These programs import tools/ for exports, bench.py, --dry_run and --errors.
MAY_IMPORT_TOOLS = re.compile(r"(efficientdet|yolov4)/(export\w*|bench|train|eval)\.py")

# Old names, which usual terms replaced (docs/dev/architecture.md).
OLD_WORDS = (
    *(r"passport(?!\.json|\"|\`)", "laggard", "rehears", "keep_going", "vary_seeds", "adopt", r"\bdoors?\b"),
    *("sitting", "by_heart", "rival", r"\bfindings?\b"),
)
LONG_STORIES = {  # functions that may have 61 to 100 lines
    "efficientdet/train.py:train",
    "yolov4/train.py:train",
    "common/training/step_guard.py:guarded_step",
    "yolov4/fresh_mosaic.py:tiles_of",
}


def room(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "common" and len(parts) == 3 else parts[0]


def lines(paths) -> int:
    return sum(map(code_lines, paths))


def functions():
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.name}", node


def test_the_rooms_import_in_one_direction():
    wrong = [
        f"{path} imports {found}"
        for path in FILES
        if room(path) in LAYERS
        for found in imports(path)
        if not found.endswith("__init__.py")
        and room(found) not in LAYERS[room(path)] | {room(path)}
        and not (room(found) == "tools" and MAY_IMPORT_TOOLS.fullmatch(path))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("what", "size", "limit"),
    [
        ("product", lambda: lines(FILES), 18_000),
        ("common", lambda: lines(COMMON), 6_200),
        ("files of common", lambda: len(COMMON), 55),
        ("files at common's root", lambda: sum(path.count("/") == 1 for path in COMMON), 22),
    ],
)
def test_the_whole_stays_small(what, size, limit):
    assert size() <= limit, what


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize(("entry", "limit"), [("train", 8_250), ("pipeline", 1_600), ("losses", 500)])
def test_what_a_reader_must_read_stays_small(app, entry, limit):
    assert lines(closure([f"{app}/{entry}.py"])) <= limit


@pytest.mark.parametrize("app", APPS)
def test_train_fits_a_few_screens(app):
    assert len((ROOT / app / "train.py").read_text().splitlines()) <= 250
    assert depth(f"{app}/train.py") <= 9


def test_files_and_functions_stay_short():
    long_files = [path for path in FILES if len((ROOT / path).read_text().splitlines()) > 350]
    long_functions = {name for name, node in functions() if node.end_lineno - node.lineno + 1 > 60}
    too_long = [name for name, node in functions() if node.end_lineno - node.lineno + 1 > 100]
    many_parameters = [name for name, node in functions() if len(node.args.args + node.args.kwonlyargs) > 14]
    assert not long_files
    assert not too_long
    assert not many_parameters
    assert long_functions == LONG_STORIES


def test_docstrings_stay():
    documented = 0
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                documented += node.body[0].end_lineno - node.body[0].lineno + 1
    assert documented >= 0.24 * lines(FILES)


def test_each_module_has_a_test_file_that_names_it():
    tests = [path for path in python_files("tests") if "/test_" in path]
    named = " ".join(tests + [ast.get_docstring(parse(path)) or "" for path in tests])
    modules = [path for path in FILES if not path.endswith("__init__.py")]
    assert [path for path in modules if not re.search(rf"\b(test_)?{path.rsplit('/')[-1]}\b", named)] == []


def test_no_line_is_exempt_from_the_rules():
    assert sum((ROOT / path).read_text().count(mark) for path in FILES for mark in ("# noqa", "# fmt:")) <= 8


def test_replaced_words_do_not_come_back():
    word = re.compile("|".join(OLD_WORDS), re.IGNORECASE)
    found = [path for path in FILES if word.search((ROOT / path).read_text())]
    assert not found
