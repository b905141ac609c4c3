"""Changes of a blob through its grammar: edits become pieces, stretches of bytes to put together.

Whatever the edits, the pieces are plain bytes of what was saved: a reproducer needs no grammar.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from subjects.scenario import BlobEdit
from subjects.state.parse import BadBlob, Shape, parse
from subjects.state.tree import FORMATS, Node
from subjects.trace import Piece

FILLER = b"\x5a"
"""What appended bytes consist of."""
MOST_INSERTED = 4096
OWN = -2
"""In a piece: the slot that is being changed (until it has its number)."""


class Source:
    """A blob with its grammar: `tree` is None where it cannot be read; it has only places then."""

    def __init__(self, data: bytes, shape: Shape | None = None):
        self.data = data
        self.tree: Node | None
        self.shape: Shape | None
        try:
            self.tree, self.shape = parse(data, shape)
        except BadBlob:
            self.tree, self.shape = None, None
        self._named: dict[str, list[tuple[Node, Node]]] = {}
        if self.tree is not None:
            self._index(self.tree)

    def _index(self, parent: Node) -> None:
        for child in parent.children:
            self._named.setdefault(child.name, []).append((child, parent))
            if child.children:
                self._index(child)

    def names(self) -> list[str]:
        """The names of all fields and groups."""
        return list(self._named)

    def all_of(self, name: str) -> list[tuple[Node, Node]]:
        """The nodes of a name, each with the group that it is in. The window of a partial state is its only attention
        part: nothing in the blob says which one it is."""
        found = self._named.get(name, [])
        if not found and name.startswith("window."):
            found = self._named.get("attn." + name.removeprefix("window."), [])
        return found

    def find(self, name: str, nth: int) -> tuple[Node, Node] | None:
        """The nth node of a name, counted round."""
        found = self.all_of(name)
        return found[nth % len(found)] if found else None


Splice = tuple[int, int, list[Piece]]
"""Bytes start to end are replaced by pieces."""


def pieces_of(source: Source, edits: Sequence[BlobEdit], other: Callable[[int], Source | None]) -> list[Piece]:
    """What the changed blob is put together from; its own bytes are pieces of slot OWN. `other`: the blob of another
    slot, None where there is none.
    """
    splices: list[Splice] = []
    for edit in edits:
        found = _splices(source, edit, other)
        # an insertion beside a replaced stretch touches it, but does not overlap
        if all(e <= s0 or s >= e0 for s, e, _ in found for s0, e0, _ in splices if (s, e) != (s0, e0) or s != e):
            splices += found
    out: list[Piece] = []
    at = 0
    for start, end, pieces in sorted(splices, key=lambda x: (x[0], x[1])):
        if start > at:
            out.append(Piece(OWN, at, start))
        out += pieces
        at = max(at, end)
    if at < len(source.data):
        out.append(Piece(OWN, at, len(source.data)))
    return _joined(out)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one slot that follow each other as one piece, empty ones left out."""
    out: list[Piece] = []
    for p in pieces:
        if p.slot == -1 and p.data and out and out[-1].slot == -1:
            out[-1] = Piece(-1, data=out[-1].data + p.data)
        elif p.slot != -1 and out and out[-1].slot == p.slot and out[-1].end == p.start:
            out[-1] = Piece(p.slot, out[-1].start, p.end)
        elif p.data or p.end > p.start:
            out.append(p)
    return out


def assemble(pieces: Sequence[Piece], blob_of: Callable[[int], bytes]) -> bytes:
    """The bytes that pieces stand for; `blob_of` gives what a slot holds."""
    return b"".join(p.data if p.slot == -1 else blob_of(p.slot)[p.start : p.end] for p in pieces)


def _splices(source: Source, edit: BlobEdit, other: Callable[[int], Source | None]) -> list[Splice]:
    if not edit.where:
        return _at_place(source, edit, other)
    found = source.find(edit.where, edit.nth)
    if found is None:
        return []
    node, parent = found
    match edit.how:
        case "set" | "add" | "flip":
            return _changed(source.data, node, edit)
        case "zero":
            return [(node.start, node.end, [Piece(-1, data=bytes(node.end - node.start))])]
        case "cut":
            place = min(max(node.start + edit.value, 0), len(source.data))
            return [(place, len(source.data), [])]
        case "insert":
            return [(node.end, node.end, [Piece(-1, data=FILLER * min(max(edit.value, 0), MOST_INSERTED))])]
        case "drop" | "double" | "swap":
            return _moved(source, node, parent, edit)
        case "take":
            donor = other(edit.value)
            theirs = donor.find(edit.where, edit.nth) if donor is not None else None
            if theirs is None:
                return []
            return [(node.start, node.end, [Piece(edit.value, theirs[0].start, theirs[0].end)])]


def _at_place(source: Source, edit: BlobEdit, other: Callable[[int], Source | None]) -> list[Splice]:
    size = len(source.data)
    at = size * min(max(edit.nth, 0), 1000) // 1000
    match edit.how:
        case "cut":
            return [(min(max(at + edit.value, 0), size), size, [])]
        case "insert":
            return [(at, at, [Piece(-1, data=FILLER * min(max(edit.value, 0), MOST_INSERTED))])]
        case "zero":
            end = min(at + max(edit.value, 0), size)
            return [(at, end, [Piece(-1, data=bytes(end - at))])]
        case "take":
            donor = other(edit.value)
            return [] if donor is None else [(0, size, [Piece(edit.value, 0, len(donor.data))])]
        case "set" | "add" | "flip":
            at &= ~3
            end = min(at + 4, size)
            word = Node("", at, end, "u32", int.from_bytes(source.data[at:end], "little"))
            return _changed(source.data, word, edit)
        case _:
            return []


def _changed(data: bytes, node: Node, edit: BlobEdit) -> list[Splice]:
    """A number changed; of a group its first field, of text and data the first four bytes."""
    while node.kind == "group" and node.children:
        node = node.children[0]
    start, end = node.start, node.end
    if node.kind not in FORMATS:
        end = min(start + 4, end)
    if start == end:
        return []
    if edit.how == "flip":
        return [(start, start + 1, [Piece(-1, data=bytes([data[start] ^ ((edit.value & 0xFF) or 1)]))])]
    size = end - start
    value = edit.value + (int.from_bytes(data[start:end], "little") if edit.how == "add" else 0)
    return [(start, end, [Piece(-1, data=(value % (1 << (8 * size))).to_bytes(size, "little"))])]


def _moved(source: Source, node: Node, parent: Node, edit: BlobEdit) -> list[Splice]:
    alone = edit.value == 1 or node.last != "cell"
    group = parent.group(node.last)
    i = next(k for k, n in enumerate(group) if n is node)
    stretches = [] if alone else _rows(parent, i)
    own = [(node.start, node.end), *stretches]
    if edit.how == "swap":
        if len(group) < 2:
            return []
        j = (i + 1) % len(group)
        theirs = [(group[j].start, group[j].end), *([] if alone else _rows(parent, j))]
        return [
            splice
            for (a, b), (c, d) in zip(own, theirs, strict=True)
            for splice in ((a, b, [Piece(OWN, c, d)]), (c, d, [Piece(OWN, a, b)]))
        ]
    if edit.how == "drop":
        found: list[Splice] = [(a, b, []) for a, b in own]
    else:
        found = [(b, b, [Piece(OWN, a, b)]) for a, b in own]
    if not alone:
        count = parent.group("n_cells")[0]
        n = int(parent.number("n_cells")) + (1 if edit.how == "double" else -1)
        found.append((count.start, count.end, [Piece(-1, data=struct.pack("<I", n))]))
    return found


def _rows(parent: Node, i: int) -> list[tuple[int, int]]:
    """The bytes of cell `i` in the data of every layer."""
    out: list[tuple[int, int]] = []
    for layer in parent.children:
        for data in layer.children if layer.last in ("k", "v", "r", "s") else ():
            if data.last not in ("data", "ngram_data"):
                continue
            for j in range(max(data.across, 1)):
                start = data.start + (j * data.cells + i) * data.width
                out.append((start, start + data.width))
    return out
