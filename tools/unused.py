"""Finds functions, classes and constants that a copy of one app (tools/copy_app.py) does not use.

For example, a copy of efficientdet does not use functions that only yolov4 calls.
"""

import ast
import collections
import functools
from collections.abc import Iterator, Mapping


def unused(texts: Mapping[str, str], project: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields (path, scope, name) of each definition in `texts` that only files outside `texts` use."""
    places: list[dict[str, list[tuple[str, str]]]] = [collections.defaultdict(list) for _ in range(2)]
    for uses, files in zip(places, (texts, project), strict=True):
        for path, text in files.items():
            for scope, name in _references(text)[1]:
                uses[name].append((path, scope))
    plain = {"", *_plain_classes(project)}
    for path, text in texts.items():
        for scope, name in _references(text)[0]:
            inside = f"{scope}.{name}.".lstrip(".")
            is_used, was_used = (
                any(other != path or not f"{around}.".startswith(inside) for other, around in uses[name])
                for uses in places
            )
            if was_used and not is_used and scope in plain and not name.startswith("__"):
                yield path, scope, name


def _plain_classes(project: Mapping[str, str]) -> set[str]:
    bases = {name: of for text in project.values() for name, of in _classes(text).items()}
    plain: set[str] = {"abc.ABC", "NamedTuple"}
    while new := {name for name in bases.keys() - plain if bases[name] <= plain}:
        plain |= new
    return plain


@functools.cache
def _classes(text: str) -> dict[str, set[str]]:
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return {node.name: {ast.unparse(base) for base in node.bases} for node in classes}


@functools.cache
def _references(text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns two lists of (scope, name): what a file defines, and what it uses."""
    defined: list[tuple[str, str]] = []
    read: list[tuple[str, str]] = []

    def walk(around: ast.AST, scope: str) -> None:
        is_outer = isinstance(around, ast.Module | ast.ClassDef)
        for node in ast.iter_child_nodes(around):
            inner = scope
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if is_outer:
                    defined.append((scope, name))
                    inner = f"{scope}.{name}".lstrip(".")
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    if isinstance(around, ast.Module):
                        defined.append((scope, name))
                        inner = name
                case (
                    ast.Name(id=name, ctx=ast.Load())
                    | ast.Attribute(attr=name)
                    | ast.Constant(value=str(name))
                    | ast.alias(name=name, asname=str())
                ):
                    read.append((scope, name))
            walk(node, inner)

    walk(ast.parse(text), "")
    return defined, read
