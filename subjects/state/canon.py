"""The canonical form of a saved state: by sequence, memory part, layer and position, whatever the order of its cells.

Two blobs of one state may differ in bytes: cells lie elsewhere, a whole context has more streams. In canonical form
they are equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subjects.state.parse import TYPES, Shape, parse
from subjects.state.tree import Node, write

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

WORDS = {
    "k": "K",
    "v": "V",
    "r": "convolution row",
    "s": "state row",
    "ngram": "n-gram row",
    "kv": "compressor rows",
    "score": "compressor scores",
}
"""What a tensor is called where people read."""
PART_WORDS = {
    "attn": "attention",
    "window": "windowed attention",
    "index": "indexer",
    "recurrent": "recurrent",
    "raw": "raw attention",
}


class Key(NamedTuple):
    """Which rows: memory part, number of the layer within the part, tensor."""

    part: str
    layer: int
    tensor: str

    def words(self) -> str:
        """For people."""
        part = PART_WORDS.get(self.part, self.part)
        return f"layer {self.layer}, {part} {WORDS.get(self.tensor, self.tensor)}"


class Rows(NamedTuple):
    """The rows of one key: a ggml type, positions in ascending order, and for each its bytes (n, width)."""

    type: int
    positions: tuple[int, ...]
    data: Bytes

    def values(self) -> Floats:
        """As float32 (n, values of a row)."""
        name, _, size = TYPES[self.type]
        flat = np.ascontiguousarray(self.data)
        if name == "F32":
            return flat.view(np.float32)
        if name == "F16":
            return flat.view(np.float16).astype(np.float32)
        if name == "BF16":
            return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        blocks = flat.reshape(len(self.positions), -1, size)
        out: Floats = dequantize(blocks, GGMLQuantizationType(self.type)).reshape(len(self.positions), -1)
        return out


@dataclass(slots=True)
class Sequence:
    """One sequence's state: positions of the cells of each part (one for each cell), and all rows."""

    positions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[Key, Rows] = field(default_factory=dict)


Canon = dict[int, Sequence]
"""By sequence id; the blob of a single sequence has it as 0, whichever it was saved from."""


def canonical(data: bytes, shape: Shape | None = None) -> Canon:
    """The canonical form of a blob. `shape`: what is known of it (see `parse`). Raises BadBlob."""
    tree, _ = parse(data, shape)
    return Layout(tree).canonical(data)


def canonical_tree(tree: Node) -> Canon:
    """The canonical form of a blob that was read already."""
    return Layout(tree).canonical(write(tree))


class Place(NamedTuple):
    """Where a row is in a blob: its ggml type, the offset of its first piece, how many pieces it has, the bytes of a
    piece, and how far they are apart (transposed V has one piece a value).
    """

    type: int
    start: int
    pieces: int
    size: int
    apart: int


class _Data(NamedTuple):
    key: Key
    type: int
    start: int
    end: int
    cells: int
    width: int
    across: int

    def matrix(self, data: Bytes) -> Bytes:
        """The data of a layer as (cells, bytes of a cell)."""
        flat = data[self.start : self.end]
        if not self.across:
            return flat.reshape(self.cells, self.width)
        values = flat.view(f"<u{self.width}").reshape(self.across, self.cells)  # 2 or 4 bytes each
        return np.ascontiguousarray(values.T).view(np.uint8)


class _Cells(NamedTuple):
    """Cells that rows belong to. where: offsets of the bytes of their positions; of: by sequence, which cells."""

    part: str
    where: npt.NDArray[np.intp]
    of: dict[int, npt.NDArray[np.intp]]
    layers: list[_Data]


class Layout:
    """Where everything is in a blob: all that its numbers say but positions and, of a single sequence, its id.

    Most blobs have the layout of one that was read before, and are read with it in a fraction of the time.
    """

    def __init__(self, tree: Node):
        self.single = tree.value in ("sequence state", "sequence state file")
        self.length = tree.end
        self.parts: list[_Cells] = []
        self.compressed: list[tuple[int, int, int, _Data]] = []
        for part in tree.children:
            match part.last:
                case "recurrent":
                    self._cells(part, "recurrent")
                case "attn" | "window" | "index":
                    for stream in part.group("stream"):
                        self._cells(stream, part.last)
                case "dsv4":
                    self._dsv4(part)
                case _:
                    pass
        free = {"pos", "seq"} if self.single else {"pos"}
        fixed = [n for n in tree.leaves() if n.kind != "data" and n.last not in free]
        self._fixed = np.concatenate([np.arange(n.start, n.end) for n in fixed] or [np.arange(0)])
        self._values: Bytes = np.zeros(0, np.uint8)

    def learn(self, data: Bytes) -> None:
        """Remember what the fixed bytes are, so that `fits` can tell."""
        self._values = data[self._fixed]

    def fits(self, data: Bytes) -> bool:
        """Whether a blob has this layout."""
        return len(data) == self.length and np.array_equal(data[self._fixed], self._values)

    def _cells(self, group: Node, part: str) -> None:
        cells = group.group("cell")
        of: dict[int, list[int]] = {}
        for i, cell in enumerate(cells):
            for s in [0] if self.single else sorted({int(s.value) for s in cell.group("seq")}):
                of.setdefault(s, []).append(i)
        starts = [c.group("pos")[0].start for c in cells]
        where = np.array(starts, np.intp).reshape(-1, 1) + np.arange(4, dtype=np.intp)
        layers: list[_Data] = []
        seen: Counter[str] = Counter()
        for layer in group.children:
            if layer.last not in ("k", "v", "r", "s"):
                continue
            for data in layer.children:
                if data.last in ("data", "ngram_data"):
                    tensor = "ngram" if data.last == "ngram_data" else layer.last
                    kind = 0 if tensor == "ngram" else layer.number("type")
                    key = Key(part, seen[layer.last], tensor)
                    layers.append(_Data(key, kind, data.start, data.end, data.cells, data.width, data.across))
            seen[layer.last] += 1
        members = {s: np.array(m, np.intp) for s, m in of.items()}
        self.parts.append(_Cells(part, where, members, layers))

    def _dsv4(self, dsv4: Node) -> None:
        for part in dsv4.children:
            if part.group("stream"):
                for stream in part.group("stream"):
                    self._cells(stream, part.last)
                continue
            for layer in part.group("layer"):
                for tensor in layer.children[1:]:
                    for data in tensor.group("data"):
                        n_stream, n = part.number("n_stream"), tensor.number("rows")
                        key, kind = Key(part.last, layer.number("id"), tensor.last), tensor.number("type")
                        whole = _Data(key, kind, data.start, data.end, data.cells, data.width, data.across)
                        self.compressed.extend((0 if self.single else s, s, n, whole) for s in range(n_stream))

    def canonical(self, data: bytes) -> Canon:
        """The canonical form of a blob that has this layout."""
        flat: Bytes = np.frombuffer(data, np.uint8)
        out: Canon = {0: Sequence()} if self.single else {}
        for part in self.parts:
            where = flat[part.where].view("<i4").ravel()
            for s, members in part.of.items():
                order = members[np.argsort(where[members], kind="stable")]
                into = out.setdefault(s, Sequence())
                positions = tuple(where[order].tolist())
                into.positions[part.part] = (*into.positions.get(part.part, ()), *positions)
                for layer in part.layers:
                    into.rows[layer.key] = Rows(layer.type, positions, layer.matrix(flat)[order])
        for s, stream, n, whole in self.compressed:
            rows = whole.matrix(flat).reshape(-1, n, whole.width)[stream]
            out.setdefault(s, Sequence()).rows[whole.key] = Rows(whole.type, tuple(range(n)), rows)
        return out

    def place(self, data: bytes, seq: int, key: Key, pos: int) -> Place | None:
        """Where a row of cells is; None where there is none."""
        flat: Bytes = np.frombuffer(data, np.uint8)
        for part in self.parts:
            where = flat[part.where].view("<i4").ravel()
            for i in part.of.get(seq, ()):
                if where[i] != pos or part.part != key.part:
                    continue
                for d in part.layers:
                    if d.key == key:
                        size, pieces = d.width, max(d.across, 1)
                        return Place(d.type, d.start + int(i) * size, pieces, size, d.cells * size)
        return None


class Reader:
    """Reads blobs of one model, and remembers their layouts and, for partial states and others, the shape."""

    MOST = 512

    def __init__(self) -> None:
        self._layouts: dict[int, list[Layout]] = {}
        self._shapes: dict[bool, Shape] = {}
        self._n = 0

    def layout(self, data: bytes, *, partial: bool = False) -> Layout:
        """The layout of a blob. Raises BadBlob."""
        flat = np.frombuffer(data, np.uint8)
        for layout in self._layouts.get(len(data), ()):
            if layout.fits(flat):
                return layout
        tree, self._shapes[partial] = parse(data, self._shapes.get(partial))
        layout = Layout(tree)
        layout.learn(flat)
        if self._n >= self.MOST:
            self._layouts.clear()
            self._n = 0
        self._layouts.setdefault(len(data), []).append(layout)
        self._n += 1
        return layout

    def canonical(self, data: bytes, *, partial: bool = False) -> Canon:
        """The canonical form of a blob. Raises BadBlob."""
        return self.layout(data, partial=partial).canonical(data)


class Difference(NamedTuple):
    """The first place in which two states differ. pos: -1 where it is not one of a row; error: largest absolute
    difference there, infinite where something is missing; text: in words."""

    key: Key
    pos: int
    error: float
    text: str


def differences(a: Sequence, b: Sequence, bands: dict[str, float] | None = None) -> list[Difference]:
    """Where the states of two sequences differ, one entry for a key, in the order of `b`; empty: they are equal.

    bands: for a name such as "recurrent.s" (part and tensor) the difference up to which rows count as equal; without
    it they must be equal to the bit.
    """
    found: list[Difference] = []
    for part in dict.fromkeys((*b.positions, *a.positions)):
        mine, theirs = a.positions.get(part, ()), b.positions.get(part, ())
        if sorted(mine) != sorted(theirs):
            key, word = Key(part, -1, "cells"), PART_WORDS.get(part, part)
            text = f"{word} holds positions {ranges(mine)} and should hold {ranges(theirs)}"
            found.append(Difference(key, -1, float("inf"), text))
    for key in dict.fromkeys((*b.rows, *a.rows)):
        one, other = a.rows.get(key), b.rows.get(key)
        if one is None or other is None or one.type != other.type or one.data.shape[1:] != other.data.shape[1:]:
            if not found:
                found.append(
                    Difference(key, -1, float("inf"), f"{key.words()} is missing, or of another type or width")
                )
            continue
        if one.positions != other.positions:
            continue  # told above
        difference = _first_row(key, one, other, (bands or {}).get(f"{key.part}.{key.tensor}", 0.0))
        if difference is not None:
            found.append(difference)
    return found


def _first_row(key: Key, one: Rows, other: Rows, band: float) -> Difference | None:
    unequal = (one.data != other.data).any(axis=1)
    if not unequal.any():
        return None
    with np.errstate(all="ignore"):
        error = np.abs(one.values()[unequal] - other.values()[unequal]).max(axis=1)
    error = np.where(np.isfinite(error), error, np.inf)
    if band and not (error > band).any():
        return None
    rows = np.flatnonzero(unequal)
    first = int(rows[np.argmax(error > band)])
    pos = one.positions[first]
    return Difference(key, pos, float(error.max()), f"{key.words()} of position {pos}")


def ranges(positions: tuple[int, ...]) -> str:
    """Positions as ranges, for people: "0..4, 7"."""
    parts: list[str] = []
    at = sorted(set(positions))
    i = 0
    while i < len(at):
        j = i
        while j + 1 < len(at) and at[j + 1] == at[j] + 1:
            j += 1
        parts.append(f"{at[i]}..{at[j]}" if j > i else str(at[i]))
        i = j + 1
    doubled = len(positions) - len(at)
    return (", ".join(parts) or "none") + (f" ({doubled} twice)" if doubled else "")


def summary(a: Sequence, b: Sequence, found: list[Difference]) -> str:
    """What differs first and what is equal, in one line: "layer 2, recurrent state row; attention equal in all 20
    positions"."""
    if not found:
        return "equal in every part"
    bad = {d.key.part for d in found}
    equal = [p for p in b.positions if p not in bad]
    parts = [found[0].text]
    for p in equal:
        n = len(b.positions[p])
        parts.append(f"{PART_WORDS.get(p, p)} equal in {'its position' if n == 1 else f'all {n} positions'}")
    return "; ".join(parts)
