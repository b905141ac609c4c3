"""The ledger, row by row of the design's table "What the ledger expects", on traces written by hand."""

from __future__ import annotations

import pytest
from fakes import GONE, MODEL, Ideal, Tape, facts_of, ideal_judge, run

from fuzz.state import Traits
from fuzz.strategies import generate, scenarios
from oracles.ledger import (
    EMPTY,
    WINDOW_GONE,
    Edit,
    HalfRestored,
    History,
    Item,
    RowClaim,
    Seg,
    State,
    Undefined,
    count_outputs,
    cut,
    read,
    window_need,
)
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Ask,
    BlobEdit,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Part,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)

A = (5, 1, 63, 9, 9, 30, 2, 7)
B = (40, 41, 42)
UNIFIED = ContextParams(kv_unified=True)
THREE = ContextParams(kv_unified=True, n_seq_max=3)
ATTENTION = ("dense", "window")
STATEFUL = ("recurrent", "hybrid")


def tokens(state: State) -> tuple[int, ...] | None:
    assert isinstance(state, History), state
    return state.tokens()


def history(state: State) -> History:
    assert isinstance(state, History), state
    return state


def reason(state: State) -> str:
    assert isinstance(state, Undefined), state
    return state.reason


def segs(*pieces: tuple[int, tuple[int, ...]], out: str = "last") -> tuple[Item, ...]:
    return tuple(Seg(start, t, "all" if len(t) == 1 and out == "last" else out) for start, t in pieces)  # type: ignore[arg-type]


def one(pos: int, token: int) -> Seg:
    """A batch of one row that was output: all of its rows were."""
    return Seg(pos, (token,), "all")


def claims(tape: Tape, seq: int = 0) -> list[RowClaim]:
    return [c for c in tape.ledger().rows if c.seq == seq]


def fed(memory: str = "dense", params: ContextParams | None = None) -> Tape:
    """Sequence 0 holds A, sequence 1 holds B."""
    return Tape(memory, params).decode((0, A)).decode((1, B))


# --- decode -----------------------------------------------------------------------------------------------------------


def test_decode_grows_each_sequence_by_its_rows() -> None:
    tape = Tape().decode((0, A), (1, B)).decode((0, (3,)))
    m = tape.ledger().moments[-1]
    assert tokens(m.after[0]) == (*A, 3)
    assert tokens(m.after[1]) == B
    assert history(m.after[0]).items == segs((0, A), (8, (3,)))
    assert history(m.after[0]).length == 9
    assert m.touched == {0}
    assert m.before[0] != m.after[0]
    assert m.before[1] == m.after[1]


@pytest.mark.parametrize("rc", [1, -1])
def test_refused_decode_changes_nothing(rc: int) -> None:
    tape = fed().decode((0, (3, 4)), rc=rc)
    m = tape.ledger().moments[-1]
    assert m.after == m.before
    assert [c.step for c in tape.ledger().rows] == [0, 1]
    # and what comes next goes on where it was
    assert tokens(tape.decode((0, (6,))).after()) == (*A, 6)


@pytest.mark.parametrize("rc", [2, -2, -3])
@pytest.mark.parametrize(("end", "kept"), [(7, ()), (8, (3,)), (9, (3, 4)), (10, (3, 4, 5))])
def test_partial_decode_leaves_the_prefix_that_positions_name(rc: int, end: int, kept: tuple[int, ...]) -> None:
    tape = fed().decode((0, (3, 4, 5)), rc=rc, pos={0: (0, end)})
    h = history(tape.after())
    assert h.tokens() == A + kept
    assert h.shaped == (2,)
    assert "split" in h.kinds
    assert tokens(tape.after(1)) == B
    assert len(tape.ledger().rows) == 2
    tape.decode((0, (6,)))
    assert claims(tape)[-1].chain[-1] == one(8 + len(kept), 6)


@pytest.mark.parametrize("pos", [(0, 6), (0, 11), GONE])
def test_partial_decode_whose_positions_name_no_prefix_is_undefined(pos: tuple[int, int]) -> None:
    tape = fed().decode((0, (3, 4, 5)), rc=2, pos={0: pos})
    assert "no prefix" in reason(tape.after())
    assert tokens(tape.after(1)) == B


def test_decode_that_never_returned_changes_nothing() -> None:
    m = fed().decode((0, (3,)), rc=None, done=False).ledger().moments[-1]
    assert m.after == m.before


def test_decode_at_another_position_is_undefined_and_its_rows_after_it_are_counted() -> None:
    tape = fed().decode((0, (3,)), at=20)
    assert "position" in reason(tape.after())
    tape.decode((0, (4,)))
    assert [step.step for step in claims(tape)] == [0]
    assert len(tape.ledger().undefined_rows) == 2  # that row, and the one after it


def test_a_split_cache_shares_nothing_and_nor_does_an_empty_copy() -> None:
    split = Tape(params=ContextParams(n_seq_max=3)).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, -1, -1)
    assert split.step(SeqAdd(seq=0, delta=4), 0, -1, -1, 4).ledger().moments[-1].touched == {0}
    empty = Tape(params=THREE).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, 20, -1)
    assert empty.step(SeqAdd(seq=0, delta=4), 0, -1, -1, 4).ledger().moments[-1].touched == {0}


def test_a_window_of_one_token_needs_the_last_position() -> None:
    assert window_need((0, 1, 2), 1) == 2
    assert window_need((0, 1, 2), 2) == 2
    assert window_need((0, 1, 2), 3) == 1
    assert window_need((0, 5, 9), 4) == 9


def test_beside_an_undefined_sequence_room_for_a_restore_is_unknown() -> None:
    def restored(tape: Tape) -> bool:
        tape.step(Save(seq=0, slot=0), 0, 0, 0, rc=9)
        return tape.step(Restore(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)]).ledger().moments[-1].must_accept

    assert restored(Tape(params=UNIFIED).decode((0, A)).decode((1, B)))
    assert not restored(Tape(params=UNIFIED).decode((0, A)).decode((1, B)).decode((1, (3,)), at=20))


def test_room_is_known_only_where_cells_are_counted() -> None:
    def room(tape: Tape) -> bool:
        return tape.ledger().moments[-1].room

    full = tuple(range(8)) * 2
    assert room(Tape(n_ctx=16).decode((0, full)))
    assert not room(Tape(n_ctx=16).decode((0, full)).decode((0, (1,)), rc=1))
    assert room(Tape(n_ctx=16).decode((0, full)).decode((1, full)))
    assert not room(Tape(params=UNIFIED, n_ctx=16).decode((0, full)).decode((1, (1,)), rc=1))
    assert room(Tape(params=UNIFIED, n_ctx=16).decode((0, full[:15])).decode((1, (1,))))
    assert room(Tape("recurrent", n_ctx=16).decode((0, full)).decode((0, full)))


# --- seq_rm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["dense", "recurrent", "hybrid"])
def test_removal_of_a_tail_cuts_the_history_in_every_memory(memory: str) -> None:
    tape = fed(memory).step(SeqRm(seq=0), 0, 6, -1, rc=1, pos={0: (0, 5)})
    h = history(tape.after())
    assert h.tokens() == A[:6]
    assert (h.length, h.shaped, h.edited) == (6, (2,), False)
    assert "split" in h.kinds  # a batch was cut in two
    assert tokens(tape.after(1)) == B


@pytest.mark.parametrize("p1", [8, 9, 100])
def test_an_end_at_or_behind_the_last_position_is_a_tail_too(p1: int) -> None:
    tape = fed("recurrent").step(SeqRm(seq=0), 0, 6, p1, rc=1, pos={0: (0, 5)})
    assert tokens(tape.after()) == A[:6]


def test_removal_at_a_batch_boundary_keeps_the_composition() -> None:
    tape = Tape().decode((0, A)).decode((0, B)).step(SeqRm(seq=0), 0, 8, -1, rc=1, pos={0: (0, 7)})
    h = history(tape.after())
    assert h.items == segs((0, A))
    assert h.kinds == frozenset()


@pytest.mark.parametrize("args", [(0, -1, -1), (0, 0, -1), (0, 0, 8), (0, 0, 50)])
@pytest.mark.parametrize("memory", ["dense", "recurrent", "hybrid"])
def test_removal_of_a_whole_sequence_leaves_it_empty(memory: str, args: tuple[int, ...]) -> None:
    tape = fed(memory).step(SeqRm(seq=0), *args, rc=1, pos={0: GONE})
    h = history(tape.after())
    assert h.empty
    assert h.length == 0
    assert h.shaped == (2,)  # the first suspect if something is left over
    assert tokens(tape.after(1)) == B


def test_removal_in_every_sequence() -> None:
    tape = fed().step(SeqRm(seq=-1), -1, -1, -1, rc=1, pos={0: GONE, 1: GONE})
    m = tape.ledger().moments[-1]
    assert m.touched == {0, 1}
    assert history(m.after[0]).empty
    assert history(m.after[1]).empty


@pytest.mark.parametrize("memory", ["dense", "recurrent", "hybrid"])
def test_refused_removal_changes_nothing_in_any_part(memory: str) -> None:
    m = fed(memory).step(SeqRm(seq=0), 0, 3, 5, rc=0).ledger().moments[-1]
    before, after = history(m.before[0]), history(m.after[0])
    assert after.shaped == (2,)  # the rows to come are the refused removal's to answer for
    assert (after.items, after.length, after.kinds) == (before.items, before.length, before.kinds)
    assert m.after[1] == m.before[1]
    assert m.touched == {0}


@pytest.mark.parametrize("args", [(0, 8, -1), (0, 20, 30), (0, 3, 3), (0, 5, 2)])
@pytest.mark.parametrize("memory", ["dense", "recurrent"])
def test_removal_of_an_empty_range_changes_nothing(memory: str, args: tuple[int, ...]) -> None:
    m = fed(memory).step(SeqRm(seq=0), *args, rc=1).ledger().moments[-1]
    assert m.after == m.before


@pytest.mark.parametrize(
    ("p0", "p1", "left", "length"),
    [(0, 2, (2, 3, 4, 5, 6, 7), 8), (-1, 2, (2, 3, 4, 5, 6, 7), 8), (3, 5, (0, 1, 2, 5, 6, 7), 8)],
)
def test_removal_of_a_head_or_middle_is_an_edit_of_attention(
    p0: int, p1: int, left: tuple[int, ...], length: int
) -> None:
    tape = fed().step(SeqRm(seq=0), 0, p0, p1, rc=1, pos={0: (left[0], 7)})
    h = history(tape.after())
    assert (h.positions, h.length) == (left, length)
    assert h.items == (*segs((0, A)), Edit("seq_rm", (max(p0, 0), p1)))
    assert h.tokens() is None
    assert h.edited
    assert {"edited"} <= h.kinds
    tape.decode((0, (3,)))
    assert claims(tape)[-1].chain == (*h.items, one(8, 3))
    assert history(tape.after()).positions == (*left, 8)


@pytest.mark.parametrize("memory", STATEFUL)
def test_removal_of_a_head_or_middle_says_nothing_good_of_a_recurrent_part(memory: str) -> None:
    assert "recurrent" in reason(fed(memory).step(SeqRm(seq=0), 0, 0, 2, rc=1).after())
    assert "recurrent" in reason(fed(memory).step(SeqRm(seq=0), 0, 3, 5, rc=1).after())


def test_the_tail_of_an_edited_history_is_an_edit() -> None:
    tape = fed().step(SeqRm(seq=0), 0, 2, 4, rc=1).step(SeqRm(seq=0), 0, 6, -1, rc=1, pos={0: (0, 5)})
    h = history(tape.after())
    assert h.positions == (0, 1, 4, 5)
    assert h.items[1:] == (Edit("seq_rm", (2, 4)), Edit("seq_rm", (6, -1)))


def test_removal_below_the_window_is_undefined_by_design() -> None:
    long = tuple(range(40))
    tape = Tape("window").decode((0, long), pos={0: (24, 39)})
    lost = tape.step(SeqRm(seq=0), 0, 30, -1, rc=1, pos={0: (24, 29)})  # 30 needs 15 .. 29
    assert reason(lost.after()) == WINDOW_GONE
    tape = Tape("window").decode((0, long), pos={0: (24, 39)})
    held = tape.step(SeqRm(seq=0), 0, 39, -1, rc=1, pos={0: (24, 38)})  # 39 needs 24 .. 38
    assert tokens(held.after()) == long[:39]
    tape = Tape("window").decode((0, long), pos={0: (24, 39)})
    one_short = tape.step(SeqRm(seq=0), 0, 38, -1, rc=1, pos={0: (24, 37)})
    assert reason(one_short.after()) == WINDOW_GONE
    short = Tape("window").decode((0, A)).step(SeqRm(seq=0), 0, 3, -1, rc=1, pos={0: (0, 2)})
    assert tokens(short.after()) == A[:3]


# --- seq_cp, seq_keep, seq_add, seq_div -------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(0, 1, -1, -1), (0, 1, 0, -1), (0, 1, 0, 8), (0, 1, 0, 99)])
@pytest.mark.parametrize("memory", ["dense", "window", "recurrent", "hybrid"])
def test_copy_of_a_whole_sequence(memory: str, args: tuple[int, ...]) -> None:
    tape = Tape(memory).decode((0, A)).step(SeqCp(src=0, dst=1), *args, pos={1: (0, 7)})
    m = tape.ledger().moments[-1]
    copy = history(m.after[1])
    assert copy.items == segs((0, A))
    assert copy.shaped == (1,)
    assert "cells" in copy.kinds
    assert m.after[0] == m.before[0]
    assert m.touched == {1}


def test_copy_goes_its_own_way_afterwards() -> None:
    tape = Tape().decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, -1, -1, pos={1: (0, 7)})
    tape.decode((0, (1,))).decode((1, (2,)))
    assert tokens(tape.after(0)) == (*A, 1)
    assert tokens(tape.after(1)) == (*A, 2)


def test_copy_onto_something_is_undefined() -> None:
    tape = fed().step(SeqCp(src=0, dst=1), 0, 1, -1, -1, pos={1: (0, 7)})
    assert "not empty" in reason(tape.after(1))
    assert tokens(tape.after(0)) == A


def test_copy_onto_itself_and_of_nothing_change_nothing() -> None:
    m = fed().step(SeqCp(src=0, dst=0), 0, 0, -1, -1).ledger().moments[-1]
    assert m.after == m.before
    assert m.touched == frozenset()
    m = Tape().decode((1, B)).step(SeqCp(src=0, dst=0), 0, 0, -1, -1).ledger().moments[-1]
    assert m.after[0] == EMPTY


def test_copy_of_a_range() -> None:
    prefix = Tape(params=UNIFIED).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, 0, 5, pos={1: (0, 4)})
    assert tokens(prefix.after(1)) == A[:5]
    middle = Tape(params=UNIFIED).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, 2, 5, pos={1: (2, 4)})
    h = history(middle.after(1))
    assert h.positions == (2, 3, 4)
    assert h.length == 5
    assert h.items == (*segs((0, A[:5]), out="none"), Edit("seq_rm", (0, 2)))
    nothing = Tape(params=UNIFIED).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, 20, 30)
    assert history(nothing.after(1)).empty


@pytest.mark.parametrize("memory", ["window", "recurrent", "hybrid"])
def test_copy_of_a_range_of_other_memory_is_undefined(memory: str) -> None:
    tape = Tape(memory).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, 0, 5, pos={1: (0, 4)})
    assert "not plain attention" in reason(tape.after(1))


def test_keep_empties_all_others() -> None:
    tape = Tape(params=THREE).decode((0, A)).decode((1, B)).decode((2, B)).step(SeqKeep(seq=1), 1)
    m = tape.ledger().moments[-1]
    assert m.touched == {0, 2}
    assert history(m.after[0]).empty
    assert history(m.after[2]).empty
    assert m.after[1] == m.before[1]


@pytest.mark.parametrize(
    ("op", "args", "positions"),
    [
        (SeqAdd(seq=0, delta=4), (0, -1, -1, 4), tuple(range(4, 12))),
        (SeqAdd(seq=0, delta=3), (0, 5, -1, 3), (0, 1, 2, 3, 4, 8, 9, 10)),
        (SeqDiv(seq=0, d=1), (0, -1, -1, 1), None),
        (SeqAdd(seq=0, delta=0), (0, -1, -1, 0), None),
        (SeqAdd(seq=0, delta=3), (0, 20, -1, 3), None),
    ],
)
def test_moved_positions(op: SeqAdd | SeqDiv, args: tuple[int, ...], positions: tuple[int, ...] | None) -> None:
    tape = fed().step(op, *args, pos={0: (positions or range(8))[:: len(positions or range(8)) - 1]})  # type: ignore[dict-item]
    m = tape.ledger().moments[-1]
    if positions is None:
        assert m.after == m.before
        assert m.touched == frozenset()
        return
    h = history(m.after[0])
    assert (h.positions, h.length) == (positions, positions[-1] + 1)
    call = "seq_add" if isinstance(op, SeqAdd) else "seq_div"
    assert h.items == (*segs((0, A)), Edit(call, (max(args[1], 0), args[2], args[3])))
    assert "edited" in h.kinds
    assert tokens(m.after[1]) == B


def test_positions_that_run_into_each_other_are_undefined() -> None:
    assert "ran into" in reason(fed().step(SeqAdd(seq=0, delta=-4), 0, 5, -1, -4).after())
    assert "below zero" in reason(fed().step(SeqAdd(seq=0, delta=-1), 0, 0, -1, -1).after())


def test_divided_positions() -> None:
    tape = Tape().decode((0, A)).step(SeqDiv(seq=0, d=2), 0, -1, -1, 2, pos={0: (0, 3)})
    h = history(tape.after())
    assert h.positions == (0, 0, 1, 1, 2, 2, 3, 3)
    assert h.length == 4
    assert h.items[-1] == Edit("seq_div", (0, -1, 2))


def test_sequences_that_share_cells_are_edited_too() -> None:
    tape = Tape(params=THREE).decode((0, A)).decode((2, B)).step(SeqCp(src=0, dst=1), 0, 1, -1, -1, pos={1: (0, 7)})
    m = tape.step(SeqAdd(seq=0, delta=4), 0, -1, -1, 4, pos={0: (4, 11), 1: (4, 11)}).ledger().moments[-1]
    assert m.touched == {0, 1}  # told apart from "untouched"
    assert "shares cells" in reason(m.after[1])
    assert history(m.after[0]).edited
    assert tokens(m.after[2]) == B


def test_a_copy_of_a_copy_shares_too_and_an_emptied_sequence_does_not() -> None:
    def shared() -> Tape:
        tape = Tape(params=THREE).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, -1, -1, pos={1: (0, 7)})
        return tape.step(SeqCp(src=1, dst=2), 1, 2, -1, -1, pos={2: (0, 7)})

    moved = shared().step(SeqAdd(seq=0, delta=4), 0, -1, -1, 4)
    assert moved.ledger().moments[-1].touched == {0, 1, 2}
    apart = shared().step(SeqRm(seq=0), 0, -1, -1, rc=1, pos={0: GONE}).decode((0, B))
    m = apart.step(SeqAdd(seq=0, delta=4), 0, -1, -1, 4).ledger().moments[-1]
    assert m.touched == {0}
    assert tokens(m.after[1]) == A


def test_a_restored_sequence_has_cells_of_its_own() -> None:
    tape = Tape(params=UNIFIED).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, -1, -1, pos={1: (0, 7)})
    tape.step(Save(seq=0, slot=0), 0, 0, 0, rc=9).step(Restore(seq=1, slot=0), 0, 1, 0, rc=9, blobs=[(9, 9)])
    m = tape.step(SeqAdd(seq=0, delta=4), 0, -1, -1, 4, pos={0: (4, 11)}).ledger().moments[-1]
    assert m.touched == {0}
    assert tokens(m.after[1]) == A


# --- save and restore -------------------------------------------------------------------------------------------------


def saved(memory: str = "dense", flags: int = 0, params: ContextParams | None = None) -> Tape:
    """A and B in sequences 0 and 1, 0 saved, then continued."""
    tape = fed(memory, params).step(Save(seq=0, slot=0, flags=flags), 0, 0, flags, rc=100, blobs=[(100, 100)])
    return tape.decode((0, (3, 4)))


def restore(tape: Tape, seq: int = 0, rc: int = 100, pos: tuple[int, int] = (0, 7)) -> Tape:
    return tape.step(Restore(seq=seq, slot=0), 0, seq, 0, rc=rc, blobs=[(100, rc)], pos={seq: pos})


@pytest.mark.parametrize(
    "op", [Save(seq=0, slot=3), SaveAll(slot=3), *(Ask(what=w) for w in ("positions", "size", "size_all", "can_shift"))]
)
def test_saves_and_queries_change_nothing(op: Save | SaveAll | Ask) -> None:
    m = fed().step(op, rc=100, blobs=[(100, 100)], value=7).ledger().moments[-1]
    assert m.after == m.before
    assert m.touched == frozenset()


@pytest.mark.parametrize("seq", [0, 1])
@pytest.mark.parametrize("memory", ["dense", "window", "recurrent", "hybrid"])
def test_accepted_restore_brings_the_history_of_the_moment_of_saving(memory: str, seq: int) -> None:
    tape = restore(saved(memory), seq)
    m = tape.ledger().moments[-1]
    h = history(m.after[seq])
    assert h.items == segs((0, A))
    assert h.shaped == (4,)
    assert "cells" in h.kinds
    assert m.touched == {seq}
    assert m.must_accept
    assert m.slot is not None
    assert tokens(m.after[1 - seq]) == (B if seq == 0 else (*A, 3, 4))


def test_a_slot_remembers_the_moment_it_was_saved_in() -> None:
    tape = saved().step(Save(seq=1, slot=1), 1, 1, 0, rc=50).step(Save(seq=0, slot=0), 0, 0, 0, rc=100)
    assert tokens(restore(tape, 0, pos=(0, 9)).after()) == (*A, 3, 4)
    again = tape.step(Restore(seq=0, slot=1), 1, 0, 0, rc=50, pos={0: (0, 2)})
    assert tokens(again.after()) == B


@pytest.mark.parametrize("pos", [(0, 9), GONE, (0, 4), (3, 9)])
def test_refused_restore_leaves_it_unchanged_or_empty(pos: tuple[int, int]) -> None:
    tape = restore(saved(), rc=0, pos=pos)
    m = tape.ledger().moments[-1]
    assert tokens(m.after[1]) == B
    if pos == (0, 9):
        assert tokens(m.after[0]) == (*A, 3, 4)
        assert history(m.after[0]).shaped == (4,)
    elif pos == GONE:
        assert history(m.after[0]).empty
    else:
        assert "neither as it was nor empty" in reason(m.after[0])
    # the next good restore works
    assert tokens(restore(tape).after()) == A


def test_corrupt_blobs() -> None:
    def corrupted(value: int) -> Tape:
        return saved().step(Corrupt(slot=0, edits=(BlobEdit(how="flip"),)), 0, 0, 1, value=value, blobs=[(100, 100)])

    taken = restore(corrupted(1)).ledger().moments[-1]
    assert "corrupted" in reason(taken.after[0])
    assert not taken.must_accept
    assert tokens(taken.after[1]) == B
    refused = restore(corrupted(1), rc=0, pos=(0, 9)).ledger().moments[-1]
    assert tokens(refused.after[0]) == (*A, 3, 4)
    unchanged = restore(corrupted(0)).ledger().moments[-1]  # a mutation that changed no byte
    assert tokens(unchanged.after[0]) == A
    assert unchanged.must_accept


@pytest.mark.parametrize("memory", ["window", "hybrid"])
def test_partial_restore_waits_for_the_cut_that_the_caller_owes(memory: str) -> None:
    tape = restore(saved(memory, PARTIAL), pos=(0, 9))
    state = tape.after()
    assert isinstance(state, HalfRestored)
    assert (tokens(state.saved), state.full) == (A, 10)
    done = tape.step(SeqRm(seq=0), 0, 8, -1, rc=1, pos={0: (0, 7)})
    h = history(done.after())
    assert h.items == segs((0, A))
    assert h.shaped == (4, 5)
    assert {"cells", "split"} <= h.kinds


@pytest.mark.parametrize("memory", ["window", "hybrid"])
def test_partial_restore_without_the_cut_is_undefined(memory: str) -> None:
    tape = restore(saved(memory, PARTIAL), pos=(0, 9)).decode((0, (6,)))
    assert "tail was not cut" in reason(tape.after())
    assert len(tape.ledger().undefined_rows) == 1
    elsewhere = restore(saved(memory, PARTIAL), pos=(0, 9)).step(SeqRm(seq=0), 0, 5, -1, rc=1, pos={0: (0, 4)})
    assert "cut elsewhere" in reason(elsewhere.after())


@pytest.mark.parametrize("memory", ["window", "hybrid"])
def test_partial_restore_onto_the_saved_length_is_whole(memory: str) -> None:
    tape = fed(memory).step(Save(seq=0, slot=0, flags=PARTIAL), 0, 0, PARTIAL, rc=100)
    assert history(restore(tape).after()).items == segs((0, A))


@pytest.mark.parametrize("memory", ["window", "hybrid"])
def test_partial_restore_onto_another_prefix_is_undefined(memory: str) -> None:
    assert "prefix" in reason(restore(saved(memory, PARTIAL), seq=1).after(1))


@pytest.mark.parametrize("memory", ["dense", "recurrent"])
def test_partial_is_whole_where_memory_has_one_part(memory: str) -> None:
    assert tokens(restore(saved(memory, PARTIAL), seq=1).after(1)) == A


def test_device_handles() -> None:
    good = restore(saved(flags=ON_DEVICE)).ledger().moments[-1]
    assert tokens(good.after[0]) == A
    assert good.must_accept
    older = saved(flags=ON_DEVICE).step(Save(seq=0, slot=1, flags=ON_DEVICE), 1, 0, ON_DEVICE, rc=100)
    assert not restore(older, rc=0, pos=(0, 9)).ledger().moments[-1].must_accept
    right = restore(older).ledger().moments[-1]  # refused or right, never wrong
    assert tokens(right.after[0]) == A
    other = saved(flags=ON_DEVICE).step(Save(seq=1, slot=1, flags=ON_DEVICE), 1, 1, ON_DEVICE, rc=100)
    assert restore(other).ledger().moments[-1].must_accept  # one store a sequence
    foreign = saved(flags=ON_DEVICE).reopen(Reopen(), ContextParams())
    assert not restore(foreign, rc=0, pos=GONE).ledger().moments[-1].must_accept


def whole(params: ContextParams | None = None) -> Tape:
    tape = fed(params=params).step(SaveAll(slot=0), 0, -1, 0, rc=500)
    return tape.decode((0, (3, 4))).step(SeqRm(seq=1), 1, -1, -1, rc=1, pos={1: GONE})


def restore_all(tape: Tape, rc: int = 500, pos: dict[int, tuple[int, int]] | None = None) -> Tape:
    return tape.step(RestoreAll(slot=0), 0, -1, 0, rc=rc, pos={0: (0, 7), 1: (0, 2)} if pos is None else pos)


def test_whole_context_restore() -> None:
    m = restore_all(whole()).ledger().moments[-1]
    assert tokens(m.after[0]) == A
    assert tokens(m.after[1]) == B
    assert m.touched == {0, 1}
    assert m.must_accept
    refused = restore_all(whole(), 0, {}).ledger().moments[-1]
    assert tokens(refused.after[0]) == (*A, 3, 4)
    assert history(refused.after[1]).empty
    emptied = restore_all(whole(), 0, {0: GONE, 1: GONE}).ledger().moments[-1]
    assert all(history(s).empty for s in emptied.after.values())
    half = restore_all(whole(), 0, {0: (0, 7)}).ledger().moments[-1]
    assert "neither" in reason(half.after[0])


def test_whole_context_restore_brings_shared_cells_back() -> None:
    tape = Tape(params=UNIFIED).decode((0, A)).step(SeqCp(src=0, dst=1), 0, 1, -1, -1, pos={1: (0, 7)})
    tape.step(SaveAll(slot=0), 0, -1, 0, rc=500).step(Clear(), 1, pos={0: GONE, 1: GONE})
    restore_all(tape, pos={0: (0, 7), 1: (0, 7)}).step(SeqAdd(seq=0, delta=1), 0, -1, -1, 1)
    assert tape.ledger().moments[-1].touched == {0, 1}


def test_clear_empties_everything() -> None:
    m = fed().step(Clear(), 1, pos={0: GONE, 1: GONE}).ledger().moments[-1]
    assert all(history(s).empty for s in m.after.values())
    assert m.touched == {0, 1}


def test_reopen_empties_everything_and_host_slots_survive() -> None:
    other = ContextParams(n_batch=16, n_ubatch=16)
    tape = saved().reopen(Reopen(params=other), other)
    m = tape.ledger().moments[-1]
    assert all(history(s).empty for s in m.after.values())
    assert m.params == other
    back = restore(tape).ledger().moments[-1]
    assert tokens(back.after[0]) == A
    assert back.must_accept
    assert claims(tape.decode((0, (6,))))[-1].params == other


@pytest.mark.parametrize(
    "change",
    [
        {"type_k": "f16"},
        {"type_v": "f16"},
        {"flash_attn": True},
        {"kv_unified": True},
        {"n_seq_max": 3},
        {"swa_full": True},
        {"n_ctx": 512},
    ],
)
def test_another_layout_may_refuse(change: dict[str, object]) -> None:
    other = ContextParams(**change)  # type: ignore[arg-type]
    m = restore(saved().reopen(Reopen(params=other), other), rc=0, pos=GONE).ledger().moments[-1]
    assert not m.must_accept
    assert history(m.after[0]).empty


def test_a_full_unified_cache_may_refuse() -> None:
    tape = Tape(params=THREE, n_ctx=16).decode((0, A)).step(Save(seq=0, slot=0), 0, 0, 0, rc=100)
    assert restore(tape, 1, rc=0, pos=GONE).ledger().moments[-1].must_accept  # 8 + 8
    tape.decode((0, (3,)))
    assert not restore(tape, 1, rc=0, pos=GONE).ledger().moments[-1].must_accept  # 9 + 8
    assert restore(tape, 0, rc=0, pos=(0, 8)).ledger().moments[-1].must_accept  # in place of the 9


def test_a_skipped_step_changes_nothing() -> None:
    m = fed().step(Restore(seq=0, slot=9), skipped="slot 9 holds nothing of that kind").ledger().moments[-1]
    assert m.after == m.before
    assert m.touched == frozenset()


# --- claims -----------------------------------------------------------------------------------------------------------


def test_claims_of_every_form_of_output() -> None:
    tape = Tape().decode((0, A), out="all").decode((0, B), out="none").decode((0, (3, 4))).decode((0, (5,)))
    mine = claims(tape)
    assert [c.row for c in mine] == list(range(10))
    assert [c.ref_row for c in mine] == list(range(10))
    assert [c.pos for c in mine] == [*range(8), 12, 13]
    assert [c.step for c in mine] == [0] * 8 + [2, 3]
    assert mine[0].chain == (Seg(0, A, "all"),)
    assert mine[-1].chain == (Seg(0, A, "all"), Seg(8, B, "none"), Seg(11, (3, 4), "last"), one(13, 5))
    assert [count_outputs(c.chain) for c in mine] == [8] * 8 + [9, 10]
    assert not any(c.first or c.draft for c in mine)
    assert all(c.kinds == frozenset() for c in mine)


def test_rows_of_two_sequences_are_told_apart() -> None:
    tape = Tape().decode((0, A)).decode((0, (3,)), (1, B))
    assert [(c.row, c.ref_row, c.pos) for c in claims(tape, 0)] == [(0, 0, 7), (1, 1, 8)]
    assert [(c.row, c.ref_row, c.pos) for c in claims(tape, 1)] == [(2, 0, 2)]
    assert claims(tape, 1)[0].chain == segs((0, B))
    assert claims(tape, 0)[0].kinds == frozenset()
    assert claims(tape, 0)[1].kinds == {"mixed"}
    assert claims(tape, 1)[0].kinds == {"mixed"}


def test_other_cells_count_in_a_unified_cache_only() -> None:
    assert claims(Tape(params=UNIFIED).decode((1, B)).decode((0, A)))[0].kinds == {"cells"}
    assert claims(Tape(params=UNIFIED).decode((0, A)))[0].kinds == frozenset()
    assert claims(Tape().decode((1, B)).decode((0, A)))[0].kinds == frozenset()


def test_the_first_row_after_something_happened() -> None:
    tape = restore(saved()).decode((0, (6, 7)), out="all").decode((0, (8,)))
    mine = [c for c in claims(tape) if c.step > 4]
    assert [c.first for c in mine] == [True, False, False]
    assert all(c.shaped == (4,) for c in mine)
    assert [c.ref_row for c in mine] == [1, 2, 3]


def test_without_outputs_the_first_row_is_still_to_come() -> None:
    tape = restore(saved()).decode((0, (6, 7)), out="none").decode((0, (8,)))
    assert [c.first for c in claims(tape) if c.step > 4] == [True]


def test_a_restored_history_is_claimed_by_the_batches_that_made_it() -> None:
    tape = restore(saved(), 1).decode((1, (6,)))
    assert claims(tape, 1)[-1].chain == segs((0, A), (8, (6,)))


def test_a_cut_batch_is_claimed_without_the_rows_that_went() -> None:
    tape = Tape().decode((0, A), out="all").step(SeqRm(seq=0), 0, 5, -1, rc=1, pos={0: (0, 4)}).decode((0, (6,)))
    last = claims(tape)[-1]
    assert last.chain == (Seg(0, A[:5], "all"), one(5, 6))
    assert (last.ref_row, last.pos) == (5, 5)
    tape = Tape().decode((0, A)).step(SeqRm(seq=0), 0, 5, -1, rc=1, pos={0: (0, 4)}).decode((0, (6,)))
    last = claims(tape)[-1]
    assert last.chain == (Seg(0, A[:5], "none"), one(5, 6))
    assert last.ref_row == 0


def test_drafts_are_claimed_row_by_row() -> None:
    tape = Tape().decode((0, A)).draft(Draft(seq=0, n=3), 0, (3, 4, 5))
    mine = claims(tape)[1:]
    assert [c.draft for c in mine] == [True] * 3
    assert [c.chain[-1] for c in mine] == [one(8, 3), one(9, 4), one(10, 5)]
    assert [len(c.chain) for c in mine] == [2, 3, 4]


def test_interleaved_rows_belong_to_their_sequences() -> None:
    tape = Tape()
    both = Decode(parts=(Part(seq=0, n=2), Part(seq=1, n=2)), interleave=True)
    tape.decode((0, (1,)), (1, (2,)), (0, (3,)), (1, (4,)), op=both)
    # the tape numbers rows part by part; as the runner does it, positions follow the sequence
    batch = tape.steps[0].batches[0]
    batch.rows = [type(r)(r.seq, i // 2, r.token, i >= 2) for i, r in enumerate(batch.rows)]
    mine = tape.ledger().rows
    assert [(c.seq, c.row, c.chain) for c in mine] == [(0, 0, segs((0, (1, 3)))), (1, 1, segs((0, (2, 4))))]


def fed_twice() -> Tape:
    return Tape().decode((0, A)).decode((0, B), out="all")


def test_cut_of_a_history() -> None:
    h = history(fed_twice().after())
    assert h.items == (Seg(0, A, "last"), Seg(8, B, "all"))
    assert cut(h, 11) == h
    assert cut(h, 9).items == (Seg(0, A, "last"), Seg(8, B[:1], "all"))
    assert cut(h, 8).items == (Seg(0, A, "last"),)
    assert cut(h, 8).kinds == frozenset()
    assert cut(h, 3).items == (Seg(0, A[:3], "none"),)
    assert cut(h, 3).kinds == {"split"}
    assert cut(h, 0).items == ()
    assert [cut(h, n).length for n in (11, 9, 3, 0)] == [11, 9, 3, 0]


# --- against a library without faults ---------------------------------------------------------------------------------

KINDS = {
    "dense": Traits(memory="dense"),
    "recurrent": Traits(memory="recurrent"),
    "hybrid": Traits(memory="hybrid", rollback=True, can_shift=False),
}


@pytest.mark.parametrize("memory", KINDS)
def test_every_claim_is_what_an_ideal_library_answers(memory: str) -> None:
    """Generated programs on a library in plain Python that does what llama.h says: all claims hold, to the bit."""
    judge = ideal_judge(memory)
    compared = unjudged = 0
    for program in generate(scenarios(MODEL, KINDS[memory]), 5, 80):
        result = judge.judge(program)
        assert result.violations == [], result.violations[0].because
        assert all(c.error == 0.0 for c in result.account.compared)
        compared += len(result.account.compared)
        unjudged += len(result.account.unjudged)
    assert compared > 1000
    assert unjudged < 0.05 * compared


class Forgetful(Ideal):
    """Every restore lets the last token but one be another."""

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        rc = super().seq_set(ctx, seq, flags, blob)
        if rc and len(self.seqs[seq]) > 1:
            p, t = self.seqs[seq][-2]
            self.seqs[seq][-2] = (p, t ^ 1)
        return rc


def test_a_library_with_a_fault_breaks_a_claim() -> None:
    judge = ideal_judge("dense", Forgetful)
    wrong = [judge.judge(p, fault="x") for p in generate(scenarios(MODEL, KINDS["dense"]), 5, 40)]
    assert sum(any(c.wrong for c in j.account.compared) for j in wrong) > 6


def test_facts_follow_the_contexts() -> None:
    params = ContextParams(n_seq_max=3, kv_unified=True)
    tape = fed().reopen(Reopen(params=params), params)
    ledger = read(tape.scenario, tape.trace())
    assert [m.params for m in ledger.moments] == [ContextParams(), ContextParams(), params]
    assert ledger.moments[-1].facts == facts_of("dense", params)
    assert set(ledger.moments[-1].after) == {0, 1, 2}


def test_the_ideal_library_is_run_like_the_real_one() -> None:
    trace = run(saved().scenario, Ideal())
    assert trace.end.how == "ok"
    assert [s.pos for s in trace.steps] == [s.pos for s in saved().steps]
