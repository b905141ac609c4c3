"""What a blob holds, for people and machines: `look`, and its text."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import Counter
from typing import NamedTuple

import msgspec

from fuzz.blobs.names import MUST_BE, TENSORS, bytes_of, many, part_words, places
from fuzz.blobs.odd import odd_of
from subjects.state.canon import WORDS, ranges
from subjects.state.parse import (
    FORMS,
    SEQ_FILE_MAGIC,
    SEQ_MAGIC,
    SESSION_MAGIC,
    THE_END,
    TYPES,
    AsFar,
    BadBlob,
    Shape,
    form_of,
    pending_row,
    read_as_far,
)
from subjects.state.tree import FORMATS, Node

KINDS = ("eagle3",)
"""Drivers whose states have nothing to know them by."""
NO_STATE = {"empty file": b"", "GGUF file": b"GGUF"}
"""What is given by mistake, and how it begins."""
SHOWN = 12
"""Digits of a hash that people see."""


class Cell(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cell; extension: x, y and token of M-RoPE and n-gram models."""

    position: int
    sequences: tuple[int, ...]
    extension: tuple[int, ...] = ()


class Rows(msgspec.Struct, frozen=True):
    """The data of one tensor of one layer. layer: its number within the part, or in a compressed cache the model's own;
    row: bytes of one cell; offset, size: of all its data, which a blob from a device does not have.
    """

    layer: int
    tensor: str
    type: str
    row: int
    cells: int
    offset: int
    size: int
    sha256: str
    transposed: bool


class Group(msgspec.Struct, frozen=True):
    """A memory part, one of its streams, or a header."""

    name: str
    words: str
    offset: int
    size: int
    fields: dict[str, int | str]
    cells: tuple[Cell, ...]
    rows: tuple[Rows, ...]
    groups: tuple[Group, ...]


class Fault(msgspec.Struct, frozen=True):
    """Why a blob cannot be read to its end: the field, its offset, and words."""

    field: str
    offset: int
    words: str


class Look(msgspec.Struct, frozen=True):
    """A blob. parts: those that it was read as having; data: False for one that was saved on a device; whole: it was
    read to its end, otherwise `fault` says why not and the groups are what could be read, the parts a guess.
    """

    kind: str
    size: int
    sha256: str
    whole: bool
    fault: Fault | None
    parts: tuple[str, ...]
    data: bool
    extension: bool
    groups: tuple[Group, ...]
    odd: tuple[str, ...]


class Blob(NamedTuple):
    """A blob as far as it can be read."""

    data: bytes
    tree: Node
    shape: Shape
    fault: Fault | None

    @property
    def behind(self) -> int:
        """Bytes behind its end, where that is all that is wrong; 0 where they are the most of it."""
        if self.fault is None or self.fault.field != THE_END or self.tree.value not in FORMS:
            return 0
        left = len(self.data) - self.fault.offset
        return left if 2 * left < len(self.data) else 0


def read(data: bytes, kind: str | None = None) -> Blob:
    """Read a blob as far as it makes sense. kind: one of KINDS, for a driver's state. Never raises."""
    if kind is not None:
        try:
            return Blob(data, pending_row(data), Shape(()), None)
        except BadBlob as e:
            return Blob(data, Node("", 0, len(data), value="driver state"), Shape(()), _fault(data, e, 0))
    for what, begins in NO_STATE.items():
        if data.startswith(begins) if begins else not data:
            said = f"{'a' if begins else 'an'} {what}, which is no saved state"
            return Blob(data, Node("", 0, len(data), value=what), Shape(()), Fault("", 0, said))
    got = read_as_far(data)
    if got.fault is not None and form_of(data) == "context state" and (other := _with_magic(data)) is not None:
        form, found = other
        said = f"{data[:4].hex(' ')} is no magic; with that of a {form} all the rest can be read, as shown"
        return Blob(data, found.tree, found.shape, Fault("magic", 0, said))
    return Blob(
        data,
        got.tree,
        got.shape,
        None if got.fault is None else _fault(data, got.fault, got.wanted, got.spare, got.mended),
    )


def _with_magic(data: bytes) -> tuple[str, AsFar] | None:
    """The reading with another magic, where that is all that is wrong."""
    forms = {"sequence state": SEQ_MAGIC, "sequence state file": SEQ_FILE_MAGIC, "session file": SESSION_MAGIC}
    for form, magic in forms.items():
        found = read_as_far(data, magic)
        if found.fault is None:
            return form, found
    return None


def _fault(data: bytes, e: BadBlob, wanted: int, spare: int = 0, mended: int | None = None) -> Fault:
    left = len(data) - e.reached
    form = form_of(data)
    if e.field == THE_END and form in FORMS and 2 * left < len(data):
        who = "llama_state_load_file refuses" if form == "session file" else "llama.cpp does not look at"
        return Fault(THE_END, e.reached, f"{_behind(left)} the end, which {who}; or a field before them is wrong")
    if e.field == THE_END or (e.field and left and "more behind" in str(e)):
        text = f"{bytes_of(left)} more than there should be, or a field before them is wrong"
    elif wanted > left:
        text = f"it takes {wanted} bytes and {left} are left: cut short, or a number before it is wrong"
    elif not wanted and e.field in ("driver.pending", "driver.verify"):
        text = f"{bytes_of(left)} are left, which are not as many as it takes"
    elif not wanted:
        text = str(e)
    else:
        last = e.field.rpartition(".")[2]
        raw = data[e.reached : e.reached + (wanted or 4)]
        text = f"it is {int.from_bytes(raw, 'little')}" if wanted in (2, 4, 8) else "it makes no sense"
        if wanted == 4 and raw[-1] & 0x80:
            text += f" (or {int.from_bytes(raw, 'little', signed=True)})"
        # a number that others have to fit is told with what would, not with what it must be
        if last in MUST_BE and (mended is None or not _possible(last, raw, data)):
            text += f" and must be {MUST_BE[last]}"
    if mended is None and 0 < wanted <= left and ".cell." in e.field:
        text += "; or the number of cells before it is wrong"
    if mended is not None:
        text += f"; with {mended} in its place all the rest can be read, as shown"
    if spare:
        text += f"; or the blob has no such part, and {bytes_of(spare)} behind its end"
    ahead = data[e.reached : e.reached + 16]
    return Fault(e.field, e.reached, text + (f"; the bytes there: {ahead.hex(' ')}" if ahead else ""))


def _behind(n: int) -> str:
    return f"{n} more {many('byte', n)} behind"


def _possible(last: str, raw: bytes, data: bytes) -> bool:
    """Whether a reading takes a number for plausible, and it is what follows that does not fit."""
    value = int.from_bytes(raw, "little")
    most = {"n_stream": 256, "n_cells": len(data) // 8, "n_tokens": len(data) // 4, "v_trans": 1}
    return last in most and int(last == "n_stream") <= value <= most[last]


def look(blob: Blob) -> Look:
    """What a blob holds."""
    return Look(
        kind=str(blob.tree.value),
        size=len(blob.data),
        sha256=hashlib.sha256(blob.data).hexdigest(),
        whole=blob.fault is None,
        fault=blob.fault,
        parts=blob.shape.parts,
        data=blob.shape.data,
        extension=blob.shape.ext,
        groups=_groups(blob.tree),
        odd=tuple(odd_of(blob.data, blob.tree, blob.shape)),
    )


def _groups(tree: Node) -> tuple[Group, ...]:
    loose = [c for c in tree.children if c.kind != "group"]
    head = Node("header", 0, loose[-1].end if loose else 0, children=loose)
    return tuple(_group(n) for n in ([head] if loose else []) + [c for c in tree.children if c.kind == "group"])


def _group(node: Node) -> Group:
    fields: dict[str, int | str] = {}
    rows: list[Rows] = []
    inner: list[Group] = []
    layers: Counter[str] = Counter()
    for child in node.children:
        if child.last == "cell" or (child.last == "token" and node.last == "file"):
            continue
        if child.last == "layer":
            number = int(child.children[0].value) if child.children else 0
            rows += [r for tensor in child.children[1:] for r in _rows(tensor, number)]
        elif child.last in TENSORS:
            rows += _rows(child, layers[child.last])
            layers[child.last] += 1
        elif child.kind == "data":
            rows.append(_data(child, 0, child.last, "F32", child.width))
        elif child.kind == "group":
            inner.append(_group(child))
        elif isinstance(child.value, int | str):
            fields[child.last] = child.value
    cells = tuple(c for n in node.group("cell") if (c := _cell(n)) is not None)
    return Group(
        node.name, part_words(node.name), node.start, node.end - node.start, fields, cells, tuple(rows), tuple(inner)
    )


def _cell(node: Node) -> Cell | None:
    """None where the blob ends before its position."""
    if not node.group("pos"):
        return None
    extension = tuple(int(c.value) for c in node.children if c.last in ("x", "y", "token"))
    return Cell(node.number("pos"), tuple(int(c.value) for c in node.group("seq")), extension)


def _rows(layer: Node, number: int) -> list[Rows]:
    """The rows of a tensor: one entry, or two where it has n-gram rows beside."""
    fields = {c.last: int(c.value) for c in layer.children if c.kind not in ("data", "group") and c.value != ""}
    if "type" not in fields:
        return []
    kind = TYPES[fields["type"]][0]
    row = fields["row"] if "row" in fields else fields.get("element", 0) * fields.get("width", 0)
    data = layer.group("data")
    out = [_data(data[0], number, layer.last, kind, row) if data else Rows(
        number, layer.last, kind, row, 0, layer.end, 0, "", "element" in fields)]  # fmt: skip
    out += [_data(n, number, "ngram", "F32", n.width) for n in layer.group("ngram_data")]
    return out


def _data(node: Node, number: int, tensor: str, kind: str, row: int) -> Rows:
    assert isinstance(node.value, bytes)
    digest = hashlib.sha256(node.value).hexdigest()
    return Rows(number, tensor, kind, row, node.cells, node.start, node.end - node.start, digest, bool(node.across))


# ---------------------------------------------------------------------------------------------------------------------
# Text


def text(found: Look, name: str, *, cells: bool = False) -> list[str]:
    """Lines for people. cells: one for each cell."""
    if found.kind in NO_STATE and found.fault is not None:
        return [f"{name}: {found.fault.words}"]
    lines = [f"{name}: {found.kind}, {bytes_of(found.size)}, sha256 {found.sha256[:SHOWN]}"]
    if not found.data:
        lines.append("from a device: cells and sizes, no data")
    for group in found.groups:
        lines += ["", *_text(group, "", cells)]
    if found.parts == ("attn",) and found.kind in FORMS:
        lines.append("  (attention, or a window that was saved alone: nothing in the blob says which)")
    if found.fault is not None:
        said = found.fault.words.split("; ")
        behind = found.fault.field == THE_END and "behind the end" in said[0]
        if behind:
            lines += ["", f"from byte {found.fault.offset} on: {said.pop(0)}"]
        else:
            lines += ["", f"cannot be read from byte {found.fault.offset} on: {found.fault.field or 'the beginning'}"]
        lines += [f"  {part}" for part in said]
        some = {g.name for g in found.groups} & set(found.parts)
        if found.kind in FORMS and some and not behind and "as shown" not in found.fault.words:
            lines.append(f"  read as {', '.join(map(part_words, found.parts))}: the parts are a guess")
    if found.odd or found.fault is None:
        lines += ["", "odd" if found.fault is None else "odd in what could be read"]
        lines += [f"  {line}" for line in found.odd or ("nothing",)]
    return lines


def _text(group: Group, pad: str, cells: bool) -> list[str]:
    head = f"{pad}{group.words}, {bytes_of(group.size)} at {group.offset}"
    facts = [f"{k} {_value(k, v)}" for k, v in group.fields.items() if k not in ("n_stream", "n_cells", "n_layer")]
    if facts and group.name.rpartition(".")[2] not in ("attn", "window", "index", "recurrent", "stream"):
        head += ": " + ", ".join(facts)
    if group.fields.get("v_trans"):
        head += ", V transposed"
    lines = [head]
    claimed = group.fields.get("n_cells", len(group.cells))
    if group.cells:
        n = len(group.cells)
        some = f"{claimed} cells, of which {n} can be read" if claimed != n else f"{n} {many('cell', n)}"
        lines.append(f"{pad}  {some}: {_positions(group.cells)}")
    elif "n_cells" in group.fields:
        none = f"{claimed} {many('cell', int(claimed))}, none of which can be read"
        lines.append(f"{pad}  {none if claimed else 'no cells'}")
    if cells:
        lines += [f"{pad}    {_one(i, c)}" for i, c in enumerate(group.cells)]
    lines += [f"{pad}  {line}" for line in _table(group.rows)]
    empty: list[int] = []
    streams = 0
    for inner in group.groups:
        if not inner.name.endswith(".stream"):
            lines += _text(inner, pad + "  ", cells)
            continue
        number, streams = streams, streams + 1
        if inner.fields.get("n_cells") == 0:
            empty.append(number)
            continue
        named = msgspec.structs.replace(inner, words=f"stream {number}")
        lines += _text(named, pad + "  ", cells)
    if empty:
        lines.append(f"{pad}  {many('stream', len(empty))} {ranges(tuple(empty))}: no cells")
    return lines


def _value(name: str, value: int | str) -> str:
    return f"0x{value:08x}" if name == "magic" else str(value)


def _positions(cells: tuple[Cell, ...]) -> str:
    """Positions as ranges, by the sequences that hold them."""
    of: dict[tuple[int, ...], list[int]] = {}
    for cell in cells:
        of.setdefault(cell.sequences, []).append(cell.position)
    parts = []
    for seqs, found in of.items():
        word = f"{many('position', len(found))} {ranges(tuple(found))}"
        who = f" of {many('sequence', len(seqs))} {', '.join(map(str, seqs))}" if seqs else ""
        parts.append(word + who)
    return "; ".join(parts) + (", each with x, y and a token" if cells[0].extension else "")


def _one(number: int, cell: Cell) -> str:
    who = f"  sequence {', '.join(map(str, cell.sequences))}" if cell.sequences else ""
    names = zip(("x", "y", "token"), cell.extension, strict=False)
    return f"cell {number}  position {cell.position}{who}" + "".join(f"  {k} {v}" for k, v in names)


def _table(rows: tuple[Rows, ...]) -> list[str]:
    """One line for the rows of a layer, in columns."""
    table = [
        (
            f"layer {r.layer}" if r.tensor in WORDS else "",
            WORDS.get(r.tensor, r.tensor),
            r.type,
            f"{bytes_of(r.row)} a row",
            f"{bytes_of(r.size)} at {r.offset}" if r.sha256 else "no data",
            r.sha256[:SHOWN],
        )
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True) if w).rstrip() for row in table]


class Field(msgspec.Struct, frozen=True):
    """One field, or a group of them (its value is empty), under the name and number that edits of a scenario use."""

    offset: int
    size: int
    name: str
    nth: int
    value: int | str


def fields(blob: Blob) -> list[Field]:
    """All fields of a blob."""
    out: list[Field] = []
    for node, nth, _ in places(blob.tree):
        if node.kind == "group":
            value: int | str = ""
        elif isinstance(node.value, bytes):
            value = "sha256 " + hashlib.sha256(node.value).hexdigest()[:SHOWN]
        elif node.kind in FORMATS:  # what is in the bytes: another may have been read in place of a wrong one
            value = int(struct.unpack_from(FORMATS[node.kind], blob.data, node.start)[0])
        else:
            value = node.value
        out.append(Field(node.start, node.end - node.start, node.name, nth, value))
    return out


def fields_text(found: list[Field]) -> list[str]:
    """Lines of them."""
    table = [("offset", "size", "name", "nth", "value")]
    table += [
        (str(f.offset), str(f.size), f.name, str(f.nth), _value(f.name.rpartition(".")[2], f.value)) for f in found
    ]
    widths = [max(map(len, column)) for column in itertools.islice(zip(*table, strict=True), 4)]
    return [
        f"{o:>{widths[0]}}  {s:>{widths[1]}}  {n:<{widths[2]}}  {i:>{widths[3]}}  {v}".rstrip()
        for o, s, n, i, v in table
    ]
