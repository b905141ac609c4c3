"""What target, draft and driver must hold of a sequence after every operation and answer, on traces written by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
from driver_fakes import HIDDEN, DriverTape

from oracles.ledger import WINDOW_GONE
from oracles.lines import LEARNS, LOST, NOWHERE, DraftClaim, Event, Line, given
from subjects.scenario import ON_DEVICE, PARTIAL, PIECES, ContextParams, Mangling, Piece, Propose, Route
from subjects.trace import Step, Tap, TapRow

A = (5, 1, 63, 9, 9, 30, 2, 7)
B = (40, 41, 42)
MTP, EAGLE3, SIMPLE, NGRAM = "draft-mtp", "draft-eagle3", "draft-simple", "ngram-map-k"
CARRY = (MTP, EAGLE3)
EVERY = (*CARRY, SIMPLE, NGRAM)
ROUTES: tuple[Route, ...] = ("cut", "host", "device", "whole")
SUBSETS = [parts for k in range(8) for parts in combinations(PIECES, k)]
ROLLBACK = ContextParams(n_rs_seq=3)


def fed(kind: str = MTP, memory: str = "dense", **more: object) -> DriverTape:
    """Sequence 0 holds A."""
    return DriverTape(kind, memory, **more).decode((0, A))  # type: ignore[arg-type]


def drafts(tape: DriverTape, seq: int = 0) -> list[DraftClaim]:
    """Claims on what was drafted."""
    return [c for c in tape.claims(seq) if c.last >= 0]


def firsts(tape: DriverTape, seq: int = 0) -> list[DraftClaim]:
    """Claims on the first row of a processed batch."""
    return [c for c in tape.claims(seq) if c.last < 0]


def unknown(tape: DriverTape) -> list[str]:
    return tape.read()[1].unknown


def in_step(line: Line) -> bool:
    return not line.undefined and line.draft == line.tokens == line.carry


# --- decode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_a_decode_is_held_by_all_three(kind: str) -> None:
    line = fed(kind).decode((0, B)).line()
    assert line.tokens == A + B
    assert in_step(line)
    assert line.events == (Event("decode", A), Event("decode", B))
    assert line.proposed is None
    assert line.shaped == ()


def test_several_sequences_each_hold_their_own() -> None:
    tape = DriverTape().decode((0, A), (1, B))
    assert (tape.line(0).tokens, tape.line(1).tokens) == (A, B)
    assert tape.line(0).history.kinds == {"mixed"}
    ledger, _ = tape.read()
    assert [m.touched for m in ledger.moments] == [{0, 1}]
    unified = DriverTape(params=ContextParams(kv_unified=True)).decode((0, A)).decode((1, B))
    assert unified.line(1).history.kinds == {"cells"}
    assert unified.line(0).history.kinds == frozenset()


def test_output_rows_of_the_target_are_claimed_as_those_of_plain_decoding() -> None:
    tape = fed().decode((0, B), out="all").propose((0, 3, (4, 5, 6))).verify((0, 2))
    ledger, _ = tape.read()
    assert [(c.step, c.pos, c.ref_row) for c in ledger.rows] == [
        (0, 7, 0),
        *((1, 8 + j, 1 + j) for j in range(3)),
        *((3, 11 + j, 4 + j) for j in range(4)),
    ]
    assert not DriverTape().decode((0, A), out="none").read()[0].rows
    assert not fed().rm(n=2, rc=0).decode((0, B)).read()[0].rows[1:], "nothing is said of what is undefined"


@pytest.mark.parametrize("rc", [1, 2, -1, -3, -100])
def test_a_decode_that_failed_says_nothing(rc: int) -> None:
    tape = fed().decode((0, B), rc=rc)
    assert tape.line().undefined == "a decode failed"
    assert tape.line().tokens == A
    assert not drafts(tape.propose((0, 1, (2,))))
    assert unknown(tape) == ["a decode failed"]


def test_a_position_that_nobody_expects_says_nothing() -> None:
    tape = fed()
    tape.tokens[0] = A[:-1]
    assert tape.decode((0, B)).line().undefined == "decoded at a position that the ledger does not expect"


@pytest.mark.parametrize("kind", EVERY)
def test_the_first_row_of_a_batch_is_paired_with_what_the_driver_carries(kind: str) -> None:
    claims = firsts(fed(kind).decode((0, B)))
    if kind not in CARRY:
        assert claims == []
        return
    lag = int(kind == EAGLE3)
    beginning = [] if lag else [(0, 0, 0)]  # eagle3 has nothing that waits there
    assert [(c.step, c.want_pos, c.pos) for c in claims] == [*beginning, (1, 8 - lag, 8 - lag)]
    assert all(c.given.hidden is not None and c.given.hidden.tobytes() == HIDDEN for c in claims)
    assert claims[-1].line.tokens == A, "what it stood behind when the batch came"


def test_a_row_that_never_came_is_seen() -> None:
    (_, claim) = firsts(fed().decode((0, B), taps=[]))
    assert (claim.pos, claim.want_pos) == (-1, 8)
    assert claim.given.hidden is not None
    assert claim.given.hidden.size == 0


def test_a_shared_memory_shows_no_pairing() -> None:
    tape = fed(shares=True).decode((0, B))
    assert firsts(tape) == []
    assert in_step(tape.line())
    assert len(drafts(tape.propose((0, 3, (4,))))) == 1


def test_an_operation_that_did_not_run_changes_nothing() -> None:
    before = fed().line()
    assert fed().step(Propose(seqs=(0,)), skipped="nothing").line() == before
    assert fed().step(Propose(seqs=(0,)), done=False).line() == before


# --- propose ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
def test_a_draft_is_claimed_behind_its_tokens(kind: str) -> None:
    tape = fed(kind).propose((0, 3, (4, 5)), n_max=2)
    (claim,) = drafts(tape)
    assert (claim.line.tokens, claim.last, claim.drafts, claim.n_max) == (A, 3, (4, 5), 2)
    assert claim.want_pos == 8 - (kind == EAGLE3)
    if kind != NGRAM:
        assert claim.pos == claim.want_pos
        assert claim.given.logits.shape == (2, 64)
    assert (claim.given.hidden is not None) == (kind in CARRY)
    line = tape.line()
    assert (line.proposed, line.last, line.tokens) == ((4, 5), 3, A)
    assert line.events[-1] == Event("propose", (3,), 2)
    assert in_step(line)


def test_several_draft_in_one_call_and_each_has_its_own_rows() -> None:
    tape = fed().decode((1, B)).propose((1, 7, (8, 9)), (0, 3, (4,)))
    (one,), (zero,) = drafts(tape, 1), drafts(tape, 0)
    assert (one.drafts, one.pos, len(one.given.logits)) == ((8, 9), 3, 2)
    assert (zero.drafts, zero.pos, len(zero.given.logits)) == ((4,), 8, 1)


def test_a_second_draft_takes_the_place_of_the_first() -> None:
    tape = fed().propose((0, 3, (4, 5))).propose((0, 9, (8,)))
    assert [c.drafts for c in drafts(tape)] == [(4, 5), (8,)]
    assert (tape.line().last, tape.line().proposed) == (9, (8,))


def test_where_nothing_is_said_of_a_draft() -> None:
    assert unknown(DriverTape().propose((0, 3, (4,)))) == ["there is nothing to draft from"]
    opened = fed().propose((0, 3, (4,))).verify((0, 0), open_=True).propose((0, 3, (4,)))
    assert unknown(opened) == ["a verification is open"]
    lost = fed().decode((1, B), rc=1).propose((0, 3, (4,)), (1, 3, (4,)))
    assert unknown(lost) == ["drafted together with a sequence that is undefined", "a decode failed"]
    assert not drafts(lost)
    alone = fed().decode((1, B), rc=1).propose((0, 3, (4,)))
    assert len(drafts(alone)) == 1, "one at a time it is right"
    # one table for all sequences: what another one has shown is drafted on purpose
    assert unknown(fed("ngram-mod").decode((1, B)).propose((0, 3, (4,)))) == [
        "ngram-mod shares on purpose what it learns"
    ]
    assert len(drafts(fed("ngram-mod").propose((0, 3, (4,))))) == 1


def test_given_reads_the_rows_of_one_sequence() -> None:
    assert given(Step(op=0), 0, 64, True)[0] == -1
    taps = [
        Tap(0, [TapRow(1, 9, 1, False, b""), TapRow(2, 5, 0, True, HIDDEN)], bytes(4 * 4)),
        Tap(0, [TapRow(3, 6, 0, True, b""), TapRow(4, 9, 1, True, b"")], bytes(range(32))),
    ]
    pos, got = given(Step(op=0, taps=taps), 0, 4, True)
    assert pos == 5
    assert got.hidden is not None
    assert got.hidden.tobytes() == HIDDEN
    assert got.logits.tobytes() == bytes(16) + bytes(range(16))
    pos, got = given(Step(op=0, taps=taps), 1, 4, True)
    assert (pos, got.hidden) == (9, None)
    assert got.logits.tobytes() == bytes(range(16, 32))
    # a driver without a row of its own, and a backend that samples
    assert given(Step(op=0, taps=taps), 0, 4, False)[1].hidden is None
    hidden_logits = [Tap(0, taps[0].rows, b"")]
    assert given(Step(op=0, taps=hidden_logits), 0, 4, True)[1].logits.shape == (0, 4)


# --- verify, accept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_verification_holds_what_it_took_by_every_route(kind: str, route: Route, k: int) -> None:
    tape = fed(kind, offers=True).propose((0, 3, (4, 5, 6))).verify((0, k), route=route)
    line = tape.line()
    assert line.tokens == (*A, 3, *(4, 5, 6)[:k])
    assert in_step(line)
    assert line.shaped == ((2,) if k < 3 else ()), "a full acceptance is no rollback"
    assert (line.proposed, line.open, line.unoffered) == (None, -1, False)
    assert line.events[-1] == Event("verify", (), k)
    (_, claim) = drafts(tape.propose((0, 9, (1,))))
    assert claim.line.tokens == line.tokens


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("route", ROUTES[1:])
def test_going_back_under_a_driver_that_offers_nothing_is_noted(kind: str, route: Route) -> None:
    tape = fed(kind).propose((0, 3, (4, 5))).verify((0, 1), route=route)
    assert tape.line().unoffered == (kind in CARRY)
    assert not fed(kind).propose((0, 3, (4, 5))).verify((0, 2), route=route).line().unoffered


def test_a_batch_of_several_is_taken_apart() -> None:
    tape = fed().decode((1, B)).propose((0, 3, (4, 5)), (1, 6, (7, 8))).verify((1, 2), (0, 0))
    assert (tape.line(0).tokens, tape.line(1).tokens) == ((*A, 3), (*B, 6, 7, 8))
    assert (tape.line(0).shaped, tape.line(1).shaped) == ((3,), ())
    by_host = (
        fed(offers=True).decode((1, B)).propose((0, 3, (4, 5)), (1, 6, (7, 8))).verify((0, 1), (1, 2), route="host")
    )
    assert (by_host.line(0).tokens, by_host.line(1).tokens) == ((*A, 3, 4), (*B, 6, 7, 8))
    assert in_step(by_host.line(0))
    assert in_step(by_host.line(1))
    # both batches of it pair their first row, the second one only of the sequence that was put back
    assert [c.step for c in firsts(by_host)] == [0, 3, 3]
    assert [c.step for c in firsts(by_host, 1)] == [1, 3]


def test_a_failed_verification_says_nothing() -> None:
    tape = fed().propose((0, 3, (4,))).verify((0, 1))
    tape.steps[-1].batches[0].rc = 1
    assert tape.line().undefined == "a decode failed"
    again = fed(offers=True).propose((0, 3, (4, 5))).verify((0, 1), route="host")
    again.steps[-1].batches[1].rc = -2
    assert again.line().undefined == "a decode failed"
    refused = fed().propose((0, 3, (4,))).verify((0, 0), value=0)
    assert refused.line().undefined == "a removal was refused"


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("n", [0, 1, 2])
def test_an_open_verification_waits_for_its_answer(kind: str, n: int) -> None:
    tape = fed(kind).propose((0, 3, (4, 5))).verify((0, 0), open_=True)
    line = tape.line()
    assert (line.open, line.opened, line.proposed, line.last) == (8, 2, (4, 5), 3)
    assert line.tokens == (*A, 3, 4, 5)
    after = tape.accept(0, n).line()
    assert after.tokens == (*A, 3, *(4, 5)[:n])
    assert in_step(after)
    assert (after.open, after.proposed, after.shaped) == (-1, None, (3,) if n < 2 else ())
    # for a kind that learns: what a reference repeats is the round, not the rows that were decoded for it
    assert after.events == (Event("decode", A), Event("propose", (3,), -1), Event("verify", (), n))
    (_, claim) = drafts(tape.propose((0, 9, (1,))))
    assert claim.line.tokens == after.tokens


@pytest.mark.parametrize("memory", ["recurrent", "hybrid"])
def test_recurrent_parts_go_back_within_the_last_ubatch_of_the_sequence(memory: str) -> None:
    def two(n: int, m: int, params: ContextParams = ROLLBACK) -> DriverTape:
        tape = fed(memory=memory, params=params).decode((1, B))
        return tape.propose((0, 3, (4, 5, 6)[:n]), (1, 3, (4, 5, 6)[:m]))

    assert in_step(two(3, 3).verify((0, 1), (1, 1)).line())
    unequal = two(3, 2).verify((0, 1), (1, 2))
    assert "stale-rollback" in unequal.line(0).undefined
    assert in_step(unequal.line(1)), "it took all"
    assert "stale-rollback" in two(3, 3, ContextParams(n_rs_seq=3, n_ubatch=7)).verify((0, 1), (1, 3)).line().undefined
    dense = fed().decode((1, B)).propose((0, 3, (4, 5)), (1, 3, (4,))).verify((0, 1), (1, 0))
    assert in_step(dense.line(0))


@pytest.mark.parametrize("memory", ["recurrent", "hybrid"])
def test_recurrent_parts_do_not_go_back_behind_other_work_or_a_restore(memory: str) -> None:
    def opened() -> DriverTape:
        return fed(memory=memory, offers=True, params=ROLLBACK).propose((0, 3, (4, 5))).verify((0, 0), open_=True)

    assert in_step(opened().accept(0, 1).line())
    assert "moved-rollback" in opened().decode((1, B)).accept(0, 1).line().undefined
    assert in_step(opened().decode((1, B)).accept(0, 2).line())
    restored = opened().checkpoint(0).rewind(0)
    assert "behind a restore" in restored.accept(0, 1).line().undefined
    assert in_step(opened().checkpoint(0).rewind(0).accept(0, 2).line())


# --- checkpoint, rewind -----------------------------------------------------------------------------------------------


def polluted(kind: str, *, offers: bool, flags: int = 0, memory: str = "dense") -> DriverTape:
    """A checkpoint behind A, and three more tokens."""
    return fed(kind, memory, offers=offers).checkpoint(0, flags=flags).decode((0, B))


@pytest.mark.parametrize("kind", EVERY)
def test_a_checkpoint_changes_nothing(kind: str) -> None:
    assert fed(kind).checkpoint(0).line() == fed(kind).line()


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("parts", SUBSETS, ids="+".join)
@pytest.mark.parametrize("offers", [False, True])
def test_each_part_goes_back_where_it_was_put_back(kind: str, parts: tuple[Piece, ...], offers: bool) -> None:
    line = polluted(kind, offers=offers).rewind(0, parts=parts).line()
    target, driver = "target" in parts, "driver" in parts
    assert line.tokens == (A if target else A + B)
    # the tail of the draft's memory is cut; where it was not put back it still begins with the tokens
    assert line.draft == (A if "draft" in parts or target else A + B)
    everything = target and ("draft" in parts or kind in LEARNS)
    keeps = kind in (*CARRY, *LEARNS)
    if offers:
        assert line.carry == (A if driver else A + B)
        assert not line.unoffered
    else:
        # a driver that keeps its state to itself is held to it
        assert line.carry == (A if everything and keeps else A + B)
        assert line.unoffered == (everything and keeps)
    there = {"target", *([] if kind in LEARNS else ["draft"]), *(["driver"] if offers else [])}
    assert line.shaped == ((3,) if there & set(parts) else ()), "what was not there shapes nothing"
    assert not line.undefined
    assert (LOST in line.events) == (kind in LEARNS and offers and target != driver)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("parts", SUBSETS[1:], ids="+".join)
def test_what_is_out_of_step_is_not_claimed(kind: str, parts: tuple[Piece, ...]) -> None:
    tape = polluted(kind, offers=True).rewind(0, parts=parts).propose((0, 3, (4,)))
    target, driver, draft = "target" in parts, "driver" in parts, "draft" in parts
    if kind in CARRY:
        right = target == driver
    else:
        right = kind == SIMPLE or target == driver
    right = right and not (draft and not target)
    assert len(drafts(tape)) == right, unknown(tape)
    assert len(unknown(tape)) == (not right)


@pytest.mark.parametrize("kind", EVERY)
def test_the_same_checkpoint_goes_into_another_sequence(kind: str) -> None:
    tape = polluted(kind, offers=True).rewind(1)
    assert tape.line(1).tokens == A
    assert in_step(tape.line(1))
    assert tape.line(0).tokens == A + B
    assert tape.line(1).shaped == (3,)
    # without the draft's memory there is nothing to draft from
    tape = polluted(SIMPLE, offers=True).rewind(1, parts=("target", "driver"))
    assert tape.line(1).draft == ()
    assert unknown(tape.propose((1, 3, (4,)))) == ["the draft's memory holds other tokens"]


def test_what_is_left_of_an_undefined_sequence_is_not_known_either() -> None:
    """The target put back alone does not make a draft right that went wrong with the old one."""
    for parts in (("target",), ("target", "driver")):
        tape = fed(SIMPLE, offers=True).checkpoint(0).decode((0, B), rc=1).rewind(0, parts=parts)
        assert (tape.line().undefined, tape.line().draft) == ("", None)
    alone = fed(offers=True).checkpoint(0).decode((0, B), rc=1).rewind(0, parts=("target", "draft"))
    assert alone.line().carry == NOWHERE
    whole = fed(offers=True).checkpoint(0).decode((0, B), rc=1).rewind(0)
    assert in_step(whole.line())


def test_a_restore_in_step_is_no_gap_of_the_interface() -> None:
    """A driver that offers nothing and already stands where it must be has nothing to be held to."""
    tape = fed().checkpoint(0).rewind(0)
    assert not tape.line().unoffered
    assert in_step(tape.line())
    opened = fed().propose((0, 3, (4,))).verify((0, 0), open_=True).checkpoint(0).rewind(0)
    assert opened.line().unoffered, "the rows of a verification are another thing that it keeps"
    shared = fed(shares=True).checkpoint(0).decode((0, B)).rewind(0, parts=("target",))
    assert shared.line().unoffered
    assert in_step(shared.line())


def test_a_gap_lasts_until_the_driver_takes_a_row_of_its_own() -> None:
    tape = polluted(MTP, offers=False).rewind(0)
    assert tape.line().unoffered
    assert polluted(MTP, offers=False).rewind(0).rewind(0).line().unoffered
    later = tape.propose((0, 3, (4, 5))).verify((0, 1))
    assert not later.line().unoffered
    learns = polluted(NGRAM, offers=False).rewind(0).propose((0, 3, (4, 5))).verify((0, 1))
    assert learns.line().unoffered, "what it has learnt stays wrong"
    assert polluted(NGRAM, offers=False).rewind(0).rm(n=2).line().unoffered
    assert not polluted(MTP, offers=False).rewind(0).rm(n=2).line().unoffered


def test_a_checkpoint_of_an_open_verification() -> None:
    tape = fed(offers=True).propose((0, 3, (4, 5))).verify((0, 0), open_=True).checkpoint(0).accept(0, 2)
    tape.decode((0, B)).rewind(0)
    line = tape.line()
    assert (line.open, line.proposed, line.tokens) == (8, (4, 5), (*A, 3, 4, 5))
    assert tape.accept(0, 1).line().tokens == (*A, 3, 4)
    (_, claim) = drafts(tape.propose((0, 9, (1,))))
    assert [tape.read()[0].scenario.ops[i].__class__.__name__ for i in claim.line.shaped] == [
        "Rewind",
        "Accept",
    ]


@pytest.mark.parametrize(("rc", "value"), [(0, 1), (1, 0), (0, 0)])
def test_a_refused_part_says_nothing(rc: int, value: int) -> None:
    assert polluted(MTP, offers=True).rewind(0, rc=rc, value=value).line().undefined == "a part was refused"


@pytest.mark.parametrize("flags", [PARTIAL, PARTIAL | ON_DEVICE])
def test_a_partial_restore_needs_its_prefix(flags: int) -> None:
    assert in_step(polluted(MTP, offers=True, flags=flags).rewind(0).line())
    elsewhere = polluted(MTP, offers=True, flags=flags).rewind(1).line(1)
    assert elsewhere.undefined
    cut_first = fed(offers=True).checkpoint(0, flags=flags).rm(n=3).decode((0, B)).rewind(0)
    assert "does not hold the saved prefix" in cut_first.line().undefined


def test_a_handle_of_the_device_is_good_until_the_next_one() -> None:
    assert in_step(polluted(MTP, offers=True, flags=ON_DEVICE).rewind(0).line())
    older = fed(offers=True).checkpoint(0, 0, ON_DEVICE).decode((0, B)).checkpoint(0, 1, ON_DEVICE).rewind(0, 0)
    assert "older or foreign handle" in older.line().undefined
    assert in_step(
        fed(offers=True).checkpoint(0, 0, ON_DEVICE).decode((0, B)).checkpoint(0, 1, ON_DEVICE).rewind(0, 1).line()
    )
    assert "older or foreign handle" in polluted(MTP, offers=True, flags=ON_DEVICE).rewind(1).line(1).undefined
    assert "older or foreign handle" in polluted(MTP, offers=True, flags=ON_DEVICE).reopen().rewind(0).line().undefined
    assert in_step(polluted(MTP, offers=True).reopen().rewind(0).line()), "one on the host survives"
    between = fed(offers=True).decode((1, B)).checkpoint(0, 0, ON_DEVICE).checkpoint(1, 1, ON_DEVICE).rewind(0, 0)
    assert in_step(between.line()), "there is one a sequence"


# --- malformed states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True])
def test_a_malformed_state_changes_nothing_and_is_told(told: bool) -> None:
    how: Mangling = "width"
    tape = fed(offers=True).checkpoint(0).mangle(0, how).rewind(0, parts=("driver",), log=["no"] if told else [])
    assert tape.read()[1].refusals == [(3, "width", told)]
    assert tape.line().tokens == A
    assert in_step(tape.line())
    assert tape.line().shaped == (3,)
    assert len(drafts(tape.propose((0, 3, (4,))))) == 1, "which is claimed"
    later = fed(offers=True).checkpoint(0).mangle(0, how).decode((0, B)).rewind(0, parts=("driver",))
    assert later.line().carry == A + B
    assert not later.line().unoffered


def test_a_mangled_state_that_is_not_handed_over_is_none() -> None:
    assert not fed(offers=True).checkpoint(0).mangle(0).rewind(0, parts=("target", "draft")).read()[1].refusals
    saved_again = fed(offers=True).checkpoint(0).mangle(0).checkpoint(0).rewind(0)
    assert not saved_again.read()[1].refusals


# --- cuts and beginnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", (*CARRY, SIMPLE))
def test_after_a_cut_the_driver_is_right_or_says_that_it_is_not(kind: str) -> None:
    def cut_() -> DriverTape:
        return fed(kind).rm(n=3)

    line = cut_().line()
    assert (line.tokens, line.draft, line.carry) == (A[:5], A[:5], A)
    assert line.was_cut == (kind in CARRY)
    assert line.shaped == (1,)
    assert len(drafts(cut_().propose((0, 3, (4,))))) == 1, "without a word it is claimed to be right"
    warned = cut_().propose((0, 3, (4,)), log=["the pending row is another one's"])
    assert len(drafts(warned)) == (kind not in CARRY)
    assert unknown(warned) == (["the driver carries a row of other tokens"] if kind in CARRY else [])


def test_after_a_cut_the_next_batch_gives_the_driver_a_row_of_its_own() -> None:
    def went_on(kind: str, *tokens: int, **more: object) -> DriverTape:
        return fed(kind).rm(n=3).decode((0, tokens), **more)  # type: ignore[arg-type]

    assert in_step(went_on(MTP, *B).line())
    assert not went_on(MTP, *B).line().was_cut
    assert [c.step for c in firsts(went_on(MTP, *B))] == [0, 2]
    assert [c.step for c in firsts(went_on(MTP, *B, log=["a gap"]))] == [0], "it said so"
    # what is left of eagle3's memory ends with the token that came, so nothing waits
    assert in_step(went_on(EAGLE3, *A[5:]).line())
    assert went_on(EAGLE3, *B).line().draft is None
    assert firsts(went_on(EAGLE3, *B)) == []


def test_what_a_driver_has_learnt_of_a_cut_tail_is_not_known() -> None:
    tape = fed(NGRAM).rm(n=3).propose((0, 3, (4,)))
    assert unknown(tape) == ["the driver has learnt from other tokens"]
    assert not fed(NGRAM).rm(n=3).line().was_cut
    assert len(drafts(fed("ngram-simple").rm(n=3).propose((0, 3, (4,))))) == 1


def test_a_cut_that_cuts_nothing_or_is_refused() -> None:
    assert fed().rm(n=0).line() == fed().line()
    assert "refused" in fed().rm(n=3, rc=0).line().undefined
    for memory in ("recurrent", "hybrid"):
        assert fed(memory=memory).rm(n=3).line().undefined == "a recurrent state was cut outside a round"
        assert not fed(memory=memory).rm().line().undefined


def test_a_cut_takes_the_draft_with_it() -> None:
    assert fed().propose((0, 3, (4,))).rm(n=1).line().proposed is None
    assert fed().rm(n=3).line().events == fed().line().events, "no call tells it"
    assert fed(NGRAM).rm(n=3).line().events == (LOST,)


def test_behind_a_cut_a_window_must_hold_what_the_next_token_sees() -> None:
    def cut_(lowest: int, n: int = 3) -> str:
        tape = DriverTape(memory="window").decode((0, tuple(range(40))))
        return tape.rm(n=n, pos={0: (lowest, 39 - n)}).line().undefined

    assert cut_(20) == ""
    assert cut_(22) == ""  # the next token, at 37, sees 16 back
    assert cut_(23) == WINDOW_GONE
    draft = DriverTape(memory="window").decode((0, tuple(range(40)))).rm(n=3, draft_pos={0: (30, 36)})
    assert draft.line().undefined == WINDOW_GONE
    # of a state that was saved behind more tokens nothing may be left: an empty memory has no lowest position
    both = DriverTape(memory="window").decode((0, tuple(range(33)))).checkpoint(0).decode((1, (1,)))
    assert both.rewind(1, parts=("draft",), draft_pos={1: (-1, -1)}).line(1).undefined == WINDOW_GONE
    dense = fed().rm(n=3, pos={0: (4, 4)})
    assert not dense.line().undefined


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("broken", [False, True])
def test_a_sequence_that_was_emptied_begins_anew(kind: str, broken: bool) -> None:
    tape = fed(kind)
    if broken:
        tape.decode((0, B), rc=1)
    tape.rm()
    assert tape.line() == Line(shaped=(len(tape.ops) - 1,))
    tape.decode((0, B))
    assert in_step(tape.line())
    assert tape.line().events == (Event("decode", B),)
    if kind == MTP:
        (claim,) = [c for c in firsts(tape) if c.step == len(tape.ops) - 1]
        assert not claim.line.history.length
        assert claim.want_pos == 0


@pytest.mark.parametrize("kind", EVERY)
def test_begin_is_an_event_and_nothing_else(kind: str) -> None:
    line = fed(kind).begin(0).line()
    assert line.events == (Event("decode", A), Event("begin"))
    assert (line.tokens, line.draft, line.carry, line.shaped) == (A, A, A, ())


def test_new_contexts_are_empty() -> None:
    tape = fed().reopen(ContextParams(n_seq_max=3))
    ledger, drive = tape.read()
    assert drive.lines[-1] == {0: Line(), 1: Line(), 2: Line()}
    assert ledger.moments[-1].params.n_seq_max == 3
    assert len(drafts(tape.decode((2, A)).propose((2, 3, (4,))), 2)) == 1


# --- eagle3 -----------------------------------------------------------------------------------------------------------


def test_eagle3_is_one_behind_until_it_drafts() -> None:
    tape = fed(EAGLE3)
    assert not tape.line().seeded
    tape.propose((0, 3, (4, 5)))
    assert tape.line().seeded
    (claim,) = drafts(tape)
    assert (claim.pos, claim.want_pos) == (7, 7)
    # the token that it drafted behind has come: nothing waits any more
    tape.verify((0, 2))
    assert firsts(tape) == []
    assert not tape.line().seeded
    tape.decode((0, B))
    (first,) = firsts(tape)
    assert (first.step, first.want_pos, first.pos) == (3, 10, 10)


def test_eagle3_drafted_behind_a_token_that_never_came() -> None:
    same = fed(EAGLE3).propose((0, 3, (4,))).decode((0, (3, 8)))
    assert in_step(same.line())
    other = fed(EAGLE3).propose((0, 3, (4,))).decode((0, (9, 8)))
    assert other.line().draft is None, "its memory has the token 3"
    assert unknown(other.propose((0, 1, (2,)))) == ["the draft's memory holds other tokens"]
    mtp = fed(MTP).propose((0, 3, (4,))).decode((0, (9, 8)))
    assert in_step(mtp.line())


def test_eagle3_writes_where_the_row_is_that_it_carries() -> None:
    tape = fed(EAGLE3, offers=True).checkpoint(0).decode((0, B)).rewind(0, parts=("target", "draft"))
    assert tape.line().draft == A
    assert tape.propose((0, 3, (4,))).line().draft is None


def test_what_is_left_of_a_longer_draft_memory_ends_with_the_token_that_came() -> None:
    tape = fed(EAGLE3, offers=True).checkpoint(0).decode((0, B)).rewind(0, parts=("target", "driver"))
    line = tape.line()
    assert (line.seeded, line.last) == (True, B[0])
    assert in_step(tape.decode((0, B)).line())
    other = fed(EAGLE3, offers=True).checkpoint(0).decode((0, B)).rewind(0, parts=("target", "driver"))
    assert other.decode((0, (1, 2))).line().draft is None
    # where nobody knows what it holds, nobody knows whether a row is waiting
    lost = fed(EAGLE3, offers=True).propose((0, 3, (4,))).checkpoint(0).decode((0, B))
    assert lost.line().draft is None
    lost.rewind(0, parts=("target", "driver")).decode((0, B))
    assert firsts(lost) == []
