"""The reader of saved states, after the sources of llama.cpp that is pinned (llama-cpp-python 0.3.36).

What is written where: src/llama-context.cpp (state_seq_get_data, state_save_file, state_write_data),
src/llama-kv-cache.cpp and src/llama-memory-recurrent.cpp (state_write, state_write_meta, state_write_data), and for the
order of the parts src/llama-kv-cache-iswa.cpp, llama-memory-hybrid*.cpp and llama-kv-cache-dsv4.cpp.

A blob does not say which memory parts it has, whether it came from a device (then it holds no data), nor whether cells
carry an extension (M-RoPE, n-gram tokens). The reader tries what there could be and takes the first reading that is
plausible in every field and ends exactly where the bytes end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from subjects.state.tree import FORMATS, Kind, Node

SEQ_MAGIC = 0xAF143CD8  # src/llama-context.cpp: io_magic
SESSION_MAGIC, SESSION_VERSION = 0x6767736E, 10  # llama.h: LLAMA_SESSION_*
SEQ_FILE_MAGIC, SEQ_FILE_VERSION = 0x67677371, 3  # llama.h: LLAMA_STATE_SEQ_*
DSV4_MAGIC, DSV4_VERSION = 0x34565344, 1  # src/llama-kv-cache-dsv4.cpp
ROWS_MAGIC = 0x53435053  # tests/planted/mtp_state.patch: the state that a mended driver offers

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    20: ("IQ4_NL", 32, 18),
    30: ("BF16", 1, 2),
}
"""ggml types that a cache can have (ggml.h): name, values in a block, bytes of a block."""
MOST_STREAMS = 256  # LLAMA_MAX_SEQ
MOST_LAYERS = 1024


class BadBlob(ValueError):
    """Bytes that are no saved state of the pinned version; the message says how far they could be read.

    reached: the offset of the field that could not be; field: its name.
    """

    def __init__(self, text: str, reached: int = 0, field: str = ""):
        super().__init__(text)
        self.reached, self.field = reached, field


class _No(Exception):
    """This reading fails; another may not."""


class Shape(NamedTuple):
    """What a blob does not say of itself. parts: memory parts in order. data: False for a device's. ext: cells carry an
    extension of 12 bytes. values: attention parts have V (those of an index or of latent attention have none).
    """

    parts: tuple[str, ...]
    data: bool = True
    ext: bool = False
    values: bool = True


PARTS: tuple[tuple[str, ...], ...] = (
    ("attn", "recurrent"),
    ("attn", "window"),
    ("recurrent",),
    ("attn",),
    ("dsv4",),
    ("attn", "window", "recurrent"),
    ("attn", "recurrent", "index"),
)
NO_VALUES = frozenset({"index"})
SHAPES = tuple(Shape(parts, data, ext, values) for data in (True, False) for parts in PARTS for ext in (False, True)
               for values in ((True, False) if parts != ("recurrent",) else (True,))
               if not (ext and parts == ("recurrent",)))  # fmt: skip


Instead = dict[int, int]
"""Numbers to be read in place of those at some offsets."""


class _Reader:
    """Takes fields off the bytes, in order."""

    def __init__(self, data: bytes, shape: Shape, at: int = 0, single: bool = True, instead: Instead | None = None):
        self.data, self.shape, self.at, self.single = data, shape, at, single
        self.reached, self.field, self.wanted = at, "", 0
        self.instead, self.effort = instead or {}, 0

    def number(self, into: Node, last: str, kind: Kind = "u32", plausible: Callable[[int], bool] | None = None) -> int:
        name = f"{into.name}.{last}" if into.name else last
        start, size = self.at, struct.calcsize(FORMATS[kind])
        if start >= self.reached:
            self.reached, self.field, self.wanted = start, name, size
        if start + size > len(self.data):
            raise _No(name)
        value = int(struct.unpack_from(FORMATS[kind], self.data, start)[0])
        value = self.instead.get(start, value)
        self.effort += 1
        if plausible is not None and not plausible(value):
            raise _No(name)
        into.children.append(Node(name, start, start + size, kind, value))
        self.at = start + size
        return value

    def bytes(self, into: Node, last: str, size: int, kind: Kind = "data") -> Node:
        name = f"{into.name}.{last}" if into.name else last
        if self.at >= self.reached:
            self.reached, self.field, self.wanted = self.at, name, size
        if size < 0 or self.at + size > len(self.data):
            raise _No(name)
        self.effort += size >> 8
        raw = self.data[self.at : self.at + size]
        node = Node(name, self.at, self.at + size, kind, raw.decode("latin-1") if kind == "text" else raw)
        into.children.append(node)
        self.at += size
        return node

    def rows(self, into: Node, cells: int, width: int, across: int = 0) -> None:
        """The data of all cells of one layer; nothing where the blob is a device's."""
        if not self.shape.data:
            return
        node = self.bytes(into, "data", cells * width * max(across, 1))
        node.cells, node.width, node.across = cells, width, across

    def open(self, into: Node, last: str) -> Node:
        node = Node(f"{into.name}.{last}" if into.name else last, self.at, self.at)
        into.children.append(node)
        return node

    def close(self, node: Node) -> None:
        node.end = self.at


def _cache_type(value: int) -> bool:
    return value in TYPES


def _fits(value_type: int) -> Callable[[int], bool]:
    block = TYPES[value_type][2]
    return lambda row: row % block == 0 and row < 1 << 32


def _attention(r: _Reader, root: Node, name: str) -> None:
    part = r.open(root, name)
    n_stream = r.number(part, "n_stream", plausible=lambda n: 1 <= n <= MOST_STREAMS)
    for _ in range(n_stream):
        stream = r.open(part, "stream")
        n_cells = r.number(stream, "n_cells", plausible=lambda n: n * 8 <= len(r.data))
        if n_cells:
            _cells(r, stream, n_cells, ext=r.shape.ext, least=1)
            _keys_values(r, stream, n_cells, values=r.shape.values and name not in NO_VALUES)
        r.close(stream)
    r.close(part)


def _cells(r: _Reader, into: Node, n: int, *, ext: bool, least: int) -> None:
    """Cells; those of one sequence name `least` sequences, of a whole context one to all of them."""
    count = (lambda k: k == least) if r.single else (lambda k: least <= k <= MOST_STREAMS)
    for _ in range(n):
        cell = r.open(into, "cell")
        r.number(cell, "pos", "i32")
        k = r.number(cell, "n_seq", plausible=count)
        if ext:
            for last in ("x", "y", "token"):
                r.number(cell, last, "i32")
        for _ in range(k):
            r.number(cell, "seq", "i32", plausible=lambda s: 0 <= s < MOST_STREAMS)
        r.close(cell)


def _keys_values(r: _Reader, into: Node, n_cells: int, *, values: bool) -> None:
    transposed = r.number(into, "v_trans", plausible=lambda v: v in (0, 1))
    # none where all attention layers are windowed: the other half still has the cells
    n_layer = r.number(into, "n_layer", plausible=lambda n: n <= MOST_LAYERS)
    for _ in range(n_layer):
        _layer(r, into, "k", n_cells)
    for _ in range(n_layer if values else 0):
        if not transposed:
            _layer(r, into, "v", n_cells)
            continue
        layer = r.open(into, "v")
        t = r.number(layer, "type", "i32", _cache_type)
        size = r.number(layer, "element", plausible=TYPES[t][2].__eq__)
        width = r.number(layer, "width", plausible=lambda w: w <= 1 << 20)
        r.rows(layer, n_cells, size, width)
        r.close(layer)


def _layer(r: _Reader, into: Node, last: str, n_cells: int) -> tuple[int, int]:
    layer = r.open(into, last)
    t = r.number(layer, "type", "i32", _cache_type)
    row = r.number(layer, "row", "u64", _fits(t))
    r.rows(layer, n_cells, row)
    r.close(layer)
    return t, row


def _recurrent(r: _Reader, root: Node, name: str) -> None:
    part = r.open(root, name)
    n_cells = r.number(part, "n_cells", plausible=lambda n: n * 8 <= len(r.data))
    _cells(r, part, n_cells, ext=False, least=0)
    r.number(part, "s_trans", plausible=lambda v: v == 0)
    most = r.number(part, "n_layer", plausible=lambda n: 1 <= n <= MOST_LAYERS)
    # Layers without recurrent state are left out and nothing says how many: rows of convolution ("r", which may have a
    # second one for n-gram embeddings) come first, then as many of the state ("s"). Each kind is the same everywhere.
    n = _same_rows(r, part, "r", most, n_cells)
    for _ in range(n):
        _layer(r, part, "s", n_cells)
    r.close(part)


def _same_rows(r: _Reader, part: Node, last: str, most: int, n_cells: int) -> int:
    n = 0
    first: tuple[int, int] | None = None
    while n < most:
        at, kept = r.at, len(part.children)
        try:
            found = _layer(r, part, last, n_cells)
        except _No:
            found = None
        if found is None or (first is not None and found != first):
            r.at = at
            del part.children[kept:]
            break
        first, n = found, n + 1
        _second_row(r, part.children[-1], n_cells)
    # Where convolution and state rows are alike they were all taken for the former.
    left = n if n and not _another(r, n_cells) else 0
    if part.last == r.shape.parts[-1] and r.at != len(r.data):
        left = 0  # this reading fails: at the row that makes no sense
    if left and left % 2 == 0:
        half = [c for c in part.children if c.last == last][n // 2 :]
        if half:
            r.at = half[0].start
            del part.children[part.children.index(half[0]) :]
            n //= 2
    if n == 0:
        raise _No(f"{part.name}.{last}")
    return n


def _another(r: _Reader, n_cells: int) -> bool:
    """Whether a row of state follows."""
    at, probe = r.at, Node("", r.at, r.at)
    try:
        _layer(r, probe, "s", n_cells)
    except _No:
        return False
    finally:
        r.at = at
    return True


def _second_row(r: _Reader, layer: Node, n_cells: int) -> None:
    """The row of n-gram embeddings behind a convolution row: a size without a type."""
    at, kept = r.at, len(layer.children)
    try:
        row = r.number(layer, "ngram_row", "u64", lambda w: 0 < w < 1 << 24 and w % 4 == 0)
        if r.shape.data:
            node = r.bytes(layer, "ngram_data", n_cells * row)
            node.cells, node.width = n_cells, row
    except _No:
        r.at = at
        del layer.children[kept:]
        return
    r.close(layer)


def _dsv4(r: _Reader, root: Node, name: str) -> None:
    part = r.open(root, name)
    r.number(part, "magic", plausible=lambda m: m == DSV4_MAGIC)
    r.number(part, "version", plausible=lambda v: v == DSV4_VERSION)
    mode = r.number(part, "mode", plausible=lambda m: m in (0, 1))
    # its raw memory is a windowed one: both halves, or the window alone in a partial state
    for half in ("raw", "window") if mode == 0 else ("window",):
        _attention(r, part, half)
    if mode == 0:
        for cache in ("csa", "hca", "index"):
            _dsv4_rows(r, part, cache, ("version", "n_rows", "n_stream", "n_layer"), ("k",))
    for state in ("csa_state", "hca_state", "index_state"):
        fields = ("version", "ratio", "size", "n_embd", "n_stream", "n_layer")
        _dsv4_rows(r, part, state, fields, ("kv", "score"))
    r.close(part)


def _dsv4_rows(r: _Reader, root: Node, name: str, fields: tuple[str, ...], tensors: tuple[str, ...]) -> None:
    part = r.open(root, name)
    for f in fields:
        r.number(part, f, plausible=lambda n: n < 1 << 24)
    n_stream = part.number("n_stream")
    for _ in range(part.number("n_layer")):
        layer = r.open(part, "layer")
        r.number(layer, "id", plausible=lambda n: n < MOST_LAYERS)
        for tensor in tensors:
            group = r.open(layer, tensor)
            t = r.number(group, "type", "i32", _cache_type)
            r.number(group, "values", "u64", lambda n: n < 1 << 24)
            rows = r.number(group, "rows", "u64", lambda n: n < 1 << 24)
            width = r.number(group, "row", "u64", _fits(t))
            if rows:
                r.rows(group, n_stream * rows, width)
            r.close(group)
        r.close(layer)
    r.close(part)


_PARTS: dict[str, Callable[[_Reader, Node, str], None]] = {
    "attn": _attention,
    "window": _attention,
    "index": _attention,
    "recurrent": _recurrent,
    "dsv4": _dsv4,
}


# ---------------------------------------------------------------------------------------------------------------------
# Whole blobs


def _seq_header(r: _Reader, root: Node) -> None:
    r.number(root, "magic", plausible=lambda m: m == SEQ_MAGIC)
    r.number(root, "seq", "i32")


def _file_header(magic: int, version: int, what: str) -> Callable[[_Reader, Node], None]:
    def read(r: _Reader, root: Node) -> None:
        head = r.open(root, "file")
        r.number(head, "magic", plausible=lambda m: m == magic)
        said = r.number(head, "version")
        if said != version:
            raise BadBlob(f"a {what} of version {said}; this redraft reads version {version}", r.at - 4, "file.version")
        n = r.number(head, "n_tokens", plausible=lambda n: 4 * n <= len(r.data))
        for _ in range(n):
            r.number(head, "token", "i32")
        r.close(head)

    return read


def _arch(r: _Reader, root: Node) -> None:
    head = r.open(root, "arch")
    n = r.number(head, "length", plausible=lambda n: 1 <= n <= 64)
    name = r.bytes(head, "name", n, "text")
    if not all(c.isalnum() or c in "-_." for c in str(name.value)):
        raise _No("arch.name")
    r.close(head)


_SEQ_FILE = _file_header(SEQ_FILE_MAGIC, SEQ_FILE_VERSION, "sequence state file")
_SESSION = _file_header(SESSION_MAGIC, SESSION_VERSION, "session file")


def _both(*readers: Callable[[_Reader, Node], None]) -> Callable[[_Reader, Node], None]:
    def read(r: _Reader, root: Node) -> None:
        for reader in readers:
            reader(r, root)

    return read


FORMS: dict[str, tuple[Callable[[_Reader, Node], None], bool]] = {
    "sequence state": (_seq_header, True),
    "sequence state file": (_SEQ_FILE, True),
    "session file": (_both(_SESSION, _arch), False),
    "context state": (_arch, False),
}
"""Kinds of blob: what reads the header, and whether the cells are of a single sequence."""
SINGLE = frozenset(form for form, (_, single) in FORMS.items() if single)
"""Kinds of blob whose cells are of a single sequence."""
_MAGICS = {SEQ_MAGIC: "sequence state", SEQ_FILE_MAGIC: "sequence state file", SESSION_MAGIC: "session file"}


def form_of(data: bytes) -> str:
    """The kind of blob that some bytes claim to be (a key of FORMS, or "driver state")."""
    head = int.from_bytes(data[:4], "little") if len(data) >= 4 else 0
    if head in _MAGICS:
        return _MAGICS[head]
    return "driver state" if head == ROWS_MAGIC else "context state"


def parse(data: bytes, shape: Shape | None = None) -> tuple[Node, Shape]:
    """The tree of a blob, and the shape that it was read with. `shape`: what is known of it already, tried first.

    Raises:
        BadBlob: no reading is plausible and ends where the bytes end.
    """
    form = form_of(data)
    if form == "driver state":
        return driver_rows(data), Shape(())
    best: tuple[int, str] = (0, "")
    for candidate in _candidates(shape):
        root = Node("", 0, len(data), value=form)
        reached, field, _ = _read(root, data, candidate)
        if not field:
            return root, candidate
        best = max(best, (reached, field))
    raise BadBlob(_no_sense(form, data, *best), *best)


THE_END = "the end"
"""The field that makes no sense where all was read and bytes are left."""
_NEAR = 12
"""Bytes between readings that got about as far: small numbers are plausible as almost everything."""


def _read(root: Node, data: bytes, shape: Shape, instead: Instead | None = None) -> tuple[int, str, int]:
    """One reading, into `root`: where it failed, in which field, and of how many bytes that is. The field is empty
    where it did not fail, THE_END where bytes are left. Raises BadBlob on another version.
    """
    header, single = FORMS[str(root.value)]
    return _read_with(_Reader(data, shape, single=single, instead=instead), header, root)


def _read_with(r: _Reader, header: Callable[[_Reader, Node], None], root: Node) -> tuple[int, str, int]:
    data, shape = r.data, r.shape
    try:
        header(r, root)
        for part in shape.parts:
            _PARTS[part](r, root, part)
    except _No:
        return r.reached, r.field, r.wanted
    return r.at, "" if r.at == len(data) else THE_END, 0


def _no_sense(form: str, data: bytes, reached: int, field: str) -> str:
    return (
        f"no {form} of llama.cpp as of llama-cpp-python 0.3.36: of {len(data)} bytes the first {reached} can be read, "
        f"then {field} makes no sense"
    )


class AsFar(NamedTuple):
    """What can be read of a blob. fault: what is wrong, None where nothing is; wanted: bytes of the field at fault,
    more than are left where the blob is cut short; spare: bytes behind the end of another reading, one that has fewer
    parts and got about as far, 0 where there is none. mended: the number with which in place of the one at fault all
    the rest can be read, and was.
    """

    tree: Node
    shape: Shape
    fault: BadBlob | None = None
    wanted: int = 0
    spare: int = 0
    mended: int | None = None


def read_as_far(data: bytes, magic: int | None = None) -> AsFar:
    """The tree of a blob, or of as much of it as makes sense. Where one number alone is wrong, that is the reading with
    another in its place; else it is the one that got furthest. Of those that got about as far, one that the bytes do
    not suffice for is taken first, then one that has all its parts and bytes left. magic: the one to be read in place
    of what the bytes begin with. Never raises.
    """
    form = form_of(data) if magic is None else _MAGICS[magic]
    instead = None if magic is None else {0: magic}
    if form == "driver state":
        root = Node("", 0, len(data), value=form)
        try:
            return AsFar(driver_rows(data, root), Shape(()))
        except BadBlob as e:
            _close(root)
            return AsFar(root, Shape(()), e)
    tries: list[tuple[int, str, int, Shape]] = []
    for shape in SHAPES:
        root = Node("", 0, len(data), value=form)
        try:
            reached, field, wanted = _read(root, data, shape, instead)
        except BadBlob as e:
            _close(root)
            return AsFar(root, shape, e)
        if not field:
            return AsFar(root, shape)
        # cells of a recurrent part may be anything, so having read some says nothing, nor have small numbers behind
        if shape.parts != ("recurrent",) or not field.startswith(_LOOSE):
            tries.append((reached, field, wanted, shape))
    furthest = max(t[0] for t in tries)
    near = [t for t in tries if t[0] >= furthest - _NEAR]
    # only deepseek4's begins with a magic of its own
    near = [t for t in near if t[1].startswith("dsv4.") and t[1] != "dsv4.magic"] or near
    # of each kind the first: SHAPES has the likely ones first
    spare = next((t for t in near if t[1] == THE_END), None)
    short = next((t for t in near if t[2] > len(data) - t[0] and (spare is None or t[0] > spare[0])), None)
    reached, field, wanted, best = short or spare or near[0]
    left = len(data) - reached
    clear = left < _SMALL if field == THE_END else wanted > left == 0
    if magic is None and not clear and (mended := _mended(data, form)) is not None:
        return mended
    root = Node("", 0, len(data), value=form)  # read again: the trees of a large blob would not all fit
    _read(root, data, best, instead)
    _close(root)
    fault = BadBlob(_no_sense(form, data, reached, field), reached, field)
    return AsFar(root, best, fault, wanted, len(data) - spare[0] if spare and field != THE_END else 0)


_LOOSE = tuple(f"recurrent.{last}" for last in ("n_cells", "cell.", "s_trans", "n_layer", "r"))
_SMALL = 64
"""So few bytes behind the end of a reading are what somebody appended."""
_EFFORT = 150_000
"""Fields that are read at most to find the number that is wrong: half a second or so."""
_COUNTS = ("n_cells", "n_stream", "n_layer", "n_tokens", "v_trans")
"""Numbers that what follows depends on: a reading with a wrong one fails later."""
_OTHERS: dict[str, tuple[int, ...]] = {
    "n_cells": tuple(range(1, 33)),
    "n_stream": tuple(range(1, 17)),
    "n_layer": tuple(range(1, 65)),
    "n_tokens": tuple(range(65)),
    "v_trans": (0, 1),
    "s_trans": (0,),
    "n_seq": (1, 0, 2, 3, 4),
    "seq": (0,),
    "type": tuple(TYPES),
    "element": (4, 2),
    "magic": (DSV4_MAGIC,),
    "version": (DSV4_VERSION,),
    "mode": (0, 1),
}
"""What is tried in place of a number that may be wrong."""


def _mended(data: bytes, form: str) -> AsFar | None:
    """The reading to the end of a blob that has one wrong number."""
    header, single = FORMS[form]
    left = _EFFORT

    def attempt(shape: Shape, instead: Instead) -> tuple[Node, _Reader, str, int]:
        nonlocal left
        root = Node("", 0, len(data), value=form)
        r = _Reader(data, shape, single=single, instead=instead)
        try:
            _, field, wanted = _read_with(r, header, root)
        except BadBlob as e:
            field, wanted = e.field, 0
        left -= r.effort + 10
        return root, r, field, wanted

    for shape in SHAPES:
        for node in _suspects(*attempt(shape, {})):
            others = _OTHERS.get(node.last, ())
            if node.last == "n_cells":  # as many as there seem to be, or a few less
                group = next(
                    (
                        g
                        for g in attempt(shape, {node.start: len(data) // 8})[0].walk()
                        if g.children and g.children[0].start == node.start
                    ),
                    None,
                )
                n = len(group.group("cell")) if group is not None else 0
                others = (*range(n, max(n - 4, 0), -1), *others)
            for other in others:
                if other == node.value:
                    continue
                root, _, field, _ = attempt(shape, {node.start: other})
                if not field and any(n.kind == "data" or n.last == "row" for n in root.leaves()):
                    fault = BadBlob(_no_sense(form, data, node.start, node.name), node.start, node.name)
                    return AsFar(root, shape, fault, node.end - node.start, 0, other)
                if left < 0:
                    return None
    return None


def _suspects(root: Node, r: _Reader, field: str, wanted: int) -> list[Node]:
    """Numbers that may be why a reading failed: where it did, and before, the latest first."""
    before = [n for n in root.leaves() if n.last in _COUNTS]
    kinds: dict[int, Kind] = {2: "u16", 4: "u32", 8: "u64"}
    own = []
    if field not in ("", THE_END) and wanted in kinds and r.reached + wanted <= len(r.data):
        raw = r.data[r.reached : r.reached + wanted]
        own = [Node(field, r.reached, r.reached + wanted, kinds[wanted], int.from_bytes(raw, "little"))]
    return own + [n for n in reversed(before) if not own or n.start != own[0].start][:8]


def _close(node: Node) -> int:
    """Give groups that were not read to their end the end of what they have."""
    for child in node.children:
        end = _close(child)
        if node.name:
            node.end = max(node.end, end)
    return node.end


def _candidates(shape: Shape | None) -> Iterator[Shape]:
    if shape is not None:
        yield shape
    yield from (s for s in SHAPES if s != shape)


def driver_rows(data: bytes, into: Node | None = None) -> Node:
    """A driver's state as the mended drivers of tests/planted/mtp_state.patch write it. into: keeps what can be read.

    Raises BadBlob.
    """
    r, root = _Reader(data, Shape(())), into or Node("", 0, len(data), value="driver state")
    try:
        head = r.open(root, "driver")
        for last, kind in (
            ("magic", "u32"),
            ("version", "u16"),
            ("type", "u16"),
            ("n_params", "u64"),
            ("n_embd", "i32"),
            ("pending_pos", "i32"),
            ("verify_pos", "i32"),
            ("n_rows", "i32"),
        ):
            r.number(head, last, kind)  # type: ignore[arg-type]
        width = 4 * head.number("n_embd")
        for last, n in (("pending", 1), ("verify", head.number("n_rows"))):
            node = r.bytes(head, last, n * width)
            node.cells, node.width = n, width
        r.close(head)
    except _No as e:
        raise BadBlob(f"no driver state: {e} makes no sense", r.reached, r.field) from None
    if r.at != len(data):
        raise BadBlob(f"a driver state of {r.at} bytes with {len(data) - r.at} more behind it", r.at, "the end")
    return root


def pending_row(data: bytes) -> Node:
    """The state that draft-eagle3 offers: a position and one row of floats (common/speculative.cpp, get_state)."""
    r, root = _Reader(data, Shape(())), Node("", 0, len(data), value="driver state")
    try:
        head = r.open(root, "driver")
        r.number(head, "pending_pos", "i32", lambda p: p >= 0)
        if (len(data) - 4) % 4:
            raise _No("driver.pending")
        node = r.bytes(head, "pending", len(data) - 4)
        node.cells, node.width = 1, len(data) - 4
        r.close(head)
    except _No as e:
        raise BadBlob(f"no driver state: {e} makes no sense", r.reached, r.field) from None
    return root
