"""Greedy equivalence: with speculation on, the target gives what plain decoding gives, by every route."""

from __future__ import annotations

from oracles.account import Account, Compared
from oracles.base import Oracle, OracleFailure
from oracles.rows import DOUBT, NAME_OF, band_rung, tie_rung
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Rewind, SeqRm, Verify


class GreedyFailure(OracleFailure):
    """The target diverges from plain decoding."""


class Greedy(Oracle):
    """Every output row of the target, against plain decoding of the same tokens without any driver."""

    name = "greedy"
    title = "greedy equivalence"
    failure = GreedyFailure
    rank = 18
    driver = True

    def judge(self, account: Account) -> Verdict:
        """Judge rows; a different token inside the band is a near tie."""
        if account.driven is None:
            return Verdict(oracle=self.name, unknown=("there is no driver",))
        rows = account.compared
        unknown = (*(DOUBT for r in rows if r.ambiguous), *account.unjudged)
        wrong = [r for r in rows if r.wrong]
        return Verdict(
            oracle=self.name,
            violations=tuple(self._violation(account, r) for r in wrong[:1]),
            compared=len(rows) - sum(r.ambiguous for r in rows),
            unknown=unknown,
        )

    def _violation(self, account: Account, row: Compared) -> Violation:
        c = row.claim
        route = route_of(account, c.shaped)
        token = f"; its greedy token is {row.token}, plain decoding gives {row.expected}" if row.other_token else ""
        return Violation(
            oracle=self.name,
            key=f"greedy:{route}",
            rule=rule("verify.greedy"),
            because=f"The row of sequence {c.seq} at position {c.pos} (operation {c.step}, route {route}) must be that "
            f"of plain decoding of the same tokens; but it is off by {row.error:.3g}{token}. It is the first of "
            f"{len(account.compared)} rows that diverges.",
            check=Check(kind="draft", step=c.step, seq=c.seq, what="target", band=row.band),
            error=row.error,
            band=row.band,
            nmse=row.nmse,
            suspects=tuple(reversed(c.shaped)) or (c.step,),
            rungs=(band_rung(row), tie_rung(row)),
        )


def route_of(account: Account, shaped: tuple[int, ...]) -> str:
    """By which route the history came to where it is."""
    if not shaped:
        return "decode"
    op = account.ledger.scenario.ops[shaped[-1]]
    if isinstance(op, Verify):
        return op.route
    return "rewind" if isinstance(op, Rewind) else "cut" if isinstance(op, SeqRm) else NAME_OF[type(op)]
