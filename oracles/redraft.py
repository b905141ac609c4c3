"""Redraft equality: the drafts after save, pollute, restore are those from before."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, put_back, seen, shaper, violation, what, where
from oracles.verdict import Violation
from subjects.scenario import Rewind


class RedraftFailure(OracleFailure):
    """A restored sequence drafts something else."""


class Redraft(DraftOracle):
    """Draft tokens and logits of a restored sequence, against a clean target, draft and driver."""

    name = "redraft"
    title = "redraft"
    failure = RedraftFailure
    rank = 26

    def mine(self, account: Account, held: Held) -> bool:
        """Drafts behind a restore."""
        found = shaper(account, held)
        return held.claim.last >= 0 and found is not None and isinstance(found[1], Rewind)

    def violated(self, account: Account, held: Held) -> Violation:
        """The hidden row is right (or cannot be seen), so it is the draft's memory."""
        return violation(
            self.name,
            account,
            held,
            key=f"redraft:{what(held)}",
            clause="rewind.state",
            because=f"Put back: {put_back(account, held)}; the rest stood there already. So when "
            f"{where(account, held)}, it must draft as a driver does that never left; but {seen(held)}.",
        )
