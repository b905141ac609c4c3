"""What is odd about a blob. Odd is not wrong: a hole is what `seq_rm` leaves, and a zero row may have been computed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from fuzz.blobs.names import many, part_words
from subjects.state.canon import WORDS, Canon, Layout, Sequence, ranges
from subjects.state.parse import SINGLE, TYPES, Shape
from subjects.state.tree import Node

CELLS = ("attn", "window", "index", "raw")
"""Parts that have one cell for each position."""


def odd_of(data: bytes, tree: Node, shape: Shape) -> list[str]:
    """What is odd about a blob, a line each. tree: as far as it could be read."""
    if tree.value == "driver state":
        return list(_driver(tree))
    canon = Layout(_without_halves(tree)).canonical(data)
    single = tree.value in SINGLE
    out = [*_header(tree, canon, single), *_empty(tree, canon, shape)]
    for s, sequence in canon.items():
        who = "" if single else f"sequence {s}: "
        out += [who + line for line in (*_positions(sequence, shape), *_ends(sequence))]
    for part, stream, group in _cell_groups(tree):
        out += [f"{part_words(part)}{stream}: {line}" for line in _cells(group, part)]
    return [*out, *_types(tree), *_rows(canon, single)]


def _without_halves(tree: Node) -> Node:
    """The tree of a blob that ends inside a cell has half of one, which the canonical form cannot take."""
    whole = [c for c in (_without_halves(c) for c in tree.children) if c.last != "cell" or c.group("pos")]
    return Node(tree.name, tree.start, tree.end, tree.kind, tree.value, whole, tree.cells, tree.width, tree.across)


def _cell_groups(tree: Node) -> Iterator[tuple[str, str, Node]]:
    """Each group of cells with its part, and the stream's number where several have cells."""
    parts = [*tree.children, *(c for dsv4 in tree.group("dsv4") for c in dsv4.children)]
    for part in parts:
        streams = part.group("stream")
        several = sum(bool(s.group("cell")) for s in streams) > 1
        for i, stream in enumerate(streams):
            yield part.last, f", stream {i}" if several else "", stream
        if part.group("cell"):
            yield part.last, "", part


def _header(tree: Node, canon: Canon, single: bool) -> Iterator[str]:
    said = [int(c.value) for c in tree.group("seq")]
    named = sorted({int(n.value) for n in tree.walk() if n.name.endswith(".cell.seq")})
    if single and said and named and named != said:
        yield f"the cells name sequence {', '.join(map(str, named))}, the header {said[0]}"
    if single and not said and len(named) > 1:
        yield f"the cells name sequences {', '.join(map(str, named))}, in the blob of one"
    for head in tree.group("file"):
        tokens = head.group("token")
        ends = [max(p) for s in canon.values() for p in s.positions.values() if p]
        if tokens and ends and single and max(ends) + 1 != len(tokens):
            yield f"the file has {len(tokens)} {many('token', len(tokens))}, the cells end at position {max(ends)}"


def _empty(tree: Node, canon: Canon, shape: Shape) -> Iterator[str]:
    holding = {p for s in canon.values() for p, found in s.positions.items() if found}
    read = [p for p in shape.parts if p != "dsv4" and tree.group(p)]
    if read and not holding:
        yield "no part has a cell"
        return
    for part in read:
        if part not in holding:
            yield f"{part_words(part)} has no cells"


def _positions(sequence: Sequence, shape: Shape) -> Iterator[str]:
    for part, found in sequence.positions.items():
        word, at = part_words(part), set(found)
        below = tuple(p for p in found if p < 0)
        if below:
            yield f"{word}: negative {many('position', len(below))} {ranges(below)}"
        if part == "recurrent":
            if len(found) > 1:
                yield f"recurrent: {len(found)} cells ({ranges(found)}) where one sequence has one"
            continue
        if part in CELLS and found:
            missing = _missing(sorted(at))
            if missing:
                yield f"{word}: a hole, nothing of {missing}"
            if part == "attn" and min(at) > 0:
                alone = " (as in a window that was saved alone)" if shape.parts == ("attn",) else ""
                yield f"{word}: begins at position {min(at)}{alone}"


def _missing(at: list[int]) -> str:
    """Ranges between positions (in order) that have none. A damaged position may be anything: they are not counted."""
    out: list[str] = []
    for one, other in itertools.pairwise(at):
        if other - one == 2:
            out.append(str(one + 1))
        elif other - one > 2:
            out.append(f"{one + 1}..{other - 1}")
    return f"position{'s' if len(out) > 1 or '..' in out[0] else ''} {', '.join(out)}" if out else ""


def _ends(sequence: Sequence) -> Iterator[str]:
    ends = {part: max(found) for part, found in sequence.positions.items() if found}
    if len(set(ends.values())) > 1:
        yield "parts end at different positions: " + ", ".join(f"{part_words(p)} at {e}" for p, e in ends.items())
    whole, window = sequence.positions.get("attn"), sequence.positions.get("window")
    if whole and window and (more := tuple(sorted(set(window) - set(whole)))):
        yield f"windowed attention has {many('position', len(more))} {ranges(more)}, which attention has not"


def _cells(group: Node, part: str) -> Iterator[str]:
    cells = [c for c in group.group("cell") if c.group("pos")]
    shared: dict[tuple[int, ...], list[int]] = {}
    seen: Counter[tuple[int, ...]] = Counter()
    last: dict[int, int] = {}
    back: tuple[int, int, int] | None = None
    for i, cell in enumerate(cells):
        pos = cell.number("pos")
        seqs = tuple(int(c.value) for c in cell.group("seq"))
        ext = tuple(int(c.value) for c in cell.children if c.last in ("x", "y", "token"))
        if ext[2:] != (-1,):
            ext = ()  # only the cells of an image, which have no token, share a position
        if len(seqs) > 1:
            shared.setdefault(seqs, []).append(pos)
        for s in seqs:
            seen[pos, s, *ext] += 1
            if back is None and pos < last.get(s, pos):
                back = (i, pos, last[s])
            last[s] = pos
    if part in CELLS:
        twice = tuple(sorted({key[0] for key, n in seen.items() if n > 1}))
        if twice:
            most = max(seen.values())
            often = "twice" if most == 2 else f"up to {most} times"
            yield f"{many('position', len(twice))} {ranges(twice)} {often}"
        if back is not None:
            yield f"positions run backwards: cell {back[0]} is of position {back[1]}, the one before it of {back[2]}"
    for seqs, found in shared.items():
        yield f"{many('position', len(found))} {ranges(tuple(found))} shared by sequences " + ", ".join(map(str, seqs))


def _types(tree: Node) -> Iterator[str]:
    """Types that differ between the layers of a part."""
    of: dict[str, dict[int, list[int]]] = {}
    number: Counter[tuple[int, str]] = Counter()
    for part, stream, group in _cell_groups(tree):
        for layer in group.children:
            if layer.group("type") and layer.last in WORDS:
                key = f"{part_words(part)}{stream} {WORDS[layer.last]}"
                n = number[id(group), layer.last]
                number[id(group), layer.last] += 1
                of.setdefault(key, {}).setdefault(layer.number("type"), []).append(n)
    for key, types in of.items():
        if len(types) > 1:
            yield f"{key}: types differ, " + ", ".join(
                f"{TYPES[t][0]} in {many('layer', len(at))} {ranges(tuple(at))}" for t, at in types.items()
            )


def _rows(canon: Canon, single: bool) -> Iterator[str]:
    """Rows that are not finite or all zero; layers and sequences that are alike in one line."""
    found: dict[tuple[str, str, str, tuple[int, ...]], tuple[set[int], set[int]]] = {}
    for s, sequence in canon.items():
        for key, rows in sequence.rows.items():
            if not rows.data.size:
                continue
            with np.errstate(all="ignore"):
                finite = np.isfinite(rows.values())
            bad = np.flatnonzero(~np.logical_and.reduce(finite, axis=1))
            zero = np.flatnonzero(rows.data.max(axis=1) == 0)
            if key.part not in sequence.positions:
                zero = zero[:0]  # a compressed cache has rows that are not filled yet
            for what, which in (("not finite (NaN or infinite)", bad), ("all zero", zero)):
                at = tuple(rows.positions[i] for i in which)
                if at:
                    layers, seqs = found.setdefault((key.part, key.tensor, what, at), (set(), set()))
                    layers.add(key.layer)
                    seqs.add(s)
    for (part, tensor, what, at), (layers, seqs) in found.items():
        words = f"{part_words(part)} {WORDS.get(tensor, tensor)}"
        who = "" if single else f" of {many('sequence', len(seqs))} {ranges(tuple(seqs))}"
        layer = f"{many('layer', len(layers))} {ranges(tuple(layers))}"
        yield f"{layer}, {words}{who}: {many('position', len(at))} {ranges(at)} {what}"


def _driver(tree: Node) -> Iterator[str]:
    for head in tree.group("driver"):
        for node in head.children:
            if isinstance(node.value, bytes) and node.value and len(node.value) % 4 == 0:
                values = np.frombuffer(node.value, np.float32)
                if not np.isfinite(values).all():
                    yield f"{node.last}: {int((~np.isfinite(values)).sum())} of {values.size} values not finite"
                elif not values.any():
                    yield f"{node.last}: all zero"
            elif isinstance(node.value, int) and node.value < 0:
                yield f"{node.last} is {node.value}"
