"""Hidden-state error: embedding rows of contexts that give them, against the reference's."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.rows import clear_of_doubt, row_violation, shaper_name, state_rule, where
from oracles.verdict import Verdict


class HiddenStateFailure(OracleFailure):
    """A hidden row is another one."""


class HiddenState(Oracle):
    """Embedding rows (`embeddings` = true): what a speculative driver is fed with."""

    name = "hidden"
    title = "hidden-state error"
    failure = HiddenStateFailure
    rank = 5
    observations = frozenset({"continue"})

    def judge(self, account: Account) -> Verdict:
        """Judge every embedding row."""
        rows = [r for r in account.compared if r.hidden_band > 0]
        bad = []
        for r in rows:
            if r.hidden_wrong and not r.hidden_unjudged:
                because = (
                    f"The hidden row behind {where(account, r)} must be the one that a clean context computes for "
                    f"the same history; "
                    f"but it is off by up to {r.hidden_error:.3g}, honest differences here stay below "
                    f"{r.hidden_band:.3g}."
                )
                rule = f"{state_rule(account, r)}; the embedding row belongs to another state"
                bad.append(
                    row_violation(
                        self.name,
                        account,
                        r,
                        key=f"hidden:{shaper_name(account, r)}",
                        rule=rule,
                        because=because,
                        hidden=True,
                    )
                )
        compared, unknown = clear_of_doubt(rows, hidden=True)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared, unknown=unknown)
