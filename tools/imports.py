"""Finds which files of this project import which other files, by parsing the sources.

A path is relative to the project's root: "common/boxes.py".
"""

import ast
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRODUCT = ("common", "efficientdet", "yolov4", "tools")


def python_files(*folders: str) -> list[str]:
    """Returns all .py files below these folders, sorted."""
    return sorted(
        path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


def read(path: str) -> str:
    return (ROOT / path).read_text()


def imports(path: str) -> frozenset[str]:
    """Returns the project's files that a file imports. Imports under TYPE_CHECKING do not count."""
    return _imports(read(path)) - {path}


@functools.cache
def _imports(text: str) -> frozenset[str]:
    tree = ast.parse(text)
    unused = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    found = [files for statement, _, files in _import_statements(tree) if id(statement) not in unused]
    return frozenset(itertools.chain(*found))


@functools.cache
def imported_files(text: str) -> tuple[tuple[str, str, str | None], ...]:
    """Returns (local name, file, imported name) for each import of a file of this project.

    The imported name is None if the whole file is imported.
    """
    found = []
    for statement, alias, files in _import_statements(ast.parse(text)):
        if files:
            module = files[-1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            name = alias.name if module == getattr(statement, "module", None) else None
            found.append((alias.asname or alias.name, files[-1], name))
    return tuple(found)


def _import_statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.alias, list[str]]]:
    """Yields (statement, imported name, files of the project that this import loads)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                yield node, alias, _files_of(module, alias.name) if module else _files_of(alias.name, None)


def _files_of(module: str, name: str | None) -> list[str]:
    """Returns the files of a module, and of the packages that contain it.

    If `name` is a submodule, its file is returned too.
    """
    parts = module.split(".")
    if parts[0] not in (*PRODUCT, "tests", "examples"):
        return []
    places = ["/".join(parts[: count + 1]) + "/__init__.py" for count in range(len(parts))]
    places.append("/".join(parts) + ".py")
    if name:
        places += ["/".join((*parts, name)) + end for end in (".py", "/__init__.py")]
    return [place for place in places if (ROOT / place).exists()]


def closure(paths: Iterable[str], read: Callable[[str], str] = read) -> set[str]:
    """Returns these files and all files that they import, also indirectly."""
    seen: set[str] = set()
    left = list(paths)
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            left += _imports(read(path))
    return seen
