"""The canonical form of a saved state: by sequence, memory part, layer and position, whatever the order of its cells.

Two blobs of one state may differ in bytes: cells lie elsewhere, a whole context has more streams. In canonical form
they are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from subjects.state.parse import SINGLE, TYPES, Shape, parse
from subjects.state.tree import Node

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


Ext = tuple[int, ...]
"""What a cell has besides its position in M-RoPE and n-gram models: x, y, token."""


@dataclass(slots=True)
class Sequence:
    """One sequence's state: positions of the cells of each part (one for each cell, ascending), all rows, and in the
    order of the positions the extensions of the cells of those parts that have them.
    """

    positions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[Key, Rows] = field(default_factory=dict)
    extensions: dict[str, tuple[Ext, ...]] = field(default_factory=dict)

    def drop_below(self, part: str, least: int) -> None:
        """Leave out a part's cells of positions below `least`, and their rows."""
        at = self.positions.get(part, ())
        self.positions[part] = tuple(p for p in at if p >= least)
        if part in self.extensions:
            self.extensions[part] = tuple(e for p, e in zip(at, self.extensions[part], strict=True) if p >= least)
        for key, rows in self.rows.items():
            if key.part == part and rows.positions and min(rows.positions) < least:
                kept = [i for i, p in enumerate(rows.positions) if p >= least]
                self.rows[key] = Rows(rows.type, tuple(rows.positions[i] for i in kept), rows.data[kept])


Canon = dict[int, Sequence]
"""By sequence id; the blob of a single sequence has it as 0, whichever it was saved from."""


def canonical(data: bytes, shape: Shape | None = None) -> Canon:
    """The canonical form of a blob. `shape`: what is known of it (see `parse`). Raises BadBlob."""
    tree, _ = parse(data, shape)
    return Layout(tree).canonical(data)


class Place(NamedTuple):
    """Where a row is in a blob: its ggml type, the offset of its first piece, how many pieces it has, the bytes of a
    piece, and how far they are apart (transposed V has one piece a value).
    """

    type: int
    start: int
    pieces: int
    size: int
    apart: int


class CellPlace(NamedTuple):
    """Where cells are in a blob: the offset of their number, and whether they have an extension."""

    at: int
    ext: bool


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
    """Cells that rows belong to. at: offset of their number; where, ext: offsets of the bytes of their positions and
    extensions (None where they have none); of: by sequence, which cells."""

    part: str
    at: int
    where: npt.NDArray[np.intp]
    ext: npt.NDArray[np.intp] | None
    of: dict[int, npt.NDArray[np.intp]]
    layers: list[_Data]


class Layout:
    """Where everything is in a blob: all that its numbers say but what cells hold, which of a single sequence is its id
    too.

    Most blobs have the layout of one that was read before, and are read with it in a fraction of the time.
    """

    def __init__(self, tree: Node):
        self.single = tree.value in SINGLE
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
        free = {"pos", "x", "y", "token", *(("seq",) if self.single else ())}
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
        extended = [c.group("x")[0].start for c in cells if c.group("token")]
        ext = None
        if cells and len(extended) == len(cells):
            ext = np.array(extended, np.intp).reshape(-1, 1) + np.arange(12, dtype=np.intp)
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
        at = next((n.start for n in group.group("n_cells")), group.start)
        self.parts.append(_Cells(part, at, where, ext, members, layers))

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
            ext = None if part.ext is None else flat[part.ext].view("<i4")
            for s, members in part.of.items():
                # cells of one position, those of an image, are told apart by their extension
                columns = () if ext is None else ext[members].T[::-1]
                order = members[np.lexsort((*columns, where[members]))]
                into = out.setdefault(s, Sequence())
                positions = tuple(where[order].tolist())
                into.positions[part.part] = (*into.positions.get(part.part, ()), *positions)
                if ext is not None:
                    more = tuple(map(tuple, ext[order].tolist()))
                    into.extensions[part.part] = (*into.extensions.get(part.part, ()), *more)
                for layer in part.layers:
                    into.rows[layer.key] = Rows(layer.type, positions, layer.matrix(flat)[order])
        for s, stream, n, whole in self.compressed:
            rows = whole.matrix(flat).reshape(-1, n, whole.width)[stream]
            out.setdefault(s, Sequence()).rows[whole.key] = Rows(whole.type, tuple(range(n)), rows)
        return out

    def cells(self, seq: int, part: str, stream: int) -> CellPlace | None:
        """Where the cells of a sequence are; where it has none in that part, where those of a stream are."""
        all_of = [p for p in self.parts if p.part == part]
        own = next((p for p in all_of if seq in p.of), None)
        if own is None and all_of:
            own = all_of[stream if 0 <= stream < len(all_of) else 0]
        return None if own is None else CellPlace(own.at, own.ext is not None)

    def place(self, data: bytes, seq: int, key: Key, pos: int) -> Place | None:
        """Where a row of cells is, or of rows without cells the one of that number; None where there is none."""
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
        for s, stream, n, whole in self.compressed:
            if (s, whole.key) == (seq, key) and 0 <= pos < n:
                return Place(whole.type, whole.start + (stream * n + pos) * whole.width, 1, whole.width, whole.width)
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


class Fact(NamedTuple):
    """One way in which two sequences differ.

    what: "cells", a part holds other positions; "missing", one of the two lacks rows; "form", rows are of another type
    or width; "number", there are more or fewer rows that have no cells; "rows", rows that both have; "extension", x, y
    or token of cells that both have. pos: the first that differs (of rows without cells its number), -1 where it is of
    none. error: largest absolute difference there, infinite where something is missing. counts: how many of how many
    differ.
    """

    what: Literal["cells", "missing", "form", "number", "rows", "extension"]
    key: Key
    pos: int = -1
    error: float = float("inf")
    counts: tuple[int, int] = (0, 0)


def facts(a: Sequence, b: Sequence, bands: dict[str, float] | None = None) -> Iterator[Fact]:
    """How the states of two sequences differ, in the order of `b`: cells, then rows (one fact for a key), then
    extensions. None: they are equal. Where parts hold other positions the rest is compared in what both hold.

    bands: for a name such as "recurrent.s" (part and tensor) the difference up to which rows count as equal; without
    it they must be equal to the bit.
    """
    parts = dict.fromkeys((*b.positions, *a.positions))
    for part in parts:
        mine, theirs = a.positions.get(part, ()), b.positions.get(part, ())
        if mine != theirs and sorted(mine) != sorted(theirs):
            yield Fact("cells", Key(part, -1, "cells"))
    for key in dict.fromkeys((*b.rows, *a.rows)):
        one, other = a.rows.get(key), b.rows.get(key)
        if one is None or other is None:
            # told above where it has no cells
            if key.part not in parts or (a if one is None else b).positions.get(key.part):
                yield Fact("missing", key)
        elif one.type != other.type or one.data.shape[1:] != other.data.shape[1:]:
            yield Fact("form", key)
        elif one.positions != other.positions and key.part not in parts:
            yield Fact("number", key)
        else:
            fact = _first_row(key, *_common(one, other), (bands or {}).get(f"{key.part}.{key.tensor}", 0.0))
            if fact is not None:
                yield fact
    for part in parts:
        fact = _first_extension(part, a, b)
        if fact is not None:
            yield fact


def _common(x: Rows, y: Rows) -> tuple[Rows, Rows]:
    """Both with the positions that both hold (of a doubled one the first row)."""
    if x.positions == y.positions:
        return x, y
    both = tuple(sorted(set(x.positions) & set(y.positions)))
    return (
        Rows(x.type, both, x.data[[x.positions.index(p) for p in both]]),
        Rows(y.type, both, y.data[[y.positions.index(p) for p in both]]),
    )


def _first_row(key: Key, one: Rows, other: Rows, band: float) -> Fact | None:
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
    return Fact("rows", key, one.positions[first], float(error.max()), (len(rows), len(one.positions)))


def extensions(state: Sequence, part: str) -> dict[int, list[Ext]]:
    """The extensions of a part's cells by position."""
    out: dict[int, list[Ext]] = {}
    for pos, ext in zip(state.positions.get(part, ()), state.extensions.get(part, ()), strict=False):
        out.setdefault(pos, []).append(ext)
    return out


def _first_extension(part: str, a: Sequence, b: Sequence) -> Fact | None:
    if a.extensions.get(part) == b.extensions.get(part) and a.positions.get(part) == b.positions.get(part):
        return None
    mine, theirs = extensions(a, part), extensions(b, part)
    both = sorted({*a.positions.get(part, ())} & {*b.positions.get(part, ())})
    unequal = []
    for pos in both:
        x, y = mine.get(pos, []), theirs.get(pos, [])
        if x != y and (len(x) == len(y) or not x or not y):  # another number of cells was told with the positions
            unequal.append(pos)
    if not unequal:
        return None
    return Fact("extension", Key(part, -1, "extension"), unequal[0], counts=(len(unequal), len(both)))


def differences(a: Sequence, b: Sequence, bands: dict[str, float] | None = None) -> list[Difference]:
    """How the state `a` of a sequence differs from `b`, which it should be, in words (see `facts`)."""
    return [Difference(f.key, f.pos, f.error, _words(f, a, b)) for f in facts(a, b, bands)]


def _words(fact: Fact, a: Sequence, b: Sequence) -> str:
    key = fact.key
    part = PART_WORDS.get(key.part, key.part)
    match fact.what:
        case "cells":
            held = [s.positions.get(key.part, ()) for s in (a, b)]
            return f"{part} holds {_held(held[0])} and should hold {_should(*held)}"
        case "missing":
            return f"{key.words()} is missing" if key not in a.rows else f"{key.words()} should not be there"
        case "form":
            return f"{key.words()} is of another type or width"
        case "number":
            return f"{key.words()}: {len(a.rows[key].positions)} rows and should be {len(b.rows[key].positions)}"
        case "extension":
            mine, theirs = (_ext_words(extensions(s, key.part).get(fact.pos, [])) for s in (a, b))
            return f"{part}: x, y, token of position {fact.pos} are {mine} and should be {theirs}"
        case _:
            unit = "of position" if key.part in b.positions else "number"
            return f"{key.words()} {unit} {fact.pos}"


def _held(positions: tuple[int, ...]) -> str:
    if not positions:
        return "no cells"
    return f"position{'' if len(positions) == 1 else 's'} {ranges(positions)}"


def _should(mine: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    """What it should hold, without the noun where that was said before."""
    if not theirs:
        return "none"
    alike = bool(mine) and (len(mine) == 1) == (len(theirs) == 1)
    return ranges(theirs) if alike else _held(theirs)


def _ext_words(found: list[Ext]) -> str:
    return " and ".join(", ".join(map(str, ext)) for ext in found) or "none"


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
