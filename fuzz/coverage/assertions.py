"""What of a source does not count: sides of branches that fail an assertion, and blocks that only log for debugging.

llama.cpp's assertions are macros, so their conditions are branches like any other to the compiler. The side that ends
the process cannot be asked of a sound program. `GGML_ASSERT(a && b)` has two branches and both false sides fail;
`GGML_ASSERT(a || b)` has two and only the false side of b does. Nothing else of an assertion is left out, nor is an
`if` whose body is GGML_ABORT: such an `if` may be taken by a blob or a program of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ASSERTION = "GGML_ASSERT"
"""assert() is compiled out of the builds that are measured."""
_DEBUG = re.compile(r"^\s*if \(\(*debug\b.*\)\s*\{\s*$")


@dataclass(frozen=True)
class _Node:
    """A part of a condition: `kind` leaf, not, and, or."""

    kind: str
    parts: tuple[_Node, ...] = ()
    text: str = ""


def failing(argument: str, branches: int) -> list[set[bool]] | None:
    """For each branch of an assertion, in the order in which clang writes them: the sides that fail it.

    argument: the text between the macro's parentheses. None where the number of conditions is not that of the branches
    (a lambda or a constant in it): the caller must not guess then.
    """
    tree = _parse(argument)
    leaves = _ordered(tree)
    if len(leaves) != branches:
        return None
    if tree.kind == "leaf":
        # GGML_ASSERT(x) is `if (!(x)) abort`, and the branch is of the whole condition
        return [{True}]
    return [{side for side in (True, False) if _decided(tree, leaf, side) is False} for leaf in leaves]


def argument(lines: Sequence[str], line: int, column: int) -> str:
    """The text between the parentheses of a macro's use; line and column (from 1) are those of its name."""
    text = "\n".join([lines[line - 1][column - 1 :], *lines[line : line + 20]])
    start = text.find("(")
    if start < 0:
        return ""
    end = _closing(text, start)
    return text[start + 1 : end]


def debug_lines(lines: Sequence[str]) -> set[int]:
    """The lines (from 1) of `if (debug ...) { ... }` blocks that do nothing but log, their conditions included.

    `debug` is a variable set from LLAMA_..._DEBUG in the environment. A block counts as logging when it calls
    LLAMA_LOG_DEBUG or a `..._print` function; one that does not stays in.
    """
    found: set[int] = set()
    for i, line in enumerate(lines):
        if not _DEBUG.match(line) or i + 1 in found:
            continue
        depth, j = 0, i
        while j < len(lines):
            depth += _bare(lines[j]).count("{") - _bare(lines[j]).count("}")
            if depth <= 0:
                break
            j += 1
        if re.search(r"LLAMA_LOG_DEBUG|_print\(", "\n".join(lines[i : j + 1])):
            found.update(range(i + 1, j + 2))
    return found


def _bare(line: str) -> str:
    """A line without comments, strings and character literals: what is in them opens and closes nothing."""
    return re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'|//.*', "", line)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes; the end of the text if it does not."""
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c in "\"'":
            i += 1
            while i < len(text) and text[i] != c:
                i += 2 if text[i] == "\\" else 1
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return len(text)


def _split(text: str, operator: str) -> list[str]:
    """A condition cut at an operator that stands in no parentheses."""
    parts, last, i = [], 0, 0
    while i < len(text):
        if text[i] in "([{\"'":
            i = _end_of(text, i) + 1
        elif text.startswith(operator, i):
            parts.append(text[last:i])
            i += len(operator)
            last = i
        else:
            i += 1
    return [*parts, text[last:]]


def _end_of(text: str, i: int) -> int:
    """The last character of the bracket or literal that begins at `i`."""
    if text[i] not in "\"'":
        return _closing(text, i)
    c, i = text[i], i + 1
    while i < len(text) and text[i] != c:
        i += 2 if text[i] == "\\" else 1
    return i


def _parse(text: str) -> _Node:
    text = text.strip()
    for kind, operator in (("or", "||"), ("and", "&&")):
        parts = _split(text, operator)
        if len(parts) > 1:
            # a message (`&& "why"`) is a constant, which the compiler makes no branch of
            return _Node(kind, tuple(_parse(p) for p in parts if not p.strip().startswith('"')))
    if text.startswith("!") and text[1:].lstrip().startswith("("):
        inner = _parse(text[1:])
        return _Node("not", (inner,)) if inner.kind != "leaf" else _Node("leaf", text=text)
    if text.startswith("(") and _closing(text, 0) == len(text) - 1:
        return _parse(text[1:-1])
    return _Node("leaf", text=text)


def _leaves(node: _Node) -> list[_Node]:
    return [node] if node.kind == "leaf" else [leaf for p in node.parts for leaf in _leaves(p)]


def _ordered(node: _Node) -> list[_Node]:
    """Leaves in clang's order: an operator has two sides; what is nested in them goes before the sides themselves."""
    if node.kind == "leaf":
        return [node]
    found: list[_Node] = []
    for i, part in enumerate(node.parts):
        if part.kind != "leaf":
            found += _ordered(part)
        if i:
            # the left side is the first part alone, or an operator, whose leaves are there already
            first = node.parts[0]
            found += [x for x in ((first, part) if i == 1 else (part,)) if x.kind == "leaf"]
    return found or [leaf for p in node.parts for leaf in _ordered(p)]


def _decided(node: _Node, leaf: _Node, side: bool) -> bool | None:
    """The value of a condition once one of its leaves has come out as `side`, None where others still decide.

    That the leaf was evaluated says that what stands before it did not decide.
    """
    if node.kind == "leaf":
        return side if node is leaf else None
    for i, part in enumerate(node.parts):
        if not any(x is leaf for x in _leaves(part)):
            continue
        value = _decided(part, leaf, side)
        if value is None:
            return None
        if node.kind == "not":
            return not value
        decides = node.kind == "or"  # the value that ends the evaluation
        return value if value is decides or i == len(node.parts) - 1 else None
    return None
