"""Drafting itself: without any restore or rollback, a draft is that of a clean target, draft and driver."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, seen, violation, what, where
from oracles.verdict import Violation


class DraftingFailure(OracleFailure):
    """A sequence drafts something else although nothing was restored or rolled back."""


class Drafting(DraftOracle):
    """Drafts after nothing but decodes, full acceptance and drafts, however they were cut into batches and rounds."""

    name = "drafting"
    title = "drafting"
    failure = DraftingFailure
    rank = 27

    def mine(self, account: Account, held: Held) -> bool:
        """All drafts, and all rows that can be seen."""
        return True

    def violated(self, account: Account, held: Held) -> Violation:
        """The least specific thing that can be said of a draft."""
        return violation(
            self.name,
            account,
            held,
            key=f"drafting:{what(held)}",
            clause="propose.drafts",
            because=f"Nothing was restored or rolled back, so how the tokens came there must not matter; but when "
            f"{where(account, held)}, {seen(held)}.",
            suspects=(held.claim.step,),
        )
