"""First-token divergence: the first output after a restore, removal or copy, where and how far outside the band."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.rows import clear_of_doubt, row_violation, shaper_name, state_rule, where
from oracles.verdict import Verdict


class FirstTokenFailure(OracleFailure):
    """The first token afterwards is another one."""


class FirstToken(Oracle):
    """The earliest place where a wrong state can show: the first row after the operation that shaped the history."""

    name = "first-token"
    title = "first-token divergence"
    failure = FirstTokenFailure
    rank = 7
    observations = frozenset({"continue"})

    def judge(self, account: Account) -> Verdict:
        """Judge the first row after every shaping operation."""
        rows = [r for r in account.compared if r.claim.first]
        bad = []
        for r in rows:
            if r.wrong and r.other_token:
                because = (
                    f"Right after the {shaper_name(account, r)}, {where(account, r)} must have top token "
                    f"{r.expected}, as a clean context has; "
                    f"but it has {r.token}. The reference prefers its own by {r.gap:.3g}, the logits are off by up "
                    f"to {r.error:.3g}."
                )
                rule = f"{state_rule(account, r)}; the first token already diverges"
                bad.append(
                    row_violation(
                        self.name, account, r, key=f"first-token:{shaper_name(account, r)}", rule=rule, because=because
                    )
                )
        compared, unknown = clear_of_doubt(rows)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared, unknown=unknown)
