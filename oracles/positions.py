"""Positions: pos_min and pos_max tell the truth after every operation."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.expect import position_error
from oracles.ledger import History
from oracles.rows import NAME_OF
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import SeqKeep, SeqRm

RULE = f"{rule('ask.positions')}; the queries tell something else"


class PositionsFailure(OracleFailure):
    """A position query does not tell the truth."""


class Positions(Oracle):
    """Sequences that an operation worked on; removals are the removal oracle's, neighbours the isolation oracle's."""

    name = "positions"
    title = "positions"
    failure = PositionsFailure
    rank = 8

    def judge(self, account: Account) -> Verdict:
        """Judge the positions of every touched sequence after every step."""
        bad: list[Violation] = []
        compared = 0
        for m in account.ledger.moments:
            if not m.step.done or m.step.skipped or isinstance(m.op, SeqRm | SeqKeep):
                continue
            for s in sorted(m.touched):
                state = m.after.get(s)
                if state is None or s >= len(m.step.pos):
                    continue
                compared += isinstance(state, History)  # of others nothing is known
                wrong = position_error(state, m.facts, m.step.pos[s])
                if wrong is not None:
                    name = NAME_OF[type(m.op)]
                    because = (
                        f"After operation {m.step.op} ({name}) sequence {s} must {wrong[1]}; but its positions are "
                        f"{tuple(m.step.pos[s])}."
                    )
                    check = Check(kind="positions", step=m.step.op, seq=s, expected=wrong[0])
                    bad.append(
                        Violation(oracle=self.name, key=f"positions:{name}", rule=RULE, because=because, check=check)
                    )
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared)
