"""Query purity: queries are sprinkled in, and both runs must be equal to the bit."""

from __future__ import annotations

from fakes import MODEL, Ideal, ideal_judge

from oracles.account import Account
from oracles.ledger import read
from oracles.purity import Purity
from subjects.scenario import Ask, ContextParams, Decode, Draft, Part, Reopen, Save, Scenario
from subjects.trace import End, Trace, from_bytes, to_bytes

PROGRAM = Scenario(
    model=MODEL,
    ops=(Decode(parts=(Part(seq=0, n=5, out="all"),)), Ask(what="size"), Save(seq=0, slot=0), Draft(seq=0, n=3)),
)


class Impure(Ideal):
    """A size query changes the newest token."""

    def seq_size(self, ctx: int, seq: int, flags: int) -> int:
        if self.seqs[seq]:
            p, t = self.seqs[seq][-1]
            self.seqs[seq][-1] = (p, (t + 1) % 64)
        return super().seq_size(ctx, seq, flags)


def test_the_variant_asks_and_changes_nothing_else() -> None:
    variant = Purity().variant(PROGRAM)
    assert variant is not None
    assert [op for op in variant.ops if not isinstance(op, Ask)] == [
        op for op in PROGRAM.ops if not isinstance(op, Ask)
    ]
    asked = {(op.what, op.flags) for op in variant.ops if isinstance(op, Ask)}
    assert {what for what, _ in asked} == {"size", "size_all", "can_shift", "positions"}
    assert {("size", 0)} < asked
    assert len(variant.ops) == len(PROGRAM.ops) + 4 * 3  # none after a query


def test_queries_are_of_sequences_that_there_are() -> None:
    ops = (*PROGRAM.ops, Reopen(params=ContextParams(n_seq_max=1)), *PROGRAM.ops)
    variant = Purity().variant(Scenario(model=MODEL, params=ContextParams(n_seq_max=4), ops=ops))
    assert variant is not None
    at = variant.ops.index(Reopen(params=ContextParams(n_seq_max=1)))
    assert {op.seq for op in variant.ops[at:] if isinstance(op, Ask)} == {0}
    assert max(op.seq for op in variant.ops[:at] if isinstance(op, Ask)) > 0


def test_a_pure_library_is_ok_and_an_impure_one_is_not() -> None:
    judge = ideal_judge("dense", Impure)
    sound = judge.judge(PROGRAM, variants=True)
    verdicts = [v for v in sound.verdicts if v.oracle == "purity" and v.compared]
    assert [v.value for v in verdicts] == ["ok"]
    assert verdicts[0].compared == len(sound.account.ledger.trace.logit_rows())
    broken = judge.judge(PROGRAM, variants=True, fault="x", observed=False)
    (found,) = [v for v in broken.violations if v.oracle == "purity"]
    assert found.check.kind == "rows"
    assert found.check.step == 3
    assert found.check.reference == Purity().variant(PROGRAM)
    assert found.error > 0
    row = found.check.row
    assert broken.variant is not None
    first, second = broken.account.ledger.trace.logit_rows(), broken.variant.ledger.trace.logit_rows()
    assert (first[:row] == second[:row]).all()
    assert (first[row] != second[row]).any()


def test_one_bit_is_enough_and_the_sign_of_zero_counts() -> None:
    judge = ideal_judge()
    run = judge.judge(PROGRAM, observed=False)
    trace = run.account.ledger.trace
    data = bytearray(trace.logits)
    data[-1] ^= 0x80
    other = Trace(trace.steps, trace.facts, trace.end, bytes(data), trace.hidden, "", trace.params)
    verdict = Purity().compare(run.account, Account(read(PROGRAM, other)))
    assert [v.check.row for v in verdict.violations] == [len(trace.logit_rows()) - 1]
    assert Purity().compare(run.account, run.account).value == "ok"


def test_a_variant_that_dies_or_whose_decodes_answer_otherwise_is_a_violation() -> None:
    run = ideal_judge().judge(PROGRAM, observed=False).account
    t = run.ledger.trace
    for end in (End("signal", 6), End("hang")):
        dead = Account(read(PROGRAM, Trace(t.steps, t.facts, end, t.logits, t.hidden, "", t.params)))
        (v,) = Purity().compare(run, dead).violations
        assert (v.check.kind, v.check.step, v.check.reference) == ("alive", t.steps[-1].op, PROGRAM)
    other = from_bytes(to_bytes(t))
    other.steps[3].batches[1].rc = 1
    (v,) = Purity().compare(run, Account(read(PROGRAM, other))).violations
    assert (v.check.kind, v.check.step, v.check.expected, v.check.reference) == ("answer", 3, (1,), PROGRAM)


def test_runs_that_cannot_be_compared_are_unknown() -> None:
    judge = ideal_judge()
    run = judge.judge(PROGRAM, observed=False).account
    t = run.ledger.trace
    dead = Account(read(PROGRAM, Trace(t.steps, t.facts, End("signal", 6), t.logits, t.hidden, "", t.params)))
    shorter = Account(read(PROGRAM, Trace(t.steps, t.facts, t.end, t.logits[:-256], t.hidden, "", t.params)))
    for a, b in ((dead, run), (run, shorter)):
        verdict = Purity().compare(a, b)
        assert verdict.value == "unknown"
        assert verdict.unknown
    silent = judge.judge(Scenario(model=MODEL, ops=()), observed=False).account
    assert Purity().compare(silent, silent).value == "unknown"
