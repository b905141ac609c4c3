"""Drafts after partial acceptance: whatever way the rest went, the next draft is made from what was accepted."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, seen, shaper, violation, what, where
from oracles.verdict import Violation
from subjects.scenario import Accept, Verify


class RoundDraftsFailure(OracleFailure):
    """A sequence drafts from what was rejected."""


class RoundDrafts(DraftOracle):
    """Drafts and hidden rows behind a verification that took only a part of the draft, by the route that it took."""

    name = "round_drafts"
    title = "partial acceptance"
    failure = RoundDraftsFailure
    rank = 24

    def mine(self, account: Account, held: Held) -> bool:
        """Claims behind a rollback."""
        found = shaper(account, held)
        return found is not None and isinstance(found[1], Verify | Accept)

    def violated(self, account: Account, held: Held) -> Violation:
        """Which route it was is part of the key."""
        found = shaper(account, held)
        route = found[1].route if found and isinstance(found[1], Verify) else "cut"
        return violation(
            self.name,
            account,
            held,
            key=f"round_drafts:{route}:{what(held)}",
            clause="verify.rolled-back",
            because=f"What was rejected was taken back by the route `{route}`, so nothing of it may matter; but when "
            f"{where(account, held)}, {seen(held)}.",
        )
