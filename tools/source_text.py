"""The text of a Python file, and where the nodes of its syntax tree stand in it."""

import ast
import re
from collections.abc import Sequence
from typing import Any


class SourceText:
    """One file, as bytes, because the columns of ast count those; its methods return the new text."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._lines = self._text.splitlines(keepends=True)

    def without_item(self, items: Sequence, item: object, comma: bytes = b"") -> str:
        """The text without one of several things that commas, `or` or `and` separate.

        Args:
            items: nodes, or tuples of nodes that go together: a key and its value.
            item: one of them.
            comma: what must follow the other one of two, in a tuple.
        """
        groups = [item if isinstance(item, tuple) else (item,) for item in items]  # key and value, ...
        spans = [self.span(*filter(None, group)) for group in groups]
        index = items.index(item)
        start, end = spans[index]
        rest = re.compile(rb" *, *(#.*)?\n").match(self._text, end)
        line = self._text.rfind(b"\n", 0, start) + 1
        if rest and not self._text[line:start].strip():
            return self.replaced((line, rest.end()), b"")
        if comma:
            end = self._after_comma(spans[1][1])
            return self.replaced((spans[0][0], end), self.cut(*spans[1 - index]) + comma)
        if index + 1 < len(items):
            end = spans[index + 1][0]
        elif index:
            start = spans[index - 1][1]
        else:
            end = self._after_comma(end)
        return self.replaced((start, end), b"")

    def _offset(self, line: int) -> int:
        return sum(len(text) for text in self._lines[: line - 1])

    def span(self, *nodes: Any) -> tuple[int, int]:
        """Where nodes start and end, with parentheses around them and the stars before."""
        starts = [self._offset(n.lineno) + n.col_offset for n in nodes]
        ends = [self._offset(n.end_lineno) + n.end_col_offset for n in nodes]
        start, end = min(starts), max(ends)
        while (before := re.search(rb"(?<![\w)\]])\(\s*$|\*\*$", self._text[:start])) is not None:
            after = re.compile(rb"\s*\)").match(self._text, end)
            if before[0] != b"**":
                if after is None:
                    break
                end = after.end()
            start = before.start()
        return start, end

    def _after_comma(self, end: int) -> int:
        return end + self._text[end:].startswith(b",")

    def cut(self, start: int, end: int) -> bytes:
        """What stands there."""
        return self._text[start:end]

    def replaced(self, span: tuple[int, int], by: bytes) -> str:
        """The text with something else there."""
        return (self._text[: span[0]] + by + self._text[span[1] :]).decode()

    def first_line(self, node: ast.stmt) -> int:
        """The first line of a statement, its decorators and a comment above it unless that is a heading."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        while re.match(rb" *# (?!---)", self._lines[first - 2] if first > 1 else b""):
            first -= 1
        return first

    def else_line(self, node: ast.If) -> int:
        """The line of the `else:` of an if."""
        numbers = range((node.body[-1].end_lineno or 0) + 1, node.orelse[0].lineno + 1)
        return next(n for n in numbers if self._lines[n - 1].strip().startswith(b"else:"))

    def without_lines(self, first: int, last: int) -> str:
        """The text without these lines, from 1, both included."""
        return b"".join(self._lines[: first - 1] + self._lines[last:]).decode()
