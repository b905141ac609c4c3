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
    return canonical_tree(tree)


def canonical_tree(tree: Node) -> Canon:
    """The same of a tree."""
    single = tree.value in ("sequence state", "sequence state file")
    out: Canon = {}
    for part in tree.children:
        match part.last:
            case "recurrent":
                _cells(out, part, "recurrent", single)
            case "attn" | "window" | "index":
                for stream in part.group("stream"):
                    _cells(out, stream, part.last, single)
            case "dsv4":
                _compressed(out, part, single)
            case _:
                pass
    if single:
        out.setdefault(0, Sequence())
    return out


def _cells(out: Canon, group: Node, part: str, single: bool) -> None:
    cells = group.group("cell")
    of: dict[int, list[int]] = {}
    for i, cell in enumerate(cells):
        seqs = [0] if single else sorted({int(s.value) for s in cell.group("seq")})
        for s in seqs:
            of.setdefault(s, []).append(i)
    where = [int(c.number("pos")) for c in cells]
    for s, members in of.items():
        order = sorted(members, key=lambda i: where[i])
        into = out.setdefault(s, Sequence())
        positions = tuple(where[i] for i in order)
        into.positions[part] = (*into.positions.get(part, ()), *positions)
        layers: Counter[str] = Counter()
        for layer in group.children:
            if layer.last not in ("k", "v", "r", "s"):
                continue
            number = layers[layer.last]
            layers[layer.last] += 1
            for data in layer.children:
                if data.last in ("data", "ngram_data"):
                    tensor = "ngram" if data.last == "ngram_data" else layer.last
                    kind = 0 if tensor == "ngram" else layer.number("type")
                    into.rows[Key(part, number, tensor)] = Rows(kind, positions, _matrix(data)[order])


def _matrix(data: Node) -> Bytes:
    """The data of a layer as (cells, bytes of a cell)."""
    assert isinstance(data.value, bytes)
    flat = np.frombuffer(data.value, np.uint8)
    if not data.across:
        return flat.reshape(data.cells, data.width)
    return flat.reshape(data.across, data.cells, data.width).transpose(1, 0, 2).reshape(data.cells, -1)


def _compressed(out: Canon, dsv4: Node, single: bool) -> None:
    for part in dsv4.children:
        if part.group("stream"):
            for stream in part.group("stream"):
                _cells(out, stream, part.last, single)
            continue
        for layer in part.group("layer"):
            for tensor in layer.children[1:]:
                data = tensor.group("data")
                if not data:
                    continue
                n_stream, n = part.number("n_stream"), tensor.number("rows")
                rows = _matrix(data[0]).reshape(n_stream, n, -1)
                for s in range(n_stream):
                    into = out.setdefault(0 if single else s, Sequence())
                    key = Key(part.last, layer.number("id"), tensor.last)
                    into.rows[key] = Rows(tensor.number("type"), tuple(range(n)), rows[s])


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
