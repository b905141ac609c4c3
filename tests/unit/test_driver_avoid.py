"""Avoidances of drivers: each sees its trigger, stays silent beside it, and leaves none in a program."""

from __future__ import annotations

import functools
import json

import pytest

from fuzz.avoid import AVOIDANCES, Avoider, triggered
from fuzz.drivers.avoid import DRIVER_AVOIDANCES, repair
from fuzz.drivers.avoid import triggered as driver_triggered
from fuzz.drivers.gen import programs
from fuzz.drivers.state import valid
from fuzz.known import FOLDER, load_all, match, scenario_of
from fuzz.strategies import generate
from fuzz.traits import Traits, traits_of
from subjects import pairs, recipes
from subjects.scenario import (
    OPEN,
    Accept,
    AnyOp,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverKind,
    DriverParams,
    Edge,
    Mangle,
    ModelRef,
    Part,
    Propose,
    Rewind,
    Save,
    Scenario,
    SeqRm,
    Verify,
)

DENSE = Traits(memory="dense")
HYBRID = Traits(memory="hybrid", rollback=True)
EAGLE3, MTP, MAP = "draft-eagle3", "draft-mtp", "ngram-map-k"
ASK = Propose(seqs=(0,))
TAIL = SeqRm(seq=0, lo=Edge(at="end", d=-2), hi=OPEN)


def feed(n: int, seq: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n),))


def program(kind: DriverKind, *ops: AnyOp, **driver: object) -> Scenario:
    return Scenario(
        model=ModelRef(recipe="llama"),
        params=ContextParams(n_rs_seq=3),
        driver=DriverParams(kind=kind, **driver),  # type: ignore[arg-type]
        ops=ops,
    )


SAVED = (feed(8), Checkpoint(seq=0, slot=0))
RW = Rewind(seq=0, slot=0)
OPENED = (feed(8), ASK, Verify(seqs=(0,)), Checkpoint(seq=0, slot=0))
TAKEN = Verify(seqs=(0,), accept=(1,))
ALL = Verify(seqs=(0,), accept=(3,))
HOST = Verify(seqs=(0,), accept=(1,), route="host")
BOTH = (feed(4), feed(4, 1))


@pytest.mark.parametrize(
    ("name", "traits", "scenario", "at"),
    [
        ("driver-unoffered", DENSE, program(MTP, *SAVED, RW, ASK), 2),
        ("driver-unoffered", DENSE, program(MTP, *SAVED, Rewind(seq=1, slot=0, parts=("draft",)), ASK), 2),
        ("driver-unoffered", DENSE, program(EAGLE3, *SAVED, RW), 2),
        ("driver-unoffered", DENSE, program("ngram-mod", *SAVED, RW), 2),
        ("driver-unoffered", HYBRID, program(MTP, feed(8), ASK, HOST), 2),
        ("driver-cut", DENSE, program(MTP, feed(8), TAIL, ASK), 1),
        ("driver-fresh", DENSE, program(MTP, feed(8), SeqRm(seq=0), feed(3)), 1),
        ("driver-fresh", DENSE, program("ngram-cache", feed(8), SeqRm(seq=0), feed(3)), 1),
        ("driver-mangled", DENSE, program(MTP, *SAVED, Mangle(slot=0, how="long"), RW), 2),
        ("eagle3-bridge", HYBRID, program(EAGLE3, feed(8), feed(3)), 1),
        ("eagle3-bridge", HYBRID, program(EAGLE3, feed(8), ASK, ALL, feed(3)), 3),
        ("eagle3-undrafted", HYBRID, program(EAGLE3, feed(8), ASK, TAKEN, feed(3)), 3),
        ("eagle3-undrafted", HYBRID, program(EAGLE3, *OPENED, Accept(seq=0, n=1), feed(3)), 5),
        ("eagle3-backend", HYBRID, program(EAGLE3, *BOTH, Propose(seqs=(0, 1)), backend_sampling=True), 2),
        ("eagle3-open", HYBRID, program(EAGLE3, *OPENED, Accept(seq=0, n=3), RW), 5),
        ("ngram-begin", DENSE, program(MAP, feed(8), TAIL, ASK), 2),
        ("ngram-begin", DENSE, program("ngram-map-k4v", *SAVED, RW, ASK), 3),
    ],
)
def test_a_trigger_is_seen_and_repaired(name: str, traits: Traits, scenario: Scenario, at: int) -> None:
    assert driver_triggered(name, scenario, traits) == triggered(name, scenario, traits) == at
    repaired = repair(scenario, traits, (name,))
    assert driver_triggered(name, repaired, traits) is None
    assert valid(repaired, traits) == []
    assert repair(repaired, traits, (name,)) == repaired
    avoider = Avoider([name])
    assert avoider.repair(scenario, traits) == repaired
    assert avoider.triggers(repaired, traits) == []
    assert repaired.ops[:at] == scenario.ops[:at], "what comes before is left alone"


@pytest.mark.parametrize(
    ("name", "traits", "scenario"),
    [
        ("driver-unoffered", HYBRID, program(EAGLE3, *SAVED, RW, ASK)),  # the one that offers
        ("driver-unoffered", DENSE, program("draft-simple", *SAVED, RW, ASK)),
        ("driver-unoffered", DENSE, program("ngram-simple", *SAVED, RW, ASK)),
        ("driver-unoffered", DENSE, program(MTP, *SAVED, Rewind(seq=0, slot=0, parts=("driver",)), ASK)),
        ("driver-unoffered", DENSE, program(MTP, feed(8), ASK, TAKEN)),
        ("driver-unoffered", DENSE, program(MTP, feed(8), ASK, Verify(seqs=(0,), route="host"))),
        ("driver-cut", DENSE, program(MTP, feed(8), SeqRm(seq=0))),
        ("driver-cut", DENSE, program("draft-simple", feed(8), TAIL)),
        ("driver-fresh", DENSE, program(MTP, feed(8), TAIL)),
        ("driver-fresh", DENSE, program("draft-simple", feed(8), SeqRm(seq=0))),
        ("driver-mangled", DENSE, program(MTP, *SAVED, RW)),
        ("eagle3-bridge", HYBRID, program(EAGLE3, feed(8), ASK, feed(3))),
        ("eagle3-bridge", HYBRID, program(EAGLE3, feed(8), feed(3, 1))),
        ("eagle3-bridge", HYBRID, program(EAGLE3, feed(8), ASK, TAKEN, feed(3))),
        ("eagle3-undrafted", HYBRID, program(EAGLE3, feed(8), ASK, ALL, feed(3))),
        ("eagle3-undrafted", HYBRID, program(EAGLE3, feed(8), ASK, TAKEN, ASK, feed(3))),
        ("eagle3-undrafted", HYBRID, program(EAGLE3, feed(8), feed(3))),
        ("eagle3-undrafted", HYBRID, program(MTP, feed(8), ASK, TAKEN, feed(3))),
        ("eagle3-bridge", HYBRID, program(MTP, feed(8), feed(3))),
        ("eagle3-backend", HYBRID, program(EAGLE3, *BOTH, Propose(seqs=(0, 1)))),
        ("eagle3-backend", HYBRID, program(EAGLE3, *BOTH, Propose(seqs=(1,)), backend_sampling=True)),
        ("eagle3-open", HYBRID, program(EAGLE3, *OPENED, Accept(seq=0, n=3))),
        ("eagle3-open", HYBRID, program(MTP, *OPENED, Accept(seq=0, n=3), RW)),
        ("ngram-begin", DENSE, program(MAP, feed(8), TAIL, Begin(seq=0), ASK)),
        ("ngram-begin", DENSE, program("ngram-mod", feed(8), TAIL, ASK)),
    ],
)
def test_what_lies_beside_a_trigger_is_left_alone(name: str, traits: Traits, scenario: Scenario) -> None:
    assert driver_triggered(name, scenario, traits) is None
    assert repair(scenario, traits, (name,)) == scenario


def test_what_is_done_instead() -> None:
    def instead(name: str, s: Scenario, traits: Traits = HYBRID) -> tuple[AnyOp, ...]:
        return repair(s, traits, (name,)).ops

    # a verification that takes everything restores nothing
    taken = Verify(seqs=(0,), accept=(3,))
    assert instead("driver-unoffered", program(MTP, feed(8), ASK, HOST, ASK)) == (feed(8), ASK, taken, ASK)
    # the first of several drafts alone
    several = program(EAGLE3, *BOTH, Propose(seqs=(1, 0), last=(5, 6)), backend_sampling=True)
    assert instead("eagle3-backend", several) == (*BOTH, Propose(seqs=(1,), last=(5,)))
    # the driver is told
    assert instead("ngram-begin", program(MAP, feed(8), TAIL, ASK), DENSE) == (feed(8), TAIL, Begin(seq=0))
    # what is left out takes with it what has lost its ground: slots, verifications, whole sequences
    no_saves = program(MTP, *SAVED, Mangle(slot=0, how="long"), Rewind(seq=0, slot=0, parts=("driver",)))
    assert instead("driver-mangled", no_saves) == (*SAVED, Rewind(seq=0, slot=0, parts=("driver",)))
    into_another = program(MTP, *SAVED, Rewind(seq=1, slot=0), Propose(seqs=(0, 1)), Verify(seqs=(0, 1), accept=(1, 1)))
    assert instead("driver-unoffered", into_another) == (
        *SAVED,
        Propose(seqs=(0,)),
        Verify(seqs=(0, 1), accept=(1, 1)),
    )
    assert instead("driver-unoffered", program(MTP, *SAVED, Rewind(seq=1, slot=0), Propose(seqs=(1,)))) == SAVED


def test_the_token_of_a_sequence_goes_with_it() -> None:
    s = program(MAP, *BOTH, SeqRm(seq=0), feed(2), Propose(seqs=(0, 1), last=(5, 6)))
    assert repair(s, DENSE, ("driver-fresh",)).ops == (*BOTH, feed(2), Propose(seqs=(0, 1), last=(5, 6)))
    into_another = program(MAP, *SAVED, Rewind(seq=1, slot=0), Propose(seqs=(1, 0), last=(5, 6)))
    assert repair(into_another, DENSE, ("driver-unoffered",)).ops == (*SAVED, Propose(seqs=(0,), last=(6,)))


def test_names_of_plain_faults_and_none_change_nothing() -> None:
    s = program(MTP, *SAVED, RW)
    assert repair(s, DENSE, ()) is s
    assert repair(s, DENSE, tuple(AVOIDANCES)) is s
    assert triggered("device-older", s, DENSE) is None, "a plain fault is none of a program with a driver"
    plain = Scenario(model=s.model, ops=(feed(4), Save(seq=0, slot=0)))
    assert triggered("driver-unoffered", plain, DENSE) is None
    assert Avoider(["driver-unoffered"]).repair(plain, DENSE) is plain
    assert not set(AVOIDANCES) & set(DRIVER_AVOIDANCES)


# --- generated programs -----------------------------------------------------------------------------------------------


@functools.cache
def made(name: str) -> tuple[Traits, list[Scenario]]:
    pair = pairs.get(name)
    traits = traits_of(recipes.get(pair.target))
    base = DriverParams(kind=pair.kind, n_max=pair.n_max)
    return traits, generate(programs(ModelRef(recipe=pair.target), base, traits, pair.n_rs_seq), 3, 40)


@pytest.mark.parametrize("name", ["qwen35-mtp", "step35-mtp", "qwen35-eagle3", "llama-eagle3", "llama-ngram-map-k"])
def test_a_repaired_program_is_valid_and_sets_off_nothing(name: str) -> None:
    traits, found = made(name)
    names = tuple(DRIVER_AVOIDANCES)
    kept = before = 0
    for s in found:
        for chosen in (names, *((n,) for n in names)):
            repaired = repair(s, traits, chosen)
            assert valid(repaired, traits) == [], chosen
            assert [n for n in chosen if driver_triggered(n, repaired, traits) is not None] == []
            assert repair(repaired, traits, chosen) == repaired
            assert (repaired.params, repaired.driver) == (s.params, s.driver)
        before += len(s.ops)
        kept += len(repair(s, traits, names).ops)
    assert kept > 0.4 * before, "stepping round must not leave stumps"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("qwen35-mtp", "driver-unoffered"),
        ("qwen35-mtp", "driver-fresh"),
        ("llama-eagle3", "driver-unoffered"),
        ("qwen35-eagle3", "eagle3-bridge"),
        ("qwen35-eagle3", "eagle3-undrafted"),
        ("llama-ngram-map-k", "ngram-begin"),
    ],
)
def test_without_avoidance_the_known_faults_are_set_off_often(name: str, fault: str) -> None:
    traits, found = made(name)
    assert sum(driver_triggered(fault, s, traits) is not None for s in found) > 0.05 * len(found)


# --- the corpus -------------------------------------------------------------------------------------------------------


def test_every_avoidance_of_drivers_has_a_known_fault_whose_scenario_sets_it_off() -> None:
    faults = [f for f in load_all() if f.avoidance in DRIVER_AVOIDANCES]
    assert {f.avoidance for f in faults} == set(DRIVER_AVOIDANCES)
    for f in faults:
        s = scenario_of(f)
        assert s.driver is not None
        traits = traits_of(recipes.get(s.model.recipe or ""))
        assert valid(s, traits) == [], f.name
        assert driver_triggered(f.avoidance, s, traits) is not None, f.name
        assert json.loads((FOLDER / f"{f.name}.json").read_text())["name"] == f.name


def test_a_finding_is_known_only_behind_the_trigger() -> None:
    faults = load_all()
    fault = next(f for f in faults if f.name == "driver-unoffered")
    s = program(MTP, *SAVED, RW, ASK)
    signature = "driver_contract:draft-mtp:unoffered/rewind/dense-draft-mtp/target+draft+driver"
    assert match(signature, s, DENSE, faults, 2) == fault
    assert match(signature, s, DENSE, faults, 1) is None, "what comes later cannot have caused it"
    assert match(signature, program(MTP, *SAVED, ASK), DENSE, faults, 2) is None
    assert match("driver_isolation:row/rewind/dense-draft-mtp/target", s, DENSE, faults, 2) is None
