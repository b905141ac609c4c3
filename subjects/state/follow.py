"""How far llama.cpp reads a changed blob: its reader's checks, in its order, after a good blob of the same context.

Sources as in `parse`. A model of the reader, good enough to tell whether a known fault is in the way of an input before
it is tried; no verdict rests on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from subjects.state.tree import FORMATS, Node

_FREE = frozenset({"pos", "seq", "x", "y", "token"})
"""Numbers that are taken as they are."""
_PARTS = frozenset({"attn", "window", "index", "recurrent", "dsv4"})


LARGEST = (1 << 31) - 1


class Reached(NamedTuple):
    """Where a blob is refused. field: the name of the field, empty where it is taken. early: nothing was changed by
    then. ended: because the bytes end there. recurrent: how many recurrent cells it claims (0: not read so far).
    stuck: a cell of attention was read whose position no removal reaches (below 0, or the largest there is).
    """

    field: str = ""
    early: bool = False
    ended: bool = False
    recurrent: int = 0
    stuck: bool = False


class _Refused(Exception):
    def __init__(self, field: str, ended: bool = False):
        super().__init__(field)
        self.field, self.ended = field, ended


class _Number(NamedTuple):
    """A number that is read; it must be `value` unless that is None."""

    name: str
    format: struct.Struct
    value: int | None


class _Bytes(NamedTuple):
    """Bytes that are passed over; they must be `text` unless that is None."""

    name: str
    size: int
    text: bytes | None


class _Rows(NamedTuple):
    """Data of all cells. each: bytes of one cell."""

    name: str
    each: int


class _Tokens(NamedTuple):
    """A number of tokens, and as many of them."""

    counted: _Number


class _Cells(NamedTuple):
    """A group of cells and what the layers hold of them. cell: the numbers of one, `format` all of them; was: how many
    there are in the good blob."""

    counted: _Number
    recurrent: bool
    was: int
    cell: tuple[_Number, ...]
    format: struct.Struct
    rest: tuple[_Number | _Rows, ...]


class _PartRead(NamedTuple):
    """A memory part has been read."""


_Step = _Number | _Bytes | _Tokens | _Cells | _PartRead


class Plan:
    """What a context reads of a good blob, in order and without the tree: made once, followed by every changed blob."""

    def __init__(self, tree: Node):
        self.steps: list[_Step] = []
        self.whole = tree.value in ("context state", "session file")
        for child in tree.children:
            if child.children:
                self.steps.extend(_group(child))
            else:
                self.steps.append(_number(child))
            if child.last in _PARTS:
                self.steps.append(_PartRead())


def _number(node: Node) -> _Number:
    value = None if node.last in _FREE or not isinstance(node.value, int) else node.value
    return _Number(node.name, struct.Struct(FORMATS[node.kind]), value)


def _group(group: Node) -> Iterator[_Step]:
    counted = group.group("n_cells")
    if counted:
        yield _cells(group, counted[0])
        return
    streams = group.group("stream")
    # a sequence's cells are in one stream; in which one depends on the sequence that the good blob is of
    full = next((s for s in streams if s.group("cell")), None)
    for child in group.children:
        if child.last == "token":
            continue
        if child.last == "stream" and full is not None:
            yield _cells(full, full.group("n_cells")[0])
        elif child.children:
            yield from _group(child)
        elif child.kind in ("data", "text"):
            text = str(child.value).encode("latin-1") if child.kind == "text" else None
            yield _Bytes(child.name, child.end - child.start, text)
        elif child.last == "n_tokens":
            yield _Tokens(_number(child)._replace(value=None))
        else:
            yield _number(child)


def _cells(group: Node, counted: Node) -> _Cells:
    cells = group.group("cell")
    cell = tuple(_number(leaf) for leaf in cells[0].leaves()) if cells else ()
    rest: list[_Number | _Rows] = []
    for child in group.children:
        if child.last in ("n_cells", "cell"):
            continue
        for leaf in child.leaves():
            if leaf.kind == "data":
                rest.append(_Rows(leaf.name, (leaf.end - leaf.start) // max(len(cells), 1)))
            else:
                rest.append(_number(leaf))
    every = struct.Struct("<" + "".join(n.format.format.removeprefix("<") for n in cell))
    number = _number(counted)._replace(value=None)
    return _Cells(number, group.last == "recurrent", len(cells), cell, every, tuple(rest))


class _Follower:
    def __init__(self, data: bytes, whole: bool):
        self.whole = whole
        self.data, self.at, self.recurrent, self.early, self.stuck = data, 0, 0, True, False

    def number(self, like: _Number) -> int:
        if self.at + like.format.size > len(self.data):
            raise _Refused(like.name, ended=True)
        value: int = like.format.unpack_from(self.data, self.at)[0]
        self.at += like.format.size
        if like.value is not None and value != like.value:
            raise _Refused(like.name)
        return value

    def skip(self, name: str, size: int) -> None:
        if self.at + size > len(self.data):
            raise _Refused(name, ended=True)
        self.at += size

    def step(self, step: _Step) -> None:
        match step:
            case _Number():
                self.number(step)
            case _Bytes(name, size, text):
                if text is not None and self.data[self.at : self.at + size] != text:
                    raise _Refused(name, ended=self.at + size > len(self.data))
                self.skip(name, size)
            case _Tokens(counted):
                self.skip(counted.name, 4 * self.number(counted))
            case _Cells():
                self.cells(step)
            case _PartRead():
                self.early = False

    def cells(self, like: _Cells) -> None:
        # of a whole context attention was emptied by then
        self.early = self.early and (like.recurrent or not self.whole)
        n = self.number(like.counted)
        self.early = False
        if like.recurrent:
            self.recurrent = n
        if not n and not like.recurrent:
            return  # an empty stream has nothing more
        if not like.was and not like.recurrent:
            raise _Refused(like.counted.name)  # what the layers would be is not known: taken for refused
        if n > 1 << 16:
            raise _Refused(like.counted.name)
        if like.cell and self.at + n * like.format.size <= len(self.data):
            end = self.at + n * like.format.size
            self.all_of(like, memoryview(self.data)[self.at : end])
            self.at = end
        elif like.cell:
            for _ in range(n):  # to where it ends
                for number in like.cell:
                    self.number(number)
        for leaf in like.rest:
            if isinstance(leaf, _Rows):
                self.skip(leaf.name, leaf.each * n)
            else:
                self.number(leaf)

    def all_of(self, like: _Cells, cells: memoryview) -> None:
        """Compare the numbers of all cells."""
        fixed = [(i, number) for i, number in enumerate(like.cell) if number.value is not None]
        for values in like.format.iter_unpack(cells):
            # the position comes first
            self.stuck = self.stuck or (not 0 <= values[0] < LARGEST and not like.recurrent)
            for i, number in fixed:
                if values[i] != number.value:
                    raise _Refused(number.name)


def follow(data: bytes, like: Plan) -> Reached:
    """How far a blob gets in a context whose own blob of that kind is `like`."""
    f = _Follower(data, like.whole)
    try:
        for step in like.steps:
            f.step(step)
    except _Refused as e:
        return Reached(e.field, f.early, e.ended, f.recurrent, f.stuck)
    return Reached(recurrent=f.recurrent, stuck=f.stuck)
