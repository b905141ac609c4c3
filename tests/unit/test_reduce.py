"""Reduction with predicates in plain Python: minimal forms, and what is promised at a deadline."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from fakes import MODEL

from fuzz import reduce as reducer
from fuzz.drivers.gen import programs
from fuzz.reduce import Reduction, _sequences, reduce
from fuzz.state import traits_of, valid
from fuzz.strategies import generate, scenarios
from subjects import pairs, recipes
from subjects.scenario import (
    ON_DEVICE,
    OPEN,
    Accept,
    AnyOp,
    Ask,
    Begin,
    BlobEdit,
    Checkpoint,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    DriverParams,
    Edge,
    Mangle,
    Part,
    Propose,
    Reopen,
    Restore,
    Rewind,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
    Verify,
    dumps,
    loads,
)

RICH = ContextParams(
    n_batch=32, n_ubatch=8, n_seq_max=4, n_rs_seq=3, kv_unified=True, type_k="f16", n_threads=2, embeddings=True
)


def program(*ops: AnyOp, params: ContextParams = RICH) -> Scenario:
    return Scenario(model=MODEL, params=params, ops=ops)


BIG = program(
    Decode(parts=(Part(seq=2, n=17, stream=3, out="all"), Part(seq=3, n=5, stream=1)), interleave=True),
    Save(seq=3, slot=7, flags=3, again=True),
    Ask(what="size_all", seq=2),
    SeqCp(src=2, dst=1, lo=Edge(at="start", d=2), hi=Edge(at="end", d=-3)),
    Draft(seq=3, n=6, stream=2),
    SeqKeep(seq=3),
    Corrupt(slot=7, edits=(BlobEdit(how="flip", nth=900, value=4), BlobEdit(how="insert", nth=1000, value=9))),
    Save(seq=3, slot=9, medium="file"),
    SeqAdd(seq=3, delta=5, lo=Edge(at="start", d=4)),
    Restore(seq=3, slot=9, times=3, resave=True),
    Reopen(params=ContextParams(n_seq_max=3, type_k="f16")),
    SeqRm(seq=3, lo=Edge(at="end", d=-9), hi=Edge(at="end", d=2)),
    Clear(data=False),
    Decode(parts=(Part(seq=3, n=12, stream=1, out="none"),), abort_after=4),
)


def pair(s: Scenario) -> bool:
    """A save and, after it, a restore of the same slot."""
    saved = set()
    for op in s.ops:
        if isinstance(op, Save):
            saved.add(op.slot)
        if isinstance(op, Restore) and op.slot in saved:
            return True
    return False


def has(kind: type, **fields: object) -> Callable[[Scenario], bool]:
    return lambda s: any(isinstance(op, kind) and all(getattr(op, k) == v for k, v in fields.items()) for op in s.ops)


PLAIN = ContextParams()


@pytest.mark.parametrize(
    ("holds", "ops", "params"),
    [
        (pair, (Save(seq=0, slot=0), Restore(seq=0, slot=0)), PLAIN),
        (lambda s: bool(s.ops), None, PLAIN),
        (has(Save, medium="file"), (Save(seq=0, slot=0, medium="file"),), PLAIN),
        (has(Save, flags=3), (Save(seq=0, slot=0, flags=3),), PLAIN),
        (
            lambda s: any(isinstance(op, Save) and op.flags & ON_DEVICE for op in s.ops),
            (Save(seq=0, slot=0, flags=ON_DEVICE),),
            PLAIN,
        ),
        (has(Restore, times=3), (Restore(seq=0, slot=0, times=3),), PLAIN),
        (has(SeqRm), (SeqRm(seq=0),), PLAIN),
        (
            lambda s: any(isinstance(op, SeqRm) and op.lo.at == "end" for op in s.ops),
            (SeqRm(seq=0, lo=Edge(at="end"), hi=OPEN),),
            PLAIN,
        ),
        (
            lambda s: any(isinstance(op, SeqRm) and op.lo.at == "end" and op.lo.d < -2 for op in s.ops),
            (SeqRm(seq=0, lo=Edge(at="end", d=-3), hi=OPEN),),
            PLAIN,
        ),
        (has(SeqAdd), (SeqAdd(seq=0, delta=1),), PLAIN),
        (has(Decode, abort_after=0), None, PLAIN),
        (has(Reopen), (Reopen(),), PLAIN),
        (
            lambda s: any(isinstance(op, Decode) and sum(p.n for p in op.parts) > 8 for op in s.ops),
            (Decode(parts=(Part(seq=0, n=9),)),),
            PLAIN,
        ),
        (
            lambda s: any(isinstance(op, Decode) and len(op.parts) == 2 for op in s.ops),
            (Decode(parts=(Part(seq=0, n=1), Part(seq=1, n=1))),),
            PLAIN,
        ),
        (has(Decode, interleave=True), (Decode(parts=(Part(seq=0, n=1),), interleave=True),), PLAIN),
        (has(Draft), (Draft(seq=0, n=1),), PLAIN),
        (
            lambda s: s.params.n_rs_seq > 1 and has(Clear)(s),
            (Clear(data=False),),
            ContextParams(n_rs_seq=2),
        ),
        (
            lambda s: s.params.kv_unified and s.params.type_k == "f16" and has(Clear)(s),
            (Clear(data=False),),
            ContextParams(kv_unified=True, type_k="f16", n_seq_max=1),  # the fewest, once they are not the default
        ),
        (lambda s: s.params.n_seq_max >= 3 and has(Clear)(s), (Clear(data=False),), ContextParams(n_seq_max=3)),
        (has(Corrupt), (Corrupt(slot=0, edits=(BlobEdit(how="insert"),)),), PLAIN),
    ],
)
def test_minimal_forms(holds: Callable[[Scenario], bool], ops: tuple[AnyOp, ...] | None, params: ContextParams) -> None:
    start = BIG
    if holds(BIG) is False:
        start = program(*BIG.ops[:-1], Decode(parts=(Part(seq=3, n=12),), abort_after=0))
    assert holds(start)
    result = reduce(start, holds)
    assert result.complete
    assert holds(result.scenario)
    assert result.scenario.params == params
    if ops is None:
        assert len(result.scenario.ops) == 1
    else:
        assert result.scenario.ops == ops
    assert result.kept > 0
    assert result.tried >= result.kept


def test_the_reduced_program_is_its_own_reduction() -> None:
    once = reduce(BIG, pair).scenario
    again = reduce(once, pair)
    assert again.scenario == once
    assert again.kept == 0


def test_it_is_deterministic() -> None:
    def holds(s: Scenario) -> bool:
        return len(s.ops) >= 3 and pair(s) and len({type(op) for op in s.ops}) >= 3

    runs: list[list[str]] = []
    for _ in range(2):
        seen: list[str] = []

        def noted(s: Scenario, seen: list[str] = seen) -> bool:
            seen.append(s.key())
            return holds(s)

        runs.append([reduce(BIG, noted).scenario.key(), *seen])
    assert runs[0] == runs[1]


def test_nothing_is_run_twice_and_the_empty_program_never() -> None:
    seen: list[Scenario] = []

    def holds(s: Scenario) -> bool:
        seen.append(s)
        return pair(s)

    result = reduce(BIG, holds)
    keys = [s.key() for s in seen]
    assert len(keys) == len(set(keys)) == result.tried
    assert BIG.key() not in keys
    assert all(s.ops for s in seen)
    everything = reduce(BIG, lambda _: True)
    assert len(everything.scenario.ops) == 1


def holds_only(results: list[Scenario], holds: Callable[[Scenario], bool]) -> Callable[[Scenario], bool]:
    def checked(s: Scenario) -> bool:
        if holds(s):
            results.append(s)
            return True
        return False

    return checked


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_the_result_always_holds_and_is_never_larger(name: str) -> None:
    traits = traits_of(recipes.get(name))
    for s in generate(scenarios(MODEL, traits), 9, 60):
        kinds = sorted({type(op).__name__ for op in s.ops})[:2]

        def holds(x: Scenario, kinds: list[str] = kinds) -> bool:
            return set(kinds) <= {type(op).__name__ for op in x.ops}

        good: list[Scenario] = []
        result = reduce(s, holds_only(good, holds))
        assert holds(result.scenario)
        assert result.scenario == (good[-1] if good else s)
        assert len(result.scenario.ops) == len(kinds)
        assert result.complete


def test_no_time_keeps_the_program_as_it_is() -> None:
    result = reduce(BIG, pair, seconds=-1.0)
    assert result == Reduction(BIG, tried=0, kept=0, complete=False)


def test_at_the_deadline_the_best_so_far_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

    monkeypatch.setattr(reducer, "time", Clock)
    good: list[Scenario] = []

    def slow(s: Scenario) -> bool:
        Clock.now += 1.0
        return holds_only(good, pair)(s)

    result = reduce(BIG, slow, seconds=6.0)
    assert not result.complete
    assert 6 <= result.tried <= 8
    assert result.scenario == good[-1]
    assert pair(result.scenario)
    assert len(result.scenario.ops) < len(BIG.ops)


def test_it_stops_when_it_is_told_to() -> None:
    tried: list[Scenario] = []

    def holds(s: Scenario) -> bool:
        tried.append(s)
        return pair(s)

    result = reduce(BIG, holds, stop=lambda: len(tried) >= 4)
    assert not result.complete
    assert len(tried) == 4
    assert pair(result.scenario)
    assert reduce(BIG, pair, stop=lambda: True).scenario == BIG


def test_a_predicate_that_never_holds_leaves_the_program_alone() -> None:
    result = reduce(BIG, lambda _: False)
    assert result.scenario == BIG
    assert result.kept == 0
    assert result.tried > 50
    assert result.complete


def test_an_error_in_the_predicate_is_not_hidden() -> None:
    def broken(_: Scenario) -> bool:
        raise RuntimeError("the sandbox is gone")

    with pytest.raises(RuntimeError):
        reduce(BIG, broken)


def test_sequences_and_slots_get_low_numbers_all_at_once() -> None:
    def holds(s: Scenario) -> bool:
        """A copy, and a removal of its destination; and a slot other than the first."""
        copies = [op.dst for op in s.ops if isinstance(op, SeqCp)]
        slots = {op.slot for op in s.ops if isinstance(op, Save | SaveAll)}
        return bool(copies) and any(isinstance(op, SeqRm) and op.seq == copies[0] for op in s.ops) and len(slots) == 2

    start = program(Save(seq=3, slot=5), SaveAll(slot=9), SeqCp(src=3, dst=1), SeqRm(seq=1))
    result = reduce(start, holds).scenario
    assert len(result.ops) == 4
    assert sorted(op.slot for op in result.ops if isinstance(op, Save | SaveAll)) == [0, 1]
    assert {x for op in result.ops for x in reducer._ids(op)} <= {0, 1}


def test_every_operation_of_a_sequence_is_renamed_with_it() -> None:
    for op in (SeqDiv(seq=1, d=2), Ask(what="size", seq=1), Ask(what="positions", seq=1)):
        program = Scenario(model=MODEL, ops=(Decode(parts=(Part(seq=1, n=1),)), op))
        renamed = [s for s in _sequences(program) if s.ops[0] == Decode(parts=(Part(seq=0, n=1),))]
        assert [s.ops[1] for s in renamed] == [msgspec.structs.replace(op, seq=0)], op
    # a query that asks for no sequence is none that is in use
    program = Scenario(model=MODEL, ops=(Decode(parts=(Part(seq=1, n=1),)), Ask(what="can_shift")))
    assert any(s.ops[0] == Decode(parts=(Part(seq=0, n=1),)) for s in _sequences(program))


# --- with a driver ----------------------------------------------------------------------------------------------------

DRIVER = DriverParams(kind="draft-mtp", n_max=4, n_min=1, p_min=0.5, backend_sampling=True, late=True)
DRIVEN = msgspec.structs.replace(
    program(
        Decode(parts=(Part(seq=2, n=17, stream=3, out="all"), Part(seq=1, n=5, stream=1))),
        Propose(seqs=(2, 1), stream=2, n_max=2, last=(5, 6)),
        Verify(seqs=(2, 1), accept=(2, 1), route="host"),
        Checkpoint(seq=2, slot=7, flags=3),
        Decode(parts=(Part(seq=2, n=4),)),
        Propose(seqs=(2,)),
        Verify(seqs=(2,)),
        Accept(seq=2, n=3),
        Begin(seq=1),
        Mangle(slot=7, how="huge"),
        Rewind(seq=2, slot=7, parts=("driver", "target")),
        SeqRm(seq=1, lo=Edge(at="end", d=-3)),
        Reopen(params=ContextParams(n_seq_max=3)),
    ),
    driver=DRIVER,
)


def candidates(s: Scenario) -> list[Scenario]:
    """All simplifications of a program, drops aside."""
    return [c for make in (reducer._params, _sequences, reducer._operations) for c in make(s)]


def test_every_candidate_differs_and_is_well_formed() -> None:
    made = candidates(DRIVEN)
    assert len(made) > 40
    for c in made:
        assert c != DRIVEN
        assert c.key() != DRIVEN.key()
        assert loads(dumps(c)) == c
        assert c.driver is not None
        assert (c.driver.kind, c.driver.draft, c.driver.impl) == (DRIVER.kind, DRIVER.draft, DRIVER.impl)
        assert 0 < c.driver.n_max <= DRIVER.n_max
        for op in c.ops:
            if isinstance(op, Propose | Verify):
                assert op.seqs
                assert len(set(op.seqs)) == len(op.seqs)
            if isinstance(op, Propose):
                assert op.last is None or len(op.last) == len(op.seqs)
            if isinstance(op, Verify):
                assert len(op.accept) in (0, len(op.seqs))
            if isinstance(op, Rewind):
                assert op.parts
    kinds = {type(a) for c in made for a, b in zip(c.ops, DRIVEN.ops, strict=True) if a != b}
    assert kinds == {Decode, Propose, Verify, Checkpoint, Accept, Begin, Mangle, Rewind, SeqRm, Reopen}


def test_a_drivers_parameters_become_the_defaults_one_by_one() -> None:
    plain = DriverParams(kind="draft-mtp", n_max=1)
    assert reduce(DRIVEN, lambda s: bool(s.ops)).scenario.driver == plain
    for field in ("n_min", "p_min", "backend_sampling", "late"):
        kept = reduce(DRIVEN, lambda s, f=field: getattr(s.driver, f) == getattr(DRIVER, f))  # type: ignore[misc]
        assert kept.scenario.driver == msgspec.structs.replace(plain, **{field: getattr(DRIVER, field)})
    long = reduce(DRIVEN, lambda s: s.driver is not None and s.driver.n_max >= 3)
    assert long.scenario.driver == msgspec.structs.replace(plain, n_max=3)


def test_drafts_of_an_ngram_kind_become_shorter_with_what_their_callers_are_told() -> None:
    for kind, n in (("ngram-mod", 4), ("ngram-cache", 8)):
        driver = DriverParams(kind=kind, n_max=n)  # type: ignore[arg-type]
        shorter = [s.driver for s in candidates(msgspec.structs.replace(DRIVEN, driver=driver)) if s.driver != driver]
        assert all(d is not None and d.n_max == d.ngram_m for d in shorter)
        assert {d.n_max for d in shorter if d is not None} == ({1, 2, 3} if kind == "ngram-mod" else set())


def test_of_a_malformed_state_the_first_number_is_the_simplest() -> None:
    mangle = Mangle(slot=0, how="huge", at=6)
    s = msgspec.structs.replace(DRIVEN, ops=(mangle,))
    assert reduce(s, has(Mangle)).scenario.ops == (Mangle(slot=0, how="huge"),)
    assert reduce(s, has(Mangle, at=6)).scenario.ops == (mangle,)


@pytest.mark.parametrize(
    ("holds", "ops"),
    [
        (has(Propose), (Propose(seqs=(0,)),)),
        (
            lambda s: any(isinstance(op, Propose) and len(op.seqs) == 2 for op in s.ops),
            (Propose(seqs=(1, 0), last=(5, 6)),),
        ),
        (has(Propose, n_max=2), (Propose(seqs=(0,), n_max=2, last=(6,)),)),
        (has(Verify), (Verify(seqs=(0,), accept=(0,)),)),
        (has(Verify, route="host"), (Verify(seqs=(0,), accept=(0,), route="host"),)),
        (
            lambda s: any(isinstance(op, Verify) and 1 in op.accept for op in s.ops),
            (Verify(seqs=(0,), accept=(1,)),),
        ),
        (has(Accept), (Accept(seq=0, n=0),)),
        (lambda s: any(isinstance(op, Accept) and op.n >= 2 for op in s.ops), (Accept(seq=0, n=2),)),
        (has(Checkpoint), (Checkpoint(seq=0, slot=0),)),
        (has(Checkpoint, flags=3), (Checkpoint(seq=0, slot=0, flags=3),)),
        (has(Rewind), (Rewind(seq=0, slot=0),)),
        (has(Rewind, parts=("driver", "target")), (Rewind(seq=0, slot=0, parts=("driver", "target")),)),
        (has(Mangle), (Mangle(slot=0, how="huge"),)),
        (has(Begin), (Begin(seq=0),)),
    ],
)
def test_minimal_forms_with_a_driver(holds: Callable[[Scenario], bool], ops: tuple[AnyOp, ...]) -> None:
    result = reduce(DRIVEN, holds)
    assert result.complete
    found = result.scenario.ops
    if isinstance(ops[0], Propose) and ops[0].last is None:
        found = tuple(msgspec.structs.replace(op, last=None) if isinstance(op, Propose) else op for op in found)
    assert found == ops
    assert result.scenario.params == PLAIN
    assert reduce(result.scenario, holds).kept == 0


def test_a_verification_becomes_a_decode_where_that_shows_it_too() -> None:
    result = reduce(DRIVEN, lambda s: any(isinstance(op, Verify | Decode) for op in s.ops))
    assert result.scenario.ops == (Decode(parts=(Part(seq=0, n=1),)),)


def test_checkpoints_and_rounds_are_renamed_together() -> None:
    def holds(s: Scenario) -> bool:
        """A checkpoint, a rewind of its slot and sequence, and a draft of it."""
        saved = {(op.slot, op.seq) for op in s.ops if isinstance(op, Checkpoint)}
        return any(
            isinstance(op, Rewind)
            and (op.slot, op.seq) in saved
            and any(isinstance(d, Propose) and op.seq in d.seqs for d in s.ops)
            for op in s.ops
        )

    assert holds(DRIVEN)
    result = reduce(DRIVEN, holds).scenario
    assert sorted(type(op).__name__ for op in result.ops) == ["Checkpoint", "Propose", "Rewind"]
    assert {x for op in result.ops for x in reducer._ids(op)} == {0}
    assert {op.slot for op in result.ops if isinstance(op, Checkpoint | Rewind)} == {0}


@pytest.mark.parametrize("name", ["qwen35-mtp", "llama-ngram-map-k"])
def test_reductions_of_generated_programs_with_a_driver_hold(name: str) -> None:
    pair_ = pairs.get(name)
    traits = traits_of(recipes.get(pair_.target))
    base = DriverParams(kind=pair_.kind, n_max=pair_.n_max)
    for s in generate(programs(MODEL, base, traits, pair_.n_rs_seq), 9, 15):
        kinds = sorted({type(op).__name__ for op in s.ops})[:2]

        def holds(x: Scenario, kinds: list[str] = kinds) -> bool:
            return not valid(x, traits) and set(kinds) <= {type(op).__name__ for op in x.ops}

        good: list[Scenario] = []
        result = reduce(s, holds_only(good, holds))
        assert result.scenario == (good[-1] if good else s)
        assert len(result.scenario.ops) <= len(s.ops)
        for c in candidates(result.scenario):
            assert c != result.scenario
            assert not holds(c)
