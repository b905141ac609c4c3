"""`redraft blob`: what a blob holds, what is odd about it, how far a malformed one is read, and how two differ."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import blob_builder as built
import numpy as np
import pytest
from blob_builder import F16, F32, HYBRID, attention, context, recurrent, sequence, session, stream, u32

from fuzz.blobs.diff import Diff, NoPair, _differences, diff
from fuzz.blobs.diff import text as diff_text
from fuzz.blobs.look import Look, fields, look, read, text
from fuzz.cli import main
from subjects.state.canon import Key, Rows, Sequence
from subjects.state.edits import Source
from subjects.state.parse import THE_END, parse, read_as_far
from subjects.state.tree import write


def seen(data: bytes) -> Look:
    return look(read(data))


def changed(data: bytes, offset: int, value: int | float) -> bytes:
    raw = struct.pack("<f", value) if isinstance(value, float) else u32(value)
    return data[:offset] + raw + data[offset + 4 :]


def at(data: bytes, name: str, nth: int = 0) -> int:
    """The offset of a field."""
    return next(f.offset for f in fields(read(data)) if (f.name, f.nth) == (name, nth))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (HYBRID, "sequence state"),
        (built.sequence_file(attention(stream(range(3))), tokens=[5, 6, 7]), "sequence state file"),
        (context(attention(stream(range(3)), stream(range(2), [[1], [1]]))), "context state"),
        (session(attention(stream(range(2))), attention(stream(range(2))), tokens=[1, 2]), "session file"),
        (sequence(recurrent([7])), "sequence state"),
        (built.driver(), "driver state"),
    ],
)
def test_sound_blobs(data: bytes, kind: str) -> None:
    found = seen(data)
    assert (found.kind, found.whole, found.fault, found.odd) == (kind, True, None, ())
    got = read_as_far(data)
    assert got.fault is None
    assert (got.tree, got.shape) == parse(data)
    assert write(got.tree) == data
    assert diff(read(data), read(data)).identical


def test_a_look_has_cells_and_rows() -> None:
    head, attn, rec = seen(HYBRID).groups
    assert head.fields["seq"] == 0
    assert [c.position for c in attn.groups[0].cells] == [0, 1, 2, 3]
    assert [(r.tensor, r.type, r.row, r.size, r.transposed) for r in attn.groups[0].rows] == [
        ("k", "F32", 8, 32, False),
        ("v", "F32", 8, 32, True),
    ]
    assert [(r.tensor, r.row) for r in rec.rows] == [("r", 12), ("s", 16)]
    assert sum(g.size for g in seen(HYBRID).groups) == len(HYBRID)


def test_fields_have_the_names_of_edits() -> None:
    source = Source(HYBRID)
    for f in fields(read(HYBRID)):
        found = source.find(f.name, f.nth)
        assert found is not None
        assert (found[0].start, found[0].end - found[0].start) == (f.offset, f.size)


NAN = changed(HYBRID, at(HYBRID, "attn.stream.k.data") + 8, float("nan"))
K = at(HYBRID, "attn.stream.k.data")
IMAGE = [(0, 0, 9), (1, 1, -1), (2, 1, -1), (3, 3, 9)]
TEXT = [(p, p, 9) for p in range(4)]


@pytest.mark.parametrize(
    ("data", "odd"),
    [
        (sequence(attention(stream([0, 1, 1, 2]))), ["attention: position 1 twice"]),
        (
            context(attention(stream([0, 1, 1], [[0, 1], [0, 1], [0]]))),
            ["attention: position 1 twice", "attention: positions 0..1 shared by sequences 0, 1"],
        ),
        (sequence(attention(stream([0, 1, 4, 5]))), ["attention: a hole, nothing of positions 2..3"]),
        (sequence(attention(stream([0, 1, 3]))), ["attention: a hole, nothing of position 2"]),
        (
            sequence(attention(stream([1, 0]))),
            ["attention: positions run backwards: cell 1 is of position 0, the one before it of 1"],
        ),
        (sequence(attention(stream([-1, 0]))), ["attention: negative position -1"]),
        (
            sequence(attention(stream([4, 5]))),
            ["attention: begins at position 4 (as in a window that was saved alone)"],
        ),
        (sequence(attention(stream([]))), ["no part has a cell"]),
        (sequence(attention(stream([0])), recurrent([])), ["recurrent has no cells"]),
        (
            sequence(attention(stream(range(4))), recurrent([2])),
            ["parts end at different positions: attention at 3, recurrent at 2"],
        ),
        (
            sequence(attention(stream([0, 3])), attention(stream([2, 3]))),
            [
                "attention: a hole, nothing of positions 1..2",
                "windowed attention has position 2, which attention has not",
            ],
        ),
        (sequence(attention(stream([0]))[:-4] + bytes(4)), []),
        (sequence(recurrent([5, 6])), ["recurrent: 2 cells (5..6) where one sequence has one"]),
        (sequence(attention(stream([0])), seq=2), ["the cells name sequence 0, the header 2"]),
        (
            built.sequence_file(attention(stream([0, 1])), tokens=[1]),
            ["the file has 1 token, the cells end at position 1"],
        ),
        (
            context(attention(stream([0, 1], [[0, 2], [0, 2]]))),
            ["attention: positions 0..1 shared by sequences 0, 2"],
        ),
        (
            sequence(attention(stream([0, 1], kinds=(F32, F16, F32)))),
            [
                "attention K: types differ, F32 in layers 0, 2, F16 in layer 1",
                "attention V: types differ, F32 in layers 0, 2, F16 in layer 1",
            ],
        ),
        (NAN, ["layer 0, attention K: position 1 not finite (NaN or infinite)"]),
        (changed(NAN, K, float("inf")), ["layer 0, attention K: positions 0..1 not finite (NaN or infinite)"]),
        (HYBRID[: K + 8] + bytes(16) + HYBRID[K + 24 :], ["layer 0, attention K: positions 1..2 all zero"]),
        # cells of an image, which have no token, may share a position; those of text may not
        (sequence(attention(stream([0, 1, 1, 3], ext=IMAGE))), ["attention: a hole, nothing of position 2"]),
        (sequence(attention(stream([0, 1, 1, 2], ext=TEXT))), ["attention: position 1 twice"]),
        (built.driver(pending=-1), ["pending_pos is -1", "verify_pos is -1"]),
    ],
)
def test_what_is_odd(data: bytes, odd: list[str]) -> None:
    assert list(seen(data).odd) == odd
    assert seen(data).whole


@pytest.mark.parametrize(
    ("data", "field", "offset", "words"),
    [
        (HYBRID[: K + 5], "attn.stream.k.data", K, "it takes 32 bytes and 5 are left"),
        (HYBRID + b"abc", THE_END, len(HYBRID), "3 more bytes behind the end, which llama.cpp does not look at"),
        (changed(HYBRID, 0, 0xAF143CD9), "magic", 0, "d9 3c 14 af is no magic; with that of a sequence state"),
        (changed(HYBRID, 12, -1), "attn.stream.n_cells", 12, "it is 4294967295 (or -1) and must be so many that"),
        (changed(HYBRID, K - 12, 5), "attn.stream.k.type", K - 12, "it is 5 and must be a type that a cache can have"),
        (
            changed(HYBRID, at(HYBRID, "recurrent.n_layer"), 0),
            "recurrent.n_layer",
            at(HYBRID, "recurrent.n_layer"),
            "it is 0 and must be at most 1024, and of a recurrent part at least 1; with 1 in its place",
        ),
        (
            changed(HYBRID, at(HYBRID, "attn.stream.cell.n_seq", 2), 2),
            "attn.stream.cell.n_seq",
            at(HYBRID, "attn.stream.cell.n_seq", 2),
            "it is 2 and must be 1",
        ),
        (
            HYBRID[: at(HYBRID, "recurrent.cell.pos") + 2],
            "recurrent.cell.pos",
            at(HYBRID, "recurrent.cell.pos"),
            "it takes 4 bytes and 2 are left: cut short, or a number before it is wrong; or the blob has no such part",
        ),
        (changed(session(attention(stream([0]))), 4, 9), "file.version", 4, "a session file of version 9"),
        (built.driver()[:-3], "driver.verify", 40, "5 bytes are left"),
        (built.driver() + b"x", THE_END, len(built.driver()), "1 byte more"),
    ],
)
def test_what_is_malformed_is_read_as_far_as_it_makes_sense(data: bytes, field: str, offset: int, words: str) -> None:
    found = seen(data)
    assert found.fault is not None
    assert (found.whole, found.fault.field, found.fault.offset) == (False, field, offset)
    assert words in found.fault.words
    assert any("cannot be read" in line or "behind the end" in line for line in text(found, "x"))


def test_a_state_row_that_makes_no_sense_is_not_taken_for_the_end() -> None:
    """Two layers: the second half of the convolution rows would do as rows of state."""
    rows = built.layers([3], (F32, F32), 3, 0) + built.layers([3], (F32, F32), 4, 50)
    blob = sequence(attention(stream(range(4))), u32(1, 3, 0, 0, 2) + rows)
    place = at(blob, "recurrent.s.type")
    found = seen(changed(blob, place, 5))
    assert found.fault is not None
    assert (found.fault.field, found.fault.offset) == ("recurrent.s.type", place)


@pytest.mark.parametrize("data", [HYBRID, built.driver(), session(attention(stream(range(3))), tokens=[1, 2, 3])])
def test_beginnings_and_flipped_bytes_are_shown(data: bytes) -> None:
    for n in range(0, len(data), 7):
        flipped = data[:n] + bytes([data[n] ^ 0xFF]) + data[n + 1 :]
        for bad in (data[:n], flipped):
            blob = read(bad)
            assert text(look(blob), "x")
            assert fields(blob) or not bad
            try:
                assert not diff(read(data), blob).identical
            except NoPair:
                pass


MOVED = sequence(attention(stream([2, 0, 3, 1]), stream([])), recurrent([3]))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (sequence(attention(stream(range(4)), stream([])), recurrent([3]), seq=0), ""),
        (MOVED, "the cells lie in another order"),
        (sequence(attention(stream(range(4), across=False), stream([])), recurrent([3])), "V of attention is transp"),
        (sequence(attention(stream(range(4))), recurrent([3])), "attention has 2 streams in A, 1 in B"),
        (changed(HYBRID, 4, 3), "only the headers differ"),
        (built.sequence_file(HYBRID[8:], tokens=[1]), "only the headers differ"),
        (
            context(attention(stream(range(4)), stream(range(2), [[1]] * 2)), recurrent([3, 1], [[0], [1]])),
            "B is of a whole context",
        ),
    ],
)
def test_equal_states(other: bytes, words: str) -> None:
    found = diff(read(HYBRID), read(other))
    assert found.equal
    assert found.identical == (other == HYBRID)
    assert words in "; ".join(found.layout) or words == "only the headers differ"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            changed(HYBRID, K + 8, 100.0),
            ["layer 0, attention K of position 1: largest difference 89, in 1 of 4 positions"],
        ),
        (NAN, ["layer 0, attention K of position 1: not finite, in 1 of 4 positions"]),
        (
            sequence(attention(stream(range(5)), stream([])), recurrent([3])),
            ["attention holds positions 0..3 in A, positions 0..4 in B"],
        ),
        (
            sequence(attention(stream([1, 2, 3, 4], start=1), stream([])), recurrent([3])),
            [
                "attention holds positions 0..3 in A, positions 1..4 in B",
                "layer 0, attention K of position 1: largest difference 1, in 3 of 3 positions",
                "layer 0, attention V of position 1: largest difference 1, in 3 of 3 positions",
            ],
        ),
        (
            sequence(attention(stream(range(4), kinds=(F16,)), stream([])), recurrent([3])),
            [
                "layer 0, attention K: F32 of 8 bytes a row in A, F16 of 4 bytes a row in B",
                "layer 0, attention V: F32 of 8 bytes a row in A, F16 of 4 bytes a row in B",
            ],
        ),
        (
            sequence(attention(stream(range(4)), stream([]))),
            ["B has no recurrent part, A holds position 3 in it"],
        ),
        (
            sequence(attention(stream([]), stream([])), recurrent([3])),
            ["attention holds positions 0..3 in A, no cells in B"],
        ),
        (
            sequence(attention(stream(range(4)), stream([])), recurrent([3], start=2)),
            [
                "layer 0, recurrent convolution row of position 3: largest difference 2, in 1 of 1 position",
                "layer 0, recurrent state row of position 3: largest difference 2, in 1 of 1 position",
            ],
        ),
    ],
)
def test_different_states(other: bytes, words: list[str]) -> None:
    found = diff(read(HYBRID), read(other))
    assert not found.equal
    assert [p.words for s in found.sequences for p in s.different] == words


WINDOWED = sequence(attention(stream(range(6), start=7)), attention(stream([4, 5], kinds=(F32, F32))))


@pytest.mark.parametrize(
    "other", [WINDOWED, context(attention(stream(range(6))), attention(stream(range(6), kinds=(F32, F32))))]
)
def test_a_window_that_was_saved_alone_is_no_base_cache(other: bytes) -> None:
    """Its only attention part is read as attention; that of the other is another one."""
    alone, elsewhere = (sequence(attention(stream([4, 5], kinds=(F32, F32), start=n))) for n in (0, 1))
    found = diff(read(alone), read(other))
    assert (found.partial, found.equal) == ("A", True)
    assert found.sequences[0].equal == ("windowed attention equal in all 2 positions",)
    assert text_of(found)[-1].startswith("A is a partial state: equal in what both hold")
    found = diff(read(other), read(elsewhere))
    assert (found.partial, found.equal) == ("B", False)
    assert found.sequences[0].different[0].words == (
        "layer 0, windowed attention K of position 4: largest difference 1, in 2 of 2 positions"
    )
    assert text_of(found)[-1].startswith("B is a partial state: different in what both hold")


def test_recurrent_state_that_was_saved_alone() -> None:
    found = diff(read(HYBRID), read(sequence(recurrent([3]))))
    assert (found.partial, found.equal) == ("B", True)
    found = diff(read(sequence(recurrent([3], start=1))), read(HYBRID))
    assert (found.partial, found.equal) == ("A", False)
    assert {p.part for p in found.sequences[0].different} == {"recurrent"}
    both = sequence(attention(stream([4, 5], kinds=(F32, F32))), recurrent([5]))
    found = diff(read(both), read(WINDOWED + recurrent([5])))
    assert (found.partial, found.equal) == ("A", True)


def test_other_layers_than_those_of_the_window_are_no_partial_state() -> None:
    found = diff(read(sequence(attention(stream(range(6), start=7)))), read(WINDOWED))
    assert (found.partial, found.equal) == ("", False)
    assert [p.words for s in found.sequences for p in s.different] == [
        "A has no windowed attention part, B holds positions 4..5 in it"
    ]


Q = sequence(attention(stream(range(17))), recurrent([16]))
G = sequence(attention(stream(range(17))), attention(stream(range(10, 17))))


@pytest.mark.parametrize(("data", "parts"), [(Q, ("attn", "recurrent")), (G, ("attn", "window"))])
@pytest.mark.parametrize("number", [0, 3, 18, 60, 1000, 100000, 0x7FFFFFFF])
def test_one_number_that_is_wrong_is_named_and_all_the_rest_read(
    data: bytes, parts: tuple[str, ...], number: int
) -> None:
    bad = changed(data, 12, number)
    found = seen(bad)
    assert found.fault is not None
    assert (found.fault.field, found.fault.offset, found.parts) == ("attn.stream.n_cells", 12, parts)
    assert f"it is {number}" in found.fault.words
    assert "with 17 in its place all the rest can be read" in found.fault.words
    assert len(found.groups[1].groups[0].cells) == 17
    assert next(f.value for f in fields(read(bad)) if f.name == "attn.stream.n_cells") == number
    assert not any("guess" in line for line in text(found, "x"))


@pytest.mark.parametrize(
    ("number", "parts"), [(0, "attention"), (1000, "attention, recurrent"), (0x7FFFFFFF, "attention, recurrent")]
)
def test_the_parts_of_what_cannot_be_mended_are_a_guess(number: int, parts: str) -> None:
    lines = text(seen(changed(Q, 12, number)[:-20]), "x")
    assert f"  read as {parts}: the parts are a guess" in lines
    assert not any("windowed" in line for line in lines)


def test_a_part_with_a_magic_is_no_guess_at_another() -> None:
    found = seen(sequence(u32(0x34565344, 7, 9, 3, 3, 3)))
    assert found.fault is not None
    assert (found.parts, found.fault.field) == (("dsv4",), "dsv4.version")


def test_the_number_of_cells_is_the_one_in_the_bytes() -> None:
    lines = text(seen(changed(Q, 12, 30)[:-20]), "x")
    assert any("30 cells, of which " in line for line in lines)
    assert any("or the number of cells before it is wrong" in line for line in lines)
    assert "odd" not in lines


def test_bytes_behind_the_end_are_not_compared() -> None:
    more = HYBRID + b"\x00" * 9
    found = diff(read(HYBRID), read(more))
    assert (found.identical, found.equal, found.faults) == (False, True, {})
    assert found.behind == ("B has 9 more bytes behind the end, which llama.cpp does not look at",)
    assert text_of(found)[-1] == "equal state: only what is behind the end differs"
    assert not diff(read(more), read(MOVED[:-4] + bytes(4))).equal
    fault = read(session(attention(stream(range(3)))) + b"x").fault
    assert fault is not None
    assert "llama_state_load_file refuses" in fault.words


@pytest.mark.parametrize(("data", "said"), [(b"", "an empty file"), (b"GGUF" + bytes(99), "a GGUF file")])
def test_what_is_no_state_is_told_as_such(data: bytes, said: str) -> None:
    assert text(seen(data), "x") == [f"x: {said}, which is no saved state"]
    assert f"B is {said}, which is no saved state" in text_of(diff(read(HYBRID), read(data)))


def test_equal_blobs_are_checked_too() -> None:
    whole = read(context(attention(stream([0, 1], [[1], [1]]))))
    assert diff(whole, whole, 1).identical
    with pytest.raises(NoPair, match="no sequence 7 in the context"):
        diff(whole, whole, 7)
    cut = read(HYBRID[:70])
    assert diff(cut, cut).identical
    assert set(diff(cut, cut).faults) == {"A", "B"}


def test_a_large_file_is_not_copied() -> None:
    data = bytes(64 << 20)
    tracemalloc.start()
    try:
        look(read(data))
        assert tracemalloc.get_traced_memory()[1] < len(data) // 8
    finally:
        tracemalloc.stop()


def text_of(found: Diff) -> list[str]:
    return diff_text(found, "a", "b")


def test_what_both_hold() -> None:
    cut = sequence(attention(stream(range(3)), stream([])), recurrent([2]))
    found = diff(read(HYBRID), read(cut)).sequences[0]
    assert found.equal == ("attention equal in positions 0..2, which both hold",)


def test_an_extension_is_state_too() -> None:
    one = sequence(attention(stream(range(4), ext=TEXT)))
    other = sequence(attention(stream(range(4), ext=[*TEXT[:3], (3, 3, 8)])))
    found = diff(read(one), read(other))
    assert [p.words for s in found.sequences for p in s.different] == ["attention: x, y or token of position 3"]


def test_rows_without_cells_and_what_other_cells_do_not_hide() -> None:
    key, k = Key("csa_state", 0, "kv"), Key("attn", 0, "k")
    few, many = (Sequence(rows={key: Rows(0, tuple(range(n)), np.zeros((n, 8), np.uint8))}) for n in (3, 4))
    assert [d.text for d, _ in _differences(few, many)] == [
        "layer 0, csa_state compressor rows: 3 rows in A, 4 rows in B"
    ]
    one = Sequence({"attn": (0, 1)}, {k: Rows(0, (0, 1), np.zeros((2, 8), np.uint8))})
    other = Sequence({"attn": (0, 2)}, {k: Rows(0, (0, 2), np.ones((2, 8), np.uint8))})
    assert [(d.key.tensor, d.pos, n) for d, n in _differences(one, other)] == [("cells", -1, (0, 0)), ("k", 0, (1, 1))]


def test_the_first_byte_in_words() -> None:
    found = diff(read(HYBRID), read(changed(HYBRID, at(HYBRID, "recurrent.cell.pos"), 9))).first
    assert found is not None
    assert (found.name, found.nth, found.a, found.b) == ("recurrent.cell.pos", 0, "3", "9")
    assert found.words == "position of cell 0 of recurrent"
    across = at(HYBRID, "attn.stream.v.data") + 4 * (1 * 4 + 2)  # value 1 of cell 2
    found = diff(read(HYBRID), read(changed(HYBRID, across, 0.5))).first
    assert found is not None
    assert found.words == "layer 0, attention V, stream 0, position 2, value 1 of row 2"
    assert (found.a, found.b) == ("27", "0.5")
    found = diff(read(HYBRID), read(HYBRID + b"x")).first
    assert found is not None
    assert (found.offset, found.a, found.b) == (len(HYBRID), "the end", "0x78")


def test_headers_that_are_state() -> None:
    part = attention(stream(range(2)))
    one, other = session(part, tokens=[1, 2, 3]), session(part, tokens=[1, 5])
    found = diff(read(one), read(other))
    assert not found.equal
    assert found.headers == ("tokens: 3 in A, 2 in B; the first that differs is number 1: 2 / 5",)
    found = diff(read(context(part)), read(context(part, arch="else")))
    assert not found.equal
    assert found.headers == ("architecture: test in A, else in B",)
    held = attention(stream(range(2), data=False))
    found = diff(read(sequence(part)), read(sequence(held)))
    assert not found.equal
    assert found.headers == ("B has no data (it was saved on a device)",)
    assert found.sequences[0].equal == ("attention has the same positions, data not compared",)


def test_a_context_has_what_left_the_window() -> None:
    one = sequence(attention(stream(range(6))), attention(stream([4, 5])))
    whole = context(attention(stream(range(6))), attention(stream(range(6))))
    found = diff(read(one), read(whole))
    assert found.equal
    assert "positions 0..3, which left the window, in the context only" in found.layout


def test_which_sequence_of_a_context() -> None:
    part = attention(stream([0, 1, 0, 2], [[1], [1], [2], [2]]))
    whole, own = read(context(part)), attention(stream([0, 1], [[1], [1]]))
    assert diff(read(sequence(own, seq=1)), whole).equal
    assert not diff(read(sequence(own, seq=1)), whole, 2).equal
    assert diff(read(built.sequence_file(own)), whole, 1).equal
    with pytest.raises(NoPair, match="--seq N"):
        diff(read(built.sequence_file(own)), whole)
    with pytest.raises(NoPair, match="no sequence 0 in the context: it has 1, 2"):
        diff(read(sequence(own)), whole)
    with pytest.raises(NoPair, match="nothing in common"):
        diff(read(built.driver()), whole)
    other = read(context(attention(stream([0, 1, 0, 2], [[1], [1], [2], [3]]))))
    assert diff(whole, other, 1).equal
    assert [bool(s.different) for s in diff(whole, other).sequences] == [False, True, True]


def test_driver_states() -> None:
    found = diff(read(built.driver()), read(built.driver(pending=4, first=1)))
    assert not found.equal
    assert found.headers == (
        "pending_pos: 3 in A, 4 in B",
        "verify_pos: 3 in A, 4 in B",
        "pending: 2 of 2 values differ, largest difference 1",
        "verify: 2 of 2 values differ, largest difference 1",
    )
    row = u32(3) + built.floats(F32, 2, 0)
    assert read(row, "eagle3").fault is None
    bad = read(u32(-1), "eagle3").fault
    assert bad is not None
    assert bad.field == "driver.pending_pos"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"a": HYBRID, "moved": MOVED, "nan": NAN, "cut": HYBRID[:70], "row": u32(3) + bytes(4)}
    paths = {}
    for name, data in files.items():
        paths[name] = str(tmp_path / f"{name}.bin")
        Path(paths[name]).write_bytes(data)
    for argv, code in (
        (["show", "a"], 0),
        (["show", "a", "--cells"], 0),
        (["show", "a", "--fields"], 0),
        (["show", "cut"], 1),
        (["show", "cut", "--fields"], 1),
        (["show", "row", "--as", "eagle3"], 0),
        (["diff", "a", "a"], 0),
        (["diff", "a", "moved"], 0),
        (["diff", "a", "nan"], 1),
        (["diff", "a", "cut"], 2),
        (["diff", "cut", "cut"], 2),
    ):
        argv = ["blob", *(paths.get(x, x) for x in argv)]
        assert main(argv) == code, argv
        assert capsys.readouterr().out.strip()
        assert main([*argv, "--json"]) == code
        assert json.loads(capsys.readouterr().out)
    assert main(["blob", "show", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["blob", "show", str(tmp_path)]) == 2
