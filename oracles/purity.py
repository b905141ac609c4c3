"""Query purity: reading positions, sizes and capabilities changes nothing, not a bit."""

from __future__ import annotations

import msgspec

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.crash import crash_text
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Ask, Decode, Draft, Op, Reopen, Scenario

RULE = f"{rule('ask.pure')}; a program that asks computes something else than one that does not"


class PurityFailure(OracleFailure):
    """A query changed something."""


class Purity(Oracle):
    """Runs the program a second time with queries sprinkled in; both runs make the same decodes, so all rows must
    be equal bit for bit.
    """

    name = "purity"
    title = "query purity"
    failure = PurityFailure
    rank = 4

    def judge(self, account: Account) -> Verdict:
        """Within one run only positions can be compared around a query, which the isolation oracle does."""
        return Verdict(oracle=self.name)

    def variant(self, scenario: Scenario) -> Scenario | None:
        """The same program with size and position queries after every operation that is no query."""
        ops: list[Op] = []
        n_seq = scenario.params.n_seq_max
        for i, op in enumerate(scenario.ops):
            ops.append(op)
            if isinstance(op, Reopen) and op.params is not None:
                n_seq = op.params.n_seq_max
            if isinstance(op, Ask):
                continue
            seq = i % n_seq
            ops += [
                Ask(what="size", seq=seq, flags=i % 2),
                Ask(what="can_shift"),
                Ask(what="size_all"),
                Ask(what="positions", seq=seq),
            ]
        return msgspec.structs.replace(scenario, ops=tuple(ops))

    def _died(self, variant: Account) -> Verdict:
        trace = variant.ledger.trace
        step = trace.steps[-1].op if trace.steps else 0
        text = crash_text(trace.end, trace.stderr)
        because = (
            f"The program ends by itself, so it must also end with queries between its operations; but with them it "
            f"{'did not return' if trace.end.how == 'hang' else 'ended the process'}: {text}"
        )
        check = Check(kind="alive", step=step, what=text, reference=variant.ledger.scenario)
        found = Violation(oracle=self.name, key="purity:alive", rule=RULE, because=because, check=check)
        return Verdict(oracle=self.name, violations=(found,), compared=1)

    def _answers(self, account: Account, variant: Account) -> Violation | None:
        mine, theirs = (
            [
                (step.op, [batch.rc for batch in step.batches])
                for step in x.ledger.trace.steps
                if isinstance(x.ledger.scenario.ops[step.op], Decode | Draft)
            ]
            for x in (account, variant)
        )
        for (step, here), (_, there) in zip(mine, theirs, strict=False):
            if here != there:
                i = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), None)
                if i is None:
                    i = min(len(here), len(there)) - 1
                because = (
                    f"The program was run with and without queries between its operations; the decodes of operation "
                    f"{step} must return the same; but they returned {here} without and {there} with queries."
                )
                expected = tuple(rc for rc in there[i : i + 1] if rc is not None)
                check = Check(kind="answer", step=step, expected=expected, reference=variant.ledger.scenario)
                return Violation(oracle=self.name, key="purity:answers", rule=RULE, because=because, check=check)
        return None

    def compare(self, account: Account, variant: Account) -> Verdict:
        """How both runs ended, what their decodes answered, and their rows, bit for bit."""
        a, b = account.ledger.trace, variant.ledger.trace
        if a.end.how == "ok" and b.end.how in ("signal", "hang"):
            return self._died(variant)
        if a.end.how == "ok" and b.end.how == "ok" and (other := self._answers(account, variant)) is not None:
            return Verdict(oracle=self.name, violations=(other,), compared=1)
        if a.end.how != "ok" or b.end.how != "ok" or len(a.logits) != len(b.logits):
            return Verdict(oracle=self.name, unknown=("one of both runs did not end",))
        if not a.logits:
            return Verdict(oracle=self.name, unknown=("no output rows",))
        x, y = a.logit_rows(), b.logit_rows()
        if a.logits == b.logits:
            return Verdict(oracle=self.name, compared=len(x))
        row = int((x.view("u4") != y.view("u4")).any(axis=1).argmax())
        step = next(
            m.step.op
            for m in account.ledger.moments
            if isinstance(m.op, Decode | Draft)
            for q in m.step.batches
            if q.first >= 0 and row < q.first + sum(r.out for r in q.rows)
        )
        because = (
            f"The program was run with and without queries between its operations; output row {row} (operation "
            f"{step}) must be equal bit for "
            f"bit, but differs by up to {float(abs(x[row] - y[row]).max()):.3g}."
        )
        check = Check(kind="rows", step=step, row=row, ref_row=row, band=0.0, reference=variant.ledger.scenario)
        found = Violation(
            oracle=self.name,
            key="purity",
            rule=RULE,
            because=because,
            check=check,
            error=float(abs(x[row] - y[row]).max()),
        )
        return Verdict(oracle=self.name, violations=(found,), compared=len(x))
