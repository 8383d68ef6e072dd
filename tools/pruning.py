"""Removes the code that uses lost names from a copied app. Lost names are those that the copy does not have.

For example, a copy by tools/copy_app.py without the part "elastic" loses three of these lines:

    from common.distributed import elastic     removed
    if a.elastic:                              removed
        return elastic.run(train, a)           removed
    return train(a)                            stays
"""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tools.imports import imported_files
from tools.source_text import SourceText

LISTS = (ast.List, ast.Tuple, ast.Set)
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
FLAG_OWNERS = ("a", "self._a")


class UnsoundError(Exception):
    """Code that uses a lost name cannot be removed safely. The message names the line."""


class Lost(NamedTuple):
    """The lost names of one file.

    Attributes:
        names: scope -> names as in the code, such as "elastic" and "self._is_video". The scope is "" for the
            module, or for example "Run.save" for a method. ".encoded" means `encoded` of any object.
        flags: lost flag -> its default value, which decides conditions such as `if a.elastic`.
        words: lost strings: names of flags, and values of flags such as "horovod".
        is_test: whether the file is a test. A test function that uses a lost name is removed as a whole.
    """

    names: dict[str, set[str]]
    flags: Mapping[str, Any] = MappingProxyType({})
    words: Collection[str] = ()
    is_test: bool = False

    def has(self, name: str, scope: str) -> bool:
        """Returns whether a name is lost in a scope or around it."""
        inner = scope.split(".")
        around = ["", *(".".join(inner[: i + 1]) for i in range(len(inner)))]
        return any(name in self.names.get(scope, ()) for scope in around)

    def defines(self, name: str, scope: str) -> bool:
        """Returns whether a name is lost in exactly this scope."""
        return name in self.names.get(scope, ())

    @property
    def size(self) -> int:
        return sum(map(len, self.names.values()))

    def add(self, name: str, scope: str) -> None:
        scope = scope.partition(".")[0] if name.startswith("self.") else scope
        self.names.setdefault(scope, set()).add(name)


class Place(NamedTuple):
    """A node of a syntax tree, and the nodes that contain it.

    Attributes:
        above: the nodes around `node`, outermost first, each with the field that leads to `node`.
    """

    node: Any
    above: tuple[tuple[Any, str], ...] = ()

    @property
    def up(self) -> "Place":
        return Place(self.above[-1][0], self.above[:-1])

    @property
    def scope(self) -> str:
        return ".".join(node.name for node, _ in self.above if isinstance(node, DEFINITIONS))

    def walk(self) -> Iterator["Place"]:
        left = [self]
        while left:
            place = left.pop()
            yield place
            for field, value in reversed(list(ast.iter_fields(place.node))):
                for child in reversed(value if isinstance(value, list) else [value]):
                    if isinstance(child, ast.AST):
                        left.append(Place(child, (*place.above, (place.node, field))))


def prune(texts: dict[str, str], lost: Mapping[str, Lost], has: Callable[[str], bool]) -> None:
    """Prunes files in place, until no file uses a lost name.

    Args:
        texts: path -> text.
        lost: path -> lost names of this file. Names that removed code defined are added.
        has: function (path) -> whether the copy has this file.
    """
    known = -1
    sound: dict[str, int] = {}  # path -> number of its lost names when it was last pruned
    while known != (known := sum(lost_here.size for lost_here in lost.values())):
        for path, text in texts.items():
            for name, file, attribute in imported_files(text):
                gone = lost[file].names.get("", ()) if file in lost else ()
                if not has(file) or attribute in gone:
                    lost[path].add(name, "")
                elif attribute is None:
                    lost[path].names.setdefault("", set()).update(f"{name}.{other}" for other in gone)
            if sound.get(path) == lost[path].size:
                continue
            try:
                texts[path] = pruned(text, lost[path])
            except UnsoundError as error:
                raise UnsoundError(f"{path}, {error}") from None
            sound[path] = lost[path].size


def pruned(text: str, lost: Lost) -> str:
    """Returns the text without code that uses lost names. Adds the names that this code defined to `lost`."""
    names = {name.rpartition(".")[2] for found in lost.names.values() for name in found}
    used = set(re.findall(r"\w+", text))
    if not any(
        word in (used if word.isidentifier() else text) for word in (*names, *lost.flags, *lost.words)
    ):
        return text  # saves time: most files use no lost name
    while place := next((p for p in Place(ast.parse(text)).walk() if _is_lost(p, lost)), None):
        edit = _Edit(text, lost)
        try:
            in_body = any(isinstance(n, DEFINITIONS) and f == "body" for n, f in place.above)
            if lost.is_test and (in_body or isinstance(place.node, ast.arg)):
                raise UnsoundError("a test is removed as a whole")
            text = edit.without_use(place)
        except UnsoundError as error:
            if not lost.is_test:
                raise UnsoundError(f"line {place.node.lineno}, {ast.unparse(place.node)}: {error}") from None
            while len(place.above) > 1:
                place = place.up
            text = edit.without_statement(place)
    return text


def _is_lost(place: Place, lost: Lost) -> bool:
    """Returns whether this node itself uses or defines a lost name."""
    node, (parent, field) = place.node, place.above[-1] if place.above else (None, "")
    match node:
        case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
            name = ast.unparse(node)
            owner, dot, attribute = name.rpartition(".")
            is_flag = attribute in lost.flags and owner in FLAG_OWNERS
            return is_flag or lost.has(name, place.scope) or (bool(dot) and lost.has(dot + attribute, ""))
        case ast.alias():
            return lost.has(node.asname or node.name, place.scope)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=maker)) if name in lost.flags:
            return ast.unparse(maker).endswith("flag")
        case ast.arg() | ast.keyword() if lost.is_test:
            return node.arg in lost.words or (isinstance(node, ast.arg) and lost.has(node.arg, ""))
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return lost.defines("self." * isinstance(parent, ast.ClassDef) + name, place.scope)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return isinstance(parent, ast.Module) and lost.defines(name, "")
        case ast.Constant(value=str(word)) if lost.is_test and not isinstance(parent, ast.Expr | ast.Compare):
            flag, _, value = word.removeprefix("--").partition("=")
            is_flag = word.startswith("--") and flag in lost.flags
            return is_flag or not {word, value, re.split("[./-]", word)[0]}.isdisjoint(lost.words)
        case ast.Constant(value=str(word)) if not lost.is_test:
            return word in lost.words and (isinstance(parent, (*LISTS, ast.Compare)) or field == "keys")
    return False


def _stored(node: ast.AST, without: ast.AST | None = None) -> set[str]:
    """Returns the names that are assigned in `node`. Skips the part `without`."""
    if node is without:
        return set()
    found = set().union(*(_stored(child, without) for child in ast.iter_child_nodes(node)))
    is_stored = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    return found | ({ast.unparse(node)} if is_stored else set())


class _Edit(SourceText):
    def __init__(self, text: str, lost: Lost) -> None:
        super().__init__(text)
        self._lost = lost

    def without_use(self, place: Place) -> str:
        """Removes one use of a lost name, with as little code around it as possible."""
        if isinstance(place.node, ast.stmt):
            return self.without_statement(place)
        leaf, attribute = place.node, getattr(place.node, "attr", "")
        flag = attribute if attribute in self._lost.flags else ""
        # The truth value of the code at `place`; None: unknown. A lost flag has its default value. Any other
        # lost name is False.
        is_true: bool | None = bool(self._lost.flags.get(flag))
        while True:
            node, (parent, field), above = place.node, place.above[-1], place.up
            match parent:
                case ast.BoolOp() | ast.IfExp() | ast.If() if is_true is None and field in ("values", "test"):
                    raise UnsoundError("a condition whose result is not known")
                case ast.BoolOp():
                    if isinstance(parent.op, ast.Or) != is_true:
                        return self.without_item(parent.values, node)
                case ast.UnaryOp(op=ast.Not()):
                    is_true = None if is_true is None else not is_true
                case ast.Compare(ops=[operator], comparators=[right]):
                    is_true = self._compare(leaf, flag, operator, right)
                case ast.IfExp():
                    takes_body = is_true if field == "test" else field == "orelse"
                    left = parent.body if takes_body else parent.orelse
                    if not (isinstance(left, ast.Constant) and left.value is None):
                        return self.replaced(self.span(parent), self.cut(*self.span(left)))
                    is_true = False
                case ast.Call() if field == "args" and self._must_stay(leaf, above):
                    raise UnsoundError("a lost positional argument: give it by keyword")
                case ast.Dict():
                    entries = list(zip(parent.keys, parent.values, strict=True))
                    return self.without_item(entries, next(entry for entry in entries if node in entry))
                case ast.List() | ast.Tuple() | ast.Set() if self._is_list(above, leaf):
                    is_type = isinstance(above.above[-1][0], ast.Subscript)
                    one_left = isinstance(parent, ast.Tuple) and len(parent.elts) == 2 and not is_type
                    return self.without_item(parent.elts, node, comma=b"," * one_left)
                case ast.Call() if field == "keywords" or isinstance(node, ast.Starred):
                    return self.without_item([*parent.args, *parent.keywords], node)
                case ast.arguments():
                    return self._without_parameter(above, node)
                case ast.Import() | ast.ImportFrom() if len(parent.names) > 1:
                    return self.without_item(parent.names, node)
                case ast.If() if field == "test":
                    return self._without_test(above, bool(is_true))
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if field == "func":
                    is_true = False if name.startswith("is_") else None
                case ast.withitem() | ast.ExceptHandler() | ast.match_case() | ast.Module() | ast.While():
                    raise UnsoundError(f"nothing inside {type(parent).__name__} can be removed")
                case _ if field in ("ifs", "decorator_list", "returns", "bases"):
                    raise UnsoundError("without it the remaining code means something else")
                case ast.stmt():
                    return self.without_statement(above)
                case ast.NamedExpr():
                    pass
                case _:
                    is_true = None
            place = above

    def _compare(self, leaf: ast.AST, flag: str, operator: ast.cmpop, right: ast.expr) -> bool | None:
        """Returns the result of a comparison with a lost name; None: unknown."""
        if not flag:
            # If "horovod" is lost, `x == "horovod"` is always False.
            if isinstance(leaf, ast.Constant) or isinstance(operator, ast.In | ast.NotIn):
                return isinstance(operator, ast.NotEq | ast.NotIn)
            is_none = isinstance(right, ast.Constant) and right.value is None
            return isinstance(operator, ast.Is) if is_none else None
        is_equal = isinstance(operator, ast.Is | ast.Eq)
        if isinstance(right, ast.Constant) and (is_equal or isinstance(operator, ast.IsNot | ast.NotEq)):
            return (self._lost.flags[flag] == right.value) == is_equal
        return None

    def _must_stay(self, leaf: ast.AST, call: Place) -> bool:
        """Returns whether a call must stay and only loses one argument."""
        if isinstance(leaf, ast.Name) and not self._lost.defines(leaf.id, ""):
            return isinstance(call.above[-1][0], ast.Return | ast.Assign)
        return getattr(leaf, "attr", "") in self._lost.flags

    def without_statement(self, place: Place) -> str:
        """Removes a statement, and a block or function that this makes empty."""
        node, (parent, field) = place.node, place.above[-1]
        around = [place.above[0][0], *(n for n, _ in place.above if isinstance(n, DEFINITIONS))]
        kept = _stored(around[-1], node) | {n for n in _stored(around[:2][-1], node) if "." in n}
        kept |= {a.arg for a in ast.walk(getattr(around[-1], "args", node)) if isinstance(a, ast.arg)}
        if isinstance(node, DEFINITIONS):
            self._lost.add("self." * isinstance(parent, ast.ClassDef) + node.name, place.scope)
        else:
            for name in _stored(node) - kept:
                self._lost.add(name, place.scope)
        if isinstance(node, ast.AugAssign):
            raise UnsoundError("a variable that is changed here and stays")
        if isinstance(node, ast.Return) and parent is around[-1]:
            results = [n for n in ast.walk(around[-1]) if isinstance(n, ast.Return | ast.Yield)]
            if len(results) > 1:
                raise UnsoundError("a function that would return a result only in some cases")
            return self.without_statement(place.up)
        block = [statement for statement in getattr(parent, field) if statement is not node]
        left = [s for s in block if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if left or isinstance(parent, ast.Module):
            return self.without_lines(self.first_line(node), node.end_lineno)
        if field != "body" or getattr(parent, "orelse", None) or getattr(parent, "finalbody", None):
            raise UnsoundError("the block around it would be empty")
        return self.without_statement(place.up)

    def _without_test(self, place: Place, is_true: bool) -> str:
        node = place.node
        is_elif = self.cut(*self.span(node)).startswith(b"elif")
        if is_true and is_elif:
            raise UnsoundError("an elif whose condition is always true")
        if not is_true and not node.orelse:
            return self.without_statement(place)
        if not is_true and self.cut(*self.span(node.orelse[0])).startswith(b"elif"):
            start, next_start = self.span(node)[0], self.span(node.orelse[0])[0]
            return self.replaced((start, next_start + (0 if is_elif else len("el"))), b"")
        left = node.body if is_true else node.orelse
        first = (node.test.end_lineno if is_true else self.else_line(node)) + 1
        last = left[-1].end_lineno
        if is_elif:
            return self.without_lines(node.lineno, first - 2)
        inner = b"".join(line.removeprefix(b"    ") for line in self._lines[first - 1 : last])
        return b"".join([*self._lines[: node.lineno - 1], inner, *self._lines[node.end_lineno :]]).decode()

    def _without_parameter(self, place: Place, node: ast.AST) -> str:
        """Removes a parameter, whose name is then lost in the function."""
        a = place.node
        plain = [*a.posonlyargs, *a.args]
        defaults = [*[None] * (len(plain) - len(a.defaults)), *a.defaults, *a.kw_defaults]
        items = list(zip([*plain, *a.kwonlyargs], defaults, strict=True))
        item = next((item for item in items if node in item), None)
        if item is None or item[1] is None:
            return self.without_statement(place.up)
        self._lost.add(item[0].arg, Place(node, (*place.above, (place.node, ""))).scope)
        return self.without_item(items, item)

    def _is_list(self, place: Place, leaf: ast.AST) -> bool:
        """Returns whether the list or tuple at `place` may lose an element."""
        parent = place.above[-1][0]
        if str(getattr(leaf, "value", "")).startswith("--"):
            return False
        if isinstance(parent, ast.Compare):
            return len(place.node.elts) > 1
        is_row = isinstance(parent, (*LISTS, ast.Dict, ast.Return))
        is_values = isinstance(parent, ast.Assign) and not isinstance(parent.targets[0], ast.Name)
        return not (isinstance(place.node, ast.Tuple) and (is_row or is_values))
