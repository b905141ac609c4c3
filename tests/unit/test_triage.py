"""Triage: routes and signatures by table; confirming, reducing and blaming on a library in plain Python."""

from __future__ import annotations

import msgspec
import pytest
from driver_fakes import IdealDriver, driver_judge
from fakes import MODEL, Ideal, ideal_judge

from fuzz.state import Traits
from fuzz.triage import RERUNS, Symptom, Triaged, blame, find, params_at, route_of, sign, standard, triage
from oracles.account import Account
from oracles.judge import Judgement
from oracles.ledger import Ledger
from oracles.verdict import Check, Verdict, Violation
from subjects.scenario import (
    OPEN,
    Accept,
    AnyOp,
    Ask,
    Begin,
    Checkpoint,
    Clear,
    ContextParams,
    Decode,
    Draft,
    DriverParams,
    Edge,
    Mangle,
    Part,
    Propose,
    Reopen,
    Restore,
    RestoreAll,
    Rewind,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Verify,
)
from subjects.trace import End, Trace

DENSE = Traits(memory="dense")


def feed(n: int, seq: int = 0, stream: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n, stream=stream),))


def program(*ops: AnyOp, unified: bool = False) -> Scenario:
    return Scenario(model=MODEL, params=ContextParams(kv_unified=unified), ops=ops)


def driven(*ops: AnyOp) -> Scenario:
    return Scenario(model=MODEL, driver=DriverParams(kind="draft-mtp"), ops=ops)


def start(d: int) -> Edge:
    return Edge(at="start", d=d)


def end(d: int) -> Edge:
    return Edge(at="end", d=d)


@pytest.mark.parametrize(
    ("ops", "route"),
    [
        ((Save(seq=0, slot=0), Restore(seq=0, slot=0)), "buffer-whole"),
        ((Save(seq=0, slot=0, medium="file"), Restore(seq=0, slot=0)), "file-whole"),
        ((Save(seq=0, slot=0, flags=1), Restore(seq=0, slot=0)), "buffer-partial"),
        ((Save(seq=0, slot=0, flags=2), Restore(seq=0, slot=0)), "device-whole"),
        ((Save(seq=0, slot=0, flags=3), Restore(seq=0, slot=0)), "device-partial"),
        ((SaveAll(slot=0), RestoreAll(slot=0)), "context-buffer"),
        ((SaveAll(slot=0, medium="file"), RestoreAll(slot=0)), "context-file"),
        ((Save(seq=0, slot=0), Save(seq=0, slot=0, flags=2), Restore(seq=0, slot=0)), "device-whole"),
        ((Save(seq=0, slot=0, flags=2), Save(seq=0, slot=1), Restore(seq=0, slot=0)), "device-whole"),
        ((Save(seq=0, slot=1), Restore(seq=0, slot=0)), "unknown"),
        ((feed(1), Save(seq=0, slot=0, flags=1)), "buffer-partial"),
        ((SaveAll(slot=0, medium="file"),), "context-file"),
        ((SeqRm(seq=0),), "whole"),
        ((SeqRm(seq=0, lo=start(0)),), "whole"),
        ((SeqRm(seq=-1),), "whole-any"),
        ((SeqRm(seq=0, lo=end(-2)),), "tail"),
        ((SeqRm(seq=0, lo=end(-2), hi=end(0)),), "tail"),
        ((SeqRm(seq=0, lo=start(3)),), "tail"),
        ((SeqRm(seq=-1, lo=start(3)),), "tail-any"),
        ((SeqRm(seq=0, lo=end(-4), hi=end(-1)),), "middle"),
        ((SeqRm(seq=0, lo=OPEN, hi=start(2)),), "middle"),
        ((SeqCp(src=0, dst=1),), "split"),
        ((SeqKeep(seq=0),), "split"),
        ((feed(1),), ""),
        ((Draft(seq=0, n=1),), ""),
        ((Decode(parts=(Part(seq=0, n=1),), abort_after=0),), "abort"),
        ((SeqAdd(seq=0, delta=1),), ""),
        ((Clear(),), ""),
        ((Ask(what="size"),), ""),
        ((Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0)), "target+draft+driver"),
        ((Checkpoint(seq=0, slot=0, flags=3), Rewind(seq=0, slot=0, parts=("draft",))), "draft"),
        ((Verify(seqs=(0,), accept=(1,)),), "cut"),
        ((Verify(seqs=(0,), accept=(1,), route="device"),), "device"),
        ((Mangle(slot=0, how="width"),), "width"),
        ((Propose(seqs=(0,)),), ""),
        ((Accept(seq=0, n=1),), ""),
        ((Checkpoint(seq=0, slot=0, flags=1),), ""),
        ((Begin(seq=0),), ""),
    ],
)
def test_routes(ops: tuple[AnyOp, ...], route: str) -> None:
    assert route_of(program(*ops), len(ops) - 1) == route


def test_the_layout_is_that_of_the_context_in_force() -> None:
    ops = (SeqCp(src=0, dst=1), Reopen(), SeqCp(src=0, dst=1), Reopen(params=ContextParams()), SeqKeep(seq=0))
    s = program(*ops, unified=True)
    assert [route_of(s, i) for i in (0, 2, 4)] == ["unified", "unified", "split"]
    assert params_at(s, 0) == params_at(s, 3) == ContextParams(kv_unified=True)
    assert params_at(s, 4) == params_at(s, 99) == ContextParams()


def violation(oracle: str, key: str, step: int = 0, **check: object) -> Violation:
    return Violation(
        oracle=oracle,
        key=key,
        rule="r",
        because="b",
        check=Check(**{"kind": "answer", "step": step, **check}),  # type: ignore[arg-type]
    )


def test_signatures() -> None:
    s = program(Save(seq=0, slot=0, flags=2), Restore(seq=0, slot=0), Clear())
    v = violation("logits", "logits:restore")
    assert sign(v, s, 1, "hybrid", "device-whole") == "logits/restore/hybrid/device-whole"
    assert sign(v, s, 2, "dense", "") == "logits/clear/dense"
    # a crash is what the process said when it ended, wherever that was
    crash = violation("liveness", "liveness:llama-context.cpp: GGML_ASSERT(x) failed")
    assert sign(crash, s, 1, "dense", "device-whole") == sign(crash, s, 2, "hybrid", "") == crash.key


def test_signatures_of_drivers_say_what_of_the_drivers_it_is() -> None:
    s = driven(feed(8), Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0), Accept(seq=0, n=1))
    v = violation("driver_contract", "driver_contract:draft-mtp:unoffered", kind="draft")
    route = "target+draft+driver"
    assert (
        sign(v, s, 2, "hybrid-draft-mtp", route)
        == "driver_contract:draft-mtp:unoffered/rewind/hybrid-draft-mtp/target+draft+driver"
    )
    assert sign(violation("agreement", "agreement:draft"), s, 3, "dense", "") == "agreement:draft/accept/dense"
    crash = violation("liveness", "liveness:speculative.cpp: GGML_ASSERT(x) failed")
    assert sign(crash, s, 2, "hybrid-draft-mtp", route) == crash.key


def judgement(*found: Violation) -> Judgement:
    s = program()
    names = dict.fromkeys(v.oracle for v in found)
    verdicts = [Verdict(oracle=o, violations=tuple(v for v in found if v.oracle == o)) for o in names]
    return Judgement(s, Account(Ledger(s, Trace([], [], End("ok")))), verdicts)


def test_only_the_first_violation_of_a_run_counts() -> None:
    early, late = violation("logits", "a", 2), violation("removal", "b", 5)
    j = judgement(late, early)
    assert find(j, Symptom("logits", "a")) == early
    assert find(j, Symptom("removal", "b")) is None, "it may follow from the first"
    assert find(j, Symptom("logits", "b")) is None
    assert find(judgement(), Symptom("logits", "a")) is None
    assert Symptom.of(early) == Symptom("logits", "a")


# --- on a library in plain Python -------------------------------------------------------------------------------------


class Forgetful(Ideal):
    """A restore into another sequence than the saved one changes a token."""

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        rc = super().seq_set(ctx, seq, flags, blob)
        if seq == 1:
            self.seqs[seq] = [(p, t ^ 1) for p, t in self.seqs[seq]]
        return rc


LONG = program(
    feed(9),
    feed(4, 1),
    Save(seq=0, slot=3),
    Draft(seq=0, n=2),
    SeqRm(seq=1),
    Ask(what="size"),
    Restore(seq=1, slot=3),
    feed(3, 0),
    feed(2, 1, 5),
    Draft(seq=1, n=2),
)


def test_a_violation_is_confirmed_reduced_blamed_and_signed() -> None:
    judge = ideal_judge("dense", Forgetful)
    found = judge.judge(LONG, fault="x")
    assert found.violations
    t = triage(judge, found, DENSE, fault="x")
    assert isinstance(t, Triaged)
    assert t.reproduced == (RERUNS, RERUNS)
    assert t.complete
    assert t.original == found.executed
    assert [type(op) for op in t.scenario.ops] == [Decode, Save, Restore, *[type(t.scenario.ops[-1])]]
    assert isinstance(t.scenario.ops[t.culprit], Restore)
    assert t.route == "buffer-whole"
    assert t.signature == f"{t.violation.oracle}/restore/dense/buffer-whole"
    assert t.scenario.params == ContextParams()
    # and the sound library does not show it
    assert not judge.judge(t.scenario, observed=False).violations


def test_the_same_fault_seen_first_by_another_oracle_has_the_same_signature() -> None:
    judge = ideal_judge("dense", Forgetful)
    endings: tuple[tuple[AnyOp, ...], ...] = ((feed(2, 1, 5),), (Draft(seq=1, n=3),), ())
    signatures = set()
    for ending in endings:
        found = judge.judge(program(feed(9), Save(seq=0, slot=0), Restore(seq=1, slot=0), *ending), fault="x")
        t = triage(judge, found, DENSE, fault="x")
        assert isinstance(t, Triaged)
        signatures.add(t.signature)
    assert len(signatures) == 1


def test_what_does_not_reproduce_is_only_counted() -> None:
    judge = ideal_judge("dense", Forgetful)
    found = judge.judge(LONG, fault="x")
    assert triage(judge, found, DENSE) == (0, RERUNS)


def test_the_reducer_never_breaks_a_precondition() -> None:
    class Strict(Forgetful):
        def seq_cp(self, ctx: int, src: int, dst: int, p0: int, p1: int) -> None:
            assert not self.seqs[dst], "a copy onto something"
            super().seq_cp(ctx, src, dst, p0, p1)

    judge = ideal_judge("dense", Strict)
    s = program(feed(4), feed(3, 1), SeqRm(seq=1), SeqCp(src=0, dst=1), Save(seq=1, slot=0), Restore(seq=1, slot=0))
    found = judge.judge(s, fault="x")
    assert isinstance(triage(judge, found, DENSE, fault="x"), Triaged)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_blame_is_the_first_operation_after_which_it_is_wrong(k: int) -> None:
    judge = ideal_judge("dense", Forgetful)
    ops: list[AnyOp] = [feed(5), Save(seq=0, slot=0), feed(2, 0, 3), feed(1, 0, 4)]
    ops.insert(2 + k, Restore(seq=1, slot=0))
    s = program(*ops, Draft(seq=1, n=2))
    found = judge.judge(s, fault="x", observed=False)
    assert blame(judge, s, found.violations[0], fault="x")[0] == 2 + k


def test_blame_of_an_answer_is_its_step() -> None:
    judge = ideal_judge()
    s = program(feed(3), Clear(), feed(2))
    assert blame(judge, s, violation("refusal", "k", 1))[0] == 1
    assert blame(judge, s, violation("liveness", "k", 9, kind="alive"))[0] == 2
    assert blame(judge, s, violation("purity", "k", 2, kind="rows", seq=0))[0] == 2


def test_the_standard_continuation_is_of_rows_only() -> None:
    judge = ideal_judge("dense", Forgetful)
    s = program(feed(5), Save(seq=0, slot=0), Restore(seq=1, slot=0), feed(1, 1, 2))
    found = judge.judge(s, fault="x", observed=False).violations[0]
    made = standard(judge, s, found, fault="x")
    assert made is not None
    assert made[0].ops[:3] == s.ops[:3]
    assert isinstance(made[0].ops[3], Draft)
    assert len(made[0].ops) == 4
    assert standard(judge, s, None, fault="x") is None
    assert standard(judge, s, violation("refusal", "k", 1), fault="x") is None
    assert standard(judge, s, found, fault="") is None, "it does not show like that"


# --- with an ideal driver ---------------------------------------------------------------------------------------------


class Unoffered(IdealDriver):
    """Keeps one row a sequence and offers nothing."""

    offers = False

    def before(self, seq: int, pos: int) -> bytes:
        rows = self.rows[seq]
        return rows[max(rows)] if pos and pos - 1 in rows else super().before(seq, pos)

    def paired(self, seq: int, pos: int, start: bool) -> bytes:
        return self.before(seq, pos) if start else super().before(seq, pos)


CP, RW = Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0)


def test_a_wrong_draft_is_confirmed_reduced_blamed_and_signed() -> None:
    judge = driver_judge("dense", driver=Unoffered)
    s = driven(
        feed(9), feed(4, 1), Propose(seqs=(1,)), CP, Begin(seq=0), feed(5, 0, 3), RW, feed(3, 1), Propose(seqs=(1, 0))
    )
    found = judge.judge(s, fault="x", variants=False)
    t = triage(judge, found, DENSE, fault="x")
    assert isinstance(t, Triaged)
    assert t.reproduced == (RERUNS, RERUNS)
    assert t.complete
    assert [type(op) for op in t.scenario.ops] == [Decode, Checkpoint, Decode, Rewind, type(t.scenario.ops[-1])]
    assert t.scenario.ops[t.culprit] == RW
    assert t.route == "target+draft+driver"
    assert t.signature == "driver_contract:draft-mtp:unoffered/rewind/dense-draft-mtp/target+draft+driver"
    assert not judge.judge(t.scenario, variants=False).violations


@pytest.mark.parametrize("k", [0, 1, 2])
def test_blame_of_a_draft_is_the_first_operation_after_which_it_is_wrong(k: int) -> None:
    judge = driver_judge("dense", driver=Unoffered)
    ops: list[AnyOp] = [feed(9), CP, feed(5, 0, 3), feed(4, 1), Begin(seq=1)]
    ops.insert(3 + k, RW)
    s = driven(*ops, Propose(seqs=(0,)))
    found = judge.judge(s, fault="x", variants=False).violations[0]
    assert (found.check.step, found.check.kind) == (6, "draft")
    assert blame(judge, s, found, fault="x") == (3 + k, 0)


def test_blame_of_what_is_no_claim_on_a_draft_is_what_the_oracle_suspects() -> None:
    judge = driver_judge("dense")
    s = driven(feed(9), CP, feed(5), RW, Propose(seqs=(0,)))
    suspected = msgspec.structs.replace(violation("greedy", "greedy:host", 4, kind="draft", seq=0), suspects=(3, 1))
    assert blame(judge, s, suspected) == (3, 0)
    assert blame(judge, s, violation("agreement", "agreement:draft", 2, kind="draft", seq=1)) == (2, 1)
    # of a new conversation it shows only where the sequence goes on, and a draft there would be another thing
    fresh = violation("driver_isolation", "driver_isolation:fresh", 4, kind="draft", seq=0)
    assert blame(judge, s, msgspec.structs.replace(fresh, suspects=(1,))) == (1, 0)


def test_only_wrong_rows_of_the_target_have_a_standard_continuation() -> None:
    judge = driver_judge("dense", driver=Unoffered)
    s = driven(feed(9), CP, feed(5, 0, 3), RW, Propose(seqs=(0,)))
    found = judge.judge(s, fault="x", variants=False).violations[0]
    assert standard(judge, s, found, fault="x") is None
