"""References: which chains must be run, what they are remembered for, and the programs that compute them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import GONE, MODEL, N_EMBD, N_VOCAB, Ideal, Tape, replayed, run

from oracles.ledger import Edit, Item, Seg, count_outputs
from oracles.reference import Key, References, replay, solo, twin
from subjects.scenario import (
    OPEN,
    ContextParams,
    Decode,
    Edge,
    Part,
    Restore,
    Save,
    Scenario,
    SeqAdd,
    SeqDiv,
    SeqRm,
    dumps,
)
from subjects.trace import End, Trace

P = ContextParams()
A, B, C = Seg(0, (5, 1, 63), "last"), Seg(3, (9, 9), "all"), Seg(5, (30,), "last")


def key(*chain: Item, seq: int = 0, params: ContextParams = P) -> Key:
    return params, seq, chain


def answered(k: Key) -> tuple[Key, Trace, int, int]:
    return k, replayed(replay(MODEL, Path("none"), k), Ideal()), N_VOCAB, N_EMBD


# --- what must be run -------------------------------------------------------------------------------------------------


def test_a_chain_answers_for_its_beginnings() -> None:
    refs = References()
    assert refs.missing([key(A), key(A, B), key(A, B, C)]) == [key(A, B, C)]
    assert refs.missing([key(A, B, C), key(A), key(A, B), key(A)]) == [key(A, B, C)]


def test_what_is_no_beginning_is_run_too() -> None:
    other = Seg(3, (8,), "last")
    found = References().missing([key(A), key(A, B), key(A, other), key(B), key(A, seq=1)])
    assert len(found) == 4
    assert set(found) == {key(A, B), key(A, other), key(B), key(A, seq=1)}
    sized = ContextParams(n_batch=32)
    assert len(References().missing([key(A, B), key(A, params=sized)])) == 2


def test_what_is_known_is_not_run_again() -> None:
    refs = References()
    refs.put(*answered(key(A, B)))
    assert refs.missing([key(A), key(A, B)]) == []
    assert refs.missing([key(A), key(A, B, C)]) == [key(A, B, C)]
    assert refs.get(key(A, B, C)) is None
    assert refs.get(key(A, seq=1)) is None


def test_rows_are_those_of_the_chain() -> None:
    refs = References()
    refs.put(*answered(key(A, B, C)))
    for chain in ((A,), (A, B), (A, B, C)):
        rows = refs.get(key(*chain))
        assert rows is not None
        alone = np.frombuffer(answered(key(*chain))[1].logits, np.float32).reshape(-1, N_VOCAB)
        assert (rows.logits[: len(alone)] == alone).all()
    assert len(refs.get(key(A, B, C)).logits) == 4  # type: ignore[union-attr]
    assert refs.get(key(A)).hidden.size == 0  # type: ignore[union-attr]


def test_embedding_rows_are_kept_where_there_are_any() -> None:
    params = ContextParams(embeddings=True)
    refs = References()
    refs.put(*answered(key(A, B, params=params)))
    assert refs.get(key(A, params=params)).hidden.shape == (3, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize("end", [End("signal", 6), End("error", 0, "no context"), End("hang"), End("exit", 1)])
def test_a_run_that_did_not_end_well_answers_for_nothing(end: End) -> None:
    refs = References()
    k, trace, n_vocab, n_embd = answered(key(A, B))
    trace.end = end
    refs.put(k, trace, n_vocab, n_embd)
    assert refs.get(key(A)) is None
    assert refs.missing([key(A, B)]) == [key(A, B)]


def test_the_oldest_go_first_when_bytes_run_out() -> None:
    row = 4 * N_VOCAB
    refs = References(limit_bytes=3 * row)
    keys = [key(Seg(0, (t,), "all")) for t in range(5)]
    for k in keys:
        refs.put(*answered(k))
    assert refs.missing(keys) == []  # nothing goes before it was compared
    assert refs.get(keys[0]) is not None
    refs.evict()
    assert [refs.get(k) is not None for k in keys] == [True, False, False, True, True]


def test_bytes_are_counted_of_what_is_kept_only() -> None:
    """What a longer chain took the place of must not fill the store for ever: in the end nothing would be judged."""
    row = 4 * N_VOCAB
    refs = References(limit_bytes=40 * row)
    for t in range(30):
        first, second = Seg(0, (t,), "all"), Seg(1, (t,), "all")
        for k in (key(first), key(first, second)):
            refs.put(*answered(k))
        refs.evict()
    latest = [key(Seg(0, (t,), "all"), Seg(1, (t,), "all")) for t in range(15, 30)]
    assert all(refs.get(k) is not None for k in latest), "15 chains of two rows fit into 40 rows"


# --- programs ---------------------------------------------------------------------------------------------------------


def test_solo_decodes_the_batches_of_a_history_alone() -> None:
    s = solo(MODEL, P, 1, (A, B))
    assert s.params == P
    assert s.ops == (
        Decode(parts=(Part(seq=1, n=3, tokens=(5, 1, 63), out="last"),)),
        Decode(parts=(Part(seq=1, n=2, tokens=(9, 9), out="all"),)),
    )
    assert dumps(s)


@pytest.mark.parametrize(
    ("out", "outs"),
    [("last", ["none", "none", "last"]), ("all", ["all", "all", "all"]), ("none", ["none", "none", "none"])],
)
def test_solo_splits_what_is_larger_than_a_batch(out: str, outs: list[str]) -> None:
    params = ContextParams(n_batch=4, n_ubatch=4)
    s = solo(MODEL, params, 0, (Seg(0, tuple(range(10)), out),))  # type: ignore[arg-type]
    parts = [op.parts[0] for op in s.ops if isinstance(op, Decode)]
    assert [p.tokens for p in parts] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [p.out for p in parts] == outs
    assert [p.n for p in parts] == [4, 4, 2]
    exact = solo(MODEL, params, 0, (Seg(0, (1, 2, 3, 4), "last"),))
    assert len(exact.ops) == 1


def test_solo_repeats_edits() -> None:
    edits = (Edit("seq_rm", (2, 5)), Edit("seq_add", (4, -1, 3)), Edit("seq_div", (0, -1, 2)))
    s = solo(MODEL, P, 1, (A, *edits))
    assert s.ops[1:] == (
        SeqRm(seq=1, lo=Edge(at="start", d=2), hi=Edge(at="start", d=5)),
        SeqAdd(seq=1, lo=Edge(at="start", d=4), hi=OPEN, delta=3),
        SeqDiv(seq=1, lo=Edge(at="start", d=0), hi=OPEN, d=2),
    )


@pytest.mark.parametrize("n_batch", [3, 4, 64])
@pytest.mark.parametrize("embeddings", [False, True])
def test_the_quick_replay_is_the_same_program(n_batch: int, embeddings: bool) -> None:
    params = ContextParams(n_batch=n_batch, n_ubatch=n_batch, embeddings=embeddings)
    chains: list[tuple[Item, ...]] = [
        (A, B, C),
        (Seg(0, tuple(range(10)), "last"), Seg(10, tuple(range(7)), "all"), Seg(17, tuple(range(5)), "none")),
        (Seg(0, tuple(range(10)), "all"), Edit("seq_rm", (2, 5)), Seg(10, (1, 2), "last")),
        (A, Edit("seq_add", (1, -1, 3)), Seg(6, (1,), "all"), Edit("seq_div", (0, -1, 2)), Seg(4, (9, 8), "last")),
    ]
    for chain in chains:
        for seq in (0, 1):
            slow = run(solo(MODEL, params, seq, chain), Ideal())
            fast = replayed(replay(MODEL, Path("none"), (params, seq, chain)), Ideal())
            assert slow.end == fast.end == End("ok")
            assert slow.logits == fast.logits
            assert slow.hidden == fast.hidden
            assert len(slow.logits) == 4 * N_VOCAB * count_outputs(chain)


def composition(s: Scenario) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [[(p.seq, p.tokens or ()) for p in op.parts] for op in s.ops if isinstance(op, Decode)]


def test_twin_keeps_the_batches_and_leaves_out_what_did_not_survive() -> None:
    tape = Tape().decode((0, (1, 2, 3)), (1, (7, 8))).decode((0, (4, 5)), (1, (9,)))
    tape.step(SeqRm(seq=0), 0, 4, -1, rc=1, pos={0: (0, 3)}).decode((0, (6,)), (1, (10,)))
    ledger = tape.ledger()
    claim = next(c for c in ledger.rows if c.seq == 0 and c.step == 3)
    s = twin(ledger, claim)
    assert s is not None
    assert composition(s) == [[(0, (1, 2, 3)), (1, (7, 8))], [(0, (4,)), (1, (9,))], [(0, (6,)), (1, (10,))]]
    # on a library without faults its last row of the sequence is the claimed one
    rows = [r for step in run(s, Ideal()).steps for b in step.batches for r in b.rows]
    assert [r.pos for r in rows if r.seq == 0] == [0, 1, 2, 3, 4]


def test_twin_keeps_the_choice_of_outputs_and_reads_no_further_than_its_row() -> None:
    tape = Tape().decode((0, (1, 2, 3)), (1, (7, 8)), out="none").decode((0, (4,)), (1, (9, 9)))
    ledger = tape.decode((0, (5,))).ledger()
    s = twin(ledger, ledger.rows[0])
    assert s is not None
    assert [[p.out for p in op.parts] for op in s.ops if isinstance(op, Decode)] == [["none", "none"], ["all", "last"]]
    late = replace(ledger.rows[0], step=0)
    assert twin(ledger, late) is None


def test_twin_takes_the_pass_that_survived() -> None:
    tape = Tape().decode((0, (1, 2, 3))).step(Save(seq=0, slot=0), 0, 0, 0, rc=9).decode((0, (4, 5)))
    tape.step(Restore(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)], pos={0: (0, 2)}).decode((0, (4, 6)))
    ledger = tape.ledger()
    s = twin(ledger, ledger.rows[-1])
    assert s is not None
    assert [t for batch in composition(s) for _, tokens in batch for t in tokens][:4] == [1, 2, 3, 4]
    assert sum(len(tokens) for batch in composition(s) for _, tokens in batch) == 5


def test_no_twin_where_another_sequence_went_through_more_or_the_history_is_edited() -> None:
    tape = Tape().decode((0, (1, 2, 3)), (1, (7, 8))).step(SeqRm(seq=1), 1, -1, -1, rc=1, pos={1: GONE})
    ledger = tape.decode((0, (4,))).ledger()
    assert twin(ledger, ledger.rows[-1]) is None
    assert twin(ledger, ledger.rows[0]) is not None
    tape = Tape().decode((0, (1, 2, 3))).step(SeqRm(seq=0), 0, 0, 1, rc=1, pos={0: (1, 2)}).decode((0, (4,)))
    ledger = tape.ledger()
    assert twin(ledger, ledger.rows[-1]) is None
