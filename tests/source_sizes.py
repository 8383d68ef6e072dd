import ast
import functools
import io
import tokenize

from tools.imports import ROOT, imports, read

_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


@functools.cache
def parse(path: str) -> ast.Module:
    return ast.parse(read(path))


def depth(path: str, above: tuple[str, ...] = ()) -> int:
    """Returns the length of the longest chain of imports."""
    if path not in _depths:
        below = [found for found in imports(path) if found not in above]
        _depths[path] = 1 + max((depth(found, (*above, path)) for found in below), default=0)
    return _depths[path]


_depths: dict[str, int] = {}


@functools.cache
def code_lines(path: str) -> int:
    """Blank lines, comments and docstrings do not count."""
    documented: set[int] = set()
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)
