"""Avoidances: each sees its trigger, stays silent beside it, and leaves no trigger in what is generated."""

from __future__ import annotations

import pytest

from fuzz.avoid import AVOIDANCES, Avoider, triggers
from fuzz.state import traits_of, valid
from fuzz.strategies import generate, scenarios
from subjects import recipes
from subjects.scenario import (
    AnyOp,
    BlobEdit,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Edge,
    ModelRef,
    Part,
    Reopen,
    Restore,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
)

QWEN = traits_of(recipes.get("qwen35"))
DEEPSEEK = traits_of(recipes.get("deepseek4"))
LLAMA = traits_of(recipes.get("llama"))
RS4 = ContextParams(n_rs_seq=4)


def feed(n: int, seq: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n),))


def cut(d: int, seq: int = 0) -> SeqRm:
    return SeqRm(seq=seq, lo=Edge(at="end", d=-d))


def program(*ops: AnyOp, params: ContextParams = RS4) -> Scenario:
    return Scenario(model=ModelRef(recipe="qwen35"), params=params, ops=ops)


CUT = Corrupt(slot=0, edits=(BlobEdit(how="cut"),))
DEVICE = Save(seq=0, slot=0, flags=2)
ALL_OF_0 = SeqRm(seq=0, lo=Edge(at="start"), hi=Edge(at="end"))


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("ubatch-rollback", program(feed(1), params=ContextParams(n_rs_seq=4, n_ubatch=5))),
        ("ubatch-rollback", program(Reopen(params=ContextParams(n_rs_seq=2, n_ubatch=3)), feed(1))),
        ("stale-rollback", program(feed(8), feed(1), feed(1), cut(1))),
        ("stale-rollback", program(feed(8), Draft(seq=0, n=3), cut(2))),
        ("stale-rollback", program(feed(8), feed(3), cut(3))),  # a whole last batch undone
        ("stale-rollback", program(feed(8), Save(seq=0, slot=0), Restore(seq=0, slot=0), cut(1))),
        (
            "device-corrupt",
            program(feed(8), DEVICE, CUT, Restore(seq=0, slot=0)),
        ),
        ("device-foreign", program(feed(8), DEVICE, Reopen(), Restore(seq=0, slot=0))),
        ("device-older", program(feed(8), DEVICE, feed(1), Save(seq=0, slot=1, flags=2), Restore(seq=0, slot=0))),
        ("split-keep", program(feed(8), feed(8, 1), SeqKeep(seq=1))),
        ("recurrent-rm-all", program(feed(8), SeqRm(seq=-1))),
        ("recurrent-rm-part", program(feed(8), SeqRm(seq=0, hi=Edge(at="start", d=2)))),
        ("shared-rollback", program(feed(8), SeqCp(src=0, dst=1), cut(1, 1))),
        ("pending-copy", program(feed(8), cut(1), SeqCp(src=0, dst=1))),
        ("pending-wipe", program(feed(8), cut(1), ALL_OF_0)),
        ("abort-recurrent", program(Decode(parts=(Part(seq=0, n=4),), abort_after=1))),
    ],
)
def test_a_trigger_is_seen_and_repaired(name: str, scenario: Scenario) -> None:
    assert triggers(name, scenario, QWEN)
    avoider = Avoider([name])
    repaired = avoider.repair(scenario, QWEN)
    assert avoider.triggers(repaired, QWEN) == []
    assert valid(repaired, QWEN) == []


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("ubatch-rollback", program(feed(1), params=ContextParams(n_rs_seq=4, n_ubatch=6))),
        ("stale-rollback", program(feed(8), cut(4))),
        ("stale-rollback", program(feed(8), cut(5))),  # beyond n_rs_seq: refused
        ("stale-rollback", program(feed(40), cut(4))),  # longer than n_ubatch: the tail stays together
        ("stale-rollback", program(feed(8), feed(1), cut(1), params=ContextParams())),
        (
            "device-corrupt",
            program(feed(8), Save(seq=0, slot=0), CUT, Restore(seq=0, slot=0)),
        ),
        ("device-foreign", program(feed(8), DEVICE, Clear(), Restore(seq=0, slot=0))),
        ("device-older", program(feed(8), feed(8, 1), DEVICE, Save(seq=1, slot=1, flags=2), Restore(seq=0, slot=0))),
        ("split-keep", program(feed(8), feed(8, 1), SeqKeep(seq=1), params=ContextParams(kv_unified=True))),
        ("recurrent-rm-part", program(feed(8), cut(1))),
        ("shared-rollback", program(feed(8), SeqCp(src=0, dst=1), feed(6, 1), cut(1, 1))),
        ("pending-copy", program(feed(8), cut(1), feed(1), SeqCp(src=0, dst=1))),
        ("pending-wipe", program(feed(8), cut(1), SeqRm(seq=0))),
        ("abort-recurrent", program(feed(4), SaveAll(slot=0))),
    ],
)
def test_what_lies_beside_a_trigger_is_left_alone(name: str, scenario: Scenario) -> None:
    assert not triggers(name, scenario, QWEN)
    assert Avoider([name]).repair(scenario, QWEN) is scenario


def test_deepseek4_keeps_its_snapshots_across_decodes() -> None:
    assert not triggers("stale-rollback", program(feed(8), feed(3), cut(3)), DEEPSEEK)
    # but not the compressor rows of a block that single tokens have completed since
    assert triggers("stale-rollback", program(feed(8), feed(1), feed(1), cut(2)), DEEPSEEK)


def test_shifts() -> None:
    bf16 = program(feed(8), SeqAdd(seq=0, delta=1), params=ContextParams(type_k="bf16", type_v="bf16"))
    assert triggers("shift-bf16", bf16, LLAMA)
    assert not triggers("shift-bf16", program(feed(8), SeqAdd(seq=0, delta=1)), LLAMA)
    assert triggers("shift-window-hybrid", program(feed(8), SeqAdd(seq=0, delta=1)), traits_of(recipes.get("lfm2-swa")))
    assert not triggers("shift-window-hybrid", program(feed(8), SeqAdd(seq=0, delta=1)), traits_of(recipes.get("lfm2")))


@pytest.mark.parametrize(
    ("name", "slices"),
    [("llama", 1), ("gemma3", 1), ("mamba2", 1), ("qwen35", 2), ("lfm2-swa", 1), ("deepseek4", 1), ("qwen4exp", 1)],
)
def test_nothing_avoided_is_generated(name: str, slices: int) -> None:
    model, traits = ModelRef(recipe=name), traits_of(recipes.get(name))
    avoider = Avoider(AVOIDANCES)
    made = [s for k in range(slices) for s in generate(scenarios(model, traits, avoid=avoider), k, 300)]
    assert len(made) == 300 * slices
    for s in made:
        assert avoider.triggers(s, traits) == []
        assert valid(s, traits) == []
    assert sum(len(s.ops) >= 4 for s in made) > 0.85 * len(made), "stepping round must not leave stumps"


@pytest.mark.parametrize(
    "name", ["ubatch-rollback", "stale-rollback", "device-corrupt", "device-foreign", "device-older"]
)
def test_without_avoidance_the_known_faults_are_set_off_often(name: str) -> None:
    model = ModelRef(recipe="qwen35")
    made = [s for k in range(3) for s in generate(scenarios(model, QWEN), k, 300)]
    assert sum(triggers(name, s, QWEN) for s in made) > 0.015 * len(made)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError):
        Avoider(["no such fault"])
