"""How two blobs differ: the first byte, the headers, and what they mean, whatever the order of the cells."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from fuzz.blobs.look import Blob, Fault
from fuzz.blobs.names import Place, bytes_of, many, part_words, place_at, shown, where, words
from subjects.state.canon import (
    Canon,
    Difference,
    Fact,
    Layout,
    Sequence,
    facts,
    ranges,
    summary,
)
from subjects.state.parse import SINGLE, TYPES
from subjects.state.tree import FORMATS, Node


class NoPair(Exception):
    """Two blobs that cannot be compared as asked; the message says what to do."""


class First(msgspec.Struct, frozen=True):
    """The first byte that differs. name, nth: its field in A as edits of scenarios name it; words: the same; a, b: what
    the field is in each.
    """

    offset: int
    name: str
    nth: int
    words: str
    a: str
    b: str


class Part(msgspec.Struct, frozen=True):
    """One difference of meaning. layer: -1 where it is about cells; position: the first, -1 where it is of no row;
    largest: largest absolute difference, null where something is missing or not finite; rows: how many of how many
    differ.
    """

    part: str
    layer: int
    tensor: str
    position: int
    largest: float | None
    rows: tuple[int, int]
    words: str


class Compared(msgspec.Struct, frozen=True):
    """One sequence of A against one of B (their ids; -1 where a blob does not say). equal: parts that are."""

    a: int
    b: int
    summary: str
    different: tuple[Part, ...]
    equal: tuple[str, ...]


class Diff(msgspec.Struct, frozen=True):
    """Two blobs. identical: to the byte; equal: the same state; headers, cells: how these differ, in words; faults: of
    A and of B, where they cannot be read to their end, and then their states are not compared. partial: the one that is
    a partial state of the other, and then what both hold is compared; behind: bytes behind the ends, in words.
    """

    identical: bool
    equal: bool
    kinds: tuple[str, str]
    sizes: tuple[int, int]
    first: First | None
    headers: tuple[str, ...]
    layout: tuple[str, ...]
    sequences: tuple[Compared, ...]
    faults: dict[str, Fault]
    partial: str = ""
    behind: tuple[str, ...] = ()


def diff(a: Blob, b: Blob, seq: int | None = None) -> Diff:
    """Compare two blobs. seq: of a whole context this sequence alone.

    Raises NoPair where the blob of one sequence does not say which of a whole context it is, and `seq` does not either;
    where a context does not have that sequence; and where one is a driver's state and the other is not.
    """
    identical = a.data == b.data
    kinds = (str(a.tree.value), str(b.tree.value))
    sides = (("A", a), ("B", b))
    faults = {n: x.fault for n, x in sides if x.fault is not None and not x.behind}
    behind = [f"{n} has {x.fault.words.partition(';')[0]}" for n, x in sides if x.fault is not None and x.behind]
    partial = "" if faults else _partial(a, b)
    first = None if identical else _first(a, b)
    headers: list[str] = []
    layout: list[str] = []
    compared: list[Compared] = []
    same = True
    if not identical and not faults:
        if (kinds[0] == "driver state") != (kinds[1] == "driver state"):
            raise NoPair(f"A is a {kinds[0]}, B a {kinds[1]}: they have nothing in common")
        if kinds[0] == "driver state":
            headers = _drivers(a.tree, b.tree)
            same = not headers
        else:
            same, headers = _headers(a, b)
            pairs, layout = _pairs(a, b, seq)
            compared = [_compared(p, a, b) for p in pairs]
            layout += [] if partial else _layout(a.tree, b.tree, pairs)
    elif not faults and seq is not None and kinds[0] != "driver state":
        _pairs(a, b, seq)  # whether there is such a sequence
    equal = identical or (not faults and same and not any(c.different for c in compared))
    return Diff(
        identical,
        equal,
        kinds,
        (len(a.data), len(b.data)),
        first,
        tuple(headers),
        tuple(layout),
        tuple(compared),
        faults,
        partial,
        tuple(behind),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The first byte


def _first(a: Blob, b: Blob) -> First:
    size = min(len(a.data), len(b.data))
    one, other = np.frombuffer(a.data, np.uint8, size), np.frombuffer(b.data, np.uint8, size)
    unequal = one != other
    at = int(np.argmax(unequal)) if unequal.any() else size
    mine, theirs = place_at(a.tree, at), place_at(b.tree, at)
    place = mine or theirs
    if place is None:
        said = "behind what can be read"
        return First(at, "", 0, said, _byte(a.data, at), _byte(b.data, at))
    said = words(place)
    if mine and theirs and theirs.node.name != mine.node.name:
        said += f" in A, {words(theirs)} in B"
    if place.node.kind == "data":
        said = _row_words(place, at)
    return First(at, place.node.name, place.nth, said, _value(place, a.data, at), _value(theirs or place, b.data, at))


def _byte(data: bytes, at: int) -> str:
    return f"0x{data[at]:02x}" if at < len(data) else "the end"


def _value(place: Place | None, data: bytes, at: int) -> str:
    """What a field is, or of data the number that has the byte."""
    if place is None or at >= len(data) or place.node.end > len(data):
        return _byte(data, at)
    node = place.node
    if node.kind != "data":  # as it is in the bytes: a magic may have been mended for reading
        raw = data[node.start : node.end]
        value = struct.unpack(FORMATS[node.kind], raw)[0] if node.kind in FORMATS else raw.decode("latin-1")
        return shown(Node(node.name, node.start, node.end, node.kind, value))
    kind = _type_of(place)
    size = 4 if kind in ("F32", "") else 2
    start = node.start + (at - node.start) // size * size
    raw = data[start : start + size]
    match kind:
        case "F32" | "":
            return f"{np.frombuffer(raw, np.float32)[0]:.6g}" if len(raw) == 4 else raw.hex(" ")
        case "F16":
            return f"{np.frombuffer(raw, np.float16)[0]:.6g}"
        case "BF16":
            return f"{(np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)[0]:.6g}"
        case _:
            return _byte(data, at)


def _type_of(place: Place) -> str:
    """The type of a row's values; "" for floats that nothing says the type of."""
    parent = place.path[-1][0]
    if place.node.last != "data" or not parent.group("type"):
        return ""
    return TYPES[parent.number("type")][0]


def _row_words(place: Place, at: int) -> str:
    """Which row and position a byte of data is of."""
    node = place.node
    if not node.width:
        return words(place)
    index = (at - node.start) // node.width
    cell = index % node.cells if node.across else index
    group = place.path[-2][0] if len(place.path) > 1 else place.path[-1][0]
    cells = group.group("cell")
    of = f"position {cells[cell].number('pos')}, " if cell < len(cells) and cells[cell].group("pos") else ""
    inside = (at - node.start) % node.width + (index // node.cells * node.width if node.across else 0)
    size = {"F32": 4, "": 4, "F16": 2, "BF16": 2}.get(_type_of(place), 1)
    unit = "byte" if size == 1 else "value"
    return f"{where(place.path)}, {of}{unit} {inside // size} of row {cell}"


# ---------------------------------------------------------------------------------------------------------------------
# Headers and layout


def _headers(a: Blob, b: Blob) -> tuple[bool, list[str]]:
    """How headers differ; False where that is a difference of state: tokens, architecture, data or none."""
    out: list[str] = []
    same = True
    if a.tree.value != b.tree.value:
        out.append(f"A is a {shown(a.tree)}, B a {shown(b.tree)}")
    if (one := _seq(a.tree)) != (other := _seq(b.tree)) and None not in (one, other):
        out.append(f"A was saved from sequence {one}, B from sequence {other}")
    for name in ("version", "magic"):
        mine, theirs = _number(a.tree, name), _number(b.tree, name)
        if mine != theirs and None not in (mine, theirs) and a.tree.value == b.tree.value:
            out.append(f"{name}: {mine} in A, {theirs} in B")
    mine_text, theirs_text = _arch(a.tree), _arch(b.tree)
    if mine_text and theirs_text and mine_text != theirs_text:
        out.append(f"architecture: {mine_text} in A, {theirs_text} in B")
        same = False
    if a.tree.group("file") and b.tree.group("file") and (said := _tokens(a.tree, b.tree)):
        out.append(said)
        same = False
    for what, x, y in (("data", a.shape.data, b.shape.data), ("extension of its cells", a.shape.ext, b.shape.ext)):
        if x != y and (what == "data" or all(set(s.parts) - {"recurrent"} for s in (a.shape, b.shape))):
            none = "B" if x else "A"
            out.append(f"{none} has no {what}" + (" (it was saved on a device)" if what == "data" else ""))
            same = False
    return same, out


def _number(tree: Node, last: str) -> int | None:
    found = [n for head in tree.group("file") for n in head.group(last)]
    return int(found[0].value) if found else None


def _seq(tree: Node) -> int | None:
    """The sequence that a header names."""
    found = tree.group("seq")
    return int(found[0].value) if found else None


def _arch(tree: Node) -> str:
    return "".join(shown(n) for head in tree.group("arch") for n in head.group("name"))


def _tokens(a: Node, b: Node) -> str:
    one, other = ([int(t.value) for t in tree.group("file")[0].group("token")] for tree in (a, b))
    if one == other:
        return ""
    at = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    ends = [str(t[at]) if at < len(t) else "none" for t in (one, other)]
    return f"tokens: {len(one)} in A, {len(other)} in B; the first that differs is number {at}: {ends[0]} / {ends[1]}"


def _layout(a: Node, b: Node, pairs: list[_Pair]) -> list[str]:
    """What differs in the bytes and means the same."""
    out: list[str] = []
    for name in dict.fromkeys(n.name for tree in (a, b) for n in tree.walk() if n.last in ("n_stream", "v_trans")):
        one, other = ({int(n.value) for n in tree.named(name)} for tree in (a, b))
        if not one or not other or one == other:
            continue
        part = part_words(name.removesuffix(".v_trans").removesuffix(".stream").removesuffix(".n_stream"))
        if name.endswith("v_trans"):
            out.append(f"V of {part} is transposed in {'A' if 1 in one else 'B'} only")
        elif (a.value in SINGLE) == (b.value in SINGLE):
            out.append(f"{part} has {min(one)} {many('stream', min(one))} in A, {min(other)} in B")
    orders = [[_order(t, s) for s in ids] for t, ids in ((a, [p.a for p in pairs]), (b, [p.b for p in pairs]))]
    if orders[0] != orders[1]:
        out.append("the cells lie in another order")
    return out


def _order(tree: Node, seq: int) -> list[tuple[str, tuple[int, ...]]]:
    """Positions of a sequence as they lie, by part, without regard to streams."""
    single = tree.value in SINGLE
    out: list[tuple[str, tuple[int, ...]]] = []
    for group in tree.walk():
        cells = group.group("cell") if group.children else []
        own = [c.number("pos") for c in cells if single or any(s.value == seq for s in c.group("seq"))]
        if own:
            out.append((group.name, tuple(own)))
    return out


def _drivers(a: Node, b: Node) -> list[str]:
    out: list[str] = []
    one, other = ({n.last: n for n in tree.leaves()} for tree in (a, b))
    for name in dict.fromkeys((*one, *other)):
        mine, theirs = one.get(name), other.get(name)
        if mine is None or theirs is None:
            out.append(f"{name} is missing in {'A' if mine is None else 'B'}")
        elif mine.value == theirs.value:
            continue
        elif isinstance(mine.value, bytes) and isinstance(theirs.value, bytes):
            if len(mine.value) != len(theirs.value):
                out.append(f"{name}: {bytes_of(len(mine.value))} in A, {bytes_of(len(theirs.value))} in B")
                continue
            x, y = np.frombuffer(mine.value, np.float32), np.frombuffer(theirs.value, np.float32)
            with np.errstate(all="ignore"):
                most = float(np.abs(x - y).max())
            n = int((x.view(np.uint32) != y.view(np.uint32)).sum())
            out.append(f"{name}: {n} of {x.size} values differ, {_most(most)}")
        else:
            out.append(f"{name}: {shown(mine)} in A, {shown(theirs)} in B")
    return out


# ---------------------------------------------------------------------------------------------------------------------
# State


class _Pair(NamedTuple):
    a: int
    b: int
    one: Sequence
    other: Sequence
    single: tuple[bool, bool]


def _pairs(x: Blob, y: Blob, seq: int | None) -> tuple[list[_Pair], list[str]]:
    """What is to be compared with what, and what was left out of that."""
    one, other = Layout(x.tree).canonical(x.data), Layout(y.tree).canonical(y.data)
    a, b = x.tree, y.tree
    match _partial(x, y):
        case "A":
            one, other = _in_common(one, _held_parts(x), other)
        case "B":
            other, one = _in_common(other, _held_parts(y), one)
        case _:
            pass
    single = (a.value in SINGLE, b.value in SINGLE)
    if single[0] and single[1]:
        ids = [-1 if (s := _seq(t)) is None else s for t in (a, b)]
        return [_Pair(ids[0], ids[1], one[0], other[0], single)], []
    if not single[0] and not single[1]:
        seqs = sorted({*one, *other}) if seq is None else [_there(seq, one, other)]
        return [_Pair(s, s, one.get(s, Sequence()), other.get(s, Sequence()), single) for s in seqs], []
    said = _seq(a if single[0] else b)
    wanted = said if seq is None else seq
    if wanted is None:
        raise NoPair(
            "one is of a single sequence and does not say which, the other of a whole context: --seq N says it"
        )
    context = _there(wanted, other if single[0] else one)
    own = -1 if said is None else said
    if single[0]:
        trimmed, left = _trimmed(other[context], one[0])
        return [_Pair(own, context, one[0], trimmed, single)], ["B is of a whole context", *left]
    trimmed, left = _trimmed(one[context], other[0])
    return [_Pair(context, own, trimmed, other[0], single)], ["A is of a whole context", *left]


def _partial(x: Blob, y: Blob) -> str:
    """Which of two blobs is a partial state (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) of what the other has, "A" or "B";
    empty where neither is. The blob does not say; but it has the parts that such a one has, and of a window the layers.
    """
    for name, few, whole in (("A", x, y), ("B", y, x)):
        if few.tree.value != "sequence state":
            continue
        parts = set(whole.shape.parts)
        own = {"window" if p == "attn" and "window" in parts else p for p in few.shape.parts}
        if parts == {"dsv4"} == own:
            if (_number_of(few, "dsv4.mode"), _number_of(whole, "dsv4.mode")) == (1, 0):
                return name
        elif own and own == parts & {"window", "recurrent"} and "attn" in parts and _window_fits(few, whole):
            return name
    return ""


def _number_of(blob: Blob, name: str) -> int:
    return next((int(n.value) for n in blob.tree.named(name)), -1)


def _window_fits(few: Blob, whole: Blob) -> bool:
    """Whether the one attention part of a blob has the layers of the other's window; true where one has no cells, which
    says nothing of layers.
    """
    mine = {n.value for n in few.tree.named("attn.stream.n_layer")}
    theirs = {n.value for n in whole.tree.named("window.stream.n_layer")}
    return not mine or not theirs or mine == theirs


def _held_parts(blob: Blob) -> set[str]:
    """The parts that a blob has, with or without cells."""
    groups = [*blob.tree.children, *(c for dsv4 in blob.tree.group("dsv4") for c in dsv4.children)]
    return {g.last for g in groups if g.kind == "group"}


def _in_common(few: Canon, parts: set[str], whole: Canon) -> tuple[Canon, Canon]:
    """A partial state, its window named as such, and what the other has of its parts."""
    named = {"attn": "window"}
    kept = {named.get(p, p) for p in parts}
    return (
        {s: _only(x, lambda part: named.get(part, part)) for s, x in few.items()},
        {s: _only(x, lambda part: part if part in kept else "") for s, x in whole.items()},
    )


def _only(state: Sequence, name: Callable[[str], str]) -> Sequence:
    """A sequence with its parts under other names, without those that get none."""
    return Sequence(
        {name(p): x for p, x in state.positions.items() if name(p)},
        {k._replace(part=name(k.part)): r for k, r in state.rows.items() if name(k.part)},
        {name(p): x for p, x in state.extensions.items() if name(p)},
    )


def _trimmed(context: Sequence, single: Sequence) -> tuple[Sequence, list[str]]:
    """A sequence of a whole context without the cells that have left its window: the blob of one has none of them
    (src/llama-kv-cache.cpp, state_write), that of a context has.
    """
    mine, theirs = context.positions.get("window", ()), single.positions.get("window", ())
    least = min(theirs, default=0)
    left = tuple(p for p in mine if p < least)
    rows = {
        key: r
        for key, r in context.rows.items()
        if key.part in context.positions or key in single.rows  # of one, no rows that are not filled
    }
    trimmed = Sequence({**context.positions}, rows, {**context.extensions})
    if not left:
        return trimmed, []
    trimmed.drop_below("window", least)
    said = f"{many('position', len(left))} {ranges(left)}, which left the window, in the context only"
    return trimmed, [said]


def _there(seq: int, *canons: Canon) -> int:
    if not any(seq in c for c in canons):
        have = sorted({s for c in canons for s in c})
        raise NoPair(f"there is no sequence {seq} in the context: it has {', '.join(map(str, have)) or 'none'}")
    return seq


def _compared(pair: _Pair, a: Blob, b: Blob) -> Compared:
    data = a.shape.data == b.shape.data
    if not data:
        one, other = (Sequence(s.positions, {}, s.extensions) for s in (pair.one, pair.other))
        pair = pair._replace(one=one, other=other)
    have = (_held_parts(a), _held_parts(b))
    if _partial(a, b):
        have = (have[0] | have[1],) * 2
    found = _differences(pair.one, pair.other, have)
    bad = {d.key.part for d, _ in found}
    equal = tuple(p for p in pair.other.positions if p not in bad)
    return Compared(
        pair.a,
        pair.b,
        summary(pair.one, pair.other, [d for d, _ in found]),
        tuple(_part(d, rows, d.key.part in pair.one.positions) for d, rows in found),
        (*(_equal(p, len(pair.other.positions[p]), data) for p in equal), *_equal_in_common(pair, found, data)),
    )


def _equal_in_common(pair: _Pair, found: list[tuple[Difference, tuple[int, int]]], data: bool) -> Iterator[str]:
    """Parts that hold different positions and have equal rows in those that both hold."""
    rows = {d.key.part for d, _ in found if d.key.tensor != "cells"}
    for part in pair.other.positions if data else ():
        mine, theirs = pair.one.positions.get(part, ()), pair.other.positions[part]
        both = tuple(sorted(set(mine) & set(theirs)))
        if both and part not in rows and sorted(mine) != sorted(theirs):
            yield f"{part_words(part)} equal in {many('position', len(both))} {ranges(both)}, which both hold"


def _equal(part: str, n: int, data: bool) -> str:
    if not data:
        return f"{part_words(part)} has the same {many('position', n)}, data not compared"
    return f"{part_words(part)} equal in {'its position' if n == 1 else f'all {n} positions'}"


def _part(d: Difference, rows: tuple[int, int], cells: bool) -> Part:
    """cells: its rows are of cells with positions; those of a compressed cache are counted."""
    said = d.text
    if d.pos >= 0 and d.key.tensor != "extension":
        unit = "position" if cells else "row"
        said = f"{d.text}: {_most(d.error)}, in {rows[0]} of {rows[1]} {many(unit, rows[1])}"
    largest = d.error if np.isfinite(d.error) else None
    return Part(d.key.part, d.key.layer, d.key.tensor, d.pos, largest, rows, said)


def _most(error: float) -> str:
    return f"largest difference {error:.3g}" if np.isfinite(error) else "not finite"


def _differences(
    one: Sequence, other: Sequence, have: tuple[set[str], set[str]] | None = None
) -> list[tuple[Difference, tuple[int, int]]]:
    """Where two sequences differ, in words for both, and in how many of how many rows. have: the parts of each blob."""
    found: list[tuple[Difference, tuple[int, int]]] = []
    for fact in facts(one, other):
        part = fact.key.part
        if fact.what == "extension" and not (one.extensions.get(part) and other.extensions.get(part)):
            continue  # told of the headers
        found.append((Difference(fact.key, fact.pos, fact.error, _fact_words(fact, one, other, have)), fact.counts))
    return found


def _fact_words(fact: Fact, one: Sequence, other: Sequence, have: tuple[set[str], set[str]] | None = None) -> str:
    key, sides = fact.key, (("A", one), ("B", other))
    match fact.what:
        case "cells":
            lacks = next((i for i in (0, 1) if have is not None and key.part not in have[i]), None)
            if lacks is not None:
                (mine, _), (theirs, state) = (sides[lacks], sides[1 - lacks])
                held = _held(state.positions[key.part])
                return f"{mine} has no {part_words(key.part)} part, {theirs} holds {held} in it"
            held = ", ".join(f"{_held(s.positions.get(key.part, ()))} in {n}" for n, s in sides)
            return f"{part_words(key.part)} holds {held}"
        case "missing":
            return f"{key.words()} is missing in {next(n for n, s in sides if key not in s.rows)}"
        case "form":
            rows = [(n, s.rows[key]) for n, s in sides]
            said = ", ".join(f"{TYPES[r.type][0]} of {bytes_of(r.data.shape[1])} a row in {n}" for n, r in rows)
            return f"{key.words()}: {said}"
        case "number":
            counts = ((n, len(s.rows[key].positions)) for n, s in sides)
            return f"{key.words()}: " + ", ".join(f"{k} {many('row', k)} in {n}" for n, k in counts)
        case "extension":
            return f"{part_words(key.part)}: x, y or token of position {fact.pos}"
        case _:
            unit = "position" if key.part in one.positions else "row"
            return f"{key.words()} of {unit} {fact.pos}"


def _held(positions: tuple[int, ...]) -> str:
    return f"{many('position', len(positions))} {ranges(positions)}" if positions else "no cells"


# ---------------------------------------------------------------------------------------------------------------------
# Text


def text(found: Diff, a: str, b: str) -> list[str]:
    """Lines for people."""
    lines = [f"A  {a}: {found.kinds[0]}, {bytes_of(found.sizes[0])}"]
    lines.append(f"B  {b}: {found.kinds[1]}, {bytes_of(found.sizes[1])}")
    if found.identical:
        lines.append("equal to the byte")
    for name, fault in found.faults.items():
        said = fault.words.partition(";")[0]
        where_ = f"cannot be read from byte {fault.offset} on, {fault.field}: " if fault.field else "is "
        lines.append(f"{name} {where_}{said}")
    if found.identical:
        return [*lines, *found.behind]
    if found.first is not None and not found.partial:
        field = f"{found.first.name}, " if found.first.name else ""
        lines.append(
            f"first different byte {found.first.offset}: {field}{found.first.words}: {found.first.a} / {found.first.b}"
        )
    lines += [*found.headers, *found.behind]
    if found.faults:
        return [*lines, "the states are not compared; `redraft blob show` has what could be read"]
    for sequence in found.sequences:
        lines += _sequence_text(sequence, len(found.sequences) > 1)
    if found.partial:
        said = f"{'equal' if found.equal else 'different'} in what both hold"
        return [*lines, "; ".join((f"{found.partial} is a partial state: {said}", *found.layout))]
    if not found.equal:
        inside = any(s.different for s in found.sequences) or "driver state" in found.kinds
        return [*lines, "different state" if inside else "equal cells, different headers"]
    why = "; ".join(found.layout) or (
        "only what is behind the end differs" if found.behind else "only the headers differ"
    )
    return [*lines, f"equal state: {why}"]


def _sequence_text(found: Compared, several: bool) -> list[str]:
    who = f"sequence {found.a}: " if several else ""
    if not found.different:
        return [f"{who}{'; '.join(found.equal) or 'equal'}"] if several or found.equal else []
    return [who + line for line in (*_alike(found.different), *found.equal)]


def _alike(parts: tuple[Part, ...]) -> Iterator[str]:
    """Differences in words, neighbouring layers that differ alike in one line."""
    runs: list[list[Part]] = []
    for p in parts:
        if runs and p.layer >= 0 and _key(runs[-1][0]) == _key(p):
            runs[-1].append(p)
        else:
            runs.append([p])
    for run in runs:
        if len(run) == 1:
            yield run[0].words
            continue
        # the line of the one that differs most
        most = max(run, key=lambda p: float("inf") if p.largest is None else p.largest)
        yield f"layers {ranges(tuple(p.layer for p in run))},{most.words.partition(',')[2]}"


def _key(p: Part) -> tuple[object, ...]:
    """What is equal in differences that are told together; where something is missing that is all but the layer."""
    rest = p.words.partition(",")[2] if p.position < 0 else ""
    return p.layer >= 0, p.part, p.tensor, p.position, p.rows, rest
