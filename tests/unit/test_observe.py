"""Observations: what is added to a program, and that it leaves the program's own operations as they are."""

from __future__ import annotations

import pytest
from fakes import MODEL

from fuzz.state import traits_of, valid
from fuzz.strategies import generate, scenarios
from oracles.observe import CONTINUATION, CONTINUATION_STREAM, NEIGHBOUR_SLOT, observe
from oracles.registry import OBSERVATIONS
from subjects import recipes
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    AnyOp,
    Clear,
    ContextParams,
    Decode,
    Draft,
    Part,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)

A, B = Decode(parts=(Part(seq=0, n=4),)), Decode(parts=(Part(seq=1, n=4),))
AROUND = (Save(seq=1, slot=NEIGHBOUR_SLOT), Save(seq=1, slot=NEIGHBOUR_SLOT + 1))


def seen(*ops: AnyOp, wanted: str, params: ContextParams | None = None, variety: int = 1) -> tuple[AnyOp, ...]:
    scenario = Scenario(model=MODEL, ops=ops, params=params or ContextParams())
    return observe(scenario, {wanted}, variety=variety).ops


def test_nothing_wanted_changes_nothing() -> None:
    scenario = Scenario(model=MODEL, ops=(A, B, Save(seq=0, slot=0), Restore(seq=0, slot=0)))
    assert observe(scenario, ()) == scenario


@pytest.mark.parametrize("n_seq", [1, 2, 4])
def test_every_sequence_goes_on_at_the_end(n_seq: int) -> None:
    ops = seen(A, wanted="continue", params=ContextParams(n_seq_max=n_seq))
    assert ops[0] == A
    drafts = [op for op in ops[1:] if isinstance(op, Draft)]
    assert len(drafts) == len(ops) - 1
    assert [op.seq for op in drafts] == list(range(n_seq))
    assert {op.n for op in drafts} == {CONTINUATION}
    assert all(op.stream >= CONTINUATION_STREAM for op in drafts), "a stream that no program has"


def test_the_end_is_that_of_the_last_context() -> None:
    ops = seen(A, Reopen(params=ContextParams(n_seq_max=3)), Reopen(), wanted="continue")
    assert [op.seq for op in ops[3:] if isinstance(op, Draft)] == [0, 1, 2]


def test_host_saves_are_made_twice_and_device_saves_are_not() -> None:
    ops = seen(
        Save(seq=0, slot=0),
        Save(seq=0, slot=1, flags=PARTIAL),
        Save(seq=0, slot=2, flags=ON_DEVICE),
        Save(seq=0, slot=3, flags=ON_DEVICE | PARTIAL),
        SaveAll(slot=4),
        wanted="save-again",
    )
    assert [op.again for op in ops if isinstance(op, Save | SaveAll)] == [True, True, False, False, True]


def test_restores_are_saved_again_and_now_and_then_made_twice() -> None:
    many = [Restore(seq=0, slot=0) for _ in range(9)] + [RestoreAll(slot=1)]
    for variety in range(5):
        ops = [op for op in seen(*many, wanted="resave", variety=variety) if isinstance(op, Restore | RestoreAll)]
        assert all(op.resave for op in ops)
        assert [op.times for op in ops] == [2 if (variety + i) % 5 == 0 else 1 for i in range(10)]
    thrice = seen(Restore(seq=0, slot=0, times=3), wanted="resave", variety=1)
    assert thrice == (Restore(seq=0, slot=0, times=3, resave=True),)


@pytest.mark.parametrize(
    "op",
    [SeqRm(seq=0), SeqAdd(seq=0, delta=1), SeqDiv(seq=0, d=2), Restore(seq=0, slot=0), SeqCp(src=0, dst=2)],
)
def test_a_neighbour_is_saved_before_and_after(op: AnyOp) -> None:
    ops = seen(A, B, op, wanted="neighbour-blobs", params=ContextParams(n_seq_max=3))
    assert ops == (A, B, AROUND[0], op, AROUND[1])


@pytest.mark.parametrize(
    "ops",
    [
        (A, SeqRm(seq=0)),  # nobody else has anything
        (A, B, SeqRm(seq=-1)),  # all are named
        (A, B, SeqCp(src=0, dst=1)),
        (A, B, Clear()),
        (A, B, SeqKeep(seq=0)),
        (A, B, RestoreAll(slot=0)),
        (SeqRm(seq=0), B),  # not yet
    ],
)
def test_no_neighbour_no_saves(ops: tuple[AnyOp, ...]) -> None:
    assert seen(*ops, wanted="neighbour-blobs") == ops


def test_a_draft_fills_a_sequence_too() -> None:
    ops = seen(A, Draft(seq=1, n=1), SeqRm(seq=0), wanted="neighbour-blobs")
    assert ops[2] == AROUND[0]


def test_what_is_beyond_the_context_is_no_neighbour() -> None:
    ops = (Decode(parts=(Part(seq=2, n=4),)), Reopen(params=ContextParams(n_seq_max=2)), A, SeqRm(seq=0))
    assert seen(*ops, wanted="neighbour-blobs", params=ContextParams(n_seq_max=3)) == ops


def test_generated_programs_stay_valid_and_whole() -> None:
    traits = traits_of(recipes.get("qwen35"))
    for i, s in enumerate(generate(scenarios(MODEL, traits), 2, 80)):
        o = observe(s, OBSERVATIONS, variety=i)
        assert [x for x in valid(o, traits) if x != "restore.partial-cut"] == []
        assert (o.model, o.params) == (s.model, s.params)
        kept = [
            op
            for op in o.ops
            if not (isinstance(op, Save) and op.slot >= NEIGHBOUR_SLOT)
            and not (isinstance(op, Draft) and op.stream >= CONTINUATION_STREAM)
        ]
        assert [type(op) for op in kept] == [type(op) for op in s.ops]
        assert observe(s, OBSERVATIONS, variety=i) == o
