"""A blob as a tree of named fields, each with its place in the bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["group", "u16", "u32", "i32", "u64", "text", "data"]
FORMATS: dict[Kind, str] = {"u16": "<H", "u32": "<I", "i32": "<i", "u64": "<Q"}


@dataclass(slots=True)
class Node:
    """One field, or a group of fields.

    name: its path without indices, such as "recurrent.cell.pos"; several nodes may have the same one. start, end: its
    bytes. value: of a number or text. cells, width: of data, the number of cells that it holds and the bytes of one
    row; across: how many rows there are when each holds one value of every cell (transposed V), otherwise 0.
    """

    name: str
    start: int
    end: int
    kind: Kind = "group"
    value: int | str | bytes = 0
    children: list[Node] = field(default_factory=list)
    cells: int = 0
    width: int = 0
    across: int = 0

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def walk(self) -> Iterator[Node]:
        """This node and all below it, in the order of their bytes."""
        yield self
        for child in self.children:
            yield from child.walk()

    def leaves(self) -> Iterator[Node]:
        """The fields themselves."""
        return (n for n in self.walk() if n.kind != "group")

    def named(self, name: str) -> list[Node]:
        """All nodes of a name, in order."""
        return [n for n in self.walk() if n.name == name]

    def number(self, last: str) -> int:
        """The value of the child of that last name. KeyError where there is none."""
        for child in self.children:
            if child.last == last and isinstance(child.value, int):
                return child.value
        raise KeyError(f"{self.name} has no {last}")

    def group(self, last: str) -> list[Node]:
        """The children of that last name."""
        return [c for c in self.children if c.last == last]


def write(tree: Node) -> bytes:
    """The bytes of a tree, from the values of its fields."""
    out: list[bytes] = []
    for leaf in tree.leaves():
        if leaf.kind in FORMATS:
            out.append(struct.pack(FORMATS[leaf.kind], leaf.value))
        else:
            value = leaf.value
            out.append(value.encode("latin-1") if isinstance(value, str) else value)  # type: ignore[arg-type]
    return b"".join(out)
