"""Draft-token equality: a greedy redraft must choose the tokens that the same history chooses in a clean context."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.rows import clear_of_doubt, row_violation, shaper_name, where
from oracles.verdict import Verdict
from subjects.contracts import rule


class DraftTokenFailure(OracleFailure):
    """Another token was drafted."""


class DraftTokens(Oracle):
    """Greedy redraft by the model itself. Up to the first difference the subject's own tokens are the free-running
    draft, so
    comparing each step teacher-forced finds the first divergent token exactly; a near tie is no divergence."""

    name = "draft"
    title = "draft-token equality"
    failure = DraftTokenFailure
    rank = 6
    observations = frozenset({"continue"})

    def judge(self, account: Account) -> Verdict:
        """Judge every drafted token."""
        rows = [r for r in account.compared if r.claim.draft]
        bad = []
        for r in rows:
            if r.wrong and r.other_token:
                because = (
                    f"{where(account, r)} must choose token {r.expected}, because a clean context that decodes the "
                    f"same history "
                    f"prefers it by {r.gap:.3g}; but the subject chose {r.token}, its logits are off by up to "
                    f"{r.error:.3g}."
                )
                bad.append(
                    row_violation(
                        self.name,
                        account,
                        r,
                        key=f"draft:{shaper_name(account, r)}",
                        rule=rule("draft.same"),
                        because=because,
                    )
                )
        compared, unknown = clear_of_doubt(rows)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared, unknown=unknown)
