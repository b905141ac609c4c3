"""The canonical form of saved states, of blobs written by hand: order of cells, transposed V, whole contexts, types."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Several

import numpy as np
import pytest

from subjects.state.canon import Key, Reader, canonical, differences, ranges, summary
from subjects.state.parse import SEQ_FILE_MAGIC, SEQ_MAGIC, TYPES, BadBlob

K, V = Key("attn", 0, "k"), Key("attn", 0, "v")
WIDTH = 32


def values(pos: int, what: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A row that names its position."""
    return (np.arange(WIDTH, dtype=np.float32) / 8 + 10 * pos + 1000 * what).astype(np.float32)


def stored(row: np.ndarray[tuple[int], np.dtype[np.float32]], kind: str) -> bytes:
    if kind == "F16":
        return row.astype("<f2").tobytes()
    if kind == "BF16":
        return (row.view("<u4") >> 16).astype("<u2").tobytes()
    if kind == "Q8_0":
        d = np.float16(np.abs(row).max() / 127)
        return d.tobytes() + np.round(row / np.float32(d)).astype(np.int8).tobytes()
    return row.tobytes()


def stream(
    cells: Several[tuple[int, tuple[int, ...]]], kind: str = "F32", transposed: bool = False, nudge: float = 0.0
) -> bytes:
    """One stream: cells (position, sequences), K and V of one layer."""
    out = struct.pack("<I", len(cells))
    if not cells:
        return out
    for pos, seqs in cells:
        out += struct.pack(f"<iI{len(seqs)}i", pos, len(seqs), *seqs)
    number = next(n for n, t in TYPES.items() if t[0] == kind)
    rows = [[stored(values(pos, what), kind) for pos, _ in cells] for what in (1, 2)]
    rows[1][-1] = stored(values(cells[-1][0], 2) + np.float32(nudge), kind)
    out += struct.pack("<II", int(transposed), 1) + struct.pack("<iQ", number, len(rows[0][0])) + b"".join(rows[0])
    if not transposed:
        return out + struct.pack("<iQ", number, len(rows[1][0])) + b"".join(rows[1])
    size = TYPES[number][2]
    out += struct.pack("<iII", number, size, WIDTH)
    return out + b"".join(r[i * size : (i + 1) * size] for i in range(WIDTH) for r in rows[1])


def single(*streams: bytes, seq: int = 0) -> bytes:
    return struct.pack("<Ii", SEQ_MAGIC, seq) + struct.pack("<I", len(streams)) + b"".join(streams)


def whole(*streams: bytes) -> bytes:
    return struct.pack("<I", 4) + b"test" + struct.pack("<I", len(streams)) + b"".join(streams)


def cells(*positions: int, seq: int = 0) -> list[tuple[int, tuple[int, ...]]]:
    return [(p, (seq,)) for p in positions]


def test_the_order_of_cells_and_the_id_do_not_matter() -> None:
    a = canonical(single(stream(cells(0, 1, 2))))[0]
    b = canonical(single(stream(cells(2, 0, 1, seq=3)), seq=3))[0]
    assert a.positions == b.positions == {"attn": (0, 1, 2)}
    assert differences(a, b) == []
    assert np.array_equal(a.rows[K].values()[2], values(2, 1))
    assert np.array_equal(b.rows[V].values()[0], values(0, 2))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_transposed_values_are_the_same_rows(kind: str) -> None:
    a = canonical(single(stream(cells(4, 5, 3), kind)))[0]
    b = canonical(single(stream(cells(4, 5, 3), kind, transposed=True)))[0]
    assert differences(a, b) == []
    assert np.allclose(b.rows[V].values()[0], values(3, 2), rtol=2**-7)


def test_quantised_rows_are_read_as_numbers() -> None:
    a = canonical(single(stream(cells(0, 1), "Q8_0")))[0]
    assert np.allclose(a.rows[K].values()[1], values(1, 1), atol=values(1, 1).max() / 127)


def test_a_whole_context_has_its_sequences_apart_with_shared_cells_in_each() -> None:
    both = canonical(whole(stream([(0, (0, 1)), (1, (0,)), (1, (1,))])))
    assert {s: x.positions for s, x in both.items()} == {0: {"attn": (0, 1)}, 1: {"attn": (0, 1)}}
    alone = canonical(single(stream(cells(1, 0)), stream([])))[0]
    assert differences(both[0], alone) == differences(both[1], alone) == []
    split = canonical(whole(stream(cells(0, 1)), stream(cells(0, 1, seq=1))))
    assert differences(split[1], alone) == []


def test_the_first_part_that_differs_is_named() -> None:
    a = canonical(single(stream(cells(0, 1), nudge=0.5)))[0]
    b = canonical(single(stream(cells(0, 1))))[0]
    (found,) = differences(a, b)
    assert (found.key, found.pos, found.error) == (V, 1, 0.5)
    assert found.text == "layer 0, attention V of position 1"
    assert differences(a, b, {"attn.v": 0.5}) == []
    assert differences(a, b, {"attn.v": 0.25, "attn.k": 9.0}) != []
    assert summary(b, b, []) == "equal in every part"


def test_other_cells_come_first_and_once() -> None:
    a, b = canonical(single(stream(cells(0, 2))))[0], canonical(single(stream(cells(0, 1, 2))))[0]
    (found,) = differences(a, b)
    assert summary(a, b, [found]) == found.text == "attention holds positions 0, 2 and should hold 0..2"
    empty = canonical(single(stream([])))[0]
    assert differences(a, empty)[0].text.endswith("should hold none")


def test_ranges() -> None:
    assert ranges((3, 0, 1, 2, 7)) == "0..3, 7"
    assert ranges(()) == "none"
    assert ranges((1, 1)) == "1 (1 twice)"


def test_a_reader_reads_by_the_layout_that_it_knows_and_tells_others_apart() -> None:
    reader = Reader()
    blobs = [single(stream(cells(*p))) for p in ((0, 1), (4, 5), (5, 4))]
    first = reader.layout(blobs[0])
    assert [reader.layout(b) is first for b in blobs] == [True, True, True]
    assert [reader.canonical(b)[0].positions["attn"] for b in blobs] == [(0, 1), (4, 5), (4, 5)]
    assert all(differences(reader.canonical(b)[0], canonical(b)[0]) == [] for b in blobs)
    other = single(stream(cells(0, 1), transposed=True))
    assert reader.layout(other) is not first
    damaged = bytearray(blobs[0])
    damaged[12] += 1  # the number of cells
    with pytest.raises(BadBlob):
        reader.canonical(bytes(damaged))


@pytest.mark.parametrize("transposed", [False, True])
def test_places_are_where_the_rows_are(transposed: bool) -> None:
    blob = single(stream(cells(7, 3, 5), transposed=transposed))
    for key, what in ((K, 1), (V, 2)):
        place = Reader().layout(blob).place(blob, 0, key, 3)
        assert place is not None
        pieces = [blob[place.start + i * place.apart :][: place.size] for i in range(place.pieces)]
        assert np.array_equal(np.frombuffer(b"".join(pieces), "<f4"), values(3, what))
    assert Reader().layout(blob).place(blob, 0, K, 4) is None


def test_another_version_is_recognised_and_not_misread() -> None:
    head = struct.pack("<III", SEQ_FILE_MAGIC, 4, 0)
    with pytest.raises(BadBlob, match="version 4; this redraft reads version 3"):
        canonical(head + single(stream(cells(0)))[8:])
    longer = single(stream(cells(0, 1))) + b"\0" * 8  # fields that this version does not have
    with pytest.raises(BadBlob, match="makes no sense"):
        canonical(longer)
