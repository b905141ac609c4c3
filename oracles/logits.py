"""Logits: every output row against the same history in a clean context, judged by the band. The widest net of the "
"row oracles."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.rows import DOUBT, row_violation, shaper_name, state_rule, where
from oracles.verdict import Verdict


class LogitsFailure(OracleFailure):
    """A row is far outside the band."""


class Logits(Oracle):
    """Largest absolute difference against the band; between the band and far outside is ambiguous, hence unknown."""

    name = "logits"
    title = "logits of the same history"
    failure = LogitsFailure
    rank = 9
    observations = frozenset({"continue"})

    def judge(self, account: Account) -> Verdict:
        """Judge all rows."""
        bad, unknown = [], list(account.unjudged)
        for r in account.compared:
            if r.wrong:
                because = (
                    f"{where(account, r)} must equal what a clean context computes for the same history, because "
                    f"both decode the same "
                    f"tokens in the same batches; but its logits are off by up to {r.error:.3g} (NMSE {r.nmse:.2g})."
                )
                rule = f"{state_rule(account, r)}; the logits belong to another state"
                bad.append(
                    row_violation(
                        self.name, account, r, key=f"logits:{shaper_name(account, r)}", rule=rule, because=because
                    )
                )
            elif r.ambiguous:
                unknown.append(DOUBT)
        return Verdict(
            oracle=self.name,
            violations=tuple(bad),
            compared=len(account.compared) - len(unknown) + len(account.unjudged),
            unknown=tuple(unknown),
        )
