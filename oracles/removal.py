"""Removal honesty: seq_rm that says true has removed exactly that, in every part; one that says false has changed "
"nothing."""

from __future__ import annotations

from oracles.account import Account, Compared
from oracles.base import Oracle, OracleFailure
from oracles.expect import position_error
from oracles.ledger import HalfRestored, History, Moment
from oracles.rows import clear_of_doubt, row_violation, where
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import SeqKeep, SeqRm

RULE_TRUE = f"{rule('seq_rm.removed')}; it returned true"
RULE_WHOLE = rule("seq_rm.whole")
RULE_FALSE = f"{rule('seq_rm.refused-clean')}; it returned false and changed the sequence"
RULE_PART = f"{rule('seq_rm.recurrent-part')}; it returned true"
RULE_KEEP = rule("seq_keep.others")


class RemovalFailure(OracleFailure):
    """seq_rm was not honest."""


class Removal(Oracle):
    """The answer of seq_rm (and of seq_keep, which cannot refuse) against what is left."""

    name = "removal"
    title = "removal honesty"
    failure = RemovalFailure
    rank = 2
    observations = frozenset({"continue"})

    def judge(self, account: Account) -> Verdict:
        """Judge answers and positions of every removal, and the rows of histories that a removal shaped last."""
        bad: list[Violation] = []
        compared = 0
        for m in account.ledger.moments:
            if isinstance(m.op, SeqRm | SeqKeep) and m.step.done and not m.step.skipped:
                # what an undefined sequence holds after it cannot be judged
                compared += any(isinstance(m.after.get(s), History) for s in m.touched)
                found = self._answer(m, account) if isinstance(m.op, SeqRm) else None
                bad.extend([found] if found else self._positions(m))
        judged: list[Compared] = []
        for r in account.compared:
            shaper = account.shaper(r.claim)
            if shaper is None or not isinstance(shaper[0], SeqRm):
                continue
            if isinstance(shaper[1].before.get(r.claim.seq), HalfRestored):
                continue  # the cut that a partial restore owes: what is wrong then is the restore
            judged.append(r)
            if r.wrong:
                said = "true" if shaper[1].step.rc else "false"
                top = f", top token {r.token} instead of {r.expected}" if r.token != r.expected else ""
                because = (
                    f"seq_rm{tuple(shaper[1].step.args)} returned {said}, so {where(account, r)} must be what a clean "
                    f"context gives for the tokens that are left; but its logits are off by up to {r.error:.3g} "
                    f"(NMSE {r.nmse:.2g}){top}."
                )
                rule = RULE_TRUE if shaper[1].step.rc else RULE_FALSE
                bad.append(
                    row_violation(self.name, account, r, key=f"removal:{said}:state", rule=rule, because=because)
                )
        n, unknown = clear_of_doubt(judged)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared + n, unknown=unknown)

    def _answer(self, m: Moment, account: Account) -> Violation | None:
        assert isinstance(m.op, SeqRm)
        _, p0, p1 = m.step.args
        whole = p0 <= 0 and p1 < 0
        if not m.step.rc and whole:
            because = (
                f"seq_rm({m.op.seq}, {p0}, {p1}) removes a whole sequence, so it must return true; but it returned "
                f"false."
            )
            check = Check(kind="answer", step=m.step.op, seq=m.op.seq, expected=(1,))
            every = "any" if m.op.seq < 0 else "one"
            return Violation(
                oracle=self.name, key=f"removal:refused-whole:{every}", rule=RULE_WHOLE, because=because, check=check
            )
        has_recurrent = m.facts.recurrent or m.facts.hybrid
        if m.step.rc and has_recurrent and not whole:
            for s in m.touched:
                state = m.before.get(s)
                held = state.held() if isinstance(state, History) else ()
                end = 1 << 31 if p1 < 0 else p1
                gone = [p for p in held if max(p0, 0) <= p < end]
                if gone and len(gone) < len(held) and gone[-1] != held[-1]:
                    because = (
                        f"seq_rm({m.op.seq}, {p0}, {p1}) asks for positions {gone[0]}..{gone[-1]} of a sequence that "
                        f"goes on to {held[-1]}; "
                        f"its recurrent state still contains them, so it must return false; but it returned true."
                    )
                    check = Check(kind="answer", step=m.step.op, seq=s, expected=(0,))
                    return Violation(
                        oracle=self.name,
                        key="removal:partial-true",
                        rule=RULE_PART,
                        because=because,
                        check=check,
                        kind="contract",
                    )
        return None

    def _positions(self, m: Moment) -> list[Violation]:
        bad = []
        for s in sorted(m.touched):
            state = m.after.get(s)
            if state is None or isinstance(state, HalfRestored) or s >= len(m.step.pos):
                continue
            wrong = position_error(state, m.facts, m.step.pos[s])
            if wrong is None:
                continue
            expected, text = wrong
            if isinstance(m.op, SeqKeep):
                rule, key, call = RULE_KEEP, "removal:keep", f"seq_keep({m.op.seq})"
            else:
                rule = RULE_TRUE if m.step.rc else RULE_FALSE
                key, call = f"removal:{'true' if m.step.rc else 'false'}:positions", f"seq_rm{tuple(m.step.args)}"
            because = f"After {call} sequence {s} must {text}; but its positions are {tuple(m.step.pos[s])}."
            check = Check(kind="positions", step=m.step.op, seq=s, expected=expected)
            bad.append(Violation(oracle=self.name, key=key, rule=rule, because=because, check=check))
        return bad
