"""The canonical form of saved states, of blobs written by hand: order of cells, transposed V, whole contexts, types."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Several

import numpy as np
import pytest
from blob_builder import F32, attention, floats, sequence, u32
from blob_builder import cells as built_cells
from blob_builder import stream as built

from subjects.state.canon import Key, Reader, Rows, canonical, differences, facts, ranges, summary
from subjects.state.canon import Sequence as State
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
    one = canonical(single(stream(cells(0))))[0]
    assert [differences(*pair)[0].text for pair in ((one, empty), (empty, one), (one, a))] == [
        "attention holds position 0 and should hold none",
        "attention holds no cells and should hold position 0",
        "attention holds position 0 and should hold positions 0, 2",
    ]


TEXT = [(0, 0, 5), (1, 1, 6), (2, 2, 7)]
IMAGE = [(0, 0, 5), (1, 1, -1), (2, 1, -1)]


def test_the_extension_of_cells_is_state_whatever_their_order() -> None:
    def of(positions: Several[int], ext: Several[tuple[int, int, int]]) -> State:
        return canonical(sequence(attention(built(positions, ext=ext))))[0]

    a = of(range(3), TEXT)
    assert a.extensions == {"attn": tuple(TEXT)}
    assert differences(a, of([2, 0, 1], [TEXT[2], TEXT[0], TEXT[1]])) == []
    for column in range(3):
        ext = tuple(n + (i == column) for i, n in enumerate(TEXT[1]))
        (found,) = differences(of(range(3), [TEXT[0], ext, TEXT[2]]), a)  # type: ignore[list-item]
        assert (found.key, found.pos) == (Key("attn", -1, "extension"), 1)
        assert found.text.endswith(f"position 1 are {', '.join(map(str, ext))} and should be 1, 1, 6")
    # of what both hold, and behind the positions
    assert [d.key.tensor for d in differences(of([0, 1], [TEXT[0], TEXT[2]]), a)] == ["cells", "extension"]
    (found,) = differences(canonical(sequence(attention(built(range(3)))))[0], a)
    assert found.text.endswith("none and should be 0, 0, 5")


def test_cells_of_an_image_are_told_apart_by_their_extension() -> None:
    """They share a position, and may lie in any order."""

    def of(*order: int) -> State:
        rows = u32(F32) + struct.pack("<Q", 8) + b"".join(floats(F32, 2, 10 * i) for i in order)
        held = built_cells([1] * len(order), [[0]] * len(order), [(1, i, -1) for i in order])
        return canonical(sequence(attention(u32(len(order)) + held + u32(0, 1) + rows + rows)))[0]

    assert differences(of(0, 1, 2), of(2, 0, 1)) == []
    assert differences(of(0, 1, 2), of(0, 1, 3)) != []


def test_blobs_that_differ_in_extensions_have_one_layout() -> None:
    reader = Reader()
    one, other = (sequence(attention(built(range(3), ext=e))) for e in (TEXT, IMAGE))
    assert reader.layout(one) is reader.layout(other)
    assert reader.canonical(other)[0].extensions == {"attn": tuple(IMAGE)}


def test_rows_without_cells_are_counted() -> None:
    key = Key("csa_state", 0, "kv")
    few, many = (State(rows={key: Rows(0, tuple(range(n)), np.zeros((n, 8), np.uint8))}) for n in (3, 4))
    (found,) = differences(few, many)
    assert found.text == "layer 0, csa_state compressor rows: 3 rows and should be 4"
    many.rows[key].data[2] = 1
    (found,) = differences(many, State(rows={key: Rows(0, tuple(range(4)), np.zeros((4, 8), np.uint8))}))
    assert (found.pos, found.text) == (2, "layer 0, csa_state compressor rows number 2")


def test_missing_rows_are_told_beside_other_cells() -> None:
    a, b = canonical(single(stream(cells(0, 2))))[0], canonical(single(stream(cells(0, 1))))[0]
    del a.rows[V]
    assert [d.text for d in differences(a, b)][1:] == ["layer 0, attention V is missing"]
    assert [f.what for f in facts(b, a)] == ["cells", "missing"]


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
