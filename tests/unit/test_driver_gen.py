"""What the generator makes of drivers: valid programs, every operation and form for each pair, the same for a seed."""

from __future__ import annotations

import functools
from typing import get_args

import msgspec
import pytest

from fuzz.drivers.gen import programs, strategy
from fuzz.drivers.state import LONGEST, Rounds, broken, params_broken, valid
from fuzz.strategies import generate
from fuzz.traits import Traits, traits_of
from subjects import pairs, recipes
from subjects.driver_contracts import DRIVER_CONTRACTS, FORMS, forms_of
from subjects.scenario import (
    OP_TYPES,
    OPEN,
    PIECES,
    Accept,
    AnyOp,
    Ask,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Edge,
    Mangle,
    Mangling,
    ModelRef,
    Part,
    Propose,
    Reopen,
    Restore,
    Rewind,
    Route,
    Scenario,
    SeqRm,
    Verify,
    loads,
)
from subjects.scenario import dumps as dump

SLICE = 450
TAIL = Edge(at="end", d=-2)
MTP = DriverParams(kind="draft-mtp")
DENSE = Traits(memory="dense")
HYBRID = Traits(memory="hybrid", rollback=True)
WINDOW = Traits(memory="window", window=32)


def setting(name: str) -> tuple[ModelRef, DriverParams, Traits, int]:
    pair = pairs.get(name)
    traits = traits_of(recipes.get(pair.target))
    return ModelRef(recipe=pair.target), DriverParams(kind=pair.kind, n_max=pair.n_max), traits, pair.n_rs_seq


# the walk asks for no more of an ngram kind than how far it drafts (see test_kinds_of_one_walk)
SAME = {"llama-ngram-map-k4v": "llama-ngram-map-k", "llama-ngram-mod": "llama-ngram-map-k"}
SAME["llama-ngram-simple"] = "llama-ngram-map-k"


def like(name: str, found: list[Scenario]) -> list[Scenario]:
    """The same programs with the kind of driver of a pair."""
    replace, kind = msgspec.structs.replace, pairs.get(name).kind
    return [replace(s, driver=replace(s.driver, kind=kind)) for s in found if s.driver is not None]


@functools.cache
def made(name: str) -> list[Scenario]:
    """So many programs for a pair."""
    if name in SAME:
        return like(name, made(SAME[name]))
    return generate(programs(*setting(name)), 0, SLICE)


@pytest.mark.parametrize("name", SAME)
def test_kinds_of_one_walk(name: str) -> None:
    assert generate(programs(*setting(name)), 4, 20) == like(name, generate(programs(*setting(SAME[name])), 4, 20))


def impossible(name: str) -> set[str]:
    """Forms that the kind of driver or memory rules out."""
    pair = pairs.get(name)
    if pair.kind.startswith("ngram"):
        return {"propose: greedy token"}  # only a text that repeats itself says anything
    given = {"propose: given token", "decode: given tokens"}  # what is needed for that
    return given | ({"seq_rm: tail"} if recipes.get(pair.target).memory == "hybrid" else set())


@pytest.mark.parametrize("name", pairs.names())
def test_every_program_keeps_the_contract(name: str) -> None:
    _, base, traits, _ = setting(name)
    broken_ = [(valid(s, traits), dump(s)) for s in made(name) if valid(s, traits)]
    assert not broken_, broken_[0]
    assert len(made(name)) == SLICE
    for s in made(name):
        assert s.driver is not None
        assert (s.driver.kind, s.driver.impl, s.driver.draft) == (base.kind, base.impl, base.draft)
        assert 1 <= s.driver.n_max <= base.n_max
        assert 0 <= s.driver.n_min <= s.driver.n_max


@pytest.mark.parametrize("name", pairs.names())
def test_every_form_is_generated(name: str) -> None:
    _, _, traits, _ = setting(name)
    seen: set[str] = set()
    for s in made(name):
        assert s.driver is not None
        state = Rounds(traits, s.params, s.driver)
        for op in s.ops:
            tag = str(type(op).__struct_config__.tag)
            forms = forms_of(op, state)
            assert forms, op
            assert forms <= set(FORMS[tag]), (tag, forms - set(FORMS[tag]))
            seen |= {f"{tag}: {form}" for form in forms}
            state.apply(op)
    wanted = {f"{op}: {form}" for op, forms in FORMS.items() for form in forms}
    assert not impossible(name) - wanted
    assert not sorted(wanted - impossible(name) - seen)
    assert not sorted(seen & impossible(name))


def test_every_operation_of_drivers_has_forms() -> None:
    assert {c.op for c in DRIVER_CONTRACTS} | {"decode", "seq_rm", "reopen"} == set(FORMS)
    for op, forms in FORMS.items():
        assert forms, op
        assert len(set(forms)) == len(forms), op
    assert set(FORMS["mangle"]) == set(get_args(Mangling))
    assert set(get_args(Route)) <= set(FORMS["verify"])
    assert sum(f.partition("+")[0] in PIECES for f in FORMS["rewind"]) == 7
    # what a program with a driver may have is what has forms
    state = Rounds(DENSE, ContextParams(), MTP)
    no_operation = {t for t in OP_TYPES if broken(state, sample(t)) == ["no operation of a program with a driver"]}
    assert {str(t.__struct_config__.tag) for t in OP_TYPES if t not in no_operation} == set(FORMS)


def sample(kind: type) -> AnyOp:
    """Any operation of a type, its required fields filled with something."""
    fields: dict[str, object] = {"seq": 0, "slot": 0, "n": 1, "src": 0, "dst": 1, "delta": 1, "d": 2, "seqs": (0,)}
    fields |= {"parts": (Part(seq=0, n=1),), "how": "empty", "edits": (), "what": "size"}
    wanted = kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]  # type: ignore[attr-defined]
    return kind(**{f: fields[f] for f in wanted})  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["qwen35-mtp", "llama-ngram-mod"])
def test_a_seed_fixes_the_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = generate(programs(*setting(name)), 11, 60)
    monkeypatch.setenv("CI", "1")
    assert generate(strategy(*setting(name)), 11, 60) == first
    assert generate(programs(*setting(name)), 12, 60) != first


def test_few_programs_repeat_and_all_come_back_from_text() -> None:
    for name in ("qwen35-mtp", "llama-simple"):
        assert len({s.key() for s in made(name)}) > 0.9 * SLICE
    for s in made("step35-mtp")[:60]:
        assert loads(dump(s)) == s


def test_parameters_of_drivers_reach_their_boundaries() -> None:
    drivers = [s.driver for s in made("qwen35-mtp") if s.driver is not None]
    assert {d.n_max for d in drivers} == {1, 2, 3}
    assert {d.n_min for d in drivers} == {0, 1, 2, 3}
    assert {d.p_min for d in drivers} == {0.0, 0.2, 0.5, 0.8}
    assert {d.late for d in drivers} == {d.backend_sampling for d in drivers} == {False, True}
    assert {s.params.n_seq_max for s in made("qwen35-mtp")} == {1, 2, 3}
    assert {s.params.n_rs_seq for s in made("qwen35-mtp")} == {0, 1, 2, 3}
    assert {s.params.n_rs_seq for s in made("llama-simple")} == {0}
    # what a kind has no use for is left alone
    learns = [s.driver for s in made("llama-ngram-cache") if s.driver is not None]
    assert {(d.n_min, d.p_min, d.backend_sampling, d.late) for d in learns} == {(0, 0.0, False, False)}
    assert not any(s.driver and s.driver.backend_sampling for s in made("llama-simple"))


def test_programs_are_neither_stumps_nor_endless() -> None:
    for name in pairs.names():
        sizes = [len(s.ops) for s in made(name)]
        assert min(sizes) >= 2
        assert max(sizes) <= 40
        assert sum(n >= 6 for n in sizes) > 0.8 * SLICE


def test_every_program_ends_with_a_draft_of_all_that_lives() -> None:
    for s in made("qwen35-mtp"):
        assert s.driver is not None
        state = Rounds(HYBRID, s.params, s.driver)
        for op in s.ops:
            state.apply(op)
        assert not any(x.open for x in state.seqs)
        assert all(x.seeded for x in state.seqs if x.lo)


# --- the contract, by hand --------------------------------------------------------------------------------------------


def feed(n: int, seq: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n),))


ASK = Propose(seqs=(0,))
OPENED = (feed(4), ASK, Verify(seqs=(0,)))
SAVED = (feed(4), Checkpoint(seq=0, slot=0))
DEVICE = (feed(4), Checkpoint(seq=0, slot=0, flags=2))


@pytest.mark.parametrize(
    ("before", "op", "says"),
    [
        ((), feed(1, 2), "decode.ids"),
        ((), Decode(parts=()), "decode.not-empty"),
        ((), feed(0), "decode.not-empty"),
        ((), Decode(parts=(Part(seq=0, n=1), Part(seq=0, n=1))), "decode.not-empty"),
        ((), Decode(parts=(Part(seq=0, n=1),), abort_after=1), "decode.not-empty"),
        ((), feed(65), "decode.rows"),
        ((feed(64),), feed(LONGEST - 63), "decode.rows"),
        (OPENED, feed(1), "propose.answered"),
        ((feed(1),), Propose(seqs=(0, 2)), "propose.ids"),
        ((), ASK, "propose.once"),
        ((feed(1),), Propose(seqs=(0, 0)), "propose.once"),
        ((feed(1),), Propose(seqs=()), "propose.once"),
        (OPENED, ASK, "propose.answered"),
        ((feed(1),), Verify(seqs=(0,)), "verify.rows"),
        ((feed(1), ASK), Verify(seqs=(3,)), "verify.ids"),
        ((feed(1), ASK), Verify(seqs=(0,), accept=(1, 1)), "verify.count"),
        (OPENED, Verify(seqs=(0,)), "verify.rows"),
        ((*DEVICE, ASK), Verify(seqs=(0,), accept=(1,), route="device"), "checkpoint.device"),
        ((feed(1), ASK), Accept(seq=0, n=1), "accept.open"),
        (OPENED, Accept(seq=0, n=-1), "accept.open"),
        ((), Checkpoint(seq=0, slot=0), "checkpoint.ids"),
        ((feed(1),), Checkpoint(seq=0, slot=0, flags=4), "checkpoint.ids"),
        (DEVICE, Checkpoint(seq=0, slot=1, flags=3), "checkpoint.device"),
        (SAVED, Rewind(seq=2, slot=0), "rewind.ids"),
        (SAVED, Rewind(seq=0, slot=1), "rewind.slot"),
        ((*SAVED, Mangle(slot=0, how="long")), Rewind(seq=0, slot=0), "rewind.slot"),
        (DEVICE, Rewind(seq=1, slot=0), "rewind.slot"),
        ((*DEVICE, Reopen()), Rewind(seq=0, slot=0), "rewind.slot"),
        ((*OPENED, Checkpoint(seq=0, slot=0)), Rewind(seq=0, slot=0, parts=("target",)), "rewind.slot"),
        ((*OPENED, Checkpoint(seq=0, slot=0)), Rewind(seq=1, slot=0), "rewind.slot"),
        ((*OPENED, Checkpoint(seq=0, slot=0), Reopen()), Rewind(seq=0, slot=0), "rewind.slot"),
        ((feed(1),), Mangle(slot=0, how="long"), "mangle.slot"),
        ((), Begin(seq=-1), "begin.ids"),
        (OPENED, SeqRm(seq=0), "seq_rm.ids"),
        ((), SeqRm(seq=-1), "seq_rm.ids"),
        ((), Reopen(params=ContextParams(n_batch=3, n_ubatch=3)), "verify.rows"),
        ((), Restore(seq=0, slot=0), "no operation of a program with a driver"),
        ((), Ask(what="size"), "no operation of a program with a driver"),
    ],
)
def test_what_breaks_the_contract(before: tuple[AnyOp, ...], op: AnyOp, says: str) -> None:
    s = Scenario(model=ModelRef(recipe="llama"), driver=MTP, ops=before)
    assert valid(s, DENSE) == []
    assert valid(Scenario(model=s.model, driver=MTP, ops=(*before, op)), DENSE) == [says]


@pytest.mark.parametrize(
    ("traits", "n_rs", "ops", "says"),
    [
        (DENSE, 0, (Verify(seqs=(0,), accept=(1,)),), []),
        (HYBRID, 3, (Verify(seqs=(0,), accept=(1,)),), []),
        (HYBRID, 0, (Verify(seqs=(0,), accept=(1,)),), ["verify.route"]),
        (HYBRID, 0, (Verify(seqs=(0,), accept=(-1,)),), ["verify.route"]),
        (HYBRID, 0, (Verify(seqs=(0,), accept=(3,)),), []),
        (HYBRID, 0, (Verify(seqs=(0,), accept=(1,), route="host"),), []),
        (HYBRID, 0, (Verify(seqs=(0,)), Accept(seq=0, n=3)), []),
        (HYBRID, 0, (Verify(seqs=(0,)), Accept(seq=0, n=2)), ["verify.route"]),
        (HYBRID, 3, (Verify(seqs=(0,)), Accept(seq=0, n=2)), []),
        # the planes of earlier states are those of the last decode, whosever it was
        (HYBRID, 3, (Verify(seqs=(0,)), feed(1, 1), Accept(seq=0, n=2)), ["verify.route"]),
        (HYBRID, 3, (Verify(seqs=(0,)), feed(1, 1), Accept(seq=0, n=3)), []),
        (DENSE, 0, (Verify(seqs=(0,)), feed(1, 1), Accept(seq=0, n=2)), []),
        (HYBRID, 3, (SeqRm(seq=0, lo=TAIL, hi=OPEN),), ["verify.route"]),
        (DENSE, 0, (SeqRm(seq=0, lo=TAIL, hi=OPEN),), []),
        # a partial state wants the rest to be there still
        (WINDOW, 0, (Checkpoint(seq=0, slot=0, flags=1), feed(3), Rewind(seq=0, slot=0)), []),
        (WINDOW, 0, (Checkpoint(seq=0, slot=0, flags=1), Rewind(seq=1, slot=0)), ["rewind.prefix"]),
        (WINDOW, 0, (Checkpoint(seq=0, slot=0, flags=1), SeqRm(seq=0), Rewind(seq=0, slot=0)), ["rewind.prefix"]),
        (
            WINDOW,
            0,
            (Checkpoint(seq=0, slot=0, flags=1), SeqRm(seq=0, lo=TAIL), Rewind(seq=0, slot=0)),
            ["rewind.prefix"],
        ),
        (WINDOW, 0, (Checkpoint(seq=0, slot=0, flags=1), Rewind(seq=1, slot=0, parts=("driver",))), []),
        (DENSE, 0, (Checkpoint(seq=0, slot=0, flags=1), Rewind(seq=1, slot=0)), []),
    ],
)
def test_what_memory_allows(traits: Traits, n_rs: int, ops: tuple[AnyOp, ...], says: list[str]) -> None:
    s = Scenario(
        model=ModelRef(recipe="llama"), params=ContextParams(n_rs_seq=n_rs), driver=MTP, ops=(feed(8), ASK, *ops)
    )
    assert valid(s, traits) == says


@pytest.mark.parametrize(
    ("params", "traits", "says"),
    [
        (ContextParams(n_batch=4, n_ubatch=4), DENSE, []),
        (ContextParams(n_batch=3, n_ubatch=3), DENSE, ["verify.rows"]),
        (ContextParams(n_batch=8, n_ubatch=2), DENSE, []),
        (ContextParams(n_batch=8, n_ubatch=3), HYBRID, ["verify.rows"]),
        (ContextParams(n_batch=8, n_ubatch=4, n_rs_seq=3), HYBRID, ["verify.rows"]),
        (ContextParams(n_batch=8, n_ubatch=5, n_rs_seq=3), HYBRID, []),
        (ContextParams(n_batch=8, n_ubatch=16), DENSE, ["verify.rows"]),
    ],
)
def test_a_draft_fits_into_a_batch(params: ContextParams, traits: Traits, says: list[str]) -> None:
    assert params_broken(params, MTP, traits) == says
    assert valid(Scenario(model=ModelRef(recipe="llama"), params=params, driver=MTP, ops=()), traits) == says


def state_after(*ops: AnyOp) -> Rounds:
    state = Rounds(DENSE, ContextParams(n_ubatch=8), MTP)
    for op in ops:
        assert broken(state, op) == []
        state.apply(op)
    return state


BOTH = (feed(4), feed(4, 1))


@pytest.mark.parametrize(
    ("before", "op", "forms"),
    [
        (
            (),
            feed(9),
            {"one sequence", "outputs last", "tokens of a stream", "onto an empty sequence", "above n_ubatch"},
        ),
        (
            (feed(1), ASK),
            Decode(parts=(Part(seq=0, n=1, tokens=(5,), out="all"), Part(seq=1, n=1))),
            {
                "2 sequences",
                "outputs all",
                "outputs last",
                "given tokens",
                "tokens of a stream",
                "behind other tokens",
                "onto an empty sequence",
                "draft thrown away",
            },
        ),
        ((feed(1),), ASK, {"one sequence", "next token of a stream", "unlimited"}),
        (
            (*BOTH, ASK),
            Propose(seqs=(1, 0), stream=-1, n_max=2),
            {"several sequences", "greedy token", "limited", "drafted already"},
        ),
        ((feed(1),), Propose(seqs=(0,), last=(3,)), {"one sequence", "given token", "unlimited"}),
        ((feed(1), ASK), Verify(seqs=(0,)), {"one sequence", "left open"}),
        (
            (*BOTH, Propose(seqs=(0, 1))),
            Verify(seqs=(0, 1), accept=(0, -1), route="whole"),
            {"several sequences", "whole", "accept none", "accept greedily"},
        ),
        # sequence 1 has no draft, and what is asked of it does not count
        ((*BOTH, ASK), Verify(seqs=(0, 1), accept=(2, 3)), {"one sequence", "cut", "accept some"}),
        ((*BOTH, ASK), Verify(seqs=(0,), accept=(3,)), {"one sequence", "cut", "accept all"}),
        (OPENED, Accept(seq=0, n=0), {"none", "at once"}),
        ((*OPENED, feed(1, 1)), Accept(seq=0, n=1), {"some", "after other work"}),
        ((*OPENED, Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0)), Accept(seq=0, n=9), {"all", "after other work"}),
        ((feed(1),), Checkpoint(seq=0, slot=0, flags=3), {"flags 3"}),
        ((feed(1), ASK), Checkpoint(seq=0, slot=0), {"flags 0", "draft waiting"}),
        (OPENED, Checkpoint(seq=0, slot=0), {"flags 0", "verification open"}),
        (SAVED, Rewind(seq=0, slot=0), {"target+draft+driver", "flags 0", "same sequence"}),
        (
            SAVED,
            Rewind(seq=1, slot=0, parts=("driver", "target")),
            {"target+driver", "flags 0", "other sequence", "onto an empty sequence"},
        ),
        (
            (*SAVED, Mangle(slot=0, how="huge"), Reopen()),
            Rewind(seq=0, slot=0, parts=("driver",)),
            {"driver", "flags 0", "same sequence", "onto an empty sequence", "after reopen", "malformed"},
        ),
        (
            (*OPENED, Checkpoint(seq=0, slot=0, flags=1)),
            Rewind(seq=0, slot=0),
            {"target+draft+driver", "flags 1", "same sequence", "verification open"},
        ),
        (SAVED, Mangle(slot=0, how="width"), {"width"}),
        ((feed(1),), Begin(seq=0), {"goes on"}),
        ((feed(4), SeqRm(seq=0, lo=TAIL)), Begin(seq=0), {"after a cut or restore"}),
        ((*SAVED, Rewind(seq=0, slot=0)), Begin(seq=0), {"after a cut or restore"}),
        ((feed(4), SeqRm(seq=0), Begin(seq=0)), Begin(seq=0), {"goes on"}),
        ((feed(4),), SeqRm(seq=0), {"whole"}),
        ((feed(4),), SeqRm(seq=0, lo=TAIL), {"tail"}),
        ((), Reopen(), {"same parameters"}),
        ((), Reopen(params=ContextParams(n_ubatch=8)), {"same parameters"}),
        ((), Reopen(params=ContextParams()), {"other parameters"}),
    ],
)
def test_forms_by_hand(before: tuple[AnyOp, ...], op: AnyOp, forms: set[str]) -> None:
    assert forms_of(op, state_after(*before)) == forms
    assert forms <= set(FORMS[str(type(op).__struct_config__.tag)])


def test_lengths_are_bounds_where_only_the_run_knows() -> None:
    def bounds(*ops: AnyOp, **driver: float) -> tuple[int, int]:
        d = DriverParams(kind="draft-mtp", **driver)  # type: ignore[arg-type]
        state = Rounds(DENSE, ContextParams(), d)
        for op in (feed(4), ASK, *ops):
            state.apply(op)
        return state.seqs[0].lo, state.seqs[0].hi

    assert bounds(Verify(seqs=(0,), accept=(2,))) == (7, 7)
    assert bounds(Verify(seqs=(0,), accept=(9,))) == (8, 8)
    assert bounds(Verify(seqs=(0,), accept=(-1,))) == (5, 8)
    assert bounds(Verify(seqs=(0,), accept=(2,)), p_min=0.5) == (5, 7), "a draft may be shorter"
    assert bounds(Verify(seqs=(0,), accept=(2,)), n_min=2) == (5, 7)
    assert bounds(Verify(seqs=(0,)), Accept(seq=0, n=2)) == (5, 7)
    assert bounds(Verify(seqs=(0,))) == (4, 4), "nothing is taken yet"
    assert bounds(Checkpoint(seq=0, slot=0), feed(9), Rewind(seq=0, slot=0)) == (4, 4)
    assert bounds(Checkpoint(seq=0, slot=0), feed(9), Rewind(seq=0, slot=0, parts=("draft", "driver"))) == (13, 13)
    assert bounds(SeqRm(seq=0, lo=TAIL)) == (2, 2)
    assert bounds(SeqRm(seq=0, lo=Edge(at="end", d=-9))) == (0, 0)
    assert bounds(SeqRm(seq=0)) == (0, 0)
    assert bounds(Reopen()) == (0, 0)
