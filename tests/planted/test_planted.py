"""Every oracle catches the faults planted for it, and is silent on the same programs without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fuzz.avoid import AVOIDANCES, Avoider
from fuzz.models import Model
from fuzz.state import valid
from fuzz.strategies import generate, scenarios
from fuzz.triage import Triaged, triage
from oracles.judge import Judge, Judgement
from oracles.registry import ORACLES
from subjects.planted import CANARY, FAULTS, counts
from subjects.scenario import (
    OPEN,
    AnyOp,
    BlobEdit,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Edge,
    Part,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
)

JudgeOf = Callable[..., tuple[Judge, Model]]

STRICT = ContextParams()
UNIFIED = ContextParams(kv_unified=True)
OTHER_K = ContextParams(type_k="f16")
HIDDEN = ContextParams(embeddings=True)


@dataclass(frozen=True)
class Row:
    """A fault, a sound program that triggers it, and the oracle meant for it.

    alone: no other oracle sees it in the step where it shows first (what follows from it later does not count), but for
    the widest net: a wrong row is always one of the oracle of logits too.
    """

    fault: str
    oracle: str
    ops: tuple[AnyOp, ...]
    recipe: str = "llama"
    params: ContextParams = STRICT
    alone: bool = False

    def scenario(self, model: Model) -> Scenario:
        return Scenario(model=model.ref, params=self.params, ops=self.ops)


def feed(seq: int, n: int, stream: int = 0, abort_after: int | None = None) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n, stream=stream),), abort_after=abort_after)


def back(d: int) -> Edge:
    return Edge(at="end", d=-d)


# sequence 0 is saved, then continued; what comes after it is the redraft
MAGIC = Corrupt(slot=0, edits=(BlobEdit(how="set", where="magic", value=0x5A5A5A5A),))
SAVED = (feed(0, 9), Save(seq=0, slot=0), feed(0, 3, 1))
AGAIN = (SeqRm(seq=0), feed(0, 9, 1), Save(seq=0, slot=1))
BOTH = (feed(0, 9), feed(1, 6, 1))

TABLE = (
    Row("crash-on-restore", "liveness", (*SAVED, Restore(seq=0, slot=0), Restore(seq=0, slot=0)), alone=True),
    Row("hang-on-save", "liveness", (*SAVED, Save(seq=0, slot=1)), alone=True),
    Row("decode-rc", "decode", (*SAVED, Restore(seq=0, slot=0), feed(0, 4))),
    Row("abort-eats", "decode", (feed(0, 9), feed(0, 40, abort_after=0))),
    Row("rows-lost", "decode", (*SAVED, Restore(seq=0, slot=0), feed(0, 4)), alone=True),
    Row("false-refusal", "refusal", (*SAVED, Restore(seq=0, slot=0)), alone=True),
    Row("device-dead", "refusal", (feed(0, 9), Save(seq=0, slot=0, flags=2), feed(0, 3), Restore(seq=0, slot=0))),
    Row(
        "half-refusal",
        "refusal",
        (
            *SAVED,
            feed(1, 8, 2),
            MAGIC,
            Restore(seq=1, slot=0),
        ),
    ),
    Row(
        "refusal-scrambles",
        "refusal",
        (
            *SAVED,
            feed(1, 8, 2),
            MAGIC,
            Restore(seq=1, slot=0),
            feed(1, 2),
        ),
    ),
    Row("rollback-off-by-one", "removal", (feed(0, 9), SeqRm(seq=0, lo=back(3))), alone=True),
    Row("rollback-lies", "removal", (feed(0, 9), SeqRm(seq=0, lo=back(3)), feed(0, 2, 1)), alone=True),
    Row("rollback-stale", "removal", (feed(0, 9), SeqRm(seq=0, lo=back(3)), feed(0, 2, 1))),
    Row("refused-rollback-scrambles", "removal", (feed(0, 9), SeqRm(seq=0, lo=back(3)), feed(0, 2, 1)), "mamba2"),
    Row("whole-removal-refused", "removal", (*BOTH, SeqRm(seq=0)), "mamba2", alone=True),
    Row("keep-forgets", "removal", (*BOTH, SeqKeep(seq=1)), params=UNIFIED, alone=True),
    Row("restore-wrong-sequence", "state", (*SAVED, Restore(seq=0, slot=0))),
    Row("touched-neighbour", "isolation", (*BOTH, Save(seq=0, slot=0), Restore(seq=0, slot=0)), alone=True),
    Row("neighbour-bytes", "isolation", (*BOTH, Save(seq=0, slot=0), Restore(seq=0, slot=0)), alone=True),
    Row("save-moves", "isolation", (*BOTH, Save(seq=0, slot=0)), alone=True),
    Row("swapped-positions", "isolation", BOTH),
    Row("size-lies", "blob", SAVED, alone=True),
    Row("written-lies", "blob", SAVED, "mamba2", alone=True),
    Row("read-lies", "blob", (*SAVED, Restore(seq=0, slot=0)), "gemma3", alone=True),
    Row("save-wavers", "blob", (feed(0, 9), Save(seq=0, slot=0)), alone=True),
    Row("double-restore", "state", (*SAVED, Restore(seq=0, slot=0, times=2))),
    Row("whole-loses-sequence", "state", (*BOTH, SaveAll(slot=0), feed(0, 3), RestoreAll(slot=0))),
    Row("tokens-lost", "blob", (feed(0, 9), Save(seq=0, slot=0, medium="file"), Restore(seq=0, slot=0)), alone=True),
    Row("file-truncated", "blob", (feed(0, 9), Save(seq=0, slot=0, medium="file")), alone=True),
    Row("positions-backwards", "positions", (feed(0, 9),), alone=True),
    Row("drop-last-cell", "state", (*SAVED, Restore(seq=1, slot=0))),
    Row("swallowed-error", "state", (*SAVED, Reopen(params=OTHER_K), Restore(seq=1, slot=0))),
    Row("copy-truncated", "positions", (feed(0, 9), SeqCp(src=0, dst=1)), alone=True),
    Row("shift-lost", "positions", (feed(0, 9), SeqAdd(seq=0, delta=4, lo=OPEN, hi=OPEN)), alone=True),
    Row("clear-keeps", "positions", (feed(0, 9), Clear()), "qwen35", alone=True),
    Row("impure-query", "purity", (feed(0, 9), feed(0, 1)), alone=True),
    Row("hidden-drift", "hidden", (*SAVED, Restore(seq=0, slot=0), feed(0, 2)), params=HIDDEN, alone=True),
    Row("draft-greedy", "draft", (*SAVED, Restore(seq=0, slot=0), Draft(seq=0, n=4)), alone=True),
    Row("stale-snapshot", "state", (*SAVED, *AGAIN, Restore(seq=0, slot=1), Draft(seq=0, n=6)), "mamba2"),
    Row("first-swapped", "first-token", (*SAVED, Restore(seq=0, slot=0), feed(0, 1)), alone=True),
    Row("skip-recurrent-layer", "state", (*SAVED, Restore(seq=1, slot=0), feed(1, 1, 7)), "mamba2"),
    Row("restored-values", "state", (*SAVED, Restore(seq=1, slot=0), feed(1, 1))),
    Row("recurrent-nudged", "state", (*SAVED, Restore(seq=0, slot=0), feed(0, 2, 1)), "mamba2"),
    Row("extension-lost", "state", (*SAVED, Restore(seq=1, slot=0), feed(1, 2, 1)), "qwen35"),
    Row("save-alters-value", "state", (*SAVED, Restore(seq=0, slot=0)), alone=True),
    Row("logits-drift", "logits", (*SAVED, Restore(seq=0, slot=0)), "mamba2", alone=True),
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fault)
def test_first_reported_by_the_oracle_meant_for_it(row: Row, judge_of: JudgeOf) -> None:
    judge, model = judge_of(row.recipe)
    scenario = row.scenario(model)
    assert not valid(scenario, model.traits)  # the caller keeps the contract, so whatever is wrong is the fault's doing
    variants = row.oracle == "purity"

    sound = judge.judge(scenario, fresh=True, variants=variants)
    assert sound.violations == []
    assert sum(v.compared for v in sound.verdicts if v.oracle == row.oracle) > 0
    assert sound.judged
    assert counts(sound.account.ledger.trace) == (0, 0)

    on = judge_of(row.recipe, hang=2.0)[0] if row.fault.startswith("hang") else judge
    planted = on.judge(scenario, fresh=True, variants=variants, fault=row.fault)
    trace = (planted.variant or planted.account).ledger.trace
    assert counts(trace).triggered > 0
    assert counts(trace).reached > 0
    assert planted.violations[0].oracle == row.oracle
    if row.alone:
        first = planted.violations[0].check.step
        assert {v.oracle for v in planted.violations if v.check.step == first} <= {row.oracle, "logits"}


def test_a_state_that_no_logits_show_is_told_by_part_and_size(judge_of: JudgeOf) -> None:
    judge, model = judge_of("mamba2")
    row = next(row for row in TABLE if row.fault == "recurrent-nudged")
    judgement = judge.judge(row.scenario(model), fresh=True, fault=row.fault)
    assert {v.oracle for v in judgement.violations} == {"state", "blob"}  # what was saved again differs from the blob
    first = judgement.violations[0]
    assert first.key == "state:restore:recurrent.s"
    assert "recurrent state row of position 8 differs by 0.02" in first.because
    assert first.suspects[0] == first.check.step == 3


def test_a_lost_extension_is_told_as_such(judge_of: JudgeOf) -> None:
    judge, model = judge_of("qwen35")
    row = next(row for row in TABLE if row.fault == "extension-lost")
    judgement = judge.judge(row.scenario(model), fresh=True, fault=row.fault)
    assert {v.oracle for v in judgement.violations} == {"state", "blob"}  # no row shows it
    first = judgement.violations[0]
    assert first.key == "state:restore:attn.extension"
    assert "x, y, token of position 0 are 0, 0, -1 and should be" in first.because
    blob = next(v for v in judgement.violations if v.oracle == "blob")
    assert (blob.check.what, len(blob.check.expected)) == ("places", 10)


def test_every_fault_has_its_row_and_every_oracle_a_fault_that_it_alone_reports() -> None:
    assert len(FAULTS) >= 18
    assert CANARY in FAULTS
    assert sorted(row.fault for row in TABLE) == sorted(FAULTS)
    # those of drivers have theirs in test_driver_faults.py and tests/unit/test_driver_oracles.py
    plain = {oracle.name for oracle in ORACLES if not oracle.driver}
    assert {row.oracle for row in TABLE if row.alone} == plain
    assert all("Trigger: " in " ".join((fault.__doc__ or "").split()) for fault in FAULTS.values())


def test_an_unknown_fault_is_an_error_and_none_is_no_fault(judge_of: JudgeOf) -> None:
    judge, model = judge_of("llama")
    scenario = Scenario(model=model.ref, ops=SAVED)
    assert "KeyError" in judge.judge(scenario, fresh=True, fault="no-such-fault").account.ledger.trace.stderr
    assert not judge.judge(scenario, fresh=True).violations


PROGRAMS = 150
# each was among the first 20 programs of three seeds out of three, so 150 leave a margin for what a generator becomes
FOUND = {
    "llama": ("crash-on-restore", "touched-neighbour", "rollback-off-by-one", "size-lies", "first-swapped", CANARY),
    "qwen35": ("skip-recurrent-layer", "restore-wrong-sequence", "rollback-lies", "double-restore", "logits-drift"),
}


@functools.cache
def programs(model: Model, seed: int) -> list[Scenario]:
    return generate(scenarios(model.ref, model.traits, avoid=Avoider(AVOIDANCES)), seed, PROGRAMS)


def first_found(judge: Judge, model: Model, fault: str, seed: int) -> Judgement | None:
    """The first generated program that shows the fault and is sound without it, as a campaign would meet it."""
    for program in programs(model, seed):
        judgement = judge.judge(program, fault=fault)
        if judgement.violations and not judge.judge(program, fresh=True).violations:
            return judgement
    return None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("recipe", "fault"), [(recipe, fault) for recipe, all_ in FOUND.items() for fault in all_])
def test_generated_programs_find_the_fault(recipe: str, fault: str, seed: int, judge_of: JudgeOf) -> None:
    judge, model = judge_of(recipe)
    found = first_found(judge, model, fault, seed)
    assert found is not None
    assert counts((found.variant or found.account).ledger.trace).triggered > 0


def test_the_canary_is_found_confirmed_and_reduced(judge_of: JudgeOf) -> None:
    judge, model = judge_of("llama")
    found = first_found(judge, model, CANARY, 0)
    assert found is not None
    result = triage(judge, found, model.traits, fault=CANARY)
    assert isinstance(result, Triaged)
    assert result.reproduced == (3, 3)
    assert result.signature.startswith("draft/restore/dense")
    assert len(result.scenario.ops) <= 4
    assert not judge.judge(result.scenario, fresh=True, observed=False).violations
