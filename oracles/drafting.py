"""Drafting itself: without any restore or rollback, or with tokens processed since, a draft is that of a clean target,
draft and driver."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, seen, shaper, violation, what, where
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
        why = "Nothing was restored or rolled back"
        if shaper(account, held):
            why = "Tokens were processed since the last restore or rollback"
        return violation(
            self.name,
            account,
            held,
            key=f"drafting:{what(held)}",
            clause="propose.drafts",
            because=f"{why}, so how the tokens came there must not matter; but when {where(account, held)}, "
            f"{seen(held)}.",
            suspects=(held.claim.step,),
        )
