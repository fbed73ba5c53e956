"""The text of a training script, its syntax tree, and edits of the text by the positions of nodes.

A mutant keeps the text of its parent, comments and layout included, except where an `Edit` replaces it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Edit:
    """A stretch of the text, in bytes of its UTF-8 form, and what takes its place."""

    start: int
    end: int
    text: str


class Script:
    """One script: where its nodes are in its text, and what surrounds them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        self._line_starts = [0]
        for line in self._bytes.split(b"\n"):  # the lines of the parser, which knows no other line breaks
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def nodes(self, within: ast.AST | None = None) -> list[ast.AST]:
        """Every node that has a position, in the order of the text."""
        return self._nodes if within is None else self._ordered(within)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return self._ordered(self.tree)

    def _ordered(self, within: ast.AST) -> list[ast.AST]:
        return sorted((node for node in ast.walk(within) if hasattr(node, "lineno")), key=self.span)

    def calls(self, *names: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Calls of functions with one of these last names (`step` is the last name of `optimizer.step`)."""
        calls = [node for node in self.nodes(within) if isinstance(node, ast.Call)]
        return [call for call in calls if last_name(call.func) in names]

    def surrounding(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the nearest first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that a node is in, or is."""
        return next(held for held in (node, *self.surrounding(node)) if isinstance(held, ast.stmt))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends, in bytes."""
        start = self._line_starts[getattr(node, "lineno", 1) - 1] + getattr(node, "col_offset", 0)
        end = self._line_starts[getattr(node, "end_lineno", 1) - 1] + getattr(node, "end_col_offset", 0)
        return start, end

    def words(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self._bytes[start:end].decode()

    def replace(self, node: ast.AST, text: str) -> Edit:
        """Another text in place of a node."""
        return Edit(*self.span(node), text)

    def drop(self, statement: ast.stmt) -> Edit:
        """No statement in its place. `pass` keeps a block that has no other one."""
        return self.replace(statement, "pass")

    def before(self, statement: ast.stmt, text: str) -> Edit:
        """A simple statement more, in front of another one."""
        start, _ = self.span(statement)
        line = self._bytes[self._line_starts[statement.lineno - 1] : start]
        if line.strip():  # another statement is on the same line
            return Edit(start, start, f"{text}; ")
        return Edit(start, start, f"{text}\n{line.decode()}")

    def after(self, statement: ast.stmt, text: str) -> Edit:
        """A simple statement more, behind another simple one."""
        start, end = self.span(statement)
        line = self._bytes[self._line_starts[statement.lineno - 1] : start]
        return Edit(end, end, f"; {text}" if line.strip() else f"\n{line.decode()}{text}")

    def edited(self, edits: list[Edit]) -> str:
        """The text with all edits made. Raises `ValueError` if two of them overlap."""
        text, reached = [], 0
        for edit in sorted(edits, key=lambda each: (each.start, each.end)):
            if edit.start < reached:
                raise ValueError(f"two edits overlap at byte {edit.start}")
            text += [self._bytes[reached : edit.start], edit.text.encode()]
            reached = edit.end
        return b"".join([*text, self._bytes[reached:]]).decode()


def last_name(node: ast.AST) -> str:
    """`step` of `optimizer.step`, `Adam` of `torch.optim.Adam`; empty for what is neither a name nor an attribute."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """The argument of a call that is given by this name."""
    return next((held for held in call.keywords if held.arg == name), None)


def number(node: ast.AST | None) -> float | None:
    """The value of a number that is written out."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    return None
