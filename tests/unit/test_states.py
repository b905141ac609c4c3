"""States against references: what is claimed, what counts as honest, what is told, and how references are shared."""

from __future__ import annotations

import math

import pytest
from blob_builder import attention, sequence
from blob_builder import stream as built
from fakes import MODEL, Tape, facts_of
from test_state_canon import cells, single, stream, whole

from oracles.account import Account
from oracles.band import FAR, SAFETY, STEP, Bands, Measured
from oracles.blob import BlobContract
from oracles.ledger import OBSERVED_SLOTS, Item, Ledger, Seg, StateClaim, read
from oracles.reference import StateReferences, key_of
from oracles.state import State
from oracles.states import LOWEST, compare_states
from subjects.scenario import (
    PARTIAL,
    AnyOp,
    Clear,
    ContextParams,
    Corrupt,
    Edge,
    Restore,
    Save,
    SaveAll,
    SeqAdd,
    SeqKeep,
    SeqRm,
)
from subjects.state.canon import Reader
from subjects.trace import Blob, End, Trace

P = ContextParams()
BAND = 0.01


class Measures(Bands):
    """Bands of a library whose K and V differ by a hundredth."""

    def __init__(self, names: tuple[str, ...] = ("attn.k", "attn.v")) -> None:
        super().__init__(lambda _: [], MODEL, "a build", None)
        self.names = names

    def measured(self, params: ContextParams) -> Measured:
        seen = {"split": BAND / SAFETY}
        return Measured(runs=1, states=dict.fromkeys(self.names, seen), state_scale=dict.fromkeys(self.names, 4.0))


def kept(tape: Tape, *blobs: bytes) -> Tape:
    """The bytes of the last step's blobs, as the runner keeps them."""
    at = 0
    for blob in blobs:
        tape.steps[-1].blobs.append(Blob(len(blob), len(blob), str(hash(blob)), at=at, length=len(blob)))
        at += len(blob)
    return tape


def ledger_of(tape: Tape, *blobs: bytes) -> Ledger:
    return read(tape.scenario, Trace(tape.steps, tape.facts, End("ok"), params=tape.all_params, states=b"".join(blobs)))


def saved(blob: bytes, *, tokens: int = 2, flags: int = 0) -> Ledger:
    """Tokens into sequence 0, which is saved."""
    tape = Tape().decode((0, list(range(tokens)))).step(Save(seq=0, slot=0, flags=flags), 0, 0, flags, rc=len(blob))
    return ledger_of(kept(tape, blob), blob)


def hold(ledger: Ledger, reference: bytes | None, bands: Bands | None = None) -> Account:
    references = StateReferences()
    for claim in ledger.states:
        if reference is not None and claim.chain:
            data = len(reference).to_bytes(8, "little") + reference
            references.put(key_of(claim), [len(claim.chain)], Trace([], [], End("ok"), states=data))
    account = Account(ledger)
    account.states = compare_states(ledger, references, bands or Measures(), Reader())
    return account


CLEAN = single(stream(cells(0, 1)))


@pytest.mark.parametrize(
    ("nudge", "value"),
    [(0.0, "ok"), (BAND / 2, "ok"), (BAND * 4, "unknown"), (BAND * FAR * 2, "violated")],
)
def test_bands_decide(nudge: float, value: str) -> None:
    verdict = State().judge(hold(saved(single(stream(cells(1, 0), nudge=nudge))), CLEAN))
    assert verdict.value == value


def test_rows_without_a_band_are_not_told_as_fine() -> None:
    known = Measures(("attn.k",))
    for nudge in (BAND / 2, 5.0):
        account = hold(saved(single(stream(cells(0, 1), nudge=nudge))), CLEAN, known)
        assert account.states.held[0].unjudged == "no band could be measured for attn.v"
        verdict = State().judge(account)
        assert (verdict.value, verdict.compared) == ("unknown", 0)
    # what is equal to the bit needs no band, and what is missing is wrong without one
    assert State().judge(hold(saved(single(stream(cells(1, 0)))), CLEAN, known)).value == "ok"
    assert State().judge(hold(saved(single(stream(cells(0)))), CLEAN, known)).value == "violated"


def test_a_partial_state_of_which_nothing_is_looked_at_is_unknown() -> None:
    tape = Tape("hybrid").decode((0, [0, 1])).step(Save(seq=0, slot=0, flags=PARTIAL), 0, 0, PARTIAL, rc=len(CLEAN))
    account = hold(ledger_of(kept(tape, CLEAN), CLEAN), single(stream(cells(0, 1), nudge=5.0)))
    assert account.states.held[0].unjudged == "it has no part that the next token looks at"
    assert State().judge(account).value == "unknown"


def test_the_extension_of_a_cell_is_state() -> None:
    clean, lost = (sequence(attention(built([0, 1], ext=[(0, 0, 5), (1, 1, t)]))) for t in (6, -1))
    assert State().judge(hold(saved(clean), clean)).value == "ok"
    (v,) = State().judge(hold(saved(lost), clean)).violations
    assert v.key == "state:save:attn.extension"
    assert "but attention: x, y, token of position 1 are 1, 1, -1 and should be 1, 1, 6." in v.because
    assert v.check.expected == 2 * (12, 1, LOWEST, -1)


def test_a_violation_argues_and_names_the_place() -> None:
    account = hold(saved(single(stream(cells(0, 1), nudge=5.0), stream([]))), CLEAN)
    (v,) = State().judge(account).violations
    assert v.key == "state:save:attn.v"
    assert v.because == (
        "Sequence 0 was only ever decoded into, so what operation 1 saves of it must be what a clean context holds "
        "after the same tokens; but layer 0, attention V of position 1 differs by 5 (honest differences here stay "
        "below 0.01)."
    )
    assert (v.check.kind, v.check.step, v.check.row, v.check.seq) == ("state", 1, 0, 0)
    assert len(v.check.expected) == 10
    assert v.check.reference is not None
    assert isinstance(v.check.reference.ops[-1], Save)
    assert v.error == pytest.approx(5.0)
    rung = account.state_rung(0, 1)
    assert rung == "state of sequence 0 saved in operation 1: first part that differs: " + v.check.what


def test_missing_cells_are_wrong_and_have_no_size() -> None:
    (v,) = State().judge(hold(saved(single(stream(cells(0)))), CLEAN)).violations
    assert "but attention holds position 0 and should hold positions 0..1." in v.because
    assert (v.error, v.band) == (0.0, 0.0)
    # the number of cells is behind the magic, the sequence and the number of streams; no position is left out
    assert v.check.expected == 2 * (12, 0, LOWEST, -1)
    assert math.isfinite(v.error)


def test_an_emptied_sequence_must_hold_nothing() -> None:
    blob = single(stream(cells(0)))
    tape = Tape().decode((0, [1, 2])).step(SeqRm(seq=0), 0, -1, -1, rc=1, pos={0: (-1, -1)})
    tape.step(Save(seq=0, slot=0), 0, 0, 0, rc=len(blob))
    (v,) = State().judge(hold(ledger_of(kept(tape, blob), blob), None)).violations
    assert v.check.expected == (12, 0, LOWEST, -1, -1, 0, 0, -1)  # there is nothing to compare with
    assert v.because.startswith(
        "Sequence 0 was emptied by operation 1, so nothing of it must be in what operation 2 saves"
    )


@pytest.mark.parametrize("last", [SeqRm(seq=0, lo=Edge(at="start", d=1)), SeqRm(seq=0), SeqKeep(seq=1), Clear()])
def test_what_is_left_is_not_of_an_operation_on_an_empty_sequence(last: AnyOp) -> None:
    """A refused restore emptied it; a removal after it had nothing to remove."""
    blob = single(stream(cells(0)))
    tape = Tape().decode((0, [1, 2])).step(Save(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)])
    tape.step(Corrupt(slot=0, edits=()), value=1).step(Restore(slot=0, seq=0), 0, 0, 0, rc=0, pos={0: (-1, -1)})
    args = (0, last.lo.d, -1) if isinstance(last, SeqRm) else ()
    tape.step(last, *args, rc=1)
    tape.step(Save(seq=0, slot=1), 0, 1, 0, rc=len(blob))
    (v,) = State().judge(hold(ledger_of(kept(tape, blob), blob), None)).violations
    assert (v.key, v.suspects) == ("state:restore:attn.cells", (3,))
    assert v.because.startswith("Sequence 0 was emptied by operation 3, so nothing of it must be in what operation 5")


def test_a_removal_from_what_never_held_anything_is_not_to_blame() -> None:
    blob = single(stream(cells(0)))
    tape = Tape().step(SeqRm(seq=0), 0, -1, -1, rc=1).step(Save(seq=0, slot=0), 0, 0, 0, rc=len(blob))
    (v,) = State().judge(hold(ledger_of(kept(tape, blob), blob), None)).violations
    assert (v.key, v.suspects) == ("state:save:attn.cells", (1,))
    assert v.because.startswith("Sequence 0 never held anything")


def test_what_cannot_be_read_or_was_not_run_is_unknown() -> None:
    assert hold(saved(CLEAN[:-1]), CLEAN).states.held[0].unjudged.startswith("a state cannot be read")
    assert hold(saved(CLEAN), None).states.held[0].unjudged == "the reference program did not run"


def test_a_restore_saved_again_is_compared_bit_for_bit_in_any_order() -> None:
    turned, other = single(stream(cells(1, 0, seq=1)), seq=1), single(stream(cells(0, 1), nudge=1e-3))
    for again, equal in ((turned, True), (other, False)):
        tape = kept(Tape().decode((0, [1, 2])).step(Save(seq=0, slot=0), 0, 0, 0, rc=len(CLEAN)), CLEAN)
        tape.step(Restore(seq=1, slot=0, resave=True), 0, 1, 0, rc=len(CLEAN), pos={1: (0, 1)})
        kept(tape, CLEAN, again)
        account = hold(ledger_of(tape, CLEAN, again), CLEAN)
        found = account.states.again[2]
        assert (found.differences == ()) is equal
        violations = BlobContract().judge(account).violations
        assert bool(violations) is not equal
        for v in violations:  # the row that differs is compared, in each blob where it is there
            assert (v.key, v.check.what, v.check.expected[:2]) == ("blob:again:restore", "places", (0, 1))
            was, now = v.check.expected[2:7], v.check.expected[7:]
            assert CLEAN[was[1] : was[1] + was[3]] != other[now[1] : now[1] + now[3]]
            assert was == now == (0, len(CLEAN) - 128, 1, 128, 256)


def test_cells_that_a_restore_does_not_give_back_are_compared_as_such() -> None:
    lost = single(stream([]), stream(cells(0, seq=1)), seq=1)
    tape = kept(Tape().decode((0, [1, 2])).step(Save(seq=0, slot=0), 0, 0, 0, rc=len(CLEAN)), CLEAN)
    tape.step(Restore(seq=1, slot=0, resave=True), 0, 1, 0, rc=len(CLEAN), pos={1: (0, 1)})
    account = hold(ledger_of(kept(tape, CLEAN, lost), CLEAN, lost), CLEAN)
    (v,) = BlobContract().judge(account).violations
    assert v.check.expected == (0, 1, 12, 0, LOWEST, -1, 16, 0, LOWEST, -1)


def test_claims_are_made_where_the_history_is_known() -> None:
    tape = Tape().decode((0, [1, 2, 3])).step(SeqAdd(seq=0, delta=1), 0, -1, -1, 1, pos={0: (1, 3)})
    for slot in (0, OBSERVED_SLOTS):
        kept(tape.step(Save(seq=1, slot=slot), slot, 1, 0, rc=1), b"x")
    kept(tape.step(Save(seq=0, slot=0), 0, 0, 0, rc=1), b"x")
    kept(tape.step(SaveAll(slot=1), 1, -1, 0, rc=1), b"x")
    claims = ledger_of(tape, b"x").states
    # what was moved waits for a decode, and observed slots are compared by others
    assert [(c.step, c.seq, c.whole) for c in claims] == [(2, 1, False), (5, 1, True)]
    tape.decode((0, [4]))
    kept(tape.step(Save(seq=0, slot=0), 0, 0, 0, rc=1), b"x")
    assert [(c.step, c.seq) for c in ledger_of(tape, b"x").states][-1] == (7, 0)


def test_of_a_window_what_the_next_token_sees_is_claimed() -> None:
    tape = Tape("window").decode((0, list(range(20)))).step(Save(seq=0, slot=0), 0, 0, 0, rc=1)
    (claim,) = ledger_of(kept(tape, b"x"), b"x").states
    assert claim.positions == tuple(range(20))
    assert claim.facts.n_swa == 16
    cut = Tape("window").decode((0, list(range(20)))).step(SeqRm(seq=0, lo=Edge(at="end", d=-1)), 0, 19, -1, rc=1)
    assert cut.ledger().states == []


def test_whole_contexts_are_held_by_sequence() -> None:
    blob = whole(stream(cells(0, 1)), stream(cells(0, 1, seq=1), nudge=3.0))
    tape = Tape().decode((0, [1, 2])).decode((1, [1, 2])).step(SaveAll(slot=0), 0, -1, 0, rc=len(blob))
    held = hold(ledger_of(kept(tape, blob), blob), CLEAN).states.held
    assert [(h.claim.seq, h.wrong) for h in held] == [(0, False), (1, True)]


def test_bands_of_states_are_by_tensor_with_a_step_of_what_is_stored() -> None:
    b = Measures()
    assert b.states(P, ()) == {"attn.k": pytest.approx(BAND), "attn.v": pytest.approx(BAND)}
    half = b.states(ContextParams(type_v="bf16"), {"cells"})
    assert half["attn.v"] == pytest.approx(2 * STEP["bf16"] * 4.0)
    assert half["attn.k"] == pytest.approx(max(BAND, STEP["bf16"] / 4 * 4.0))


def test_beginnings_share_a_run_that_saves_on_the_way() -> None:
    items: tuple[Item, ...] = tuple(Seg(i, (i,), "last") for i in range(4))

    def claim(n: int) -> StateClaim:
        f = facts_of("dense", P)
        return StateClaim(0, 0, 0, items[:n], tuple(range(n)), frozenset(), (), P, f, False, False)

    references = StateReferences(limit_bytes=5)
    keys = [key_of(claim(n)) for n in (2, 4, 2)]
    ((key, saves),) = references.missing(keys)
    assert (key, saves) == (keys[1], [2, 4])
    data = b"".join(len(x).to_bytes(8, "little") + x for x in (b"two", b"four"))
    references.put(key, saves, Trace([], [], End("ok"), states=data))
    assert [references.get(k) for k in keys] == [b"two", b"four", b"two"]
    assert references.missing(keys) == []
    references.evict()
    assert [references.get(k) for k in keys] == [b"two", None, b"two"]
    references.put(keys[1], [4], Trace([], [], End("ok"), states=bytes(8)))  # too long to be kept
    assert references.get(keys[1]) is None
