"""Edits the text of a Python file at the positions of the nodes of its syntax tree."""

import ast
import re
from collections.abc import Sequence
from typing import Any


class SourceText:
    """The text of one file, as bytes because ast counts columns in bytes. Methods return an edited text."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._lines = self._text.splitlines(keepends=True)

    def without_item(self, items: Sequence, item: object, comma: bytes = b"") -> str:
        """Removes one item of a list, a call, a dict, or a chain of `or` or `and`.

        Args:
            items: all items, as nodes. A key with its value, or a parameter with its default, is a tuple.
            item: the item to remove.
            comma: b"," if the items are a Python tuple of two. The remaining item then needs a comma.
        """
        groups = [item if isinstance(item, tuple) else (item,) for item in items]
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
        """Returns where nodes start and end, with parentheses and `**`."""
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
        return self._text[start:end]

    def replaced(self, span: tuple[int, int], by: bytes) -> str:
        return (self._text[: span[0]] + by + self._text[span[1] :]).decode()

    def first_line(self, node: ast.stmt) -> int:
        """Returns a statement's first line, with decorators and a comment above."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        while re.match(rb" *# (?!---)", self._lines[first - 2] if first > 1 else b""):
            first -= 1
        return first

    def else_line(self, node: ast.If) -> int:
        numbers = range((node.body[-1].end_lineno or 0) + 1, node.orelse[0].lineno + 1)
        return next(n for n in numbers if self._lines[n - 1].strip().startswith(b"else:"))

    def without_lines(self, first: int, last: int) -> str:
        """Removes the lines `first` to `last`, counted from 1."""
        return b"".join(self._lines[: first - 1] + self._lines[last:]).decode()
