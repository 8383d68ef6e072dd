"""Tests the direction of imports between folders, circles of imports, and the length of functions."""

import ast
import functools
import pathlib

import pytest

from tests.conftest import ROOT

FOLDERS = ("common", "efficientdet", "yolov4", "tools")
APPS = ("efficientdet", "yolov4")
# A file of `common` imports files of its own room and of the rooms before it. "" is common/*.py.
ROOMS = ("", "distributed", "data", "weights", "evaluation", "export", "training")
PUBLIC_DOOR = ("common/readers.py", "common/data/readers.py")  # the promised name `common.readers`
MAX_LINES = 100  # of a function


def python_files(root: pathlib.Path, *folders: str) -> list[str]:
    files = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(path.relative_to(root).as_posix() for path in files)


def imports(root: pathlib.Path, path: str) -> set[str]:
    """Returns the project's files that a file imports, also in functions and under TYPE_CHECKING."""
    files = set()
    for node in ast.walk(ast.parse((root / path).read_text())):
        names: list[list[str]] = []  # for each import: the possible dotted names, the longest first
        if isinstance(node, ast.Import):
            names = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [[f"{node.module}.{alias.name}", node.module] for alias in node.names]
        for choices in names:
            places = [name.replace(".", "/") + end for name in choices for end in (".py", "/__init__.py")]
            files |= set([place for place in places if (root / place).exists()][:1])
    return files - {path}


def is_allowed(path: str, imported: str) -> bool:
    """Returns whether a file may import another file."""
    folder, target = path.split("/")[0], imported.split("/")[0]
    if folder != "common" or target != "common":
        return target in {"common": ("common",), "tools": FOLDERS}.get(folder, (folder, "common"))
    return _room(imported) <= _room(path) or (path, imported) == PUBLIC_DOOR


def _room(path: str) -> int:
    return ROOMS.index("/".join(path.split("/")[1:-1][:1]))


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns the files that `start` imports, directly or through other files."""
    files, waiting = set(), list(graph[start])
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += graph[path]
    return files


@functools.cache
def project() -> dict[str, set[str]]:
    """Returns {file: files that it imports}."""
    return {path: imports(ROOT, path) for path in python_files(ROOT, *FOLDERS)}


def test_imports_between_packages_go_only_in_the_allowed_direction():
    arrows = {(path, imported) for path, files in project().items() for imported in files}
    assert not {arrow for arrow in arrows if not is_allowed(*arrow)}


def test_no_source_file_is_in_a_circle_of_imports():
    assert not {path for path in project() if path in reachable(project(), path)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_have_at_most_100_lines(folder):
    for path in python_files(ROOT, folder):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < MAX_LINES, f"{path}:{node.name}"


# --- tests of the functions above, which otherwise could pass everything ---


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("efficientdet/train.py", "yolov4/train.py"),
        ("efficientdet/train.py", "tools/bench.py"),
        ("common/boxes.py", "efficientdet/config.py"),
        ("common/boxes.py", "tools/bench.py"),
        ("common/boxes.py", "common/data/labels.py"),
        ("common/data/labels.py", "common/weights/trained.py"),
        ("common/evaluation/evaluate.py", "common/training/run.py"),
    ],
)
def test_import_rule_of_these_tests_forbids_imports_in_the_wrong_direction(path, imported):
    assert not is_allowed(path, imported)


def test_import_search_lists_imports_in_functions_and_under_type_checking(tmp_path):
    (tmp_path / "common/data").mkdir(parents=True)
    for name in ("__init__", "a", "b", "c", "data/__init__", "data/d"):
        (tmp_path / f"common/{name}.py").touch()
    (tmp_path / "common/e.py").write_text(
        "import os\nimport common.a\nfrom common import b, VERSION\nfrom common.data.d import name\n"
        "if TYPE_CHECKING:\n    from common.c import Type\ndef f():\n    import common.e\n"
    )
    expected = {"common/__init__.py", "common/a.py", "common/b.py", "common/c.py", "common/data/d.py"}
    assert imports(tmp_path, "common/e.py") == expected


def test_import_search_lists_all_files_reachable_through_a_circle_of_imports():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert reachable(graph, "b") == {"b", "c", "d"}
