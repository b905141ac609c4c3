"""Saved states made by hand, byte by byte after the sources of llama.cpp: no decoding, so the same on every machine.

`tests/golden/test_blob_text.py` uses them too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

SEQ, SEQ_FILE, SESSION, ROWS = 0xAF143CD8, 0x67677371, 0x6767736E, 0x53435053
F32, F16, Q8_0 = 0, 1, 8
BYTES = {F32: 4, F16: 2}


def u32(*numbers: int) -> bytes:
    """Numbers of 32 bits, negative ones too."""
    return b"".join(struct.pack("<I", n & 0xFFFFFFFF) for n in numbers)


def floats(kind: int, n: int, first: int) -> bytes:
    """n small values of a type, none of them 0: first + 1, first + 2, ..."""
    return (np.arange(n) + first + 1).astype(np.float32 if kind == F32 else np.float16).tobytes()


def cells(
    positions: Sequence[int], seqs: Sequence[Sequence[int]], ext: Sequence[tuple[int, int, int]] | None = None
) -> bytes:
    """Cells with the sequences that they name. ext: their x, y, token."""
    out = b""
    for i, (pos, own) in enumerate(zip(positions, seqs, strict=True)):
        out += u32(pos, len(own)) + (u32(*ext[i]) if ext else b"") + u32(*own)
    return out


def layers(positions: Sequence[int], kinds: Sequence[int], width: int, start: int, *, across: bool = False) -> bytes:
    """K or V of some layers, each of a type, with rows of `width` values that follow from layer and position. across:
    as transposed V is written.
    """
    out = b""
    for layer, kind in enumerate(kinds):
        rows = [floats(kind, width, start + 100 * layer + 10 * p) for p in positions]
        size = BYTES[kind]
        if across:
            out += u32(kind, size, width)
            out += b"".join(row[i * size : (i + 1) * size] for i in range(width) for row in rows)
        else:
            out += u32(kind) + struct.pack("<Q", width * size) + b"".join(rows)
    return out


def stream(
    positions: Sequence[int],
    seqs: Sequence[Sequence[int]] | None = None,
    *,
    ext: Sequence[tuple[int, int, int]] | None = None,
    kinds: Sequence[int] = (F32,),
    across: bool = True,
    data: bool = True,
    start: int = 0,
) -> bytes:
    """One stream of attention: rows of two values."""
    if not positions:
        return u32(0)
    head = u32(len(positions)) + cells(positions, seqs or [[0]] * len(positions), ext) + u32(int(across), len(kinds))
    if not data:
        return head + b"".join(
            u32(k) + struct.pack("<Q", 2 * BYTES[k]) for k in kinds
        ) + b"".join(u32(k, BYTES[k], 2) for k in kinds)  # fmt: skip
    rows = layers(positions, kinds, 2, start)
    return head + rows + layers(positions, kinds, 2, start + 5, across=across)


def attention(*streams: bytes) -> bytes:
    """An attention part."""
    return u32(len(streams)) + b"".join(streams)


def recurrent(positions: Sequence[int], seqs: Sequence[Sequence[int]] | None = None, *, start: int = 0) -> bytes:
    """A recurrent part with a layer of two, convolution rows of three values, and state rows of four."""
    out = u32(len(positions)) + cells(positions, seqs or [[]] * len(positions)) + u32(0, 2)
    return out + layers(positions, (F32,), 3, start) + layers(positions, (F32,), 4, start + 50)


def sequence(*parts: bytes, seq: int = 0) -> bytes:
    """What llama_state_seq_get_data gives."""
    return u32(SEQ, seq) + b"".join(parts)


def sequence_file(*parts: bytes, tokens: Sequence[int] = ()) -> bytes:
    """What llama_state_seq_save_file writes."""
    return u32(SEQ_FILE, 3, len(tokens), *tokens) + b"".join(parts)


def context(*parts: bytes, arch: str = "test") -> bytes:
    """What llama_state_get_data gives."""
    return u32(len(arch)) + arch.encode() + b"".join(parts)


def session(*parts: bytes, tokens: Sequence[int] = ()) -> bytes:
    """What llama_state_save_file writes."""
    return u32(SESSION, 10, len(tokens), *tokens) + context(*parts)


def driver(n_embd: int = 2, pending: int = 3, rows: int = 1, first: int = 0) -> bytes:
    """The state of a driver that tests/planted/mtp_state.patch mends."""
    head = u32(ROWS) + struct.pack("<HHQ", 1, 2, 7) + u32(n_embd, pending, pending, rows)
    return head + floats(F32, n_embd * (1 + rows), first)


HYBRID = sequence(attention(stream(range(4)), stream([])), recurrent([3]))
"""Two streams, positions 0 to 3, V transposed; and one recurrent cell."""
