"""Finds which files of this project import which other files, by parsing the sources.

A path is relative to the project's root and has forward slashes: "common/boxes.py".
"""

import ast
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRODUCT = ("common", "efficientdet", "yolov4", "tools")  # the folders of the product's code


def python_files(*folders: str) -> list[str]:
    """Returns all .py files below these folders of the project, sorted."""
    return sorted(
        path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


def read(path: str) -> str:
    return (ROOT / path).read_text()


def imports(path: str) -> frozenset[str]:
    """Returns the project's files that a file imports, also inside functions, but not under TYPE_CHECKING."""
    return _imports(read(path)) - {path}


@functools.cache
def _imports(text: str) -> frozenset[str]:
    names = _imported_names(ast.parse(text))
    return frozenset(found for module, name in names for found in _files_of(module, name))


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yields (module, name) for every import in a file; for `import a.b` it is ("a.b", None)."""
    unused = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@functools.cache
def imported_files(text: str) -> tuple[tuple[str, str, str | None], ...]:
    """Returns (local name, file, name in the file or None for the whole file) for each project import."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                files = list(_files_of(module, alias.name) if module else _files_of(alias.name, None))
                is_file = bool(files) and _module_of(files[-1]) != module
                if files:
                    found.append((alias.asname or alias.name, files[-1], None if is_file else alias.name))
    return tuple(found)


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _files_of(module: str, name: str | None) -> Iterator[str]:
    """Yields the files of a module, of the packages that contain it, and of `name` if it is a submodule."""
    parts = module.split(".")
    if parts[0] not in (*PRODUCT, "tests", "examples"):
        return
    for count in range(1, len(parts) + 1):
        yield from _existing("/".join(parts[:count]) + "/__init__.py")
    yield from _existing("/".join(parts) + ".py")
    if name:
        yield from _existing("/".join((*parts, name)) + ".py")
        yield from _existing("/".join((*parts, name)) + "/__init__.py")


def _existing(path: str) -> Iterator[str]:
    if (ROOT / path).exists():
        yield path


def closure(paths: Iterable[str], read: Callable[[str], str] = read) -> set[str]:
    """Returns these files and all files that they import, also indirectly; `read` returns a file's text."""
    seen: set[str] = set()
    left = list(paths)
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            left += _imports(read(path))
    return seen
